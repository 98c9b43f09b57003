"""``TIDEConfig``: which base model the routers belong to, where they sit, how they were calibrated.

A config file may come from anybody, so every field is checked.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig

from ..common.choices import EXIT_STRATEGIES, KV_CACHE_STRATEGIES, check_choice
from ..common.errors import ConfigurationError, describe, short

NEVER_EXIT = 2.0  # any threshold above 1 never exits, since scores lie in [0, 1]
# Fields of PreTrainedConfig that a config.json may have (transformers up to 5.20 adds the last one). Others are
# refused, because transformers takes names of files, attention kernels and code from some of them.
INHERITED_FIELDS = ("architectures", "dtype", "model_type", "transformers_version", "_commit_hash")
# Arguments of `from_pretrained` that apply to both repositories, the base model's and the routers'.
FOR_BOTH = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
# Beyond any model, yet small enough that no file causes an endless loop or allocation.
LARGEST = {
    "hidden_size": 2**20,
    "num_hidden_layers": 2**12,
    "vocab_size": 2**24,
    "checkpoint_interval": 2**12,
    "min_layers": 2**12,
    "router_bottleneck_dim": 2**20,
    "translator_rank": 2**20,
    "draft_vocab_size": 2**24,
}
SAVED_DTYPES = ("float64", "float32", "bfloat16", "float16")
LARGEST_BLOCK_COUNT = 2**12  # of layers or experts in block_config
LARGEST_COUNT = 2**63  # of documents
LONGEST_NAME = 1024
LAYER_FIGURES = ("router_auc", "expected_calibration_error", "exit_rate", "head_parameters", "head_mb", "cost")
TOLERANCE_FIGURES = ("exit_threshold", "disagreement", "depth_fraction")


class TIDEConfig(PreTrainedConfig):
    r"""Configuration of [`TIDERouters`].

    Args:
        base_model_name_or_path (`str`, *optional*): Hub name or folder of the frozen base model.
        base_model_revision (`str`, *optional*): Its revision.
        unembed_hash (`str`, *optional*): Fingerprint of the base model's head (see [`unembed.unembed_hash`]).
        weights_sha256 (`str`, *optional*): Of the file of weights that was saved with this config.
        hidden_size (`int`): Width of the base model's hidden states.
        num_hidden_layers (`int`): Number of decoder layers of the base model.
        vocab_size (`int`): Rows of the base model's head.
        exit_layers (`list[int]`, *optional*): Numbers of executed layers after which a token may exit, each in
            1 ... `num_hidden_layers` - 1. Default: the multiples of `checkpoint_interval` from `min_layers` on.
        checkpoint_interval (`int`): Spacing of default exit layers.
        min_layers (`int`): Shallowest default exit layer; it does not restrict a given `exit_layers`.
        exit_strategy (`str`): Kind of exit head, `"identity"` or `"linear"`.
        translator_rank (`int`, *optional*): Rank of a `"linear"` head's translator; `None` is full rank.
        block_layer (`int`, *optional*): Layers executed before a block head drafts (see [`block_head.BlockHead`]);
            `None` if there is none. `early_exit` and `post_hoc` do not use it.
        block_config (`dict`, *optional*): Config of the block head's decoder layer: the base model's text config.
        draft_vocab_size (`int`, *optional*): Size of the draft vocabulary, the most frequent tokens; `None` is all.
            A small one saves most of the output head in draft steps. Verification always uses the whole vocabulary,
            and so does drafting if the base model's head is quantised or offloaded.
        router_bottleneck_dim (`int`): Hidden width of a router.
        exit_threshold (`float`): A token exits if its exit score is at least this. Above 1 none exits.
        kv_cache_strategy (`str`): K/V of the layers that a token skips in `early_exit`: `"recompute"` (exact: caught
            up with the next token that runs these layers), `"propagate"` (computed at once from the early state) or
            `"zero_pad"` (zeros).
        compaction_threshold (`float`): Share of holes above which a batch's cache is compacted.
        calibration (`dict`): The calibration record: data, seed, versions, and the figures per exit layer.
    """

    model_type = "tide"

    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    unembed_hash: str | None = None
    weights_sha256: str | None = None
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
        check_number("compaction_threshold", self.compaction_threshold, "the share of holes, from 0 to 1")
        for name in ("checkpoint_interval", "min_layers", "router_bottleneck_dim"):
            check_positive(name, getattr(self, name))
        for name in ("translator_rank", "draft_vocab_size"):
            if getattr(self, name) is not None:
                check_positive(name, getattr(self, name))
        check_name("base_model_name_or_path", self.base_model_name_or_path)
        check_revision(self.base_model_revision)
        check_hash("unembed_hash", self.unembed_hash)
        check_hash("weights_sha256", self.weights_sha256)
        if self.num_hidden_layers == 0 and self.exit_layers is None:
            return  # transformers builds a bare TIDEConfig() to compare defaults
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            check_positive(name, getattr(self, name))
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
        if self.block_layer is not None or self.block_config is not None:
            check_exit_layers([self.block_layer], self.num_hidden_layers)
            check_block_config(self.block_layer, self.block_config)
        check_record(self.calibration)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Read the config of routers in a folder or a Hub repository.

        Args:
            name_or_path: Folder or repository.
            **kwargs: As in `PreTrainedConfig.from_pretrained`, which in transformers 5.17 loses the `token`.

        Raises:
            ConfigurationError: A field is unknown, has the wrong type or an impossible value.
            OSError: There is no such file, or no JSON in it.
        """
        config_dict, kwargs = cls.get_config_dict(name_or_path, **kwargs)
        return cls.from_dict(config_dict, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the config that a `config.json` holds.

        Args:
            config_dict: The file's content.
            **kwargs: As in `PreTrainedConfig.from_dict`.

        Raises:
            ConfigurationError: A field is unknown, has the wrong type or an impossible value.
        """
        if not isinstance(config_dict, dict):
            raise bad_config(short(config_dict))
        known, defaults = {*TIDEConfig.__annotations__, *INHERITED_FIELDS}, PreTrainedConfig().to_dict()
        unknown = [name for name in set(config_dict) - known if config_dict[name] != defaults.get(name, known)]
        if unknown:
            raise bad_config(f"{short(sorted(unknown))}, which it must not have")
        check_inherited(config_dict)
        try:
            return super().from_dict(config_dict, **kwargs)
        except StrictDataclassError as error:
            raise bad_config(short(str(error))) from error

    @classmethod
    def get_config_dict(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> tuple[dict[str, Any], dict]:
        """Read `config.json`, as `PreTrainedConfig.get_config_dict` does.

        Raises:
            ConfigurationError: It holds no JSON object, or one that Python's parser gives up on.
            OSError: There is no such file, or no JSON in it.
        """
        try:
            return super().get_config_dict(name_or_path, **kwargs)
        except (TypeError, ValueError, RecursionError) as error:
            raise bad_config(f"'{error}'") from error


def bad_config(got: str) -> ConfigurationError:
    """An error about the config of routers."""
    return ConfigurationError(
        describe(
            "the config of the routers cannot be used",
            got=got,
            expected="a config.json with the fields of TIDEConfig alone, each of its type",
            do="Download the routers again, update tide_hf if a newer one made them, or make new ones with "
            "tide_hf.calibrate().",
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
                got=short(exit_layers),
                expected=expected,
                do="Name other exit_layers, or leave them out to have them placed.",
            )
        )
    return sorted(set(exit_layers))


def check_exit_threshold(value: Any) -> float:
    """Return `value` as a float, or raise [`ConfigurationError`] where it is no finite, non-negative number."""
    check_number("exit_threshold", value, "a number from 0 (always exit) to 1; anything above 1 never exits")
    return float(value)


def check_min_layers(value: object) -> int:
    """Return `value`, or raise [`ConfigurationError`] where it is no number of layers."""
    check_positive("min_layers", value)
    return value  # type: ignore[return-value]


def check_positive(name: str, value: object) -> None:
    """Refuse anything but an integer from 1 to `LARGEST[name]`."""
    largest = LARGEST[name]
    if type(value) is not int or not 1 <= value <= largest:
        raise ConfigurationError(
            describe(
                f"{name} is out of range",
                got=short(value),
                expected=f"a whole number from 1 to {largest}",
                do=f"Set {name}.",
            )
        )


def check_number(name: str, value: Any, expected: str) -> None:
    """Refuse anything but a finite number of at least 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not (number and 0 <= value <= sys.float_info.max):  # refuses NaN, infinity and huge integers
        do = f"Pass {name}=0.9, say, or leave it out for the value of the routers."
        raise ConfigurationError(describe(f"{name} is no usable number", got=short(value), expected=expected, do=do))


def check_name(name: str, value: object) -> None:
    """Refuse anything but a short printable string."""
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()):
        expected = f"printable text of at most {LONGEST_NAME} characters"
        raise ConfigurationError(
            describe(f"{name} is no name", got=short(value), expected=expected, do=f"Set {name} to the base model's.")
        )


