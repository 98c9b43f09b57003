"""What a token costs on a GPU: `python -m examples.benchmarks.gpu`, in one run of under ten minutes.

Eager `generate`, `generate` with transformers' compiled static cache, our plain decoding and our lossless mode on
captured steps, one sequence and eight; exits forced at a quarter, half, three quarters and all of the depth; routers
that never exit; and prompts of which nothing, half or nine tenths leaves at half the depth. The models are a random one
of Llama 3.1 8B's shape in bfloat16, and SmolLM2-135M with its weights. What fails is noted, and the rest goes on; what
there is no time for is left out. The results are written after every line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM, LlamaConfig

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.benchmark import same_start
from tide_hf.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.loading import shipped_routers
from tide_hf.provenance import provenance
from tide_hf.routers.configuration_tide import NEVER_EXIT

from .common import NoDrafts

FOLDER = Path(__file__).parent
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
BATCH = 8
DEPTHS = (0.25, 0.5, 0.75, 1.0)
ROUTER_INTERVAL = 4
PROMPT_EXITS = (0.0, 0.5, 0.9)
LINE_ERRORS = (RuntimeError, NotImplementedError, TypeError, ValueError, LookupError, AttributeError)


@dataclass
class Bench:
    """One model and the settings of a run.

    Attributes:
        model: The base model, not attached.
        routers: Its calibrated routers, if any.
        options: The script's arguments.
        engine: What runs our steps: captured on a GPU.
        expected: Plain decoding's tokens, by number of rows.
    """

    model: Any
    routers: Any
    options: argparse.Namespace
    engine: str
    expected: dict[int, list] = field(default_factory=dict)

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.model.config.num_hidden_layers)

    def prompt(self, rows: int, length: int) -> dict[str, torch.Tensor]:
        """Random tokens, the same in every line."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(3, self.model.config.vocab_size, (rows, length), generator=generator)
        return {"input_ids": ids.to(self.model.device), "attention_mask": torch.ones_like(ids).to(self.model.device)}

    def per_token(self, rows: int = 1, **generate: Any) -> dict[str, Any]:
        """Milliseconds of a new token (all rows together), without the prompt's pass."""
        inputs = self.prompt(rows, self.options.prompt)
        long, short = self.options.tokens, 2
        start = perf_counter()
        tokens = self.seconds(inputs, long, generate)[1]  # warms up
        warm_up = perf_counter() - start
        self.seconds(inputs, short, generate)
        runs = [
            (self.seconds(inputs, long, generate)[0] - self.seconds(inputs, short, generate)[0]) / (long - short)
            for _ in range(self.options.repeats)
        ]
        expected = self.expected.setdefault(rows, tokens)
        kv_bytes = rows * _bytes_of_a_slot(self.model) * (self.options.prompt + long // 2)
        return {
            "ms_per_token": 1000 * median(runs),
            "bytes_read": _bytes_read(self.model) + kv_bytes,
            "runs_ms": [1000 * run for run in runs],
            "first_call_s": warm_up,
            "equal": tokens == expected,
            "same_start": mean(same_start(*pair) for pair in zip(expected, tokens, strict=True)),
        }

    def seconds(self, inputs: dict, new_tokens: int, generate: dict[str, Any]) -> tuple[float, list]:
        """One call of `generate`, and its new tokens."""
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
        _wait()
        start = perf_counter()
        output = self.model.generate(**inputs, **options, **generate)
        tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
        return perf_counter() - start, tokens

    def attach(self, routers: Any = None, **settings: Any) -> Any:
        """Attach; return what TIDE added."""
        TIDEModelForCausalLM.attach(self.model, routers, **settings)
        return self.model._tide


def eager(bench: Bench, rows: int = 1) -> dict[str, Any]:
    return bench.per_token(rows)


def static(bench: Bench, rows: int = 1) -> dict[str, Any]:
    try:
        return bench.per_token(rows, cache_implementation="static")
    finally:
        torch.compiler.reset()


def plain(bench: Bench, rows: int = 1) -> dict[str, Any]:
    attachment = bench.attach(engine=bench.engine)
    attachment.make_drafter = NoDrafts
    return bench.per_token(rows) | _steps(bench)


def lossless(bench: Bench, rows: int = 1) -> dict[str, Any]:
    bench.attach(bench.routers, engine=bench.engine)
    found = bench.per_token(rows)
    stats = bench.model.last_exit_stats
    return found | {"acceptance_rate": stats.acceptance_rate, "rounds": stats.rounds} | _steps(bench)


def lossless_eagerly(bench: Bench) -> dict[str, Any]:
    bench.attach(bench.routers, engine="eager")
    return bench.per_token()


def exits_at(bench: Bench, depth: float) -> dict[str, Any]:
    layer = round(depth * bench.num_layers)
    leaves = layer < bench.num_layers
    routers = _fresh_routers(bench, [layer if leaves else bench.num_layers // 2])
    bench.attach(routers, mode="early_exit", exit_threshold=0.0 if leaves else NEVER_EXIT)
    found = bench.per_token(exit_criterion="fixed" if leaves else "router")
    return found | {"exit_layer": layer, "layers_executed": bench.model.last_exit_stats.layers_executed}


def never_exits(bench: Bench) -> dict[str, Any]:
    layers = list(range(ROUTER_INTERVAL, bench.num_layers, ROUTER_INTERVAL)) or [1]
    bench.attach(_fresh_routers(bench, layers), mode="early_exit", exit_threshold=NEVER_EXIT)
    return bench.per_token() | {"exit_layers": layers}


def prefill(bench: Bench, share: float) -> dict[str, Any]:
    """A prompt's pass and one token, of which `share` of the prompt's tokens leave at half the depth."""
    inputs, layer = bench.prompt(1, bench.options.prefill), bench.num_layers // 2
    base = median(bench.seconds(inputs, 1, {})[0] for _ in range(1 + bench.options.repeats))
    routers = _fresh_routers(bench, [layer])
    torch.nn.init.normal_(routers[layer].router.up.weight)
    with torch.no_grad():
        state = bench.model(**inputs, output_hidden_states=True).hidden_states[layer]
    attachment = bench.attach(routers, mode="early_exit", exit_threshold=0.5)
    with torch.no_grad():
        scores = attachment.unembed.route(routers[layer].router, state).flatten().float()
    del state
    threshold = float(scores.quantile(1 - share)) if share else NEVER_EXIT
    generate = {"exit_threshold": threshold, "exits_in_prompt": True}
    seconds = median(bench.seconds(inputs, 1, generate)[0] for _ in range(1 + bench.options.repeats))
    left = bench.model.last_exit_stats.mlp_tokens_skipped / (bench.num_layers - layer) / bench.options.prefill
    return {"ms": 1000 * seconds, "generate_ms": 1000 * base, "share": share, "share_measured": left}


def lines(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is measured, the most telling first."""
    yield "eager generate", lambda: eager(bench)
    yield "our plain decoding", lambda: plain(bench)
    yield "our lossless mode", lambda: lossless(bench)
    yield "compiled static-cache generate", lambda: static(bench)
    yield "our lossless mode, eager engine", lambda: lossless_eagerly(bench)
    yield f"eager generate, batch {BATCH}", lambda: eager(bench, BATCH)
    yield f"our plain decoding, batch {BATCH}", lambda: plain(bench, BATCH)
    yield f"our lossless mode, batch {BATCH}", lambda: lossless(bench, BATCH)
    for depth in DEPTHS:
        yield f"early_exit, all leave at {depth:.0%} depth", lambda depth=depth: exits_at(bench, depth)
    yield "early_exit, routers that never exit", lambda: never_exits(bench)
    for share in PROMPT_EXITS:
        yield f"prompt of which {share:.0%} leaves at half depth", lambda share=share: prefill(bench, share)
    yield f"compiled static-cache generate, batch {BATCH}", lambda: static(bench, BATCH)


def measure(bench: Bench, deadline: float, bandwidth: float, write: Callable[[dict], None]) -> dict[str, Any]:
    """All lines of one model, each written as it is found.

    Args:
        bench: The model.
        deadline: Of `perf_counter`, after which no line begins.
        bandwidth: Bytes per second that the device's memory can do.
        write: Takes what there is so far.
    """
    found: dict[str, Any] = {"lines": {}, "weight_bytes": _bytes_read(bench.model)}
    for name, line in lines(bench):
        if perf_counter() > deadline:
            found["lines"][name] = {"left_out": "no time left"}
            continue
        try:
            result = line()
            if "ms_per_token" in result:
                result["limit_ms"] = 1000 * result["bytes_read"] / bandwidth
                result["share_of_bandwidth_limit"] = result["limit_ms"] / result["ms_per_token"]
        except LINE_ERRORS as error:
            result = {"error": f"{type(error).__name__}: {error}"[:2000]}
        finally:
            if isinstance(bench.model, TIDEModelForCausalLM):
                bench.model.tide_release()
                TIDEModelForCausalLM.detach(bench.model)
        found["lines"][name] = result
        write(found)
    return found


def load(name: str, dtype: torch.dtype, device: str, routers: str | None = None) -> tuple[Any, Any]:
    """A model and its routers: those that come with this library, or `routers`."""
    if name == LLAMA:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE), dtype=dtype)
        return model.eval(), None
    if name == DEFAULT_MODEL:
        model, _ = load_demo_model(dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    return model.to(device).eval(), shipped_routers(name) or routers


def copy_bandwidth(device: str, size: int) -> float:
    """Bytes per second, read and written, of a copy on the device."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(6):
        _wait()
        start = perf_counter()
        target.copy_(source)
        _wait()
        seconds.append(perf_counter() - start)
    return 2 * size / min(seconds)


def _bytes_read(model: Any) -> int:
    """Of the weights that a token reads: of the embeddings only a row, unless they are the head as well."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    return total if embeddings is head else total - embeddings.numel() * embeddings.element_size()


def _bytes_of_a_slot(model: Any) -> int:
    """Of the K/V of one token, which every later token reads."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * model.dtype.itemsize


def _fresh_routers(bench: Bench, exit_layers: list[int]) -> TIDERouters:
    return TIDERouters.for_model(bench.model, exit_layers=exit_layers, kv_cache_strategy="propagate").to(
        bench.model.device
    )


def _steps(bench: Bench) -> dict[str, Any]:
    steps = bench.model._tide.captured_steps
    refused = [steps.refused] if steps.refused else []
    if steps.layers is not None:
        refused += [f"{kind.__name__}: {reason}" for kind, reason in steps.layers.refused.items()]
    made = steps.warm_up
    return {"steps": made.num_made, "capture_s": made.seconds, "bytes": made.bytes, "refused": refused}


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[LLAMA, DEFAULT_MODEL], help="names or folders")
    parser.add_argument("--routers", help="of models that are given as folders")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompt", type=int, default=128, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=98, help="new tokens")
    parser.add_argument("--prefill", type=int, default=2048, help="tokens of the prompt that is read early")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=8.5, help="no line begins after so many")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "gpu.json")
    options = parser.parse_args(arguments)
    start, device = perf_counter(), "cuda" if torch.cuda.is_available() else "cpu"
    console = Console(stderr=True)
    bandwidth = copy_bandwidth(device, 2**30 if device == "cuda" else 2**24)
    record: dict[str, Any] = {"copy_bandwidth": bandwidth, "options": vars(options) | {"output": None}, "models": {}}
    for position, name in enumerate(options.models):
        try:
            model, routers = load(name, getattr(torch, options.dtype), device, options.routers)
        except (OSError, RuntimeError) as error:
            record["models"][name] = {"error": str(error)[:2000]}
            continue
        bench = Bench(model, routers, options, "cuda_graph" if device == "cuda" else "eager")
        facts = {"provenance": provenance(model) | {"cuda": torch.version.cuda}}
        share = (position + 1) / len(options.models)

        def write(found: dict, name: str = name, facts: dict = facts) -> None:
            record["models"][name] = facts | found
            record["seconds"] = perf_counter() - start
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(record, indent=1, default=str) + "\n")
            line, result = list(found["lines"].items())[-1]
            shown = result.get("ms_per_token", result.get("ms", result.get("error", "")))
            console.print(f"{record['seconds']:6.1f} s  {name}: {line}: {shown}", highlight=False)

        write(measure(bench, start + 60 * options.minutes * share, bandwidth, write))
        del model, bench
        if device == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
