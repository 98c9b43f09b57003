"""Warm an engine up before the first answer, by calls that run every step that answers are likely to need."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from ..base_model.structure import rope_limits
from ..common.choices import EAGER, check_counts, is_count
from ..common.errors import ConfigurationError, short
from ..depth.multi_token_passes import multi_token_limit
from ..kernels.cpu.cpp_kernels import build_kernels, obstacle_to_build
from ..speculation.attachment import Attachment, head_priors
from ..speculation.drafts import Accepted, Draft
from ..speculation.policy import FEWEST_PLAIN, CostTable, expected_tokens
from ..speculation.protocols import DraftEngine
from ..speculation.rows import RowCriterion
from ..weights.reading import WeightReading
from ..weights.upcast import upcasting
from .steps.exit_steps import WINDOW
from .steps.step_tensors import WIDTHS

# Bytes of weights. Smaller models read them from the CPU's caches, where kernels gain little.
WORTH_A_BUILD = 64 * 2**20
# Prompt lengths to warm up; each may use a different weight layout.
PROMPT_LENGTHS = (8, 40, 80, 160, 320)
ANSWER_LENGTH = 2 * sum(WIDTHS)  # enough for the drafts of all verify widths
WARM_UP_CALL = {"tide_mode": "self_speculative", "tide_strict": True, "return_dict_in_generate": False}
WARM_UP_CALL |= {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "eos_token_id": None, "pad_token_id": 0}
# In a model's generation config these would end the warm-up, or keep its calls from the steps.
WARM_UP_CALL |= dict.fromkeys(("max_time", "stop_strings", "exponential_decay_length_penalty", "cache_implementation"))
WARM_UP_CALL |= {"output_attentions": False, "output_hidden_states": False}

logger = logging.getLogger(__name__)


class WarmUp:
    """Counts steps or kernels that are prepared once and kept between calls, and shows them in a progress line.

    The line obeys `transformers.utils.logging.disable_progress_bar`, and is only drawn on a terminal.
    """

    def __init__(self, description: str, unit: str) -> None:
        self.description, self.unit = description, unit  # shown in the line; the unit is a plural noun
        self.num_prepared, self.seconds, self.bytes = 0, 0.0, 0  # bytes of device memory
        self._line: Any = None
        self._shown = 0

    @contextmanager
    def shown(self, *, is_due: bool = False) -> Iterator[None]:
        """Context that shows the line as soon as something is prepared, or immediately with `is_due`; may be nested.

        A line that is due is erased if nothing was prepared.
        """
        if is_due:
            self._draw()
        self._shown += 1
        try:
            yield
        finally:
            self._shown -= 1
            if self._line is not None and not self._shown:
                self._line.close()
                self._line = None

    def add(self, number: int, seconds: float, num_bytes: int = 0) -> None:
        """Add `number` prepared steps or kernels, with the seconds and bytes that they took."""
        self.num_prepared += number
        self.seconds += seconds
        self.bytes += num_bytes
        if number:
            self._draw()

    def _draw(self) -> None:
        layout = "{desc}: {n_fmt} {unit}{postfix}" if self.num_prepared else "{desc} ..."
        if self._line is None:
            self._line = transformers_logging.tqdm(
                desc=self.description, unit=self.unit, bar_format=layout, disable=None
            )
        self._line.bar_format, self._line.leave = layout, self.num_prepared > 0
        self._line.n = self.num_prepared
        memory = f", {self.bytes / 1e6:.0f} MB" if self.bytes else ""
        self._line.set_postfix_str(f"{self.seconds:.1f} s{memory}")


class WarmUpRounds(RowCriterion):
    """Drafts with each head, then arbitrary tokens for each verify width, and then ends all rows."""

    def __init__(self) -> None:
        self.engine: Any = None
        self.rounds: list[tuple[str, int]] = []  # steps still to run, as in `StepStore.run`

    def begin(self, engine: Any, exit_layers: list[int]) -> WarmUpRounds:
        """Set the call's engine, which exists after prefill, and plan the rounds; return self."""
        self.engine = engine
        self.rounds = [("verify", width) for width in reversed(WIDTHS)]
        self.rounds += [("draft", exit_layer) for exit_layer in exit_layers]
        return self

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft for the next round."""
        kind, size = self.rounds.pop() if self.rounds else ("verify", 1)
        if kind == "verify" or min(limits) < 1:
            return [Draft().add([0] * min(size - 1, limit), "warm-up") for limit in limits]
        found, _ = self.engine.draft(size, [[] for _ in rows])
        return [Draft().add(tokens[:1], "warm-up", size) for tokens in found]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Ignore the outcome."""

    def stops_row(self, index: int, token: int) -> bool:
        """Whether no rounds are left."""
        return self.engine is not None and not self.rounds


