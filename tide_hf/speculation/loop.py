"""The self-speculative loop: cheap drafts, one full-depth pass to verify them, rollback of rejected tokens.

A round asks the drafter for draft tokens, the engine for one full-depth pass over them, and the acceptance rule which
of them the base model would have chosen. Every token is chosen from the base model's own full-depth logits, after the
same processors; drafts only decide how many positions one pass covers. Since a draft names one token at each position,
"draw from p and compare" is speculative sampling with q = 1 (Leviathan et al., arXiv 2211.17192), and a single row
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
from ..base_model.unembed import greedy_tokens
from ..common.draft_streamer import DraftStreamer
from ..common.stats import ExitStats
from ..common.token_sources import FULL_PASS, head_source
from .acceptance import AcceptanceRule
from .engine import UNREAD, Draft, Drafter, Engine
from .rows import Row, by_step


class SpeculativeDecoder:
    """Decodes the sequences of one call: `engine` runs the passes, `rule` chooses tokens from logits and ends rows.

    `stats` are updated. With `drops_stopped`, rows that have ended leave the batch.
    """

    def __init__(self, engine: Engine, rule: AcceptanceRule, stats: ExitStats, drops_stopped: bool) -> None:
        self.engine, self.rule, self.rows, self.stats = engine, rule, rule.rows, stats
        self.drops_stopped = drops_stopped
        self.batch = list(rule.rows)  # the rows in the batch, in the order of the cache

    def decode(self, make_drafter: Callable[[Engine], Drafter]) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until all rows have stopped; `make_drafter` gets the engine that decodes after prefill."""
        with self.engine.running():
            first = self._prefill()
            if not self._is_done():
                self.engine = self.engine.decoder(max(self.rule.room(row) for row in self.batch))
            drafter = make_drafter(self.engine)
            for row, tokens in zip(self.rows, first, strict=True):
                drafter.observe(row.index, Draft(), tokens, 0)
                self._note_sources(row, Draft(), tokens)
            with self.engine.decoding():
                while not self._is_done():
                    self._round(drafter)
            cache = self.engine.finish(settle=not self.drops_stopped)
        if self.rule.streamer is not None:
            self.rule.streamer.end()
        return self._result(cache)

    def _prefill(self) -> list[list[int]]:
        """Run prefill; return the first token of each row."""
        logits = self.engine.prefill()
        top_tokens: list[list[int]] | None = None
        if self.rule.on_device is not None:
            top_tokens = self.rule.on_device.choose(self.batch, logits, None).tolist()
        elif not self.rule.needs_logits:
            top_tokens = greedy_tokens(logits).tolist()
        depths = [self.stats.num_layers] * len(self.batch)
        first = self.rule.accept(self.batch, logits, [Draft() for _ in self.batch], top_tokens, depths)
        self.engine.begin([row.last for row in self.batch])
        self._drop_stopped()
        return first

    def _round(self, drafter: Drafter) -> None:
        engine, rule, batch = self.engine, self.rule, self.batch
        drafts = drafter.draft([row.index for row in batch], self._limits())
        engine.verify([draft.tokens for draft in drafts])
        logits, top_tokens = self._verified(1 + max(len(draft.tokens) for draft in drafts), drafter.rests)
        for draft, read in zip(drafts, engine.drafted() or [], strict=False):
            draft.tokens = [new if token == UNREAD else token for token, new in zip(draft.tokens, read, strict=True)]
        depths = engine.depths() or [self.stats.num_layers] * len(batch)
        new_tokens = rule.accept(batch, logits, drafts, top_tokens, depths)
        engine.commit(new_tokens)
        self._learn(drafter, drafts, new_tokens)
        self._drop_stopped()

    def _verified(self, width: int, rests: bool) -> tuple[Tensor | None, list[list[int]] | None]:
        """The logits of the last pass, where the host chooses tokens from them; else the tokens at each position.

        `rests` says that the next pass will have no drafts.
        """
        engine, on_device = self.engine, self.rule.on_device
        if on_device is not None:
            inputs = engine.inputs()[:, :width]
            return None, engine.top_tokens(on_device.choose(self.batch, engine.logits()[:, :width], inputs))
        return (engine.logits(), None) if self.rule.needs_logits else (None, engine.top_tokens(runs_ahead=rests))

    def _limits(self) -> list[int]:
        """Maximum number of tokens that each row may draft, as its answer, the cache and learned positions allow."""
        limits = [max(0, self.rule.room(row) - 1) for row in self.batch]
        free = self.engine.free_slots
        return limits if free is None else [min(limit, free) for limit in limits]

    def _learn(self, drafter: Drafter, drafts: list[Draft], new_tokens: list[list[int]]) -> None:
        """Let the drafter, and the statistics, observe how many of a round's draft tokens were accepted."""
        for row, draft, tokens in zip(self.batch, drafts, new_tokens, strict=True):
            n_matches = sum(drafted == new for drafted, new in zip(draft.tokens, tokens, strict=False))
            drafter.observe(row.index, draft, tokens, n_matches)
            self._note_sources(row, draft, tokens, n_matches)
            self.stats.rounds += 1
            self.stats.drafted += len(draft.tokens)
            self.stats.accepted += n_matches

    def _note_sources(self, row: Row, draft: Draft, tokens: list[int], n_matches: int = 0) -> None:
        """Note where a row's new tokens came from, and tell a streamer that shows it."""
        depths = row.depths[len(row.sources) :]
        sources = [
            head_source(depth) if source == FULL_PASS and depth < self.stats.num_layers else source
            for source, depth in zip(draft.sources_of(tokens), depths, strict=True)
        ]
        row.sources += sources
        if isinstance(self.rule.streamer, DraftStreamer):
            self.rule.streamer.end_round(sources, draft.tokens[n_matches:])

    def _drop_stopped(self) -> None:
        """Drop the rows that have stopped from the batch, so that they cost nothing more."""
        remaining = [index for index, row in enumerate(self.batch) if row.stopped_at is None]
        if self.drops_stopped and len(remaining) not in (0, len(self.batch)):
            self.batch = [self.batch[index] for index in remaining]
            self.engine.select(remaining)

    def _is_done(self) -> bool:
        """Whether all rows have stopped; rows that stay in the batch must also be as long as the longest row."""
        if any(row.stopped_at is None for row in self.rows):
            return False
        return self.drops_stopped or all(len(row.tokens) >= self.rule.length for row in self.rows)

    def _result(self, cache: Any) -> Tensor | GenerateDecoderOnlyOutput:
        rule, length, pad = self.rule, self.rule.length, self.rule.stopping.pad_token_id
        prompts = torch.cat([row.prompt for row in self.rows])
        tokens = [row.tokens[:length] + [pad] * (length - len(row.tokens)) for row in self.rows]
        new_tokens = torch.tensor(tokens, device=prompts.device)  # int64, as in plain decoding
        sequences = torch.cat([prompts, new_tokens], dim=-1)
        self.stats.layers_executed = self.engine.layers_executed
        self.stats.per_token = [row.depths[: row.stopped_at] for row in self.rows]
        self.stats.sources = [row.sources[: row.stopped_at] for row in self.rows]
        if not rule.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step(row.scores[:length] for row in self.rows) if rule.returns_scores else None,
            logits=by_step(row.logits[:length] for row in self.rows) if rule.returns_logits else None,
            **{CACHE: cache},
        )
