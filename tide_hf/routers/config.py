"""``TIDEConfig``: which base model the routers belong to, where they sit, how they were calibrated.

A config file may come from anybody, so every field is checked.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash

from ..common.choices import EXIT_STRATEGIES, KV_CACHE_STRATEGIES, check_choice
from ..common.errors import ConfigurationError, RoutersFileError, quoted, short
from ..common.files import parse_json

NEVER_EXIT = 2.0  # any threshold above 1 never exits, since scores lie in [0, 1]
# Fields of PreTrainedConfig that a config.json may have (transformers up to 5.20 adds `_commit_hash`). Other fields
# are refused, because some of them name files, attention kernels or code for transformers to load.
INHERITED_FIELDS = ("architectures", "dtype", "model_type", "transformers_version", "_commit_hash")
# Arguments of `from_pretrained` that apply to both repositories, the base model's and the routers'.
FOR_BOTH = ("cache_dir", "force_download", "local_files_only", "proxies", "token")
WHERE = (*FOR_BOTH, "revision", "subfolder")  # arguments of `from_pretrained` that locate files


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
        draft_head (`dict`, *optional*): Shape of the draft head (see [`draft_head.DraftHeadConfig`]); `None` if there
            is none. It needs no `exit_layers`. `post_hoc` does not use it.
        draft_vocab_size (`int`, *optional*): Number of most frequent tokens that drafts choose from; `None`: all.
            A small size saves most of the output head's cost in draft steps. Verify passes always use the whole
            vocabulary, and so do draft steps if the base model's head is quantised or offloaded.
        router_bottleneck_dim (`int`): Hidden width of a router.
        exit_threshold (`float`): A token exits if its exit score is at least this value. Above 1, no token exits.
        draft_exit_threshold (`float`): The same for tokens of the draft head, in `early_exit`.
        kv_cache_strategy (`str`): How `early_exit` gets the K/V of layers that a token skips: `"recompute"` (exact:
            computed with the next token that runs these layers), `"propagate"` (computed in the same pass, from the
            state at the exit layer) or `"zero_pad"` (zeros).
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
    draft_exit_threshold: float | int = NEVER_EXIT
    kv_cache_strategy: str = "recompute"
    compaction_threshold: float | int = 0.25
    calibration: dict[str, Any] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the exit layers and refuse values that cannot work."""
        super().__post_init__(**kwargs)
        check_choice("exit_strategy", self.exit_strategy, EXIT_STRATEGIES)
        check_choice("kv_cache_strategy", self.kv_cache_strategy, KV_CACHE_STRATEGIES)
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
            check_draft_head(self.draft_head, self.num_hidden_layers, self.hidden_size, self.vocab_size)

    @property
    def exits_with_head(self) -> bool:
        """Whether tokens exit with the draft head in `early_exit`, which needs exact K/V, and not at exit layers."""
        return self.draft_head is not None and self.kv_cache_strategy == "recompute"

    def threshold_of(self, mode: str) -> float:
        """The calibrated threshold of `early_exit` or `post_hoc`."""
        with_head = mode == "early_exit" and self.exits_with_head
        return float(self.draft_exit_threshold if with_head else self.exit_threshold)

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


def read_config(name_or_path: str | os.PathLike[str], **where: Any) -> tuple[Any, str | None]:
    """The content of `config.json`, and its commit on the Hub (`None` for a folder)."""
    file = find_file(name_or_path, CONFIG_NAME, **where)
    try:
        return parse_json(file.read_bytes()), extract_commit_hash(str(file), None)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise bad_file(name_or_path, f"a {CONFIG_NAME} that is no JSON ({error})") from error
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


def check_min_layers(value: object) -> int:
    """Return `value`, or raise [`ConfigurationError`] if it is not a valid number of layers."""
    return check_field("min_layers", value)


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


def check_draft_head(config: Any, num_layers: int, hidden_size: int, vocab_size: int) -> None:
    """Refuse the shape of a draft head that is none, or does not fit the base model's."""
    do = HEAD_ADVICE
    if not (isinstance(config, dict) and set(config) == set(HEAD_RULES)):
        raise invalid("draft_head", config, f"a JSON object with the fields {', '.join(HEAD_RULES)}", do)
    for name in HEAD_RULES:
        check_head_field(name, config[name])
    taps, own = config["tap_layers"], config["draft_vocab_size"]
    target, keys = config["target_hidden_size"], config["num_key_value_heads"]
    checks = (
        ("tap_layers", taps, max(taps) <= num_layers, f"layers of a model that has {num_layers}"),
        ("target_hidden_size", target, target == hidden_size, f"{hidden_size}, the base model's hidden size"),
        ("draft_vocab_size", own, own <= vocab_size, f"at most the vocabulary's {vocab_size}"),
        ("num_key_value_heads", keys, config["num_attention_heads"] % keys == 0, "a divisor of num_attention_heads"),
    )
    for name, got, is_valid, expected in checks:
        if not is_valid:
            raise invalid(f"{name} in draft_head", got, expected, do)


def check_head_field(name: str, value: Any) -> None:
    """Raise [`ConfigurationError`] if the rule for a field of `draft_head` refuses the value."""
    is_right, expected = HEAD_RULES[name]
    if not is_right(value):
        raise invalid(f"{name} in draft_head", value, expected, HEAD_ADVICE)


