"""What transformers itself offers to decode faster without another model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from .baselines import Contender, weight_sharing_copy
from .benchmark import timed_run

TRIAL_TOKENS = 8  # enough for a draft and its verification
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


def prompt_lookup(model: Any) -> Contender:
    """Drafts that are looked up in the text so far."""
    return Contender("prompt_lookup_num_tokens=10", model, {"prompt_lookup_num_tokens": 10})


def assistant_early_exit(model: Any) -> Contender:
    """Drafts by the lower half of the layers."""
    layers = max(1, model.config.get_text_config().num_hidden_layers // 2)
    return Contender(f"assistant_early_exit={layers}", model, {"assistant_early_exit": layers})


def those_that_run(
    contenders: Sequence[Contender], inputs: dict[str, torch.Tensor]
) -> tuple[list[Contender], dict[str, str]]:
    """Try each contender for a few tokens, since not every model can decode in every way.

    Args:
        contenders: Not attached models.
        inputs: Keyword arguments of `generate`.

    Returns:
        Those that run, and why the others do not, by name.
    """
    running, failing = [], {}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it warns, once, of how its own assistants call its generate
    for one in contenders:
        # A copy, since a call of assistant_early_exit that fails leaves the config with too few layers.
        trial = Contender(one.name, weight_sharing_copy(one.model), one.options)
        try:
            timed_run(trial, inputs, TRIAL_TOKENS)
        except FAILURES as error:
            failing[one.name] = f"{type(error).__name__}: {error}"
        else:
            running.append(one)
    transformers_logging.set_verbosity(verbosity)
    return running, failing
