"""lm-eval's own command, with the model `tide_hf` registered by the package that this belongs to."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
