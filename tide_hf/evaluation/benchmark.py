"""Benchmark of decoding methods against the base model's ``generate``: same weights, prompts, dtype and process.

Runs are interleaved prompt by prompt, so that other load on the machine affects all methods alike. Tokens of the timed
runs are compared.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from ..base_model.structure import input_device
from ..base_model.wrappers import base_inside
from ..common.choices import AUTO
from ..common.errors import ConfigurationError
from ..common.memory import copy_if_it_fits
from ..common.stats import ExitStats
from ..model import TIDEModelForCausalLM
from ..routers.config import NEVER_EXIT, check_exit_threshold
from ..routers.routers import TIDERouters
from ..speculation.drafters import NoDrafter
from ..speculation.drafts import num_shared

MAX_WARM_UPS = 6  # maximum number of runs until one compiles nothing, since each run may need new pass widths
DEFAULT_EXIT_THRESHOLD = 0.9  # for the approximate modes, if the calibrated threshold lets no token exit
TRIAL_TOKENS = 8  # enough for one draft and verify round
UNSTEADY = 1.5  # ratio between the fastest and the slowest run of a prompt above which a note says so
FAILURES = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True)
class DecodingMethod:
    """A decoding method to compare: a model and options of its `generate`."""

    name: str
    model: Any
    options: dict[str, Any] = field(default_factory=dict)
    lossless: bool = True  # whether the method claims to give the plain model's own tokens
    exit_threshold: float | None = None

    @property
    def must_be_equal(self) -> bool:
        """Whether other tokens than the plain model's are an error: below float32 rounding decides near-ties."""
        return self.lossless and getattr(self.model, "dtype", None) not in (torch.float16, torch.bfloat16)


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

    @property
    def warm_up_s(self) -> float:
        """The seconds of engine warm-up among them; 0 without TIDE."""
        return self.stats.warm_up_s if self.stats is not None else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Tokens, times and statistics, ready for JSON."""
        figures = {"tokens": self.new_tokens, "seconds": self.seconds, "tokens_per_s": self.tokens_per_s}
        return figures | {"stats": self.stats.to_dict() if self.stats is not None else None}


@dataclass
class PromptResult:
    """Results of one method on one prompt."""

    runs: list[Run] = field(default_factory=list)  # one per repeat
    equal: bool = True  # whether the tokens are the plain model's in every repeat
    same_start: float = 1.0  # share of the plain model's tokens before the first difference, minimum over repeats
    speedup: float = 1.0  # median tokens per second, divided by the plain model's
    # Whether they are those of the same weights loaded in float32; `None` if nobody has asked.
    as_float32: bool | None = None

    @property
    def tokens_per_s(self) -> float:
        """Median tokens per second of the repeats."""
        return median(run.tokens_per_s for run in self.runs)

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        runs = {"seconds": [run.seconds for run in self.runs], "num_new_tokens": len(self.runs[0].new_tokens)}
        figures = ("tokens_per_s", "speedup", "equal", "same_start", "as_float32")
        return runs | {name: getattr(self, name) for name in figures}


@dataclass
class Result:
    """Results of one method on all prompts."""

    method: DecodingMethod
    prompts: list[PromptResult]
    speedup: float = 1.0  # tokens per second, divided by the plain model's
    warm_up_s: float = 0.0  # seconds of engine warm-up, in runs that were then repeated

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all prompts per second, if each prompt runs at its median rate."""
        tokens = [len(prompt.runs[0].new_tokens) for prompt in self.prompts]
        seconds = [count / prompt.tokens_per_s for count, prompt in zip(tokens, self.prompts, strict=True)]
        return sum(tokens) / sum(seconds)

    @property
    def spread(self) -> float:
        """The ratio between the fastest and the slowest run of a prompt, maximum over prompts."""
        rates = [[run.tokens_per_s for run in prompt.runs] for prompt in self.prompts]
        return max(max(one) / min(one) for one in rates)

    @property
    def num_equal(self) -> int:
        """Number of prompts whose tokens equal the plain model's."""
        return sum(prompt.equal for prompt in self.prompts)

    @property
    def num_as_float32(self) -> int | None:
        """Number of prompts whose tokens are those of the same weights loaded in float32; `None` if not asked."""
        found = [prompt.as_float32 for prompt in self.prompts]
        return None if None in found else sum(map(bool, found))

    @property
    def same_start(self) -> float:
        """Mean share of the plain model's tokens before the first difference."""
        return mean(prompt.same_start for prompt in self.prompts)

    @property
    def layers_per_token(self) -> float | None:
        """Decoder layers executed per new token, over all runs; `None` for methods without TIDE."""
        return self._ratio("layers_executed", "total_tokens")

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted, over all runs; `None` if nothing was drafted."""
        return self._ratio("accepted", "drafted")

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per full-depth pass after prefill, over all runs: the mean acceptance length, or 1 without rounds."""
        extra = self._ratio("accepted", "rounds")
        return 1.0 + (extra or 0.0)

    def _ratio(self, part: str, whole: str) -> float | None:
        """The ratio of two statistics, each summed over all runs; `None` if the second sum is zero."""
        stats = [run.stats for prompt in self.prompts for run in prompt.runs if run.stats is not None]
        total = sum(getattr(one, whole) for one in stats)
        return sum(getattr(one, part) for one in stats) / total if total else None

    def to_dict(self) -> dict[str, Any]:
        """All figures, ready for JSON."""
        figures = ("tokens_per_s", "speedup", "layers_per_token", "acceptance_rate", "same_start")
        counts = ("num_equal", "num_as_float32")
        return (
            {name: getattr(self.method, name) for name in ("name", "lossless", "exit_threshold")}
            | {name: getattr(self, name) for name in (*figures, *counts, "warm_up_s")}
            | {"prompts": [prompt.to_dict() for prompt in self.prompts]}
        )


