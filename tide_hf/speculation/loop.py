"""The self-speculative loop: cheap drafts, one full-depth pass to verify them, roll back what was wrong.

A round asks the drafter for draft tokens, the engine for one full-depth pass over them, and the acceptance rule which
of them the base model would have chosen. Every token that leaves this loop was chosen from the base model's own
full-depth logits, after the same processors; drafts only decide how many positions one pass covers. Since a draft names
one token, "draw from p and compare" is speculative sampling with q = 1 (Leviathan et al., arXiv 2211.17192), and a
single row draws the same random numbers in the same order as plain decoding.

The rows of a batch draft to a common width and keep accepted lengths of their own; see `cache_slots.CacheSlots`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..base_model.adapters import has_adapters_by_row
from ..base_model.structure import CACHE, counts_slots, rope_limits
from ..base_model.unembed import greedy_tokens
from ..common.stats import ExitStats
from .acceptance import AcceptanceRule
from .drafters import UNREAD, Draft, Drafter
from .engine import Engine
from .ranks import ranks_of
from .rows import Row, Stopping, by_step


class SpeculativeDecoder:
    """Decodes the sequences of one call.

    Args:
        engine: Runs the passes.
        rule: Chooses tokens from logits, and ends rows.
        rows: The sequences.
        stats: Counts what happens.
        drops_stopped: Whether rows that have ended leave the batch.
    """

    def __init__(
        self, engine: Engine, rule: AcceptanceRule, rows: list[Row], stats: ExitStats, drops_stopped: bool
    ) -> None:
        self.engine, self.rule, self.rows, self.stats = engine, rule, rows, stats
        self.drops_stopped = drops_stopped
        self.batch = list(rows)  # those that still decode, in the order of the cache

    def decode(self, make_drafter: Callable[[Engine], Drafter]) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until every row is stopped.

        Args:
            make_drafter: Makes the drafter of the call, given the engine that decodes behind the prompt.
        """
        with self.engine.running():
            first = self._prefill()
            if not self._is_done():
                self.engine = self.engine.decoder(max(self.rule.room(row) for row in self.batch))
            drafter = make_drafter(self.engine)
            for row, tokens in zip(self.rows, first, strict=True):
                drafter.observe(row.index, Draft(), tokens, 0)
            with self.engine.decoding():
                while not self._is_done():
                    self._round(drafter)
            cache = self.engine.finish(settle=not self.drops_stopped)
        if self.rule.streamer is not None:
            self.rule.streamer.end()
        return self._result(cache)

    def _prefill(self) -> list[list[int]]:
        """Read the prompts; return the first token of each row."""
        logits = self.engine.prefill()
        top_tokens = None if self.rule.needs_logits else greedy_tokens(logits).tolist()
        first = self.rule.accept(self.batch, logits, [Draft() for _ in self.batch], top_tokens, self.stats.num_layers)
        self.engine.begin([row.last for row in self.batch])
        self._drop_stopped()
        return first

    def _round(self, drafter: Drafter) -> None:
        engine, rule, batch = self.engine, self.rule, self.batch
        drafts = drafter.draft([row.index for row in batch], self._limits())
        engine.verify([draft.tokens for draft in drafts])
        for draft, read in zip(drafts, engine.drafted() or [], strict=False):
            draft.tokens = [new if token == UNREAD else token for token, new in zip(draft.tokens, read, strict=True)]
        logits, top_tokens = (engine.logits(), None) if rule.needs_logits else (None, engine.top_tokens())
        new_tokens = rule.accept(batch, logits, drafts, top_tokens, self.stats.num_layers)
        engine.commit(new_tokens)
        self._learn(drafter, drafts, new_tokens)
        self._drop_stopped()

    def _limits(self) -> list[int]:
        """The most tokens that each row may draft: what its answer, the cache and learnt positions have room for."""
        limits = [max(0, self.rule.room(row) - 1) for row in self.batch]
        free = self.engine.free_slots
        return limits if free is None else [min(limit, free) for limit in limits]

    def _learn(self, drafter: Drafter, drafts: list[Draft], new_tokens: list[list[int]]) -> None:
        """Tell the drafter, and the statistics, what became of a round's drafts."""
        for row, draft, tokens in zip(self.batch, drafts, new_tokens, strict=True):
            n_matches = sum(drafted == new for drafted, new in zip(draft.tokens, tokens, strict=False))
            drafter.observe(row.index, draft, tokens, n_matches)
            self.stats.rounds += 1
            self.stats.drafted += len(draft.tokens)
            self.stats.accepted += n_matches

    def _drop_stopped(self) -> None:
        """Let rows that are stopped cost nothing more."""
        going = [place for place, row in enumerate(self.batch) if row.stopped_at is None]
        if self.drops_stopped and len(going) not in (0, len(self.batch)):
            self.batch = [self.batch[place] for place in going]
            self.engine.select(going)

    def _is_done(self) -> bool:
        """Whether all are stopped; rows that were kept must have caught up with the one that stopped last."""
        if any(row.stopped_at is None for row in self.rows):
            return False
        return self.drops_stopped or all(len(row.tokens) >= self.rule.length for row in self.rows)

    def _result(self, cache: Any) -> Tensor | GenerateDecoderOnlyOutput:
        rule, length, pad = self.rule, self.rule.length, self.rule.stopping.pad_token_id
        prompts = torch.cat([row.prompt for row in self.rows])
        tokens = [row.tokens[:length] + [pad] * (length - len(row.tokens)) for row in self.rows]
        new_tokens = torch.tensor(tokens, device=prompts.device)  # int64, as plain decoding's are
        sequences = torch.cat([prompts, new_tokens], dim=-1)
        self.stats.layers_executed = self.engine.layers_executed
        self.stats.per_token = [row.depths[: row.stopped_at] for row in self.rows]
        if not rule.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step(row.scores[:length] for row in self.rows) if rule.keeps_scores else None,
            logits=by_step(row.logits[:length] for row in self.rows) if rule.keeps_logits else None,
            **{CACHE: cache},
        )


def decoder_of(
    model: Any,
    engine: Engine,
    input_ids: Tensor,
    *,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any,
    cache_is_returned: bool,
) -> SpeculativeDecoder:
    """The decoder of one call.

    Args:
        model: The attached model.
        engine: Runs the passes.
        input_ids: (rows, prompt length).
        logits_processor: Applied to every position's scores, once, in order.
        stopping_criteria: Asked after every token.
        generation_config: Of this call.
        streamer: Gets the tokens one by one, as plain decoding gives them.
        cache_is_returned: Whether the caller gets to see the cache.
    """
    structure, config = model._tide.structure, model.config.get_text_config()
    rows = [Row(index, input_ids[index : index + 1]) for index in range(input_ids.shape[0])]
    stopping = Stopping(stopping_criteria, generation_config)
    level = counts_slots(config, generation_config.max_length)
    rule = AcceptanceRule(
        rows, logits_processor, stopping, generation_config, streamer, ranks_of(model), cache_is_returned, level
    )
    # Rows that are stopped leave the batch, unless nothing pads them, the caller gets to see their padding, others need
    # them (also for their length, which tells how positions are turned), or the rows have adapters of their own.
    drops_stopped = not (
        not stopping.pads
        or cache_is_returned
        or rule.together
        or "longrope" in rope_limits(config)
        or has_adapters_by_row(model, structure)
    )
    stats = ExitStats("self_speculative", structure.num_layers, engine=engine.name)
    return SpeculativeDecoder(engine, rule, rows, stats, drops_stopped)