def check_revision(value: object) -> None:
    """Refuse anything but a commit, branch or tag, since it becomes a path in huggingface_hub's cache."""
    valid = isinstance(value, str) and re.fullmatch(r"\w[\w./+-]{0,254}", value, re.ASCII) and ".." not in value
    if value is not None and not valid:
        raise ConfigurationError(
            describe(
                "base_model_revision is no revision",
                got=short(value),
                expected="a commit, branch or tag",
                do="Set base_model_revision to one of the base model's, or to null.",
            )
        )


def check_hash(name: str, value: object) -> None:
    """Refuse anything but a hexadecimal hash of at most 256 bits."""
    if value is not None and not (isinstance(value, str) and re.fullmatch("[0-9a-f]{1,64}", value)):
        raise ConfigurationError(
            describe(
                f"{name} is no fingerprint",
                got=short(value),
                expected="at most 64 hexadecimal digits",
                do="Take the value that TIDERouters.for_model or save_pretrained wrote.",
            )
        )


def check_block_config(block_layer: int | None, config: Any) -> None:
    """Refuse anything but a plausible base model config, since transformers builds a layer from it."""
    if not (isinstance(config, dict) and isinstance(config.get("model_type"), str) and config["model_type"] != "tide"):
        raise ConfigurationError(
            describe(
                "a block head needs the base model's config",
                got=f"block_layer={block_layer} with block_config={type(config).__name__}",
                expected="block_config with the model_type of the base model",
                do="Make routers with tide_hf.calibrate(exit_strategy='block').",
            )
        )
    for name, value in config.items():
        counts = "layer" in name or "expert" in name
        too_many = counts and isinstance(value, int) and abs(value) > LARGEST_BLOCK_COUNT
        if too_many or name in ("auto_map", "attn_implementation", "_attn_implementation", "quantization_config"):
            raise ConfigurationError(
                describe(
                    f"block_config holds a {name} that cannot be",
                    got=short(value),
                    expected=f"counts up to {LARGEST_BLOCK_COUNT}, and no names of code or kernels",
                    do="Make routers with tide_hf.calibrate(exit_strategy='block').",
                )
            )