def check_record(record: Any) -> None:
    """Refuse a calibration record that the drafting policy or the tables cannot read."""
    do = "Make new routers with tide_hf.calibrate()."
    if not isinstance(record, dict):
        raise invalid("calibration", record, "a JSON object", do)
    for name, (is_valid, expected) in RECORD_RULES.items():
        if name in record and not is_valid(record[name]):
            raise invalid(f"{name} in calibration", record[name], expected, do)


Check = Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # neither NaN nor infinity, and no huge integer


def _is_positive(value: Any) -> bool:
    return _is_number(value) and value >= 0


def _is_share(value: Any) -> bool:
    return _is_number(value) and 0 <= value <= 1


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 2**63


def _matches(pattern: str) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None


def _whole_number(largest: int) -> tuple[Check, str]:
    return lambda value: type(value) is int and 1 <= value <= largest, f"a whole number from 1 to {largest}"


def _one_of(*values: Any) -> tuple[Check, str]:
    return lambda value: value in values, "one of " + ", ".join(repr(value) for value in values)


THRESHOLD = (_is_positive, "a number from 0 (always exit) to 1; anything above 1 never exits")
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
    "exit_threshold": THRESHOLD,
    "draft_exit_threshold": THRESHOLD,
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


def _fields(required: dict[str, Check], optional: dict[str, Check]) -> Check:
    """Make a check for a JSON object with `required` fields, and `optional` fields that may be missing or null."""

    def is_valid(value: Any) -> bool:
        if not (isinstance(value, dict) and all(check(value.get(name)) for name, check in required.items())):
            return False
        return all(value.get(name) is None or check(value[name]) for name, check in optional.items())

    return is_valid


def _map(key: str, is_valid: Check) -> Check:
    """Make a check for a JSON object whose keys match the pattern `key` and whose values pass `is_valid`."""
    is_key = _matches(key)
    return lambda value: isinstance(value, dict) and all(is_key(str(k)) and is_valid(v) for k, v in value.items())


def _list(is_valid: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(is_valid, value))


def _numbers(*names: str) -> dict[str, Check]:
    return dict.fromkeys(names, _is_number)


LAYER_FIGURES = _numbers(
    "router_auc", "confidence_auc", "expected_calibration_error", "exit_rate", "head_parameters", "head_mb", "cost"
)
COVERAGE = _map(r"[01]\.[0-9]{1,4}", _is_number)  # keys are precisions
TOLERANCE = _fields(
    _numbers("tolerance"),
    _numbers("exit_threshold", "disagreement", "depth_fraction")
    | {"interval": lambda value: _list(_is_number)(value) and len(value) == 2},
)
TOLERANCES = (_list(TOLERANCE), "rows with a tolerance, and numbers for the other figures")
CHOICE = (_fields(_numbers("tolerance", "confidence", "chosen"), {}), "tolerance, confidence and chosen")
CURVE = _list(_fields({"tokens": _is_count, "agreement": _is_share}, {}))
OTHERS = {
    "documents_before": _is_count,
    "curve": CURVE,
    "coverage": COVERAGE,
    "threshold": CHOICE[0],
    "tolerances": TOLERANCES[0],
}
LAYER = _fields({"agreement": _is_share}, LAYER_FIGURES | OTHERS)
# A check for each part of a calibration record, and a description of valid values. Older records lack some parts.
RECORD_RULES: dict[str, tuple[Check, str]] = {
    "exit_layers": (_map("[1-9][0-9]{0,3}", LAYER), "by exit layer an agreement from 0 to 1, and numbers"),
    "draft_head": (LAYER, "an agreement from 0 to 1, a whole number of documents, and numbers for the other figures"),
    "num_documents": (_is_count, "a whole number of documents"),
    "threshold": CHOICE,
    "tolerances": TOLERANCES,
}

HEAD_ADVICE = "Load the head again, or make another with tide_hf.calibrate()."
SIZE, FLAG = _whole_number(2**20), (lambda value: type(value) is bool, "true or false")
MAX_TAPS = 16
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")


def _is_rope(value: Any) -> bool:
    if not (isinstance(value, dict) and value.get("rope_type", "default") in ROPE_TYPES):
        return False
    others = (one for name, one in value.items() if name != "rope_type")
    return all(_is_number(one) or type(one) is bool or one is None or _list(_is_number)(one) for one in others)


# A check for each field of `draft_head.DraftHeadConfig`, and a description of valid values.
HEAD_RULES: dict[str, tuple[Check, str]] = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"), SIZE),
    **dict.fromkeys(("head_dim", "target_hidden_size"), SIZE),
    **dict.fromkeys(("draft_vocab_size", "max_position_embeddings"), _whole_number(2**24)),
    "tap_layers": (
        lambda value: _list(_is_count)(value) and value == sorted(set(value)) and 1 <= len(value) <= MAX_TAPS,
        f"1 to {MAX_TAPS} ascending numbers of executed layers",
    ),
    "rms_norm_eps": (lambda value: _is_number(value) and 0 < value < 1, "a small positive number"),
    "hidden_act": _one_of("silu", "gelu", "gelu_pytorch_tanh", "relu"),
    "rope_parameters": (_is_rope, f"numbers, and a rope_type of {', '.join(ROPE_TYPES)}"),
    **dict.fromkeys(("attention_bias", "mlp_bias", "qk_norm", "norm_before_residual"), FLAG),
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output", "has_embedding"), FLAG),
}
