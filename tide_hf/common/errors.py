"""The errors that users can meet. Each is also the built-in error that fits it."""

from __future__ import annotations

import sys


class TIDEError(Exception):
    """Base of all errors that tide_hf raises on purpose."""


class UnsupportedModelError(TIDEError, NotImplementedError):
    """The base model, or its cache, does not support the mode."""


class UnsupportedOptionError(TIDEError, NotImplementedError):
    """A generation option cannot be combined with the mode."""


class ConfigurationError(TIDEError, ValueError):
    """A setting has a value that is not valid, or not for this model."""


class ChatTemplateError(ConfigurationError):
    """A tokenizer's chat template does not parse, or refuses a chat; `reason` is its own message."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BaseModelMismatchError(TIDEError, ValueError):
    """The routers were calibrated for another base model."""


class RoutersFileError(TIDEError, ValueError):
    """A routers file is damaged, unsafe, or has tensors of the wrong shape."""


class RoutersNotFoundError(TIDEError, FileNotFoundError):
    """There are no routers in the folder or Hub repository."""


class RoutersNotSavedError(TIDEError, OSError):
    """Routers could not be written; earlier files are unchanged."""


class HubError(TIDEError, OSError):
    """The Hub refused an upload, or could not be reached for it."""


class CalibrationError(TIDEError, ValueError):
    """Calibration is not possible with the data."""


class MissingPackageError(TIDEError, ImportError):
    """An optional package is not installed."""


class KernelError(TIDEError, RuntimeError):
    """Fused kernels are required and not available."""


class ModelNotFoundError(TIDEError, FileNotFoundError):
    """No base model could be loaded from the folder or Hub repository."""


class DemoModelError(TIDEError, OSError):
    """The demo's model could not be loaded from PyPI."""


def first_line(error: Exception) -> str:
    """The first line of an error's message; its class if there is none."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def quoted(error: Exception) -> str:
    """[`first_line`] in quotation marks, for the `got` of [`describe`]."""
    return f"'{first_line(error)}'"


def short(value: object) -> str:
    """`repr(value)`, cut if it is long; an int from a file may be too long for Python to print."""
    if isinstance(value, int) and abs(value) > sys.maxsize:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def describe(problem: str, *, got: object, expected: str, do: str) -> str:
    """The message of an error, in three sentences: what is wrong, what would be right, what the user can do."""
    return f"{problem}: got {got}. Expected {expected}. {do}"


def problem_of(error: Exception) -> str:
    """The first sentence of a message made by [`describe`]."""
    return str(error).partition(". Expected ")[0]