def compare(
    methods: Sequence[DecodingMethod],
    inputs: Sequence[dict[str, torch.Tensor]],
    *,
    max_new_tokens: int,
    repeats: int = 3,
    progress: Callable[[], None] = lambda: None,
) -> list[Result]:
    """Run all methods on all prompts, greedily by default; the first method is the baseline.

    `inputs` are keyword arguments of `generate` for each prompt (or batch of prompts). Each method has `repeats` timed
    runs on each prompt. `progress` is called after each run; `count_runs` gives the number of runs.
    """
    results = [Result(method, [PromptResult() for _ in inputs]) for method in methods]
    for result in results:  # untimed, since the first run allocates buffers and selects kernels
        _warm_run(result, inputs[0], max_new_tokens)
        progress()
    for _ in range(repeats):
        run_each(results, inputs, max_new_tokens, progress)
    for result in results:
        compare_with(results[0], result)
    compare_with_float32(results, inputs, max_new_tokens)
    return results


def run_each(
    results: Sequence[Result],
    inputs: Sequence[dict[str, torch.Tensor]],
    max_new_tokens: int,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Add one timed run of each method on each prompt to the results."""
    for position, prompt in enumerate(inputs):
        for result in results:
            result.prompts[position].runs.append(_warm_run(result, prompt, max_new_tokens))
            progress()


def count_runs(num_methods: int, num_prompts: int, repeats: int) -> int:
    """Number of runs of `compare`."""
    return num_methods * (1 + num_prompts * repeats)


def _warm_run(result: Result, inputs: dict[str, torch.Tensor], max_new_tokens: int) -> Run:
    """Time a run; repeat it while it includes engine warm-up, whose seconds are added to `result.warm_up_s`."""
    for _ in range(MAX_WARM_UPS):
        forget_answers(result.method.model)
        run = timed_run(result.method, inputs, max_new_tokens)
        result.warm_up_s += run.warm_up_s
        if not run.warm_up_s:
            break
    return run


def forget_answers(model: Any) -> None:
    """Clear what is remembered of answers, from which a repeat of a prompt would draft them."""
    if isinstance(model, TIDEModelForCausalLM):
        attachment = base_inside(model)._tide
        attachment.answers.clear()
        attachment.successors.clear()


def compare_with(plain: Result, result: Result) -> None:
    """Fill in the figures relative to the plain model's runs."""
    for reference, prompt in zip(plain.prompts, result.prompts, strict=True):
        pairs = list(zip(reference.runs, prompt.runs, strict=True))
        prompt.equal = all(expected.new_tokens == run.new_tokens for expected, run in pairs)
        prompt.same_start = min(same_start(expected.new_tokens, run.new_tokens) for expected, run in pairs)
        prompt.speedup = prompt.tokens_per_s / reference.tokens_per_s
    result.speedup = result.tokens_per_s / plain.tokens_per_s


def compare_with_float32(
    results: Sequence[Result], inputs: Sequence[dict[str, torch.Tensor]], max_new_tokens: int
) -> None:
    """Fill in which answers are those of the same weights loaded in float32, by plain `generate`.

    The first result is the baseline's. Nothing is filled in for models that are not in half precision, for sampling,
    and where memory does not hold the copy.
    """
    method = results[0].method
    model: Any = method.model
    is_half = getattr(model, "dtype", None) in (torch.float16, torch.bfloat16)
    if not is_half or getattr(model, "is_quantized", False) or method.options.get("do_sample"):
        return
    num_bytes = sum(2 * weight.nbytes for weight in model.parameters())
    copied = copy_if_it_fits(lambda: copy.deepcopy(model).float(), num_bytes)
    for position, prompt in enumerate(inputs if copied is not None else ()):
        expected = timed_run(replace(method, model=copied), prompt, max_new_tokens).new_tokens
        for result in results:
            runs = result.prompts[position].runs
            result.prompts[position].as_float32 = all(run.new_tokens == expected for run in runs)


def runs_note(results: Sequence[Result]) -> str:
    """What the speeds of a table are figures of, and whether they are steady."""
    repeats, spread = len(results[0].prompts[0].runs), max(result.spread for result in results)
    if repeats == 1:
        return "one run each, so speeds are unsteady"
    note = f"median of {repeats} interleaved runs"
    return f"{note} (unsteady: those of a prompt differ by a factor of {spread:.1f})" if spread > UNSTEADY else note


def timed_run(
    method: DecodingMethod, inputs: dict[str, torch.Tensor], max_new_tokens: int, streamer: Any = None
) -> Run:
    """Generate once, greedily by default, from a fixed seed; `inputs` and `streamer` are passed to `generate`."""
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


def same_start(expected: Sequence[int], got: Sequence[int]) -> float:
    """Share of `expected` before the first token that differs in `got`."""
    return num_shared(expected, got) / len(expected) if expected else 1.0


def weight_sharing_copy(model: nn.Module) -> Any:
    """Copy a model's modules but not its parameters and buffers, so that only the copy gets TIDE attached."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def check_plain(model: Any) -> None:
    """Raise [`ConfigurationError`] for a baseline with TIDE attached."""
    if isinstance(model, TIDEModelForCausalLM):
        raise ConfigurationError(
            "there is nothing to compare with",
            got="a model with TIDE attached",
            expected="the plain base model",
            do="Call TIDEModelForCausalLM.detach(model) first.",
        )


def tide_methods(
    model: Any,
    routers: TIDERouters | None,
    modes: Sequence[str],
    *,
    exit_threshold: float | None = None,
    engine: str = "eager",
    compute_dtype: str = AUTO,
) -> list[DecodingMethod]:
    """Plain `generate` of `model`, and each mode on a weight-sharing copy with TIDE attached.

    `model` itself never has TIDE attached: its `generate` runs no code of this library. Without routers only
    `self_speculative` can run. The approximate modes run at [`usable_threshold`].
    """
    check_plain(model)
    options = {"mode": modes[0], "engine": engine, "compute_dtype": compute_dtype}
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers, **options)
    threshold = usable_threshold(routers, exit_threshold)
    return [DecodingMethod("generate", model), *(tide_method(attached, mode, threshold) for mode in modes)]


def tide_method(attached: Any, mode: str, exit_threshold: float) -> DecodingMethod:
    """Decoding in `mode` with an attached model, at `exit_threshold` if the mode is approximate."""
    if mode == "self_speculative":
        return DecodingMethod(mode, attached, {"tide_mode": mode})
    options = {"tide_mode": mode, "exit_threshold": exit_threshold}
    return DecodingMethod(mode, attached, options, lossless=False, exit_threshold=exit_threshold)


def without_drafts(method: DecodingMethod) -> DecodingMethod:
    """`method` on the same attached model, but nothing drafts: the speed of its engine alone."""
    options = {"custom_generate": type(method.model)._sample, "make_drafter": NoDrafter}
    return replace(method, name="engine alone, no drafts", options=method.options | options)


def usable_threshold(routers: TIDERouters | None, exit_threshold: float | None) -> float:
    """Return `exit_threshold`, else the calibrated threshold, or the default if that lets no token exit."""
    if exit_threshold is not None:
        return check_exit_threshold(exit_threshold)
    calibrated = float(routers.config.exit_threshold) if routers is not None else NEVER_EXIT
    return calibrated if calibrated <= 1 else DEFAULT_EXIT_THRESHOLD


def prompt_lookup(model: Any) -> DecodingMethod:
    """Prompt lookup decoding of transformers."""
    return DecodingMethod("prompt_lookup_num_tokens=10", model, {"prompt_lookup_num_tokens": 10})


def assistant_early_exit(model: Any) -> DecodingMethod:
    """LayerSkip decoding of transformers, which drafts with the lower half of the layers."""
    layers = max(1, model.config.get_text_config().num_hidden_layers // 2)
    return DecodingMethod(f"assistant_early_exit={layers}", model, {"assistant_early_exit": layers})


def runnable_methods(
    methods: Sequence[DecodingMethod], inputs: dict[str, torch.Tensor]
) -> tuple[list[DecodingMethod], dict[str, str]]:
    """Try methods of transformers for a few tokens; return those that run, and the errors of the others by name."""
    running, failing = [], {}
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # transformers warns about its own assistants
    for one in methods:
        # A copy, because a failing assistant_early_exit leaves too few layers in the config.
        trial = DecodingMethod(one.name, weight_sharing_copy(one.model), one.options)
        try:
            timed_run(trial, inputs, TRIAL_TOKENS)
        except FAILURES as error:
            failing[one.name] = f"{type(error).__name__}: {error}"
        else:
            running.append(one)
    transformers_logging.set_verbosity(verbosity)
    return running, failing
