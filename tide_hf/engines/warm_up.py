"""Warm an engine up before the first answer: calls that run every step that answers are likely to need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from ..common.errors import ConfigurationError, describe, short
from ..depth.linear_gate import weight_dtypes
from ..kernels.cpu.cpp_kernels import CPP_TYPES, EAGER_KERNELS, compile_kernel, is_loaded
from ..speculation.attachment import Attachment, head_priors
from ..speculation.engine import UNREAD, Draft, DraftEngine, Drafter
from ..speculation.policy import CostTable, Option, choose
from ..speculation.rows import RowCriterion
from .steps.progress import WarmUp
from .steps.step_buffers import WIDTHS

# Prompt lengths, each of which may use another weight layout.
PROMPT_LENGTHS = (8, 40, 80, 160, 320)
ANSWER_LENGTH = 2 * sum(WIDTHS)  # room for the drafts


class WarmUpDrafter:
    """Drafts one token with each head, then arbitrary tokens for each width of a verify pass.

    Args:
        engine: Runs the draft heads.
        exit_layers: Exit layers of the heads.
        widths: Widths of verify passes.

    Attributes:
        rounds: Rounds that are left: `("draft", exit_layer)` or `("verify", width)`.
    """

    def __init__(self, engine: DraftEngine, exit_layers: Iterable[int], widths: Iterable[int]) -> None:
        self.engine = engine
        self.rounds = [("verify", width) for width in reversed(list(widths))]
        self.rounds += [("draft", exit_layer) for exit_layer in exit_layers]

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft for the next round."""
        kind, size = self.rounds.pop() if self.rounds else ("verify", 1)
        if kind == "verify" or min(limits) < 1:
            return [Draft().add([0] * min(size - 1, limit), "warm-up") for limit in limits]
        if not self.engine.reads_drafts:
            self.engine.draft_unread(size, 1)
            return [Draft().add([UNREAD], "warm-up", size) for _ in rows]
        tokens, _ = self.engine.draft(size, [[] for _ in rows])
        self.engine.rollback()
        return [Draft().add([token], "warm-up", size) for token in tokens]

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        """Ignore the outcome."""


class _StopAfterWarmUp(RowCriterion):
    """Ends all rows once no rounds are left."""

    def __init__(self) -> None:
        self.drafter: WarmUpDrafter | None = None

    def stops_row(self, index: int, token: int) -> bool:
        return self.drafter is not None and not self.drafter.rounds


def warm_up(model: Any, attachment: Attachment, engine: str, numbers: list[int], max_length: int) -> float:
    """Warm an engine up; see `TIDEGenerationMixin.tide_warm_up`.

    Args:
        model: The attached model.
        attachment: TIDE's state of the model.
        engine: Name of the engine.
        numbers: Batch sizes, descending, since smaller batches share the memory of larger ones.
        max_length: Most tokens of prompt and answer.

    Returns:
        Seconds that it took.
    """
    kind = attachment.engines[engine]
    before, stats = kind.warm_up_seconds, model.last_exit_stats
    most = min(max_length, getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_length)
    with kind.showing_warm_up():
        for number in numbers:
            _run(model, attachment, engine, number, PROMPT_LENGTHS[0], most)
        for length in PROMPT_LENGTHS:
            for number, padded in _kinds_of_prompts(numbers[0]) if length + ANSWER_LENGTH <= most else ():
                _run(model, attachment, engine, number, length, length + 1, padded)
    model.last_exit_stats = stats
    return kind.warm_up_seconds - before


def compile_kernels(attachment: Attachment) -> float:
    """Compile the kernels that eager calls use once they are cached; return the seconds that it took."""
    dtypes = weight_dtypes(attachment.gates()) & CPP_TYPES.keys() if attachment.use_kernels is not False else ()
    missing = [(name, dtype) for dtype in dtypes for name in EAGER_KERNELS if not is_loaded(name, dtype)]
    counter = WarmUp("Compiling kernels for this CPU", "kernels")
    with counter.shown(is_due=bool(missing)):
        for name, dtype in missing:
            begin = perf_counter()
            counter.add(int(compile_kernel(name, dtype, EAGER_KERNELS)), perf_counter() - begin)
    return counter.seconds


def _kinds_of_prompts(most_rows: int) -> set[tuple[int, bool]]:
    """Batch sizes, and whether rows are padded: prefill runs a batch at once, or in groups of similar length."""
    return {(1, False), (2, False), (2, True), (most_rows, True)} if most_rows > 1 else {(1, False)}


def checked_rows(rows: Any, max_length: Any) -> list[int]:
    """Validate batch sizes and return them in descending order.

    Raises:
        ConfigurationError: `rows` or `max_length` is not a positive integer.
    """
    numbers = list(rows) if isinstance(rows, Iterable) else [rows]
    bad = [("max_length", max_length)] if not _is_count(max_length) else []
    bad += [("rows", rows)] if not numbers or not all(map(_is_count, numbers)) else []
    for name, value in bad:
        raise ConfigurationError(
            describe(
                f"{name} makes no sense",
                got=short(value),
                expected="a whole number of at least 1" + (", or several of them" if name == "rows" else ""),
                do="Pass rows=1 for single sequences, or rows=(1, 2, 4, 8), say, for batches as well."
                if name == "rows"
                else "Pass max_length=1024, say.",
            )
        )
    return sorted(set(numbers), reverse=True)


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 1


def _run(
    model: Any, attachment: Attachment, engine: str, rows: int, length: int, max_length: int, padded: bool = False
) -> None:
    """Run one call on arbitrary tokens: every step, or prefill alone if only one token may be generated."""
    criterion = _StopAfterWarmUp()

    def make(_attachment: Attachment, _prompts: list[list[int]], engine: Any) -> WarmUpDrafter:
        criterion.drafter = WarmUpDrafter(engine, _layers_to_draft(attachment, engine), engine.widths or WIDTHS)
        return criterion.drafter

    columns, row = (torch.arange(count, device=model.device) for count in (length, rows))
    ids = (columns + row[:, None]) % attachment.structure.vocab_size  # prefill runs equal rows once
    mask = torch.ones_like(ids)
    if padded:  # padding needs other graphs
        mask[1:, 0] = 0
    with _drafting_by(attachment, make):
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(1, max_length - length),
            stopping_criteria=[criterion],
            tide_mode="self_speculative",
            tide_engine=engine,
            tide_strict=True,
            do_sample=False,
            num_beams=1,
            num_return_sequences=1,
            eos_token_id=None,
            pad_token_id=0,
            return_dict_in_generate=False,
        )


def _layers_to_draft(attachment: Attachment, engine: DraftEngine) -> list[int]:
    """The exit layer of the head that the policy would choose at costs proportional to depth, if any."""
    costs = CostTable(attachment.structure.num_layers, attachment.structure.head_share, WIDTHS)
    for _ in range(2):  # the first measurement is discarded
        costs.record(("verify", 1), 1.0)
    priors = head_priors(attachment, engine)
    choice = choose([Option("head", ((prior, WIDTHS[-1] - 1),), layer) for layer, prior in priors.items()], costs)
    return [choice.option.exit_layer] if choice.option is not None else []


@contextmanager
def _drafting_by(attachment: Attachment, make: Callable[..., Drafter]) -> Iterator[None]:
    """Make calls of this thread, and of no other, use the drafter that `make` returns."""
    before, own = attachment.make_drafter, get_ident()
    attachment.make_drafter = lambda *args: make(*args) if get_ident() == own else before(*args)
    try:
        yield
    finally:
        attachment.make_drafter = before
