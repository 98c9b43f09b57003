"""TIDE in EleutherAI's lm-eval: importing this package registers the model `tide_hf` (see `model`).

lm-eval finds only its own models and those registered before it looks a model up. It loads no plugins, so start its
command through this package:

    python -m tide_hf.evaluation.lm_eval --model tide_hf --tasks ... --model_args pretrained=...,tide_mode=early_exit

All other arguments are lm-eval's own. In Python, `import tide_hf.evaluation.lm_eval` before calling
`lm_eval.simple_evaluate`.
"""

from ...common.errors import MissingPackageError

try:
    import lm_eval  # noqa: F401  # EleutherAI's package, not this one
except ImportError as error:
    raise MissingPackageError(
        "a package is missing to run in lm-eval",
        got=str(error),
        expected="lm-eval 0.4.13 or later",
        do="Run: pip install tide-hf[lm-eval]",
    ) from error

from .model import TIDELM

__all__ = ["TIDELM"]
