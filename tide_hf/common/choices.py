"""Words that settings may take. The command line needs them before torch and transformers are loaded."""

from __future__ import annotations

from typing import Any

from .errors import ConfigurationError, describe, short

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")
MODES = ("self_speculative", "early_exit", "post_hoc")
EAGER = "eager"
ENGINES = (EAGER, "compiled")
EXIT_STRATEGIES = ("identity", "linear")  # kinds of exit head
STRATEGIES = (*EXIT_STRATEGIES, "block")  # of what `calibrate` makes
EXIT_CRITERIA = ("router", "confidence", "fixed")
KV_CACHE_STRATEGIES = ("propagate", "recompute", "zero_pad")
LABELS = ("agreement", "cosine", "kl")  # what a router predicts


def check_choice(name: str, value: Any, choices: tuple[str | bool, ...]) -> Any:
    """Return `value` if it is one of `choices`, or raise [`ConfigurationError`]."""
    if not isinstance(value, (str, bool)) or value not in choices:
        expected = "one of " + ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(
            describe(f"unknown {name}", got=short(value), expected=expected, do=f"Choose another {name}.")
        )
    return value
