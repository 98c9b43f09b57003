"""Ways of decoding that are compared: plain ``generate``, and the modes of TIDE on a copy that shares its weights."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..common.errors import ConfigurationError, describe
from ..model import TIDEModelForCausalLM
from ..routers.config import NEVER_EXIT, check_exit_threshold
from ..routers.routers import TIDERouters

DEFAULT_EXIT_THRESHOLD = 0.9  # for the approximate modes, where the calibrated threshold never exits


@dataclass(frozen=True)
class Contender:
    """One way of decoding.

    Attributes:
        name: What to call it.
        model: The model whose `generate` is called.
        options: Keyword arguments that make `generate` decode this way.
        lossless: Whether it claims the plain model's own tokens.
        exit_threshold: The threshold it runs with, where it has one.
    """

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    lossless: bool = True
    exit_threshold: float | None = None


def weight_sharing_copy(model: nn.Module) -> Any:
    """Copy a model's modules but not its tensors, so that attaching to one leaves the other as it is.

    Args:
        model: The model, not attached.

    Returns:
        The copy; parameters and buffers are `model`'s own.
    """
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_plain(model: Any) -> None:
    """Refuse a model with TIDE attached, which is not what others can be compared with.

    Raises:
        ConfigurationError: It has.
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


def tide_contenders(
    model: Any,
    routers: TIDERouters | None,
    modes: Sequence[str],
    *,
    exit_threshold: float | None = None,
    engine: str = "eager",
) -> list[Contender]:
    """Plain `generate` of `model`, and each mode on a copy of it that shares its weights.

    Args:
        model: The base model, not attached. It is not touched, so its `generate` runs no code of this library.
        routers: Its routers; `None` leaves `self_speculative` alone.
        modes: The modes.
        exit_threshold: For `early_exit` and `post_hoc`; default: the calibrated one, or 0.9 where that never exits.
        engine: What runs the layers in all modes.

    Returns:
        The contenders, plain `generate` first.
    """
    check_plain(model)
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers, mode=modes[0], engine=engine)
    threshold = usable_threshold(routers, exit_threshold)
    return [Contender("generate", model), *(tide_contender(attached, mode, threshold) for mode in modes)]


def tide_contender(attached: Any, mode: str, exit_threshold: float) -> Contender:
    """An attached model decoding in `mode`, at `exit_threshold` where the mode has one."""
    if mode == "self_speculative":
        return Contender(mode, attached, {"tide_mode": mode})
    options = {"tide_mode": mode, "exit_threshold": exit_threshold}
    return Contender(mode, attached, options, lossless=False, exit_threshold=exit_threshold)


def usable_threshold(routers: TIDERouters | None, exit_threshold: float | None) -> float:
    """The threshold for the approximate modes: the one asked for, the calibrated one, or one at which tokens exit."""
    if exit_threshold is not None:
        return check_exit_threshold(exit_threshold)
    calibrated = routers.config.exit_threshold if routers is not None else NEVER_EXIT
    return calibrated if calibrated <= 1 else DEFAULT_EXIT_THRESHOLD
