"""Decoding methods to compare: plain generate, transformers' own accelerated decoding, and TIDE's modes."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ..common.errors import ConfigurationError, describe
from ..model import TIDEModelForCausalLM
from ..routers.config import NEVER_EXIT, check_exit_threshold
from ..routers.routers import TIDERouters
from .benchmark import DecodingMethod, timed_run

DEFAULT_EXIT_THRESHOLD = 0.9  # for the approximate modes, if the calibrated threshold never exits
TRIAL_TOKENS = 8  # enough for one draft and verify round
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def weight_sharing_copy(model: nn.Module) -> Any:
    """Copy a model's modules but not its tensors, so that attaching to one leaves the other unchanged.

    Args:
        model: The model, not attached.

    Returns:
        The copy; parameters and buffers are `model`'s own.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_plain(model: Any) -> None:
    """Refuse a model with TIDE attached as the baseline.

    Raises:
        ConfigurationError: TIDE is attached.
    """
    if isinstance(model, TIDEModelForCausalLM):
        raise ConfigurationError(
            describe(
                "there is nothing to compare with",
                got="a model with TIDE attached",
                expected="the plain base model",
                do="Call TIDEModelForCausalLM.detach(model) first.",
            )
        )


def tide_methods(
    model: Any,
    routers: TIDERouters | None,
    modes: Sequence[str],
    *,
    exit_threshold: float | None = None,
    engine: str = "eager",
) -> list[DecodingMethod]:
    """Plain `generate` of `model`, and each mode on a copy of it that shares its weights.

    Args:
        model: The base model, not attached. It stays so; its `generate` runs no code of this library.
        routers: Its routers; without any only `self_speculative` can run.
        modes: The modes.
        exit_threshold: For `early_exit` and `post_hoc`; default: the calibrated one, or 0.9 if that never exits.
        engine: Engine of all modes.

    Returns:
        The methods, plain `generate` first.
    """
    check_plain(model)
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers, mode=modes[0], engine=engine)
    threshold = usable_threshold(routers, exit_threshold)
    return [DecodingMethod("generate", model), *(tide_method(attached, mode, threshold) for mode in modes)]


def tide_method(attached: Any, mode: str, exit_threshold: float) -> DecodingMethod:
    """An attached model decoding in `mode`, at `exit_threshold` if the mode is approximate."""
    if mode == "self_speculative":
        return DecodingMethod(mode, attached, {"tide_mode": mode})
    options = {"tide_mode": mode, "exit_threshold": exit_threshold}
    return DecodingMethod(mode, attached, options, lossless=False, exit_threshold=exit_threshold)


def usable_threshold(routers: TIDERouters | None, exit_threshold: float | None) -> float:
    """The threshold for the approximate modes: given, calibrated, or the default if the calibrated one never exits."""
    if exit_threshold is not None:
        return check_exit_threshold(exit_threshold)
    calibrated = routers.config.exit_threshold if routers is not None else NEVER_EXIT
    return calibrated if calibrated <= 1 else DEFAULT_EXIT_THRESHOLD


def prompt_lookup(model: Any) -> DecodingMethod:
    """Prompt lookup decoding of transformers."""
    return DecodingMethod("prompt_lookup_num_tokens=10", model, {"prompt_lookup_num_tokens": 10})


def assistant_early_exit(model: Any) -> DecodingMethod:
    """LayerSkip decoding of transformers, which drafts with the lower half of the layers."""
    layers = max(1, model.config.get_text_config().num_hidden_layers // 2)
    return DecodingMethod(f"assistant_early_exit={layers}", model, {"assistant_early_exit": layers})


def those_that_run(
    methods: Sequence[DecodingMethod], inputs: dict[str, torch.Tensor]
) -> tuple[list[DecodingMethod], dict[str, str]]:
    """Try each method for a few tokens, since not every model supports every method.

    Args:
        methods: Methods of transformers on a model that is not attached.
        inputs: Keyword arguments of `generate`.

    Returns:
        The methods that run, and the errors of the others by name.
    """
    running, failing = [], {}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # transformers warns about its own assistants
    for one in methods:
        # A copy, because a failing assistant_early_exit leaves too few layers in the config.
        trial = DecodingMethod(one.name, weight_sharing_copy(one.model), one.options)
        try:
            timed_run(trial, inputs, TRIAL_TOKENS)
        except FAILURES as error:
            failing[one.name] = f"{type(error).__name__}: {error}"
        else:
            running.append(one)
    transformers_logging.set_verbosity(verbosity)
    return running, failing