def check_record(record: Any) -> None:
    """Refuse a calibration record that the drafting policy or the tables cannot read."""
    if record is None:
        return
    if not isinstance(record, dict):
        raise _bad_record("", record, "a JSON object")
    for name, (is_valid, expected) in RECORD_PARTS.items():
        if name in record and not is_valid(record[name]):
            raise _bad_record(f" ({name})", record[name], expected)


def _bad_record(part: str, got: object, expected: str) -> ConfigurationError:
    do = "Make new routers with tide_hf.calibrate()."
    problem = f"the calibration record cannot be used{part}"
    return ConfigurationError(describe(problem, got=short(got), expected=expected, do=do))


def _are_layers(layers: Any) -> bool:
    if not isinstance(layers, dict) or not all(re.fullmatch("[1-9][0-9]{0,3}", str(layer)) for layer in layers):
        return False
    return all(_is_row(row) and _is_coverage(row.get("coverage", {})) for row in layers.values())


def _is_row(row: Any) -> bool:
    valid = isinstance(row, dict) and _is_share(row.get("agreement")) and _is_count(row.get("documents_before", 0))
    return valid and _has_numbers(row, optional=LAYER_FIGURES)


def _is_coverage(coverage: Any) -> bool:
    return isinstance(coverage, dict) and all(
        re.fullmatch(r"[01]\.[0-9]{1,4}", str(precision)) and _is_number(share) for precision, share in coverage.items()
    )


def _is_threshold(threshold: Any) -> bool:
    return isinstance(threshold, dict) and _has_numbers(threshold, ("tolerance", "confidence", "chosen"))


def _are_tolerances(rows: Any) -> bool:
    return isinstance(rows, list) and all(map(_is_tolerance, rows))


def _is_tolerance(row: Any) -> bool:
    if not (isinstance(row, dict) and _has_numbers(row, ("tolerance",), optional=TOLERANCE_FIGURES)):
        return False
    interval = row.get("interval")
    return interval is None or (isinstance(interval, list) and len(interval) == 2 and all(map(_is_number, interval)))


def _has_numbers(row: dict[str, Any], needed: Sequence[str] = (), optional: Sequence[str] = ()) -> bool:
    known = [row.get(name) for name in needed] + [row[name] for name in optional if row.get(name) is not None]
    return all(map(_is_number, known))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is_share(value: object) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_COUNT


# Check and description of each part of a calibration record. Older records lack some.
RECORD_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "exit_layers": (_are_layers, "for each exit layer an agreement from 0 to 1, and numbers for the other figures"),
    "block": (_is_row, "an agreement from 0 to 1, a whole number of documents, and numbers for the other figures"),
    "num_documents": (_is_count, "a whole number of documents"),
    "threshold": (_is_threshold, "numbers for tolerance, confidence and chosen"),
    "tolerances": (_are_tolerances, "rows with a tolerance, and numbers for the other figures"),
}


def check_inherited(config: dict[str, Any]) -> None:
    """Refuse values that transformers cannot handle."""
    allowed: dict[str, tuple] = {
        "architectures": (None, ["TIDERouters"]),
        "dtype": (None, *SAVED_DTYPES),
        "model_type": ("tide",),
    }
    for name, values in allowed.items():
        if name in config and config[name] not in values:
            expected = "one of " + ", ".join(repr(value) for value in values)
            do = "Make routers with tide_hf.calibrate()."
            raise ConfigurationError(describe(f"unknown {name}", got=short(config[name]), expected=expected, do=do))
