"""Damaged files of routers, by hypothesis: what is refused, what is loaded, and what breaks."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from tide_hf import TIDERouters
from tide_hf.errors import TIDEError

from .bench import CannotRunError

REFUSED, SAME, OTHER = "refused", "loaded, the same", "loaded, another"


def outcome(load: Callable[[], TIDERouters], original: TIDERouters) -> str:
    """What came of loading: refused by an error of the library, routers, or an error that is no word to a user."""
    try:
        routers = load()
    except TIDEError:
        return REFUSED
    except Exception as error:  # noqa: BLE001  # whatever else it is, it is what is looked for
        return f"broke: {type(error).__name__}"
    return SAME if equal(routers, original) else OTHER


def equal(one: TIDERouters, other: TIDERouters) -> bool:
    """Whether two routers have the same tensors and the same config."""
    tensors, others = one.state_dict(), other.state_dict()
    same = tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)
    return same and _content(one) == _content(other)


def _content(routers: TIDERouters) -> dict[str, Any]:
    """What the config says, but for where it was read from."""
    return {name: value for name, value in routers.config.to_dict().items() if name != "_name_or_path"}


def fuzz(folder: Path, router_pt: Path, base_model: Any, examples: int) -> dict[str, dict[str, int]]:
    """Damage routers in many ways and load them.

    Args:
        folder: Of saved routers.
        router_pt: A file as the published system saves it.
        base_model: The model that both belong to.
        examples: Damaged files of each kind.

    Returns:
        Counts of outcomes by what was damaged.

    Raises:
        CannotRunError: hypothesis is not installed.
    """
    try:
        import hypothesis  # noqa: PLC0415
    except ImportError:
        raise CannotRunError("hypothesis is not installed") from None
    quiet = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it has a report for every file that does not fit
    original = TIDERouters.from_pretrained(folder)
    published = TIDERouters.from_router_pt(router_pt, base_model)

    def load_damaged(file: str, content: bytes) -> str:
        with tempfile.TemporaryDirectory() as copy:
            if file == router_pt.name:
                Path(copy, file).write_bytes(content)
                return outcome(lambda: TIDERouters.from_router_pt(Path(copy, file), base_model), published)
            shutil.copytree(folder, copy, dirs_exist_ok=True)
            Path(copy, file).write_bytes(content)
            return outcome(lambda: TIDERouters.from_pretrained(copy), original)

    def tally(file: str, damaged: Any) -> dict[str, int]:
        counts: Counter[str] = Counter()

        @quiet
        @hypothesis.given(damaged)
        def damage(content: bytes) -> None:
            counts[load_damaged(file, content)] += 1

        damage()
        return dict(counts)

    kinds = damages(folder, router_pt, hypothesis.strategies)
    counts = {kind: tally(file, damaged) for kind, (file, damaged) in kinds.items()}
    transformers_logging.set_verbosity(verbosity)
    return counts


def damages(folder: Path, router_pt: Path, st: Any) -> dict[str, tuple[str, Any]]:
    """Kinds of damage: the file, and a strategy for what it then holds.

    Args:
        folder: Of saved routers.
        router_pt: A file as the published system saves it.
        st: `hypothesis.strategies`.
    """
    weights = (folder / "model.safetensors").read_bytes()
    header = 8 + int.from_bytes(weights[:8], "little")  # the format begins with the length of its header
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    pickled = router_pt.read_bytes()
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner)
    )
    fields = st.sampled_from(sorted(config)) | st.text(min_size=1, max_size=12)
    return {
        "weights cut off": ("model.safetensors", _cut_off(weights, st)),
        "a byte of the weights' header": ("model.safetensors", _flipped(weights, 0, header, st)),
        "a byte of the weights themselves": ("model.safetensors", _flipped(weights, header, len(weights), st)),
        "bytes put into the weights": (
            "model.safetensors",
            st.tuples(st.integers(0, len(weights)), st.binary(min_size=1, max_size=64)).map(
                lambda put: weights[: put[0]] + put[1] + weights[put[0] :]
            ),
        ),
        "a field of the config": (
            "config.json",
            st.tuples(fields, values).map(lambda pair: json.dumps(config | {pair[0]: pair[1]}).encode()),
        ),
        "a config of any bytes": ("config.json", st.binary(max_size=200)),
        "a byte of a published router.pt": (router_pt.name, _flipped(pickled, 0, len(pickled), st)),
        "a published router.pt cut off": (router_pt.name, _cut_off(pickled, st)),
    }


def _cut_off(content: bytes, st: Any) -> Any:
    return st.integers(0, len(content) - 1).map(lambda length: content[:length])


def _flipped(content: bytes, start: int, end: int, st: Any) -> Any:
    """One byte between `start` and `end` changed."""
    return st.tuples(st.integers(start, end - 1), st.integers(1, 255)).map(
        lambda pair: content[: pair[0]] + bytes([content[pair[0]] ^ pair[1]]) + content[pair[0] + 1 :]
    )
