"""lm-eval's own command; importing this package has registered the model `tide_hf`."""

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()
