"""What the GPU benchmark measures of one model; `gpu_speed` runs it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import mean, median
from subprocess import CalledProcessError
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.evaluation.benchmark import same_start, synchronize
from tide_hf.routers.config import NEVER_EXIT
from tide_hf.speculation.drafters import NoDrafter
from tide_hf.speculation.prefill import num_shared

from .common import ScriptedDrafts

BATCH = 8
DEPTHS = (0.25, 0.5, 0.75, 1.0)
ROUTER_INTERVAL = 4
LINE_ERRORS = (
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    OSError,
    CalledProcessError,
)  # of kernels that do not compile as well
ACCEPTED, DRAFTED = 0.6, 3  # of scripted drafts: the probability that a token is right, and their number
CALLS = 20  # of a step that is timed by itself
PREFIX = 2000  # characters of an error that are kept
WARM_UPS = 4  # the policy tries other widths in later calls, and each is captured


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

    def per_token(self, rows: int = 1, exact: bool = True, **generate: Any) -> dict[str, Any]:
        """Milliseconds of a new token (all rows together), without the prompt's pass.

        Args:
            rows: Sequences.
            exact: Whether tokens are to be plain decoding's, so that where they leave it is looked at.
            **generate: Options of `generate`.
        """
        inputs = self.prompt(rows, self.options.prompt)
        long, short = self.options.tokens, 2
        start = perf_counter()
        tokens = self.warmed_up(inputs, long, generate)
        warm_up = perf_counter() - start
        self.seconds(inputs, short, generate)
        runs = [
            (-self.seconds(inputs, short, generate)[0] + self.seconds(inputs, long, generate)[0]) / (long - short)
            for _ in range(self.options.repeats)
        ]
        expected = self.expected.setdefault(rows, tokens)
        kv_bytes = rows * _bytes_of_a_slot(self.model) * (self.options.prompt + long // 2)
        found = {
            "ms_per_token": 1000 * median(runs),
            "bytes_read": bytes_read(self.model) + kv_bytes,
            "runs_ms": [1000 * run for run in runs],
            "first_call_s": warm_up,
            "equal": tokens == expected,
            "same_start": mean(same_start(*pair) for pair in zip(expected, tokens, strict=True)),
        }
        return found | ({"divergences": self.divergences(inputs, tokens)} if exact else {})

    def warmed_up(self, inputs: dict, new_tokens: int, generate: dict[str, Any]) -> list:
        """The tokens of a call in which nothing had to be captured or compiled, or of the last that is waited for."""
        for _ in range(WARM_UPS):
            tokens = self.seconds(inputs, new_tokens, generate)[1]
            if not (isinstance(self.model, TIDEModelForCausalLM) and self.model.last_exit_stats.warm_up_s):
                break
        return tokens

    def seconds(self, inputs: dict, new_tokens: int, generate: dict[str, Any]) -> tuple[float, list]:
        """One call of `generate`, and its new tokens."""
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new_tokens}
        synchronize(self.model.device)
        start = perf_counter()
        output = self.model.generate(**inputs, **options, **generate)
        tokens = output[:, inputs["input_ids"].shape[1] :].tolist()
        return perf_counter() - start, tokens

    @torch.no_grad()
    def divergences(self, inputs: dict[str, Tensor], tokens: list[list[int]]) -> list[dict[str, float]]:
        """Where rows leave plain decoding's tokens, and how near a tie that is: by the logits of one pass.

        Args:
            inputs: Of the calls.
            tokens: Of each row.

        Returns:
            For each row that does: the first position that differs, how far plain decoding's token leads there, and the
            distance of two logits of that size in the model's dtype.
        """
        found = []
        for prompt, plain, own in zip(inputs["input_ids"], self.expected[len(tokens)], tokens, strict=True):
            if plain == own:
                continue
            position = num_shared(plain, own)
            text = torch.cat([prompt, prompt.new_tensor(plain[:position])])[None]
            logits = self.model(text, use_cache=False).logits[0, -1]
            best, other = logits[plain[position]].item(), logits[own[position]].item()
            spacing = torch.finfo(logits.dtype).eps * abs(best)
            found.append({"position": position, "lead": best - other, "spacing": spacing})
        return found

    def attach(self, routers: Any = None, **settings: Any) -> Any:
        """Attach; return what TIDE added."""
        TIDEModelForCausalLM.attach(self.model, routers, remembered_tokens=0, **settings)  # prompts are repeated
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
    attachment.make_drafter = NoDrafter
    return bench.per_token(rows) | _steps(bench)


def lossless(bench: Bench, rows: int = 1) -> dict[str, Any]:
    bench.attach(bench.routers, engine=bench.engine)
    found = _without_bytes(bench.per_token(rows))
    stats = bench.model.last_exit_stats
    return found | {"acceptance_rate": stats.acceptance_rate, "rounds": stats.rounds} | _steps(bench)


def scripted(bench: Bench) -> dict[str, Any]:
    """Lossless decoding with drafts that are accepted as often as a head's may be, since random models have no head."""
    attachment, tokens = bench.attach(engine=bench.engine), bench.options.tokens
    # By passes of the same width, which round alike: tokens of others would be wrong from the first near-tie on.
    attachment.make_drafter = lambda *_: ScriptedDrafts([0] * tokens, 0.0, DRAFTED)
    _, [answer] = bench.seconds(bench.prompt(1, bench.options.prompt), tokens, {})
    attachment.make_drafter = lambda *_: ScriptedDrafts(answer, ACCEPTED, DRAFTED)
    found = _without_bytes(bench.per_token())
    return found | {"acceptance_rate": bench.model.last_exit_stats.acceptance_rate, "drafted": DRAFTED} | _steps(bench)


