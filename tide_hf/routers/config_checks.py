"""What the fields of a routers' config may hold, since the file may be anybody's."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

from ..common.errors import ConfigurationError, describe, short

# Far beyond any model, and small enough that a file cannot make a loop or an allocation that does not end.
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


def check_positive(name: str, value: object) -> None:
    """Refuse anything but a whole number from 1 to what `LARGEST` says of `name`."""
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
    if not (number and 0 <= value <= sys.float_info.max):  # which leaves out NaN, and what no float can hold
        do = f"Pass {name}=0.9, say, or leave it out for the value of the routers."
        raise ConfigurationError(describe(f"{name} is no usable number", got=short(value), expected=expected, do=do))


def check_name(name: str, value: object) -> None:
    """Refuse anything but printable text of a name's length."""
    if value is not None and not (isinstance(value, str) and 0 < len(value) <= LONGEST_NAME and value.isprintable()):
        expected = f"printable text of at most {LONGEST_NAME} characters"
        raise ConfigurationError(
            describe(f"{name} is no name", got=short(value), expected=expected, do=f"Set {name} to the base model's.")
        )


def check_revision(value: object) -> None:
    """Refuse anything but a commit, branch or tag: huggingface_hub makes a path in its cache of it."""
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
    """Refuse what is no hash of at most 256 bits."""
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
    """Refuse what no base model's config holds: it is handed to transformers, to build one layer from."""
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
    """Refuse a record that the drafting policy, which starts from its agreements, or its tables would trip over."""
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


# Parts of a calibration record that something reads: what each may be, and how that is told. Older records lack some.
RECORD_PARTS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "exit_layers": (_are_layers, "for each exit layer an agreement from 0 to 1, and numbers for the other figures"),
    "block": (_is_row, "an agreement from 0 to 1, a whole number of documents, and numbers for the other figures"),
    "num_documents": (_is_count, "a whole number of documents"),
    "threshold": (_is_threshold, "numbers for tolerance, confidence and chosen"),
    "tolerances": (_are_tolerances, "rows with a tolerance, and numbers for the other figures"),
}


def check_inherited(config: dict[str, Any]) -> None:
    """Refuse values that transformers would trip over."""
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
