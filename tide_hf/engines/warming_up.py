"""Make an engine ready before the first answer: calls in which every step runs that answers are likely to need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from threading import get_ident
from time import perf_counter
from typing import Any

import torch

from ..common.errors import ConfigurationError, describe, short
from ..depth.linear_gate import weight_dtypes
from ..kernels.cpu.cpp_kernels import EAGER_KERNELS, VALUES, compile_kernel, is_loaded
from ..speculation.attachment import Attachment, head_priors
from ..speculation.costs import CostTable
from ..speculation.drafters import UNREAD, Draft, Drafter
from ..speculation.engine import DraftEngine
from ..speculation.policy import Option, choose
from ..speculation.rows import RowCriterion
from .steps.step_buffers import WIDTHS
from .steps.warm_up import WarmUp

# Tokens of prompts: a linear layer may read its weights in another form for each of these numbers.
PROMPT_LENGTHS = (8, 40, 80, 160, 320)
ANSWER_LENGTH = 2 * sum(WIDTHS)  # room for what is drafted


class WarmUpDrafter:
    """Drafts a token with a head, and then as many as each width of a verify pass takes, right or wrong.

    Args:
        engine: Runs the draft heads.
        exit_layers: The heads' layers.
        widths: Of verify passes.

    Attributes:
        rounds: What is still to be drafted: `("draft", exit_layer)` or `("verify", width)`.
    """

    def __init__(self, engine: DraftEngine, exit_layers: Iterable[int], widths: Iterable[int]) -> None:
        self.engine = engine
        self.rounds = [("verify", width) for width in reversed(list(widths))]
        self.rounds += [("draft", exit_layer) for exit_layer in exit_layers]

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft what is next."""
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
        """Learn nothing."""


class _Enough(RowCriterion):
    """Ends all rows once nothing is left to be drafted."""

    def __init__(self) -> None:
        self.drafter: WarmUpDrafter | None = None

    def stops_row(self, index: int, token: int) -> bool:
        return self.drafter is not None and not self.drafter.rounds


def warm_up(model: Any, attachment: Attachment, engine: str, numbers: list[int], max_length: int) -> float:
    """Make an engine ready; see `TIDEGenerationMixin.tide_warm_up`.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        engine: One that has to be made ready.
        numbers: Of the sequences of a call, descending: fewer share the memory of more.
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
    """Have the kernels compiled that eager calls use where they are there; return the seconds that it took."""
    dtypes = weight_dtypes(attachment.gates()) & VALUES.keys() if attachment.use_kernels is not False else ()
    missing = [(name, dtype) for dtype in dtypes for name in EAGER_KERNELS if not is_loaded(name, dtype)]
    counter = WarmUp("Compiling kernels for this CPU", "kernels")
    with counter.shown(is_due=bool(missing)):
        for name, dtype in missing:
            begin = perf_counter()
            counter.add(int(compile_kernel(name, dtype, EAGER_KERNELS)), perf_counter() - begin)
    return counter.seconds


def _kinds_of_prompts(most_rows: int) -> set[tuple[int, bool]]:
    """Rows, and whether they are padded: a batch is read together, or in groups of about one length."""
    return {(1, False), (2, False), (2, True), (most_rows, True)} if most_rows > 1 else {(1, False)}


def checked_rows(rows: Any, max_length: Any) -> list[int]:
    """The numbers of sequences, descending.

    Raises:
        ConfigurationError: These, or that of tokens, are none.
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
    """One call, on any tokens: every step runs in it, or, where there is room for one token, the prompt alone."""
    enough = _Enough()

    def make(_attachment: Attachment, _prompts: list[list[int]], engine: Any) -> WarmUpDrafter:
        enough.drafter = WarmUpDrafter(engine, _layers_to_draft(attachment, engine), engine.widths or WIDTHS)
        return enough.drafter

    columns, row = (torch.arange(count, device=model.device) for count in (length, rows))
    ids = (columns + row[:, None]) % attachment.structure.vocab_size  # rows that are alike would be read once
    mask = torch.ones_like(ids)
    if padded:  # which takes graphs of its own
        mask[1:, 0] = 0
    with _drafting_by(attachment, make):
        model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=max(1, max_length - length),
            stopping_criteria=[enough],
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
    """The layer of the head that the policy would choose if costs went by depth, if any."""
    costs = CostTable(attachment.structure.num_layers, attachment.structure.head_share, WIDTHS)
    for _ in range(2):  # the first is not believed
        costs.record(("verify", 1), 1.0)
    priors = head_priors(attachment, engine)
    choice = choose([Option("head", ((prior, WIDTHS[-1] - 1),), layer) for layer, prior in priors.items()], costs)
    return [choice.option.exit_layer] if choice.option is not None else []


@contextmanager
def _drafting_by(attachment: Attachment, make: Callable[..., Drafter]) -> Iterator[None]:
    """Let calls of this thread, and of no other, draft by what `make` makes."""
    before, own = attachment.make_drafter, get_ident()
    attachment.make_drafter = lambda *args: make(*args) if get_ident() == own else before(*args)
    try:
        yield
    finally:
        attachment.make_drafter = before
