"""Values that settings may take, and argument checks. Imports neither torch nor transformers, for a fast CLI."""

from __future__ import annotations

import sys
from typing import Any

from .errors import ConfigurationError, short

DEFAULT_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
DTYPES = ("float32", "bfloat16", "float16")
AUTO = "auto"
MODES = ("self_speculative", "early_exit", "post_hoc")
EAGER = "eager"
ENGINES = (EAGER, "compiled")
EXIT_STRATEGIES = ("identity", "linear")  # kinds of exit head
STRATEGIES = (*EXIT_STRATEGIES, "eagle3")  # choices of `exit_strategy` in `calibrate`
NEVER_EXIT = 2.0  # any threshold above 1 never exits, since scores lie in [0, 1]
EXIT_CRITERIA = ("router", "confidence", "fixed")
REMEMBERED_TOKENS = 32_768  # of earlier answers, some hundred of them: at 0.4 kB a token about 13 MB
SUCCESSORS = 32_768  # tokens whose likeliest successors are kept, at 0.3 kB each at most 10 MB
LABELS = ("agreement", "cosine", "kl")  # what a router is trained to predict


def check_choice(name: str, value: Any, choices: tuple[str | bool, ...]) -> Any:
    """Return `value` if it is one of `choices`, or raise [`ConfigurationError`]."""
    if not isinstance(value, (str, bool)) or value not in choices:
        expected = "one of " + ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(f"unknown {name}", got=short(value), expected=expected, do=f"Choose another {name}.")
    return value


def check_compute_dtype(value: Any) -> str:
    """Return the name of a dtype to compute in, given as a name or as PyTorch's dtype; raise if it is none."""
    name = str(value).removeprefix("torch.") if type(value).__name__ == "dtype" else value
    return str(check_choice("compute_dtype", name, (AUTO, *DTYPES)))


def check_share(name: str, value: object, *, usual: float) -> None:
    """Refuse a tolerance or confidence outside (0, 1); the error suggests `usual`."""
    if not isinstance(value, (int, float)) or not 0 < value < 1:
        raise _invalid(name, value, "a number between 0 and 1", usual)


def is_count(value: object) -> bool:
    """Whether a value is a positive integer, and not a bool."""
    return type(value) is int and value >= 1


def is_number(value: object) -> bool:
    """Whether a value is a number: no bool, neither NaN nor infinity, and no integer beyond all floats."""
    is_kind = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_kind and abs(value) <= sys.float_info.max  # type: ignore[arg-type]


def check_counts(*, usual: int = 60, **counts: object) -> None:
    """Refuse counts that are not positive integers; the error suggests `usual`."""
    for name, value in counts.items():
        if not is_count(value):
            raise _invalid(name, value, "a whole number of at least 1", usual)


def check_limit(**limits: object) -> None:
    """Refuse limits that are not whole numbers of at least 0."""
    for name, value in limits.items():
        if not (type(value) is int and value >= 0):
            raise _invalid(name, value, "a whole number of at least 0", 0)


def check_minutes(max_minutes: object) -> None:
    """Refuse a time budget that is not positive."""
    if max_minutes is not None and not (is_number(max_minutes) and max_minutes > 0):  # type: ignore[operator]
        raise _invalid("max_minutes", max_minutes, "a number of minutes above 0, or None", 60)


def _invalid(name: str, value: object, expected: str, usual: float) -> ConfigurationError:
    return ConfigurationError(
        f"{name} makes no sense", got=repr(value), expected=expected, do=f"Pass for example {name}={usual}."
    )
