"""``TIDEConfig``: which base model the routers belong to, where they sit, and how they were calibrated."""

from __future__ import annotations

import math
from typing import Any

from transformers import PreTrainedConfig

from .errors import ConfigurationError, describe

EXIT_STRATEGIES = ("identity", "linear")
KV_CACHE_STRATEGIES = ("propagate", "recompute", "zero_pad")
EXIT_CRITERIA = ("router", "confidence", "fixed")
ENGINES = ("eager", "compiled")
MODES = ("self_speculative", "early_exit", "post_hoc")
NEVER_EXIT = 2.0  # any threshold above 1 never exits, since scores lie in [0, 1]


class TIDEConfig(PreTrainedConfig):
    r"""Configuration of [`TIDERouters`].

    Args:
        base_model_name_or_path (`str`, *optional*): Hub name or folder of the frozen base model.
        base_model_revision (`str`, *optional*): Its revision.
        unembed_hash (`str`, *optional*): Fingerprint of the base model's head (see [`unembed.unembed_hash`]).
        hidden_size (`int`): Width of the base model's hidden states.
        num_hidden_layers (`int`): Number of decoder layers of the base model.
        vocab_size (`int`): Rows of the base model's head.
        exit_layers (`list[int]`, *optional*): Numbers of executed layers after which a token may leave, each in
            1 ... `num_hidden_layers` - 1. Default: the multiples of `checkpoint_interval` from `min_layers` on.
        checkpoint_interval (`int`): Spacing of the exit layers that are placed automatically.
        min_layers (`int`): The shallowest exit layer that is placed automatically. Layers named in `exit_layers`
            are honoured whatever this says.
        exit_strategy (`str`): Kind of exit head, `"identity"` or `"linear"`.
        translator_rank (`int`, *optional*): Rank of a `"linear"` head's translator; `None` is full rank.
        block_layer (`int`, *optional*): Number of executed layers after which a block head drafts (see
            [`block_head.BlockHead`]); `None` where there is none. It takes no part in `early_exit` and `post_hoc`.
        block_config (`dict`, *optional*): What the block's decoder layer is built from: the base model's text config.
        draft_vocab_size (`int`, *optional*): Heads draft only among so many of the most frequent tokens, which saves
            most of the output head; `None` is all. Verification always uses the whole vocabulary, and so does drafting
            where the base model's head is packed (quantised) or offloaded.
        router_bottleneck_dim (`int`): Hidden width of a router.
        exit_threshold (`float`): A token leaves where its exit score is at least this. Above 1 nothing leaves.
        kv_cache_strategy (`str`): What becomes of the K/V of layers that a token skips in `early_exit`: `"recompute"`
            (exact: computed together with the next token that goes deep), `"propagate"` (computed at once from the
            early state) or `"zero_pad"` (zeros).
        compaction_threshold (`float`): Share of holes above which a batch's cache is compacted.
        calibration (`dict`): The calibration record: data, seed, versions, and the figures per exit layer.
    """

    model_type = "tide"

    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    unembed_hash: str | None = None
    hidden_size: int = 0
    num_hidden_layers: int = 0
    vocab_size: int = 0
    exit_layers: list[int] | None = None
    checkpoint_interval: int = 4
    min_layers: int = 8
    exit_strategy: str = "identity"
    translator_rank: int | None = None
    block_layer: int | None = None
    block_config: dict[str, Any] | None = None
    draft_vocab_size: int | None = None
    router_bottleneck_dim: int = 128
    exit_threshold: float | int = NEVER_EXIT
    kv_cache_strategy: str = "recompute"
    compaction_threshold: float | int = 0.25
    calibration: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the exit layers and refuse values that cannot work."""
        super().__post_init__(**kwargs)
        check_choice("exit_strategy", self.exit_strategy, EXIT_STRATEGIES)
        check_choice("kv_cache_strategy", self.kv_cache_strategy, KV_CACHE_STRATEGIES)
        check_exit_threshold(self.exit_threshold)
        for name in ("checkpoint_interval", "min_layers", "router_bottleneck_dim"):
            _check_positive(name, getattr(self, name))
        for name in ("translator_rank", "draft_vocab_size"):
            if getattr(self, name) is not None:
                _check_positive(name, getattr(self, name))
        if self.num_hidden_layers == 0 and self.exit_layers is None:
            return  # the bare TIDEConfig() that transformers builds to compare defaults
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            _check_positive(name, getattr(self, name))
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise ConfigurationError(
                describe(
                    "draft_vocab_size is too large",
                    got=self.draft_vocab_size,
                    expected=f"at most the vocabulary's {self.vocab_size}",
                    do="Lower it, or leave it out to draft from all tokens.",
                )
            )
        if self.exit_layers is None:
            self.exit_layers = default_exit_layers(self.num_hidden_layers, self.checkpoint_interval, self.min_layers)
        self.exit_layers = check_exit_layers(self.exit_layers, self.num_hidden_layers)
        if self.block_layer is not None:
            check_exit_layers([self.block_layer], self.num_hidden_layers)
            if not (isinstance(self.block_config, dict) and isinstance(self.block_config.get("model_type"), str)):
                raise ConfigurationError(
                    describe(
                        "a block head needs the base model's config",
                        got=f"block_layer={self.block_layer} with block_config={type(self.block_config).__name__}",
                        expected="block_config with the model_type of the base model",
                        do="Make routers with tide_hf.calibrate(exit_strategy='block').",
                    )
                )


def default_exit_layers(num_layers: int, interval: int, min_layers: int) -> list[int]:
    """Multiples of `interval` in `min_layers` ... `num_layers` - 1; the middle layer where there is none."""
    layers = [layer for layer in range(interval, num_layers, interval) if layer >= min_layers]
    return layers or [max(1, num_layers // 2)]


def check_exit_layers(exit_layers: Any, num_layers: int) -> list[int]:
    """Return `exit_layers` sorted and without repeats, or raise [`ConfigurationError`]."""
    expected = f"whole numbers from 1 to {num_layers - 1} (layers executed, of {num_layers})"
    valid = isinstance(exit_layers, (list, tuple)) and len(exit_layers) > 0
    valid = valid and all(type(layer) is int and 1 <= layer < num_layers for layer in exit_layers)
    if not valid:
        raise ConfigurationError(
            describe(
                "exit layer out of range",
                got=exit_layers,
                expected=expected,
                do="Name other exit_layers, or leave them out to have them placed.",
            )
        )
    return sorted(set(exit_layers))


def check_exit_threshold(value: Any) -> float:
    """Return `value` as a float, or raise [`ConfigurationError`] where it is no finite, non-negative number."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    if not number:
        raise ConfigurationError(
            describe(
                "exit_threshold is no usable number",
                got=repr(value),
                expected="a number from 0 (always exit) to 1; anything above 1 never exits",
                do="Pass exit_threshold=0.9, say, or leave it out for the calibrated value.",
            )
        )
    return float(value)


def check_min_layers(value: object) -> int:
    """Return `value`, or raise [`ConfigurationError`] where it is no number of layers."""
    _check_positive("min_layers", value)
    return value  # type: ignore[return-value]


def check_mode(mode: object) -> str:
    """Return `mode`, or raise [`ConfigurationError`] where there is no such mode."""
    return check_choice("tide_mode", mode, MODES)


def check_engine(engine: object) -> str:
    """Refuse an engine that does not exist."""
    return check_choice("tide_engine", engine, ENGINES)


def check_choice(name: str, value: Any, choices: tuple[str | bool, ...]) -> Any:
    """Return `value` if it is one of `choices`, or raise [`ConfigurationError`]."""
    if not isinstance(value, (str, bool)) or value not in choices:
        expected = "one of " + ", ".join(repr(choice) for choice in choices)
        raise ConfigurationError(
            describe(f"unknown {name}", got=repr(value), expected=expected, do=f"Choose another {name}.")
        )
    return value


def _check_positive(name: str, value: object) -> None:
    if type(value) is not int or value < 1:
        raise ConfigurationError(
            describe(
                f"{name} is too small", got=repr(value), expected="a whole number of at least 1", do=f"Set {name}."
            )
        )
