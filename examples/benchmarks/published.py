"""The published system, tide-inference 0.2.1 from PyPI, made to look like a model. It is no dependency: see README."""

from __future__ import annotations

from importlib import import_module, metadata
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from .bench import Bench, CannotRunError
from .peer_worker import calibrate_published

VERSION = "0.2.1"
NAME = f"tide-inference {VERSION}"
EXIT_THRESHOLD = 0.85  # its default
SHORTEST_TEXT = 101  # characters: it passes over shorter ones


def load_package() -> Any:
    """Its module.

    Raises:
        CannotRunError: It is not installed, or in another version.
    """
    try:
        module, version = import_module("TIDE"), metadata.version("tide-inference")
    except (ImportError, metadata.PackageNotFoundError):
        raise CannotRunError("not installed") from None
    if version != VERSION:
        raise CannotRunError(f"version {version} is installed")
    return module


def calibrated(bench: Bench, samples: int, max_length: int) -> dict[str, Any]:
    """Calibrate it by its own code, once for each number of samples.

    Returns:
        "file", "seconds", "bytes", "texts", and "positions": the 0-based layers behind which its routers sit.
    """
    key = f"published routers {samples} {max_length}"
    if key not in bench.kept:
        load_package()
        texts = readable_texts(bench, samples, max_length)
        bench.kept[key] = _calibrate(bench, texts, bench.work / f"published-{samples}-{max_length}")
    return bench.kept[key]


def readable_texts(bench: Bench, samples: int, max_length: int) -> list[str]:
    """Those of the bench's texts that it would calibrate on.

    Raises:
        CannotRunError: There are none.
    """
    texts = [text for text in bench.texts(samples, max_length) if len(text.strip()) >= SHORTEST_TEXT]
    if not texts:
        raise CannotRunError(f"no text of {SHORTEST_TEXT} characters to calibrate it on")
    return texts


def _calibrate(bench: Bench, texts: list[str], folder: Path) -> dict[str, Any]:
    start = perf_counter()
    try:
        file = calibrate_published(bench.model, bench.tokenizer, texts, folder)
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    seconds = perf_counter() - start
    state = torch.load(file, weights_only=True)
    facts = {"file": file, "seconds": seconds, "bytes": file.stat().st_size, "texts": len(texts)}
    return facts | {"positions": sorted(map(int, state["router_layers"]))}


def engine(bench: Bench, samples: int, max_length: int, exit_threshold: float = EXIT_THRESHOLD) -> Any:
    """Its engine around the plain model, with routers that its own code calibrated."""
    package = load_package()
    config = package.TIDEConfig(exit_threshold=exit_threshold)
    return package.TIDE(bench.model, str(calibrated(bench, samples, max_length)["file"]), config=config)


class PublishedModel:
    """Its engine under the names of a model, so that it can be timed as one."""

    def __init__(self, running: Any) -> None:
        self.engine = running

    def get_input_embeddings(self) -> Any:
        """The base model's."""
        return self.engine.model.get_input_embeddings()

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, do_sample: bool = False, **_: Any) -> Tensor:
        """Decode greedily. It takes no mask, so rows must have equal lengths; it stops at token 2 alone."""
        if do_sample:
            raise CannotRunError("only greedy decoding is compared")
        return self.engine.generate(input_ids, max_new_tokens=max_new_tokens, temperature=0)