class EndAfter(RowCriterion):
    """Ends each row after a number of tokens, in a call that has room for more."""

    def __init__(self, num_tokens: int) -> None:
        self.remaining: defaultdict[int, int] = defaultdict(lambda: num_tokens)

    def stops_row(self, index: int, token: int) -> bool:
        """Whether the row has all of them."""
        self.remaining[index] -= 1
        return self.remaining[index] <= 0


def warm_up(model: Any, attachment: Attachment, engine: str, numbers: list[int], max_length: int) -> float:
    """Warm an engine up, as `TIDEGenerationMixin.tide_warm_up` describes; return the seconds that this took.

    The batch sizes `numbers` are in descending order, since smaller batches share the memory of larger ones.
    """
    kind = attachment.engines[engine]
    before, stats = kind.warm_up_seconds, model.last_exit_stats
    most = _most_tokens(model, max_length)
    run = _run_exits if attachment.mode == "early_exit" else _run
    with kind.showing_warm_up():
        for number in numbers:
            run(model, attachment, engine, number, PROMPT_LENGTHS[0], most)
        for length in PROMPT_LENGTHS:
            for number, padded in _kinds_of_prompts(numbers[0]) if length + ANSWER_LENGTH <= most else ():
                _run(model, attachment, engine, number, length, length + 1, padded)
    model.last_exit_stats = stats
    return kind.warm_up_seconds - before


def _most_tokens(model: Any, max_length: int) -> int:
    """The largest number of tokens, up to `max_length`, that the model has positions for, and drafts are made for."""
    config, limit = model.config.get_text_config(), multi_token_limit(model)
    limits = (getattr(config, "max_position_embeddings", None), *rope_limits(config).values(), limit and limit[1])
    return min(max_length, *(known for known in limits if known), max_length)


def build_while_attaching(weights: WeightReading, may_upcast: bool) -> None:
    """Build the kernels that eager calls lack, once on each machine, so that no user has to know of them.

    Only for models that they pay for, and where builds can be kept; else the log says at level INFO why not.
    """
    missing = weights.missing_kernels(may_upcast) if weights.use_kernels == "auto" else []
    if not missing or weights.num_bytes < WORTH_A_BUILD:
        return
    reasons = {dtype: obstacle_to_build(dtype) for dtype in missing}
    for dtype, reason in reasons.items():
        if reason is not None:
            logger.info("kernels for %s are not built: %s", dtype, reason)
    _build([dtype for dtype in missing if reasons[dtype] is None])


def prepare_eager(model: Any, attachment: Attachment) -> float:
    """Build the kernels that eager calls lack, and convert the weights for them.

    Returns the seconds that this took; 0 if there was nothing to do.
    """
    weights, compute = attachment.weights, attachment.compute
    missing = weights.missing_kernels(compute.may_upcast(model))
    seconds = _build(missing)
    with upcasting(compute.of_call(model, None, EAGER) is not model.dtype):
        if missing:
            weights.measure()
        begin = perf_counter()
        return seconds + (perf_counter() - begin if weights.convert() else 0.0)


def _build(dtypes: list[torch.dtype]) -> float:
    """Build kernels, with a progress line on a terminal; return the seconds that this took."""
    counter = WarmUp("Building kernels for this CPU", "dtypes")
    with counter.shown(is_due=bool(dtypes)):
        for dtype in dtypes:
            begin = perf_counter()
            counter.add(int(build_kernels(dtype)), perf_counter() - begin)
    return counter.seconds


