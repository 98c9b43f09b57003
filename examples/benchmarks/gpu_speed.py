"""What a token costs on a GPU: `python -m examples.benchmarks.gpu_speed`, one step of `gpu`.

Eager `generate`, `generate` with transformers' compiled static cache, our plain decoding and our lossless mode on
captured steps, one sequence and eight; exits forced at a quarter, half, three quarters and all of the depth; and
routers that never exit. The models are a random one of Llama 3.1 8B's shape in bfloat16, whose weights torchao may
quantise, and SmolLM2-135M with its weights. What fails is noted, and the rest goes on; what there is no time for is
left out. The results are written after every line.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.evaluation.benchmark import synchronize
from tide_hf.hub.load import shipped_routers
from tide_hf.hub.provenance import provenance

from .common import RESULTS, int8_quantizer, write_record
from .gpu_lines import LINE_ERRORS, PREFIX, Bench, bytes_read, lines, or_error

LLAMA = "llama-8b-shaped, random"
SHAPE = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
SMALL = SHAPE | {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}
SHARE = 0.7  # of the time that is left, for a model that others follow: the larger ones come first


def measure(bench: Bench, deadline: float, bandwidth: float) -> Iterator[tuple[dict[str, Any], str]]:
    """All lines of one model.

    Args:
        bench: The model.
        deadline: Of `perf_counter`, after which no line begins.
        bandwidth: Bytes per second that the device's memory can do.

    Yields:
        After each line all that there is so far, and the line's result in words.
    """
    found: dict[str, Any] = {"lines": {}, "weight_bytes": bytes_read(bench.model)}
    for name, line in lines(bench):
        if not any(re.search(pattern, name) for pattern in bench.options.lines):
            continue
        result = {"left_out": "no time left"} if perf_counter() > deadline else measured(bench, line, bandwidth)
        found["lines"][name] = result
        told = next((result[key] for key in ("ms_per_token", "ms", "error", "left_out") if key in result), "")
        yield found, f"{name}: {told}"


def measured(bench: Bench, line: Callable[[], dict[str, Any]], bandwidth: float) -> dict[str, Any]:
    """One line, or what it failed with; nothing stays attached."""
    result = or_error(line)
    if isinstance(bench.model, TIDEModelForCausalLM):
        bench.model.tide_release()
        TIDEModelForCausalLM.detach(bench.model)
    if "bytes_read" in result:
        result["limit_ms"] = 1000 * result["bytes_read"] / bandwidth
        result["share_of_bandwidth_limit"] = result["limit_ms"] / result["ms_per_token"]
    return result


def load(name: str, dtype: torch.dtype, device: str, options: argparse.Namespace) -> tuple[Any, Any]:
    """A model and its routers: those that come with this library, or those of the options."""
    if name == LLAMA:
        with torch.device(device):
            shape = SMALL if options.rehearse else SHAPE
            model = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype)
        return model.eval(), None
    if name == DEFAULT_MODEL:
        model, _ = load_demo_model(dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval(), shipped_routers(model) or options.routers


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        synchronize(source.device)
        start = perf_counter()
        target.copy_(source)
        synchronize(source.device)
        seconds.append(perf_counter() - start)
    return 2 * size / min(seconds)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[LLAMA, DEFAULT_MODEL], help="names or folders")
    parser.add_argument("--routers", help="of models that are given as folders")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantize", choices=["int8"], help="weights, by torchao")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=98, help="new tokens")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lines", nargs="+", default=[""], help="patterns of lines' names, if not all are wanted")
    parser.add_argument("--minutes", type=float, default=7.5, help="no line begins after so many")
    parser.add_argument("--output", type=Path, default=RESULTS / "gpu.json")
    parser.add_argument("--rehearse", action="store_true", help="a small model in place of the one of 8B's shape")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and write after every line."""
    options = parse(arguments)
    start, device = perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(stderr=True)
    bandwidth = copy_bandwidth(device, 2**30 if device == "cuda" else 2**24)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    record: dict[str, Any] = {"copy_bandwidth": bandwidth, "options": settings, "models": {}}

    def write(name: str, found: dict[str, Any], said: str) -> None:
        record["models"][name] = found
        record["seconds"] = perf_counter() - start
        write_record(record, options.output)
        console.print(f"{record['seconds']:6.1f} s  {name}: {said}", highlight=False, markup=False, soft_wrap=True)

    for name in options.models:
        try:
            model, routers = load(name, getattr(torch, options.dtype), device, options)
            if options.quantize:
                int8_quantizer()(model)
        except LINE_ERRORS as error:
            write(name, {"error": str(error)[:PREFIX]}, f"cannot be loaded: {error}")
            continue
        facts = {"provenance": provenance(model) | {"cuda": torch.version.cuda}}
        bench = Bench(model, routers, options, "compiled" if device == "cuda" else "eager")
        left = start + 60 * options.minutes - perf_counter()
        deadline = perf_counter() + left * (1.0 if name == options.models[-1] else SHARE)
        for found, said in measure(bench, deadline, bandwidth):
            write(name, facts | found, said)
        del model, bench
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
