"""Benchmark of decoding methods against the base model's ``generate``: same weights, prompts, dtype and process.

Runs are interleaved prompt by prompt, so that other load on the machine affects all methods alike. Tokens of the timed
runs are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter
from typing import Any

import torch

from ..base_model.structure import input_device
from ..common.stats import ExitStats
from ..speculation.prefix_cache import num_shared

MAX_WARM_UPS = 6  # repeats of a run that compiles, since other tokens take other pass widths


@dataclass(frozen=True)
class DecodingMethod:
    """A method of decoding to compare: a model and options of its `generate`.

    Attributes:
        name: Name in tables.
        model: The model whose `generate` is called.
        options: Keyword arguments of `generate`.
        lossless: Whether it claims the plain model's own tokens.
        exit_threshold: Its exit threshold, if it has one.
    """

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    lossless: bool = True
    exit_threshold: float | None = None


@dataclass(frozen=True)
class Run:
    """One timed `generate` call."""

    seconds: float
    new_tokens: list[int]
    stats: ExitStats | None

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second, prefill included."""
        return len(self.new_tokens) / self.seconds

    def to_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        stats = self.stats.to_dict() if self.stats is not None else None
        figures = {"seconds": self.seconds, "tokens_per_s": self.tokens_per_s}
        return {"tokens": self.new_tokens} | figures | {"stats": stats}


@dataclass
class PromptResult:
    """One method on one prompt.

    Attributes:
        runs: Its runs, one per repeat.
        equal: Whether its tokens were the plain model's in every repeat.
        same_start: Share of the plain model's tokens before the first difference, minimum over repeats.
        speedup: Median tokens per second over the plain model's.
    """

    runs: list[Run] = field(default_factory=list)
    equal: bool = True
    same_start: float = 1.0
    speedup: float = 1.0

    @property
    def tokens_per_s(self) -> float:
        """Median over the repeats."""
        return median(run.tokens_per_s for run in self.runs)


@dataclass
class Result:
    """One method on all prompts.

    Attributes:
        method: The method.
        prompts: Its result per prompt.
        speedup: Tokens per second over the plain model's; `None` if it claims to be lossless and is not.
        warm_up_s: Seconds of engine warm-up, in runs that were then repeated.
    """

    method: DecodingMethod
    prompts: list[PromptResult]
    speedup: float | None = None
    warm_up_s: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all prompts over the seconds they take at each prompt's median rate."""
        tokens = [len(prompt.runs[0].new_tokens) for prompt in self.prompts]
        seconds = [count / prompt.tokens_per_s for count, prompt in zip(tokens, self.prompts, strict=True)]
        return sum(tokens) / sum(seconds)

    @property
    def num_equal(self) -> int:
        """Prompts whose tokens equal the plain model's."""
        return sum(prompt.equal for prompt in self.prompts)

    @property
    def same_start(self) -> float:
        """Mean share of the plain model's tokens before the first difference."""
        return sum(prompt.same_start for prompt in self.prompts) / len(self.prompts)

    @property
    def layers_per_token(self) -> float | None:
        """Decoder layers executed per new token, over all runs; `None` for methods without TIDE."""
        stats = self._stats()
        tokens = sum(one.total_tokens for one in stats)
        return sum(one.layers_executed for one in stats) / tokens if tokens else None

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted, over all runs; `None` if nothing was drafted."""
        stats = self._stats()
        drafted = sum(one.drafted for one in stats)
        return sum(one.accepted for one in stats) / drafted if drafted else None

    def _stats(self) -> list[ExitStats]:
        return [run.stats for prompt in self.prompts for run in prompt.runs if run.stats is not None]

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        names = (
            "tokens_per_s",
            "speedup",
            "layers_per_token",
            "acceptance_rate",
            "num_equal",
            "same_start",
            "warm_up_s",
        )
        prompts = [
            {
                "seconds": [run.seconds for run in prompt.runs],
                "num_new_tokens": len(prompt.runs[0].new_tokens),
                "tokens_per_s": prompt.tokens_per_s,
                "speedup": prompt.speedup,
                "equal": prompt.equal,
                "same_start": prompt.same_start,
            }
            for prompt in self.prompts
        ]
        method = {name: getattr(self.method, name) for name in ("name", "lossless", "exit_threshold")}
        return method | {name: getattr(self, name) for name in names} | {"prompts": prompts}


def compare(
    methods: Sequence[DecodingMethod],
    inputs: Sequence[dict[str, torch.Tensor]],
    *,
    max_new_tokens: int,
    repeats: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run all methods on all prompts, greedily by default.

    Args:
        methods: The methods; the first is the baseline of the others.
        inputs: Keyword arguments of `generate` for each prompt (or batch of prompts).
        max_new_tokens: Most tokens per answer.
        repeats: Timed runs of each method on each prompt.
        progress: Called after each of the `count_runs` runs.

    Returns:
        One result per method, in order.
    """
    results = [Result(method, [PromptResult() for _ in inputs]) for method in methods]
    for result in results:  # untimed, since the first run allocates buffers and selects kernels
        _warm_run(result, inputs[0], max_new_tokens)
        progress()
    for _ in range(repeats):
        for position, prompt in enumerate(inputs):
            for result in results:
                result.prompts[position].runs.append(_warm_run(result, prompt, max_new_tokens))
                progress()
    for result in results:
        _compare_with(results[0], result)
    return results


