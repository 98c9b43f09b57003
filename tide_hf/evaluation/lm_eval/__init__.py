"""TIDE in EleutherAI's lm-eval, as the model `tide_hf`, which is in `model`.

lm-eval knows the models of its own tree and those that are registered when it looks one up. It loads no plugins, so its
command has to be started from here:

    python -m tide_hf.evaluation.lm_eval --model tide_hf --tasks ... --model_args pretrained=...,tide_mode=early_exit

All other arguments are lm-eval's own. In Python, `import tide_hf.evaluation.lm_eval` does for
`lm_eval.simple_evaluate`.
"""

from ...common.errors import MissingPackageError

try:
    import lm_eval  # noqa: F401  # the one of EleutherAI
except ImportError as error:
    raise MissingPackageError(
        "a package is missing to run in lm-eval",
        got=str(error),
        expected="lm-eval 0.4.13 or later",
        do="Run: pip install tide-hf[lm-eval]",
    ) from error

from .model import TIDELM

__all__ = ["TIDELM"]
