"""The errors that users can meet. Each class also derives from a fitting built-in error."""

from __future__ import annotations

import sys


class TIDEError(Exception):
    """Base of all errors that tide_hf raises on purpose.

    Args:
        problem: What is wrong.
        got: What was found.
        expected: What would be right.
        do: What the user can do, as a sentence.

    Attributes:
        problem: The problem and what was found, without the rest of the message.
    """

    def __init__(self, problem: str, *, got: object = None, expected: str | None = None, do: str | None = None) -> None:
        self.problem = problem if expected is None else f"{problem}: got {got}"
        self.got = got
        super().__init__(self.problem if expected is None else f"{self.problem}. Expected {expected}. {do}")


class UnsupportedModelError(TIDEError, NotImplementedError):
    """The base model, or its cache, does not support the mode."""


class UnsupportedOptionError(TIDEError, NotImplementedError):
    """A generation option cannot be combined with the mode."""


class ConfigurationError(TIDEError, ValueError):
    """A setting has a value that is invalid, in general or for this model."""


class ChatTemplateError(ConfigurationError):
    """A tokenizer's chat template does not parse, or refuses a chat."""


class BaseModelMismatchError(TIDEError, ValueError):
    """The routers were calibrated for another base model."""


class RoutersFileError(TIDEError, ValueError):
    """A routers file is damaged, unsafe, or has tensors of the wrong shape."""


class RoutersNotFoundError(TIDEError, FileNotFoundError):
    """There are no routers in the folder or Hub repository."""


class RoutersNotSavedError(TIDEError, OSError):
    """Routers could not be written; earlier files are unchanged."""


class HubError(TIDEError, OSError):
    """The Hub refused an upload, or could not be reached."""


class CalibrationError(TIDEError, ValueError):
    """Calibration is not possible with the data."""


class MissingPackageError(TIDEError, ImportError):
    """An optional package is not installed."""


class KernelError(TIDEError, RuntimeError):
    """Fused kernels are required, but not available."""


class ModelNotFoundError(TIDEError, FileNotFoundError):
    """No base model could be loaded from the folder or Hub repository."""


class DemoModelError(TIDEError, OSError):
    """The demo's model could not be loaded from PyPI."""


def first_line(error: Exception) -> str:
    """The first line of an error's message; its class name if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def quoted(error: Exception) -> str:
    """[`first_line`] in quotation marks, for the `got` of a [`TIDEError`]."""
    return f"'{first_line(error)}'"


def short(value: object) -> str:
    """`repr(value)`, truncated if long. Ints beyond 64 bits are only described: Python may refuse to print them."""
    if isinstance(value, int) and abs(value) > sys.maxsize:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