def lossless_eagerly(bench: Bench) -> dict[str, Any]:
    bench.attach(bench.routers, engine="eager")
    return _without_bytes(bench.per_token())


def replays(bench: Bench) -> dict[str, Any]:
    """Milliseconds of each step, replayed by itself: verify passes by width, draft steps that a warm-up prepares."""
    bench.attach(bench.routers, engine=bench.engine)
    bench.model.tide_warm_up(max_length=bench.options.prompt + bench.options.tokens)
    steps = bench.model._tide.engines["compiled"].steps[bench.model.device.type]
    with torch.no_grad():
        for buffers in steps._buffers.values():
            for width in steps.widths:  # of which a warm-up prepares those that passes are padded to
                steps.run(buffers, "verify", width)
    times = {
        f"{kind} {size}, {buffers.rows} x {buffers.capacity}": milliseconds(step.replay.run, bench.model.device)
        for (buffers, kind, size), step in steps._steps.items()
    }
    return {"replays_ms": times} | _steps(bench)


def or_error(function: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What `function` returns, or the error that it raises."""
    try:
        return function()
    except LINE_ERRORS as error:
        return {"error": f"{type(error).__name__}: {error}"[:PREFIX]}


def milliseconds(function: Callable[[], Any], device: torch.device) -> float:
    """Median time of a call, by the clock of the device that runs it."""
    return median(_timed(function, device) for _ in range(CALLS))


def _timed(function: Callable[[], Any], device: torch.device) -> float:
    if device.type != "cuda":
        start = perf_counter()
        function()
        return 1000 * (perf_counter() - start)
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before.record()
    function()
    after.record()
    after.synchronize()
    return before.elapsed_time(after)


def exits_at(bench: Bench, depth: float) -> dict[str, Any]:
    """All tokens leave at one depth."""
    layer = round(depth * bench.num_layers)
    leaves = layer < bench.num_layers
    routers = _fresh_routers(bench, [layer if leaves else bench.num_layers // 2])
    bench.attach(routers, mode="early_exit", engine="compiled", exit_threshold=0.0 if leaves else NEVER_EXIT)
    found = _without_bytes(bench.per_token(exact=False, exit_criterion="fixed" if leaves else "router"))
    return found | {"exit_layer": layer, "layers_executed": bench.model.last_exit_stats.layers_executed}


def never_exits(bench: Bench) -> dict[str, Any]:
    layers = list(range(ROUTER_INTERVAL, bench.num_layers, ROUTER_INTERVAL)) or [1]
    bench.attach(_fresh_routers(bench, layers), mode="early_exit", engine="compiled", exit_threshold=NEVER_EXIT)
    return bench.per_token() | {"exit_layers": layers}


def lines(bench: Bench) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """What is measured, the most telling first."""
    yield "eager generate", lambda: eager(bench)
    yield "our plain decoding", lambda: plain(bench)
    yield "our lossless mode", lambda: lossless(bench)
    yield "our scripted drafts", lambda: scripted(bench)
    yield "replays of steps", lambda: replays(bench)
    yield f"eager generate, batch {BATCH}", lambda: eager(bench, BATCH)
    yield f"our plain decoding, batch {BATCH}", lambda: plain(bench, BATCH)
    yield f"our lossless mode, batch {BATCH}", lambda: lossless(bench, BATCH)
    for depth in DEPTHS:
        yield f"early_exit, all leave at {depth:.0%} depth", lambda depth=depth: exits_at(bench, depth)
    yield "early_exit, routers that never exit", lambda: never_exits(bench)
    yield "our lossless mode, eager engine", lambda: lossless_eagerly(bench)
    yield "compiled static-cache generate", lambda: static(bench)  # these compile the longest
    yield f"compiled static-cache generate, batch {BATCH}", lambda: static(bench, BATCH)


def bytes_read(model: Any) -> int:
    """Of the weights that a token reads: of the embeddings only a row, unless they are the head as well."""
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    total = sum(map(_stored_bytes, model.parameters()))
    return total if embeddings is head else total - _stored_bytes(embeddings)


def _stored_bytes(weight: Tensor) -> int:
    """Of a weight; a quantised one is of several tensors."""
    if not hasattr(weight, "__tensor_flatten__"):
        return weight.nbytes
    return sum(getattr(weight, name).nbytes for name in weight.__tensor_flatten__()[0])


def _without_bytes(found: dict[str, Any]) -> dict[str, Any]:
    """A line in which a token is not one pass that reads all weights, so that there is no such limit to compare."""
    return {name: value for name, value in found.items() if name != "bytes_read"}


def _bytes_of_a_slot(model: Any) -> int:
    """Of the K/V of one token, which every later token reads."""
    config = model.config
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_size * model.dtype.itemsize


def _fresh_routers(bench: Bench, exit_layers: list[int]) -> TIDERouters:
    return TIDERouters.for_model(bench.model, exit_layers=exit_layers).to(bench.model.device)


def _steps(bench: Bench) -> dict[str, Any]:
    steps = bench.model._tide.engines["compiled"].steps[bench.model.device.type]
    refused = [steps.refused] if steps.refused else []
    made = steps.warm_up
    return {"steps": made.num_prepared, "capture_s": made.seconds, "bytes": made.bytes, "refused": refused}