def _warm_run(result: Result, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> Run:
    """One run, repeated while it includes engine warm-up, which is counted separately."""
    for _ in range(MAX_WARM_UPS):
        run = timed_run(result.method, inputs, max_new_tokens)
        warm_up_s = run.stats.warm_up_s if run.stats is not None else 0.0
        result.warm_up_s += warm_up_s
        if not warm_up_s:
            break
    return run


def count_runs(num_methods: int, num_prompts: int, repeats: int) -> int:
    """Number of runs of `compare`."""
    return num_methods * (1 + num_prompts * repeats)


def timed_run(
    method: DecodingMethod, inputs: dict[str, torch.Tensor], max_new_tokens: int, streamer: Any = None
) -> Run:
    """Generate once, greedily by default, from a fixed seed.

    Args:
        method: The method.
        inputs: Keyword arguments of `generate`, with `input_ids`.
        max_new_tokens: Most new tokens.
        streamer: Streamer of `generate`.

    Returns:
        The run.
    """
    model = method.model
    device = input_device(model)
    inputs = {name: tensor.to(device) for name, tensor in inputs.items()}
    synchronize(device)
    torch.manual_seed(0)
    start = perf_counter()
    options = {"do_sample": False, **method.options}
    output = model.generate(**inputs, **options, max_new_tokens=max_new_tokens, streamer=streamer)
    synchronize(device)
    seconds = perf_counter() - start
    new_tokens = output[:, inputs["input_ids"].shape[1] :].flatten().tolist()
    return Run(seconds, new_tokens, getattr(model, "last_exit_stats", None))


def synchronize(device: torch.device) -> None:
    """Wait for the kernels queued on `device`."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _compare_with(plain: Result, result: Result) -> None:
    """Fill in the figures relative to the plain model's runs."""
    for reference, prompt in zip(plain.prompts, result.prompts, strict=True):
        pairs = list(zip(reference.runs, prompt.runs, strict=True))
        prompt.equal = all(expected.new_tokens == run.new_tokens for expected, run in pairs)
        prompt.same_start = min(same_start(expected.new_tokens, run.new_tokens) for expected, run in pairs)
        prompt.speedup = prompt.tokens_per_s / reference.tokens_per_s
    if not result.method.lossless or result.num_equal == len(result.prompts):
        result.speedup = result.tokens_per_s / plain.tokens_per_s


def same_start(expected: Sequence[int], got: Sequence[int]) -> float:
    """Share of `expected` before the first token that differs in `got`."""
    return num_shared(expected, got) / len(expected) if expected else 1.0
