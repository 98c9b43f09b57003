"""The self-speculative loop: cheap drafts, one full-depth pass to verify them, rollback of rejected tokens.

A round asks the drafter for draft tokens, the engine for one full-depth pass over them, and the acceptance rule which
to add. By the exact rule, every token is chosen from the base model's own full-depth logits, after the same processors;
drafts only decide how many positions one pass covers. Since a draft's siblings are different tokens, "draw from p and
compare" is speculative sampling with q = 1 (Leviathan et al., arXiv 2211.17192), and a single row
draws the same random numbers in the same order as plain decoding.

All rows of a batch are verified at one width; each accepts its own number of tokens (see `depth.kv_cache.CacheSlots`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..base_model.structure import CACHE
from ..common.draft_streamer import DraftStreamer
from ..common.stats import ExitStats
from ..common.token_sources import FULL_PASS, head_source
from .call import Call
from .drafts import ROOT, Accepted, Draft
from .protocols import AcceptanceRule, DraftEngine, Drafter, Engine, Pass
from .rows import Row, by_step


class SpeculativeDecoder:
    """Decodes the sequences of one call: an engine runs the passes, `rule` chooses tokens from them and ends rows.

    `stats` are updated. With `drops_ended`, rows that have ended leave the batch.
    """

    def __init__(self, call: Call, rule: AcceptanceRule, stats: ExitStats, drops_ended: bool) -> None:
        self.call, self.rule, self.rows, self.stats = call, rule, rule.rows, stats
        self.drops_ended = drops_ended
        self.batch = list(rule.rows)  # the rows in the batch, in the order of the cache

    def decode(
        self, prefill: Callable[[], tuple[Pass, Engine]], make_drafter: Callable[[DraftEngine], Drafter]
    ) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until all rows have ended; `prefill` gives a pass over the prompts, and the engine of the rest."""
        prompts, engine = prefill()
        with engine.running():
            drafter = make_drafter(engine)
            self._accept(engine, drafter, prompts)
            while not self._is_done():
                drafts = drafter.draft([row.index for row in self.batch], self._limits(engine))
                if self.rule.lockstep:  # which accepts position by position
                    drafts = [draft.chain() for draft in drafts]
                self.stats.rounds += len(self.batch)
                self._accept(engine, drafter, engine.verify(drafts))
            cache = engine.finish(compact=not self.drops_ended)
        self.stats.engine, self.stats.layers_executed = engine.name, engine.layers_executed
        if self.call.streamer is not None:
            self.call.streamer.end()
        return self._result(cache)

    def _limits(self, engine: Engine) -> list[int]:
        """Maximum number of tokens that each row may draft, as its answer, the cache and learned positions allow."""
        limits = [max(0, self.rule.limit(row) - 1) for row in self.batch]
        free = engine.max_draft_tokens
        return limits if free is None else [min(limit, free) for limit in limits]

    def _accept(self, engine: Engine, drafter: Drafter, verified: Pass) -> None:
        """Add tokens to the rows; let the drafter, and the statistics, observe how many were drafted."""
        found = self.rule.accept(self.batch, verified)
        engine.commit(found)
        for row, draft, accepted in zip(self.batch, verified.drafts, found, strict=True):
            drafter.observe(row.index, draft, accepted)
            self._note_sources(row, draft, accepted)
            self.stats.drafted += len(draft.nodes)
            self.stats.accepted += len(accepted.path)
        self._drop_ended(engine)

    def _note_sources(self, row: Row, draft: Draft, accepted: Accepted) -> None:
        """Note where a row's new tokens came from, and tell a streamer that shows it."""
        depths = row.depths[len(row.sources) :]
        sources = [
            head_source(depth) if source == FULL_PASS and depth < self.stats.num_layers else source
            for source, depth in zip(accepted.sources(draft), depths, strict=True)
        ]
        row.sources += sources
        if isinstance(self.call.streamer, DraftStreamer):
            rejected = [
                draft.nodes[index].token for index in draft.branch(accepted.path[-1] if accepted.path else ROOT)
            ]
            self.call.streamer.end_round(sources, rejected)

    def _drop_ended(self, engine: Engine) -> None:
        """Drop the rows that have ended from the batch, so that they cost nothing more."""
        remaining = [index for index, row in enumerate(self.batch) if row.stopped_at is None]
        if self.drops_ended and len(remaining) not in (0, len(self.batch)):
            self.batch = [self.batch[index] for index in remaining]
            engine.select(remaining)

    def _is_done(self) -> bool:
        """Whether all rows have ended; rows that stay in the batch must also be as long as the longest row."""
        if any(row.stopped_at is None for row in self.rows):
            return False
        return self.drops_ended or all(len(row.tokens) >= self._length for row in self.rows)

    @property
    def _length(self) -> int:
        """Number of new tokens of the longest row that has ended."""
        return max(row.stopped_at or 0 for row in self.rows)

    def _result(self, cache: Any) -> Tensor | GenerateDecoderOnlyOutput:
        config, length, pad = self.call.generation_config, self._length, self.call.pad_token_id
        prompts = torch.cat([row.prompt for row in self.rows])
        tokens = [row.tokens[:length] + [pad] * (length - len(row.tokens)) for row in self.rows]
        new_tokens = torch.tensor(tokens, device=prompts.device)  # int64, as in plain decoding
        sequences = torch.cat([prompts, new_tokens], dim=-1)
        self.stats.per_token = [row.depths[: row.stopped_at] for row in self.rows]
        self.stats.sources = [row.sources[: row.stopped_at] for row in self.rows]
        if not config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step(row.scores[:length] for row in self.rows) if config.output_scores else None,
            logits=by_step(row.logits[:length] for row in self.rows) if config.output_logits else None,
            **{CACHE: cache},
        )
