"""Every error that a user of tide_hf can meet. Each kind is also the built-in that fits it."""

from __future__ import annotations

import sys


class TIDEError(Exception):
    """Base of all errors that tide_hf raises on purpose."""


class UnsupportedModelError(TIDEError, NotImplementedError):
    """The base model, or its cache, cannot be served in the mode that was asked for."""


class UnsupportedOptionError(TIDEError, NotImplementedError):
    """A generation option cannot be combined with the mode that was asked for."""


class ConfigurationError(TIDEError, ValueError):
    """A setting has a value that makes no sense for this model."""


class ChatTemplateError(ConfigurationError):
    """A tokenizer's chat template does not parse, or refuses a chat.

    Args:
        message: The error's.
        reason: What the template says.
    """

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class BaseModelMismatchError(TIDEError, ValueError):
    """The routers were calibrated for another base model."""


class RoutersFileError(TIDEError, ValueError):
    """A routers file is damaged, unsafe, or holds tensors of the wrong shape."""


class RoutersNotFoundError(TIDEError, FileNotFoundError):
    """No routers were found in the folder or Hub repository."""


class RoutersNotSavedError(TIDEError, OSError):
    """Routers could not be written; what was there before is still there."""


class HubError(TIDEError, OSError):
    """The Hub refused an upload, or could not be reached for it."""


class CalibrationError(TIDEError, ValueError):
    """Calibration cannot start or go on with the data it was given."""


class MissingPackageError(TIDEError, ImportError):
    """An optional package is not installed."""


class KernelError(TIDEError, RuntimeError):
    """Fused kernels were insisted on and cannot be had."""


class ModelNotFoundError(TIDEError, FileNotFoundError):
    """No base model could be loaded from the folder or Hub repository of that name."""


class DemoModelError(TIDEError, OSError):
    """The demo's model could not be had from PyPI."""


def first_line(error: Exception) -> str:
    """The first line of what an error says; its class where it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def quoted(error: Exception) -> str:
    """The same between quotation marks, for what was got."""
    return f"'{first_line(error)}'"


def short(value: object) -> str:
    """`repr(value)`, cut where a file made it long; an int may be too long to print at all."""
    if isinstance(value, int) and abs(value) > sys.maxsize:
        return "a number beyond 64 bits"
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def describe(problem: str, *, got: object, expected: str, do: str) -> str:
    """Word an error the one way that this library words errors.

    Args:
        problem: What is wrong, in a few words.
        got: What was given.
        expected: What would have been right.
        do: What the user can do about it.

    Returns:
        The message, in three sentences.
    """
    return f"{problem}: got {got}. Expected {expected}. {do}"


def problem_of(error: Exception) -> str:
    """The first sentence of what [`describe`] has worded: what is wrong, and what was given."""
    return str(error).partition(". Expected ")[0]