def _kinds_of_prompts(most_rows: int) -> set[tuple[int, bool]]:
    """Pairs (batch size, whether rows are padded), since prefill may split a padded batch into smaller groups."""
    return {(1, False), (2, False), (2, True), (most_rows, True)} if most_rows > 1 else {(1, False)}


def checked_rows(rows: Any, max_length: Any) -> list[int]:
    """Check that `rows` and `max_length` are positive integers; return the batch sizes in descending order."""
    numbers = list(rows) if isinstance(rows, Iterable) else [rows]
    check_counts(usual=1024, max_length=max_length)
    if not numbers or not all(map(is_count, numbers)):
        expected = "a whole number of at least 1, or several of them"
        do = "Pass rows=1 for single sequences, or rows=(1, 2, 4, 8), say, for batches as well."
        raise ConfigurationError("rows makes no sense", got=short(rows), expected=expected, do=do)
    return sorted(set(numbers), reverse=True)


def _run(
    model: Any, attachment: Attachment, engine: str, rows: int, length: int, max_length: int, padded: bool = False
) -> None:
    """Run one call on arbitrary tokens: prefill, then each step to be warmed up unless `max_length` leaves no room."""
    rounds = WarmUpRounds()
    ids, mask = _prompts(model, attachment, rows, length, padded)
    model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=max(1, max_length - length),
        stopping_criteria=[rounds],
        tide_engine=engine,
        custom_generate=type(model)._sample,  # so that `generate` passes `make_drafter` on to `_sample`
        make_drafter=lambda _, __, engine: rounds.begin(
            engine, _layers_to_draft(attachment, engine, model.device.type != "cpu")
        ),
        **WARM_UP_CALL,
    )


def _run_exits(model: Any, attachment: Attachment, engine: str, rows: int, length: int, max_length: int) -> None:
    """Run calls of `early_exit`: one in which tokens hardly exit, one in which all exit at once."""
    ids, mask = _prompts(model, attachment, rows, length)
    for exit_threshold in (1.0, 0.0):
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(1, max_length - length),
            stopping_criteria=[EndAfter(WINDOW + 1)],
            tide_engine=engine,
            exit_threshold=exit_threshold,
            **{**WARM_UP_CALL, "tide_mode": "early_exit"},
        )


def _prompts(model: Any, attachment: Attachment, rows: int, length: int, padded: bool = False) -> tuple[Tensor, Tensor]:
    """Arbitrary prompts and their mask. They differ, since prefill runs equal rows once; padding needs other graphs."""
    columns, row = (torch.arange(count, device=model.device) for count in (length, rows))
    ids = (columns + row[:, None]) % attachment.structure.vocab_size
    mask = torch.ones_like(ids)
    if padded:
        mask[1:, 0] = 0
    return ids, mask


def _layers_to_draft(attachment: Attachment, engine: DraftEngine, reads_once: bool) -> list[int]:
    """The exit layer that the policy would choose if costs were proportional to depth, in a list; may be empty."""
    costs = attachment.unmeasured_costs(1, reads_once, WIDTHS)
    for _ in range(1 + FEWEST_PLAIN):  # the first measurement is discarded
        costs.record(("verify", 1), 1.0)
    priors = head_priors(attachment, engine)
    rates = {layer: _chain_rate(prior, layer, costs) for layer, prior in priors.items()}
    best = max(rates, key=lambda layer: rates[layer], default=None)
    return [] if best is None or rates[best] <= 1.0 else [best]


def _chain_rate(acceptance: float, exit_layer: int, costs: CostTable) -> float:
    """Expected tokens of the best chain of a head for the time of a plain pass."""
    lengths = range(1, WIDTHS[-1])
    return max(
        expected_tokens(acceptance, length) / (length * costs.draft(exit_layer) + costs.verify(length + 1))
        for length in lengths
    )
