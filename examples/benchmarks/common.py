"""What the benchmarks share: command lines, loading, prompts, records and tables."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from tide_hf.cli.demo_model import DEFAULT_MODEL
from tide_hf.common.errors import MissingPackageError
from tide_hf.hub.provenance import provenance
from tide_hf.speculation.drafts import Accepted, Draft

from . import pypi_models

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results"
PROMPTS = FOLDER / "prompts.json"


def int8_quantizer() -> Callable[[Any], None]:
    """What quantises the weights of a model's linear layers, its head among them, to int8 with a scale a row.

    Raises:
        MissingPackageError: torchao is not installed.
    """
    try:
        quantization = import_module("torchao.quantization")
    except ImportError as error:
        raise MissingPackageError(
            "torchao is not installed", got="--quantize", expected="torchao", do="pip install torchao"
        ) from error
    return lambda model: quantization.quantize_(model, quantization.Int8WeightOnlyConfig())


class ScriptedDrafts:
    """Drafts `length` tokens of a known answer, each of them right with a probability of `share`, for one row."""

    def __init__(self, answer: list[int], share: float, length: int) -> None:
        self.answer, self.share, self.length = answer, share, length
        self.random, self.position = Random(0), 0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """The answer's next tokens; behind one that is wrong it does not matter what they are."""
        (limit,) = limits
        tokens = self.answer[self.position :][: min(limit, self.length)]
        drafted = [token if self.random.random() < self.share else int(token == 0) for token in tokens]
        return [Draft().add(drafted, "script")]

    def observe(self, _row: int, _draft: Draft, accepted: Accepted) -> None:
        """Move on in the answer."""
        self.position += len(accepted.tokens)


def study_parser(
    description: str | None, output: str, *, dtype: str | None = None, routers: bool = False, max_new_tokens: int = 48
) -> argparse.ArgumentParser:
    """A parser with the arguments of every study; `output` names its file in the folder of results."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    if routers:
        parser.add_argument("--routers", help="folder or Hub repository; default: those shipped for the model")
    if dtype is not None:
        parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=max_new_tokens)
    parser.add_argument("--output", type=Path, default=RESULTS / output)
    return parser


def load_for(options: argparse.Namespace) -> tuple[Any, Any]:
    """The model and tokenizer that the arguments name, on as many threads as they say."""
    torch.set_num_threads(options.threads)
    return pypi_models.load(options.model, dtype=getattr(options, "dtype", "float32"))


def rows_like(prompt: Tensor, rows: int) -> Tensor:
    """(rows, length) prompts like a (1, length) one, with another token in the middle of each: copies are read once."""
    ids = prompt.repeat(rows, 1)
    if rows > 1:
        ids[:, ids.shape[1] // 2] = torch.arange(3, 3 + rows, device=ids.device)
    return ids


def read_prompts() -> dict[str, list[str]]:
    """The benchmarks' prompts by category."""
    return json.loads(PROMPTS.read_text(encoding="utf-8"))


def setting(model: Any) -> dict[str, Any]:
    """Provenance, the prompts that go with it, and what the environment tells threads to do."""
    environment = {name: value for name, value in os.environ.items() if name.startswith(("OMP_", "MKL_", "KMP_"))}
    prompts = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
    return provenance(model) | {"prompts_sha256": prompts, "environment": environment}


def precision(record: dict[str, Any]) -> str:
    """The dtype of a record, and what its weights were rounded to or quantised by."""
    quantized, rounded = record.get("quantized"), record.get("rounded")
    weights = quantized["weights"] if quantized else f"{rounded} weights" if rounded else ""
    return f"{record['dtype']} with {weights}" if weights else record["dtype"]


def write_record(record: dict[str, Any], file: Path) -> None:
    """Write a record as JSON."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
