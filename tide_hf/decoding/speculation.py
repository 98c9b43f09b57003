"""The self-speculative loop: cheap drafts, one full-depth pass to verify them, roll back what was wrong.

Every token that leaves this loop was chosen from the base model's own full-depth logits, after the same processors;
drafts only decide how many positions one pass covers. Since a draft names one token, "draw from p and compare" is
speculative sampling with q = 1 (Leviathan et al., arXiv 2211.17192), and a single row draws the same random numbers
in the same order as plain decoding.

The rows of a batch draft to a common width and keep accepted lengths of their own; see `cache_slots.CacheSlots`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..adapters import has_adapters_by_row
from ..choices import EAGER
from ..cpu.many_queries import has_kernel
from ..cpu.shared_heads import shared_heads
from ..depth.block_drafting import block_run
from ..depth.cache_slots import CacheSlots
from ..depth.kv_cache import cache_is_returned, last_slot, start_recording, stop_recording
from ..depth.skipping import LayerRun, active
from ..prompt_inputs import types_behind
from ..stats import ExitStats
from ..structure import CACHE, counts_slots, has_windows, last_position, may_replace_cache, rope_limits
from ..unembed import greedy_tokens
from .attachment import Attachment
from .choosing import TokenChooser
from .drafting import Draft, Drafter
from .prompt_groups import read_prompts
from .ranks import ranks_of
from .rows import Row, Stopping, by_step
from .shallow import ShallowLayers

LONG_PROMPT = 128  # tokens; of shorter ones, changing how a model attends takes as long as it brings


class SelfSpeculativeDecoder:
    """Decodes the sequences of one call.

    Args:
        model: The attached model.
        attachment: What TIDE added to it.
        engine: What runs the layers; costs are kept apart by it.
        input_ids: (rows, prompt length).
        logits_processor: Applied to every position's scores, once, in order.
        stopping_criteria: Asked after every token.
        generation_config: Of this call.
        streamer: Gets the tokens one by one, as plain decoding gives them.
        model_kwargs: What `generate` prepared, the cache among it.
    """

    on_steps = False  # of fixed shape
    widths: tuple[int, ...] = ()  # of verify passes, where others are filled up
    fills_block_late = True  # a single row's K/V of the block, when it is about to draft
    native_slots: CacheSlots | None = None  # of the call's cache, once the prompt is read

    def __init__(
        self,
        model: Any,
        attachment: Attachment,
        engine: str,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        streamer: Any,
        model_kwargs: dict[str, Any],
    ) -> None:
        self.model = model
        self.attachment = attachment
        self.engine = engine
        self.input_ids = input_ids
        self.config = generation_config
        self.streamer = streamer
        self.model_kwargs = model_kwargs
        cache = model_kwargs[CACHE]
        self.ranks = ranks_of(model)
        text_config = model.config.get_text_config()
        self.block = block_run(
            text_config,
            attachment.structure,
            cache,
            attachment.unembed,
            # A block's K/V stand in the cache that the model is given.
            None if may_replace_cache(text_config, input_ids.shape[1]) else attachment.routers,
            late=self.fills_block_late and input_ids.shape[0] == 1,
        )
        self.run = self.block or LayerRun(attachment.structure, cache)
        self.shallow = ShallowLayers(self)
        self.rows = [Row(index, input_ids[index : index + 1]) for index in range(input_ids.shape[0])]
        stopping = Stopping(stopping_criteria, generation_config)
        self.is_returned = cache_is_returned(generation_config, cache)
        level = counts_slots(text_config, generation_config.max_length)
        self.chooser = TokenChooser(
            self.rows, logits_processor, stopping, generation_config, streamer, self.ranks, self.is_returned, level
        )
        self.last_slot = last_slot(cache)
        # Rows that are stopped leave the batch, unless nothing pads them, the caller gets to see their padding, others
        # need them (also for their length, which tells how positions are turned), or the rows have adapters of their
        # own.
        self.drops_stopped = not (
            not stopping.pads
            or self.is_returned
            or self.chooser.together
            or "longrope" in rope_limits(text_config)
            or has_adapters_by_row(model, attachment.structure)
        )
        self.batch = list(self.rows)  # the rows that still decode, in the order of the cache
        self.stats = ExitStats("self_speculative", attachment.structure.num_layers, engine=engine)

    def decode(self, make_drafter: Callable[[ShallowLayers], Drafter]) -> Tensor | GenerateDecoderOnlyOutput:
        """Generate until every row is stopped, with drafts of what `make_drafter` makes of the shallow layers."""
        try:
            drafter = make_drafter(self.shallow)
            with active(self.run), self._attention():
                self._prefill(drafter)
                with self._experts():
                    while not self._is_done():
                        self._round(drafter)
                result = self._result()
                if self.block is not None and self.is_returned:
                    self.block.remember()
        except BaseException:  # a streamer's or a criterion's, or an interrupt: the caller may go on with the cache
            if self.native_slots is not None and self.is_returned:
                self.native_slots.break_off()
            raise
        finally:
            if self.block is not None:
                self.block.finish()
        if self.streamer is not None:
            self.streamer.end()
        return result

    def _attention(self) -> AbstractContextManager[None]:
        """How an eager call attends: on CPUs, rows under a mask and long prompts need not copy K/V that heads share."""
        rows, length = self.input_ids.shape
        may_use_kernels = self.attachment.use_kernels is not False
        is_long = length >= LONG_PROMPT and may_use_kernels and has_kernel(self.model.dtype)
        if self.engine != EAGER or not (rows > 1 or is_long):
            return nullcontext()
        return shared_heads(self.model, self.attachment.block_head, may_use_kernels)

    def _experts(self) -> AbstractContextManager[None]:
        """How experts run in rounds: on GPUs as `generate` has them run when it decodes, which copies their weights.

        Not for the many tokens of a batch's verify pass, whose copies might not fit.
        """
        return nullcontext() if len(self.rows) > 1 else self.model._optimize_model_for_decode()

    def forward(self, tokens: list[list[int]], start: int = 0) -> Any:
        """One pass over as many new tokens for each row.

        Args:
            tokens: Tokens by row, all of one length.
            start: How many tokens behind the row's accepted ones the cache already holds.

        Returns:
            The model's output, with logits (rows, len(tokens[0]), vocabulary).
        """
        return self.model(**self.inputs_of(tokens, start), return_dict=True)

    def inputs_of(self, tokens: list[list[int]], start: int = 0) -> dict[str, Any]:
        """What the model prepares of such a pass."""
        ids = self.input_ids.new_tensor(tokens)
        rows, width = ids.shape
        kwargs = {**self.model_kwargs, CACHE: self.slots.cache}
        kwargs["attention_mask"] = self.slots.mask_for(start + width)
        if self.positions is not None:
            steps = torch.arange(start, start + width, device=self.positions.device)
            kwargs["position_ids"] = self.positions[..., None] + steps
        for name, types in self.types.items():
            own = [row.index for row in self.batch] if len(types) > 1 else [0]
            kwargs[name] = types[own].expand(rows, width)
        inputs = self.model.prepare_inputs_for_generation(ids, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return inputs

    def _prefill(self, drafter: Drafter) -> None:
        cache, logits = read_prompts(self.model, self.run, self.input_ids, self.config, self.model_kwargs)
        self.run.cache = cache  # which need not be the one that the model was given
        start_recording(cache)
        mask, positions = (self.model_kwargs.pop(name, None) for name in ("attention_mask", "position_ids"))
        for name in ("inputs_embeds", CACHE):
            self.model_kwargs.pop(name, None)
        self.types = types_behind(self.model, self.model_kwargs)
        threshold, ops = self.attachment.compaction_threshold, self.attachment.unembed.ops
        config = self.model.config.get_text_config()
        length, windows = int(cache.get_seq_length()), has_windows(config)
        self.slots = CacheSlots(cache, length, mask, threshold, self.input_ids.device, ops, windows)
        self.native_slots = self.slots
        # (rows), or (kinds, rows) where a model has positions of several kinds, for places in images.
        self.positions = None if positions is None else _last_positions(positions, len(self.rows))
        if (most := last_position(config)) is not None:  # as many slots, less what positions are ahead of them
            ahead = 0 if positions is None else max(0, int(positions.max()) + 1 - length)
            self.last_slot = min(most - ahead, self.last_slot or most)
        drafts = [Draft() for _ in self.batch]
        for row, tokens in zip(self.batch, self._accept(logits, drafts), strict=True):
            drafter.observe(row.index, Draft(), tokens, 0)
        self._drop_stopped()

    def _round(self, drafter: Drafter) -> None:
        batch, costs = self.batch, self.shallow.costs_of(len(self.batch))
        drafts = drafter.draft([row.index for row in batch], self._limits())
        width = 1 + max(len(draft.tokens) for draft in drafts)
        start = perf_counter()
        fed = [[row.last, *draft.tokens] for row, draft in zip(batch, drafts, strict=True)]
        # What stands behind a shorter draft is never looked at.
        outputs = self.forward([tokens + tokens[-1:] * (width - len(tokens)) for tokens in fed])
        new_tokens = self._accept(outputs.logits, drafts)
        accepted = [len(tokens) for tokens in new_tokens]
        self.slots.commit(width, accepted)
        if self.block is not None:
            self.block.keep(accepted)
        costs.record(("verify", width), self.ranks.agree((perf_counter() - start) * 1000))
        self._learn(drafter, drafts, new_tokens)
        self._drop_stopped()

    def _limits(self) -> list[int]:
        """The most tokens that each row may draft: what its answer, the cache and learnt positions have room for."""
        limits = [max(0, self.chooser.room(row) - 1) for row in self.batch]
        if self.last_slot is None:
            return limits
        ahead = max(0, self.last_slot - self.slots.length - 1)
        return [min(limit, ahead) for limit in limits]

    def _learn(self, drafter: Drafter, drafts: list[Draft], new_tokens: list[list[int]]) -> None:
        """Tell the drafter, and the statistics, what became of a round's drafts."""
        for row, draft, tokens in zip(self.batch, drafts, new_tokens, strict=True):
            n_matches = sum(drafted == new for drafted, new in zip(draft.tokens, tokens, strict=False))
            drafter.observe(row.index, draft, tokens, n_matches)
            self.stats.rounds += 1
            self.stats.drafted += len(draft.tokens)
            self.stats.accepted += n_matches

    def _top_tokens(self, logits: Tensor) -> list[list[int]]:
        return greedy_tokens(logits).tolist()  # the round's one synchronisation

    def _accept(self, logits: Tensor, drafts: list[Draft]) -> list[list[int]]:
        """The new tokens of each row, from the full-depth logits (rows, width, vocabulary)."""
        top_tokens = None if self.chooser.needs_logits else self._top_tokens(logits)
        new_tokens = self.chooser.accept(self.batch, logits, drafts, top_tokens, self.stats.num_layers)
        if self.positions is not None:
            self.positions += self.positions.new_tensor([len(tokens) for tokens in new_tokens])
        return new_tokens

    def _drop_stopped(self) -> None:
        """Let rows that are stopped cost nothing more."""
        going = [position for position, row in enumerate(self.batch) if row.stopped_at is None]
        if not self.drops_stopped or len(going) in (0, len(self.batch)):
            return
        self.batch = [self.batch[position] for position in going]
        self._select(going)

    def _select(self, going: list[int]) -> None:
        """Keep only these rows of the batch in the cache."""
        index = self.slots.select(going)
        if self.block is not None:
            self.block.select(index)
        if self.positions is not None:
            self.positions = self.positions[..., index.to(self.positions.device)]

    def _is_done(self) -> bool:
        """Whether all are stopped; rows that were kept must have caught up with the one that stopped last."""
        if any(row.stopped_at is None for row in self.rows):
            return False
        return self.drops_stopped or all(len(row.tokens) >= self.chooser.length for row in self.rows)

    def _result(self) -> Tensor | GenerateDecoderOnlyOutput:
        length, pad = self.chooser.length, self.chooser.stopping.pad_token_id
        tokens = [row.tokens[:length] + [pad] * (length - len(row.tokens)) for row in self.rows]
        new_tokens = torch.tensor(tokens, device=self.input_ids.device)  # int64, as plain decoding's are
        sequences = torch.cat([self.input_ids, new_tokens], dim=-1)
        self.stats.layers_executed = self.run.layers_executed + self.shallow.layers_executed
        self.stats.per_token = [row.depths[: row.stopped_at] for row in self.rows]
        if not self.drops_stopped:
            self.slots.settle()
        stop_recording(self.slots.cache)
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(
            sequences=sequences,
            scores=by_step(row.scores[:length] for row in self.rows) if self.chooser.keeps_scores else None,
            logits=by_step(row.logits[:length] for row in self.rows) if self.chooser.keeps_logits else None,
            **{CACHE: self.slots.cache},
        )


def _last_positions(positions: Tensor, rows: int) -> Tensor:
    """(..., rows) of (..., rows or 1, length) positions, which nothing else refers to."""
    last = positions[..., -1]
    return last.expand(*last.shape[:-1], rows).clone()
