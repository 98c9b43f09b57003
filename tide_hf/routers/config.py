"""``TIDEConfig``: which base model the routers belong to, where they sit, how they were calibrated.

A config file may come from anybody, so every field is checked.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from ..common.choices import EXIT_STRATEGIES, NEVER_EXIT, check_choice, is_number
from ..common.errors import ConfigurationError, RoutersFileError, quoted, short
from ..common.files import parse_json
from .draft_head_config import DraftHeadConfig
from .tables import check_record

HEAD_ADVICE = "Load the head again, or make another with tide_hf.calibrate()."
# Fields of PreTrainedConfig that a config.json may have (transformers up to 5.20 adds `_commit_hash`). Other fields
# are refused, because some of them name files, attention kernels or code for transformers to load.
INHERITED_FIELDS = ("architectures", "dtype", "model_type", "transformers_version", "_commit_hash")
RETIRED = "kv_cache_strategy"  # a field that files of earlier versions have
# Arguments of `from_pretrained` that apply to both repositories, the base model's and the routers'.
FOR_BOTH = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
WHERE = (*FOR_BOTH, "revision", "subfolder")  # arguments of `from_pretrained` that locate files

logger = logging.getLogger(__name__)


class TIDEConfig(PreTrainedConfig):
    r"""Configuration of [`TIDERouters`].

    Args:
        base_model_name_or_path (`str`, *optional*): Hub name or folder of the frozen base model.
        base_model_revision (`str`, *optional*): Revision of the base model.
        unembed_hash (`str`, *optional*): Fingerprint of the base model's head (see [`unembed.unembed_hash`]).
        weights_sha256 (`str`, *optional*): SHA-256 of the weights file that was saved with this config.
        others_sha256 (`str`, *optional*): SHA-256 of a second weights file, and its name in `tide/`: it holds all but
            the draft head, for which there is then the first (see [`files.write_routers`]).
        hidden_size (`int`): Width of the base model's hidden states.
        num_hidden_layers (`int`): Number of decoder layers of the base model.
        vocab_size (`int`): Rows of the base model's head.
        exit_layers (`list[int]`, *optional*): Numbers of executed layers after which a token may exit, each in
            1 ... `num_hidden_layers` - 1. Default: the multiples of `checkpoint_interval` from `min_layers` on.
        checkpoint_interval (`int`): Spacing of default exit layers.
        min_layers (`int`): Smallest default exit layer; ignored if `exit_layers` is given.
        exit_strategy (`str`): Kind of exit head, `"identity"` or `"linear"`.
        translator_rank (`int`, *optional*): Rank of a `"linear"` head's translator; `None` is full rank.
        draft_head (`dict`, *optional*): Shape of the draft head (see
            [`draft_head_config.DraftHeadConfig`]); `None` if there is none. It needs no `exit_layers`.
        draft_vocab_size (`int`, *optional*): Number of most frequent tokens that drafts choose from; `None`: all.
            A small size saves most of the output head's cost in draft steps. Verify passes always use the whole
            vocabulary, and so do draft steps if the base model's head is quantised or offloaded.
        router_bottleneck_dim (`int`): Hidden width of a router.
        exit_threshold (`float`): A token exits if its exit score is at least this value. Above 1, no token exits.
        compaction_threshold (`float`): Share of the slots of a batch's cache above which compaction frees them: the
            slots of rejected tokens in the row that has the fewest.
        calibration (`dict`): The calibration record: data, seed, versions, and the figures per exit layer.
    """

    model_type = "tide"

    base_model_name_or_path: str | None = None
    base_model_revision: str | None = None
    unembed_hash: str | None = None
    weights_sha256: str | None = None
    others_sha256: str | None = None
    hidden_size: int = 0
    num_hidden_layers: int = 0
    vocab_size: int = 0
    exit_layers: list[int] | None = None
    checkpoint_interval: int = 4
    min_layers: int = 8
    exit_strategy: str = "identity"
    translator_rank: int | None = None
    draft_head: dict[str, Any] | None = None
    draft_vocab_size: int | None = None
    router_bottleneck_dim: int = 128
    exit_threshold: float | int = NEVER_EXIT
    compaction_threshold: float | int = 0.25
    calibration: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the exit layers and refuse values that cannot work."""
        super().__post_init__(**kwargs)
        check_choice("exit_strategy", self.exit_strategy, EXIT_STRATEGIES)
        for name in RULES.keys() & TIDEConfig.__annotations__.keys():
            if getattr(self, name) is not getattr(TIDEConfig, name):  # defaults need not pass the check
                check_field(name, getattr(self, name))
        if self.num_hidden_layers == 0 and self.exit_layers is None:
            return  # transformers builds a bare TIDEConfig() to compare defaults
        for name in ("hidden_size", "num_hidden_layers", "vocab_size"):
            check_field(name, getattr(self, name))
        if self.draft_vocab_size is not None and self.draft_vocab_size > self.vocab_size:
            raise invalid("draft_vocab_size", self.draft_vocab_size, f"at most the vocabulary's {self.vocab_size}")
        if self.exit_layers is None:
            self.exit_layers = default_exit_layers(self.num_hidden_layers, self.checkpoint_interval, self.min_layers)
        self._check_heads()
        if self.calibration is not None:
            check_record(self.calibration)

    def _check_heads(self) -> None:
        if self.exit_layers or self.draft_head is None:
            self.exit_layers = check_exit_layers(self.exit_layers, self.num_hidden_layers)
        if self.draft_head is not None:
            self.draft_head = checked_head(self.draft_head, self.num_hidden_layers, self.hidden_size, self.vocab_size)

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> Any:
        """Read the config of routers in a folder or a Hub repository.

        Args:
            name_or_path: Folder or repository.
            **kwargs: `cache_dir`, `revision`, `subfolder`, `token` and so on, as in `PreTrainedConfig.from_pretrained`.

        Raises:
            RoutersFileError: The file is not JSON.
            ConfigurationError: A field is unknown, has the wrong type or an impossible value.
            OSError: There is no such file, or the Hub cannot be reached.
        """
        where = {name: kwargs.pop(name) for name in WHERE if name in kwargs}
        return cls.from_dict(read_config(name_or_path, **where)[0], **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build a config from the content of a `config.json`; `kwargs` are as in `PreTrainedConfig.from_dict`.

        Where vLLM loads the draft head from the same file, the fields are those of the object `tide` in it.

        Raises:
            ConfigurationError: A field is unknown, has the wrong type or an impossible value.
        """
        if holds_routers(config_dict):
            config_dict = config_dict.get(cls.model_type, config_dict)
        if not isinstance(config_dict, dict):
            raise bad_config(short(config_dict))
        if config_dict.get(RETIRED, "recompute") != "recompute":
            logger.warning("%s=%s is gone: early_exit keeps K/V exact", RETIRED, short(config_dict[RETIRED]))
        config_dict = {name: value for name, value in config_dict.items() if name != RETIRED}
        known, defaults = {*TIDEConfig.__annotations__, *INHERITED_FIELDS}, PreTrainedConfig().to_dict()
        unknown = [name for name in set(config_dict) - known if config_dict[name] != defaults.get(name, known)]
        if unknown:
            raise bad_config(f"{short(sorted(unknown))}, which it must not have")
        for name in ("architectures", "dtype", "model_type"):
            if name in config_dict:
                check_field(name, config_dict[name])
        try:
            return super().from_dict(config_dict, **kwargs)
        except StrictDataclassError as error:
            raise bad_config(short(str(error))) from error


def holds_routers(config: Any) -> bool:
    """Whether the content of a `config.json` is that of routers, also where vLLM loads their draft head from it."""
    own = TIDEConfig.model_type
    return isinstance(config, dict) and (config.get("model_type") == own or own in config)


def read_config(name_or_path: str | os.PathLike[str], name: str = CONFIG_NAME, **where: Any) -> tuple[Any, str | None]:
    """The content of `config.json`, or of a copy of it, and its commit on the Hub (`None` for a folder)."""
    file = find_file(name_or_path, name, **where)
    try:
        return parse_json(file.read_bytes()), extract_commit_hash(str(file), None)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_file(name_or_path, f"a {name} that is no JSON ({error})") from error
    except ValueError as error:
        raise bad_config(quoted(error)) from error


def find_file(name_or_path: str | os.PathLike[str], name: str, subfolder: str = "", **where: Any) -> Path:
    """The path of a file in a folder or a Hub repository. `where` holds options of transformers' `cached_file`."""
    if not Path(name_or_path).is_dir():
        return Path(str(cached_file(name_or_path, name, subfolder=subfolder, **where)))
    file = Path(name_or_path, subfolder, name)
    if not file.is_file():
        raise FileNotFoundError(f"a folder without {name}")
    return file


def bad_file(name_or_path: str | os.PathLike[str], got: str) -> RoutersFileError:
    """Make the error for routers whose files cannot be used."""
    return RoutersFileError(
        f"the routers at {name_or_path} cannot be used",
        got=got,
        expected="the config and tensors that TIDERouters.save_pretrained writes",
        do="Download them again, or make new ones with tide_hf.calibrate().",
    )


def bad_config(got: str) -> ConfigurationError:
    """Make the error for routers whose config cannot be used."""
    return ConfigurationError(
        "the config of the routers cannot be used",
        got=got,
        expected="a config.json with the fields of TIDEConfig alone, each of its type",
        do="Download the routers again, update tide_hf, or make new routers with tide_hf.calibrate().",
    )


def default_exit_layers(num_layers: int, interval: int, min_layers: int) -> list[int]:
    """Multiples of `interval` from `min_layers` to `num_layers` - 1; if there are none, the middle layer."""
    layers = [layer for layer in range(interval, num_layers, interval) if layer >= min_layers]
    return layers or [max(1, num_layers // 2)]


def check_exit_layers(exit_layers: Any, num_layers: int) -> list[int]:
    """Return `exit_layers` sorted and without repeats, or raise [`ConfigurationError`]."""
    is_list = isinstance(exit_layers, (list, tuple)) and len(exit_layers) > 0
    if not (is_list and all(type(layer) is int and 1 <= layer < num_layers for layer in exit_layers)):
        raise ConfigurationError(
            "exit layer out of range",
            got=short(exit_layers),
            expected=f"whole numbers from 1 to {num_layers - 1} (layers executed, of {num_layers})",
            do="Name other exit_layers, or leave them out for the default.",
        )
    return sorted(set(exit_layers))


def check_exit_threshold(value: Any) -> float:
    """Return `value` as a float, or raise [`ConfigurationError`] if it is not a finite, non-negative number."""
    return float(check_field("exit_threshold", value))


def check_field(name: str, value: Any) -> Any:
    """Return `value`, or raise [`ConfigurationError`] if the rule for the field `name` refuses the value."""
    is_valid, expected = RULES[name]
    if not is_valid(value):
        raise invalid(name, value, expected)
    return value


def invalid(name: str, value: object, expected: str, do: str = "") -> ConfigurationError:
    """Make the error for an invalid field."""
    do = do or f"Choose another {name}."
    return ConfigurationError(f"invalid {name}", got=short(value), expected=expected, do=do)


def checked_head(config: Any, num_layers: int, hidden_size: int, vocab_size: int) -> dict[str, Any]:
    """The shape of a draft head, with defaults; refuse one that is none, or does not fit the base model's."""
    try:
        head = DraftHeadConfig(**config)
    except (StrictDataclassError, TypeError) as error:
        expected = f"fields of {', '.join(DraftHeadConfig.__dataclass_fields__)}"
        raise invalid("draft_head", " ".join(str(error).split()), expected, HEAD_ADVICE) from error
    for name, fits, expected in (
        ("tap_layers", max(head.tap_layers) <= num_layers, f"layers of a model that has {num_layers}"),
        ("target_hidden_size", head.target_hidden_size == hidden_size, f"{hidden_size}, the base model's hidden size"),
        ("draft_vocab_size", head.draft_vocab_size <= vocab_size, f"at most the vocabulary's {vocab_size}"),
    ):
        if not fits:
            raise invalid(f"{name} in draft_head", getattr(head, name), expected, HEAD_ADVICE)
    return asdict(head)


Check = Callable[[Any], bool]


def _is_positive(value: Any) -> bool:
    return is_number(value) and value >= 0


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


def _whole_number(largest: int) -> tuple[Check, str]:
    return lambda value: type(value) is int and 1 <= value <= largest, f"a whole number from 1 to {largest}"


def _one_of(*values: Any) -> tuple[Check, str]:
    return lambda value: value in values, "one of " + ", ".join(repr(value) for value in values)


HASH = (_matches("[0-9a-f]{1,64}"), "at most 64 hexadecimal digits")
# A check for each field, and a description of valid values. Maximum sizes exceed those of any model, yet are small
# enough that no file causes an endless loop or a huge allocation.
RULES: dict[str, tuple[Check, str]] = {
    "hidden_size": _whole_number(2**20),
    "num_hidden_layers": _whole_number(2**9),  # for each, an exit layer's modules are made
    "vocab_size": _whole_number(2**24),
    "checkpoint_interval": _whole_number(2**12),
    "min_layers": _whole_number(2**12),
    "router_bottleneck_dim": _whole_number(2**20),
    "translator_rank": _whole_number(2**20),
    "draft_vocab_size": _whole_number(2**24),
    "exit_threshold": (_is_positive, "a number from 0 (always exit) to 1; anything above 1 never exits"),
    "compaction_threshold": (_is_positive, "the share of slots, from 0 to 1"),
    "base_model_name_or_path": (
        lambda value: isinstance(value, str) and 0 < len(value) <= 1024 and value.isprintable(),
        "printable text of at most 1024 characters",
    ),
    # The revision becomes a path in the cache of huggingface_hub.
    "base_model_revision": (_matches(r"(?!.*\.\.)\w[\w./+-]{0,254}"), "a commit, branch or tag"),
    "unembed_hash": HASH,
    "weights_sha256": HASH,
    "others_sha256": HASH,
    "architectures": _one_of(None, ["TIDERouters"]),
    "dtype": _one_of(None, "float64", "float32", "bfloat16", "float16"),
    "model_type": _one_of("tide"),
}
