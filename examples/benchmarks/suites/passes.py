"""What a pass of the model costs by its width, in every engine, beside the speed at which memory is read.

Drafts of a known length, all of them wrong, make passes of one width after the other, in the engines and the loop that
users get; each adds one token. A pass ends when its tokens are on the host. The memory is read before each turn of the
widths, by the sum over a buffer far larger than the caches; the pass after that finds them cold, and is not counted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.choices import EAGER, ENGINES
from tide_hf.common.errors import ConfigurationError
from tide_hf.engines.steps.step_tensors import WIDTHS
from tide_hf.evaluation.benchmark import weight_sharing_copy
from tide_hf.speculation.acceptance import ExactAcceptance
from tide_hf.speculation.drafts import Accepted, Draft
from tide_hf.speculation.protocols import Pass
from tide_hf.speculation.rows import Row

from ..bench import Bench
from ..checks import FULL_PRECISION, Check
from ..common import ScriptedDrafts, markdown
from ..measuring import MemoryReads, bytes_read, in_words, median_ms, paired_speedups

MEMORY = "memory"
# Whatever a model's own generation config says; penalties are no part of a pass.
GREEDY = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "repetition_penalty": 1.0}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        widths: Tokens of a pass, 1 first; compiled engines have a step for each of `WIDTHS`.
        prompt_tokens: Behind which a call's passes begin; each adds one.
        turns: In a call.
        repeats: Calls of each engine, in turn, after one that is not counted.
        read_mb: Size of the buffer that is read.
    """

    widths: Sequence[int] = WIDTHS
    prompt_tokens: int = 104  # and 24 in the middle of a call
    turns: int = 8
    repeats: int = 5
    read_mb: int = 512

    def __post_init__(self) -> None:
        """Refuse widths that a compiled engine would pad."""
        if list(self.widths[:1]) != [1] or not set(self.widths) <= set(WIDTHS):
            raise ConfigurationError(
                "the config names widths that no pass has",
                got=", ".join(map(str, self.widths)),
                expected=f"1, and any of {', '.join(map(str, WIDTHS[1:]))}",
                do="Correct the config.",
            )

    @property
    def new_tokens(self) -> int:
        """Of a call: one for each pass, and room for the last drafts."""
        return 1 + self.turns * (1 + len(self.widths)) + max(self.widths)


class TimedPasses(ScriptedDrafts):
    """The drafts of one call, which are wrong, and the seconds of its passes by width."""

    def __init__(self, answer: list[int], settings: Settings, memory: MemoryReads) -> None:
        super().__init__(answer, share=0.0, length=0)
        self.memory = memory
        self.plan = [width for _ in range(settings.turns) for width in (0, *settings.widths)]  # 0: reads memory before
        self.seconds: dict[str, list[float]] = {MEMORY: [], **{str(width): [] for width in settings.widths}}
        self.width, self.start = 0, 0.0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Drafts for the next width; the clock of its pass starts."""
        self.width = self.plan.pop(0) if self.plan else 0
        if self.plan and not self.width:
            self.memory.read()
            self.seconds[MEMORY].append(self.memory.seconds[-1])
        self.length = max(0, self.width - 1)
        drafts = super().draft(rows, limits)
        self.start = perf_counter()
        return drafts

    def end_pass(self) -> None:
        """The tokens of a pass are on the host."""
        if self.width:
            self.seconds[str(self.width)].append(perf_counter() - self.start)


class TimedRule(ExactAcceptance):
    """The exact rule, which reads a pass's tokens at once and says so."""

    def __init__(self, passes: TimedPasses, *args: Any) -> None:
        super().__init__(*args)
        self.passes = passes

    def accept(self, batch: list[Row], verified: Pass) -> list[Accepted]:
        """Add tokens to each row, as ever."""
        verified.tokens()
        self.passes.end_pass()
        return super().accept(batch, verified)


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Measure all engines in turn."""
    device = bench.model.device
    prompt = bench.long_prompt(settings.prompt_tokens, settings.new_tokens)
    call = {name: tensor.to(device) for name, tensor in prompt.items()} | GREEDY
    call |= {"max_new_tokens": settings.new_tokens}
    answer = bench.model.generate(**call)[0, -settings.new_tokens :].tolist()
    memory = MemoryReads(settings.read_mb, device)
    models = {name: attached(bench, name) for name in ENGINES}
    found: dict[str, Any] = {name: {"equal": True, "seconds": defaultdict(list)} for name in models}
    for turn in range(1 + settings.repeats):
        for name, model in models.items():
            passes = TimedPasses(answer, settings, memory)
            tokens = timed_call(model, passes, call)
            found[name]["equal"] &= tokens[-settings.new_tokens :] == answer
            for key, seconds in passes.seconds.items() if turn else ():
                found[name]["seconds"][key] += seconds
    for name, model in models.items():
        found[name]["bytes"] = bytes_read(model)
    return {"engines": found, "memory_bytes": memory.buffer.nbytes}


def attached(bench: Bench, engine: str) -> Any:
    """A copy with TIDE attached, in the model's own dtype; its kernels built and its weights as they read them."""
    copy = weight_sharing_copy(bench.model)
    model = TIDEModelForCausalLM.attach(copy, engine=engine, compute_dtype=copy.dtype)
    model.tide_warm_up(engine=EAGER)
    return model


def timed_call(model: Any, passes: TimedPasses, call: dict[str, Any]) -> list[int]:
    """One call of `generate` with the drafts of `passes`; all of its tokens."""
    model._tide.make_rule = lambda *args: TimedRule(passes, *args)
    own = {"custom_generate": type(model)._sample, "make_drafter": lambda *_: passes}  # so `generate` hands it on
    return model.generate(**call, **own)[0].tolist()


def tables(record: dict[str, Any]) -> dict[str, str]:
    """The table of all passes; a cost or share is the median of its turns, from the 10th to the 90th percentile."""
    rows = []
    for name, one in record["engines"].items():
        seconds, read = one["seconds"], record["memory_bytes"]
        rate = read / one["bytes"]  # of the memory's seconds, in those of reading the weights
        rows.append([name, "reading alone", median_ms(seconds[MEMORY]), "-", *_speed(read, seconds[MEMORY]), "1"])
        for width in [key for key in seconds if key != MEMORY]:
            costs = paired_speedups(seconds[width], seconds["1"])
            shares = [share / rate for share in paired_speedups(seconds[MEMORY], seconds[width])]
            cells = [median_ms(seconds[width]), in_words(costs), *_speed(one["bytes"], seconds[width])]
            rows.append([name, width, *cells, in_words(shares)])
    headings = ["engine", "tokens of a pass", "ms", "over one token's", "MB of weights", "GB/s", "of the read speed"]
    return {"passes": markdown(headings, rows)}


def _speed(num_bytes: int, seconds: Sequence[float]) -> list[str]:
    return [f"{num_bytes / 1e6:.0f}", f"{num_bytes / median(seconds) / 1e9:.1f}"]


def checks(record: dict[str, Any]) -> list[Check]:
    """Wrong drafts change no token."""
    found = record["engines"].items() if record["dtype"] in FULL_PRECISION else ()
    return [Check(f"{name}: passes of all widths give the tokens of generate", one["equal"]) for name, one in found]
