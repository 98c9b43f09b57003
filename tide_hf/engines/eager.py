"""The eager engine: the model's own forward, on the call's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..base_model.inputs import next_token_types
from ..base_model.structure import CACHE, has_windows, last_position, may_replace_cache
from ..base_model.unembed import DraftUnembed, greedy_tokens
from ..common.choices import EAGER
from ..depth.block_drafting import block_run
from ..depth.gates import FixedDepthRun, LayerRun, active, on_device
from ..depth.kv_cache import CacheSlots, cache_is_returned, crop, last_slot, start_recording, stop_recording
from ..kernels.cpu.cpp_kernels import is_loaded
from ..speculation.attachment import Attachment
from ..speculation.call import Call
from ..speculation.policy import CostTable
from ..speculation.prefill import prefill
from ..speculation.ranks import ranks_of
from .gqa_attention import gqa_attention

LONG_PROMPT = 128  # tokens; for shorter prompts, switching the attention implementation saves no time


class EagerEngine:
    """Runs one call with the model's own forward.

    Args as for `EngineKind.engine`, and:
        name: Name of the requested engine, under which costs are recorded.
        fills_block_lazily: Whether a single row's K/V of the block head are filled only when it drafts.
    """

    reads_drafts = True
    widths: tuple[int, ...] = ()  # of verify passes; empty: any width

    def __init__(
        self,
        model: Any,
        attachment: Attachment,
        call: Call,
        *,
        name: str = EAGER,
        fills_block_lazily: bool = True,
    ) -> None:
        self.model, self.attachment, self.name = model, attachment, name
        self.input_ids, self.config, self.model_kwargs = call.input_ids, call.generation_config, call.model_kwargs
        cache, structure = self.model_kwargs[CACHE], attachment.structure
        text_config = model.config.get_text_config()
        self.ranks = ranks_of(model)
        # The block's K/V are in the cache that the model is passed, which it must not replace.
        routers = None if may_replace_cache(text_config, self.input_ids.shape[1]) else attachment.routers
        is_lazy = fills_block_lazily and self.input_ids.shape[0] == 1
        self.block = block_run(text_config, structure, cache, attachment.unembed, routers, lazy=is_lazy)
        self.run = self.block or LayerRun(structure, cache)
        self.is_returned = cache_is_returned(self.config, cache)
        self.temperature = float(self.config.temperature or 1.0) if self.config.do_sample else 0.0
        self.last_slot = last_slot(cache)
        self.slots: CacheSlots | None = None  # after prefill
        self.positions: Tensor | None = None  # (rows) of the next tokens; (kinds, rows) for mRoPE
        self.types: dict[str, Tensor] = {}  # token types of generated tokens
        self.rows = list(range(self.input_ids.shape[0]))  # the call's row of each row that is left
        self.last_tokens: list[int] = []  # each row's last token, the next pass's input
        self._fed: list[int] = []  # the exit layer at which each token since the last rollback was fed
        self._block_steps, self._draft_layers = 0, 0
        self._draft_unembed: DraftUnembed | None = None
        self._logits: Tensor | None = None
        self._width, self._started = 0, 0.0

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.run.layers_executed + self._draft_layers

    @property
    def block_layer(self) -> int | None:
        """The exit layer at which the block head drafts in this call, if it does."""
        return self.block.block_layer if self.block is not None else None

    @property
    def free_slots(self) -> int | None:
        """Slots of a static cache, or learned positions, that are left; `None` without such a limit."""
        return None if self.last_slot is None else max(0, self.last_slot - self._slots.length - 1)

    @property
    def _slots(self) -> CacheSlots:
        assert self.slots is not None  # set by prefill
        return self.slots

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of passes over a number of rows."""
        return self.attachment.costs_of(num_rows, self.name, self.widths)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Activate the call's run; see `Engine.running`."""
        try:
            with active(self.run), self._attention():
                yield
        except BaseException:  # from a streamer, a criterion or Ctrl-C: the caller may reuse the cache
            if self.slots is not None and self.is_returned:
                self.slots.break_off()
            raise
        finally:
            if self.block is not None:
                self.block.finish()

    def decoding(self) -> AbstractContextManager[None]:
        """On GPUs, use the decode implementation of MoE experts as `generate` does, which copies expert weights.

        Not for batches, whose verify passes have many tokens: the copies might not fit.
        """
        return nullcontext() if self.input_ids.shape[0] > 1 else self.model._optimize_model_for_decode()

    def prefill(self) -> Tensor:
        """Run prefill; return the logits of the last prompt tokens, (rows, 1, vocabulary)."""
        cache, logits = prefill(self.model, self.run, self.input_ids, self.config, self.model_kwargs)
        self.run.cache = cache  # which may have been replaced by the model
        start_recording(cache)
        mask, positions = (self.model_kwargs.pop(name, None) for name in ("attention_mask", "position_ids"))
        for name in ("inputs_embeds", CACHE):
            self.model_kwargs.pop(name, None)
        self.types = next_token_types(self.model, self.model_kwargs)
        threshold, ops = float(self.attachment.config.compaction_threshold), self.attachment.unembed.ops
        config = self.model.config.get_text_config()
        length, windows = int(cache.get_seq_length()), has_windows(config)
        self.slots = CacheSlots(cache, length, mask, threshold, self.input_ids.device, ops, windows)
        self.positions = None if positions is None else _last_positions(positions, len(self.rows))
        if (most := last_position(config)) is not None:  # in slots: less by how far positions are ahead
            ahead = 0 if positions is None else max(0, int(positions.max()) + 1 - length)
            self.last_slot = min(most - ahead, self.last_slot or most)
        return logits

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""
        self.last_tokens = tokens
        if self.positions is not None:
            self.positions += 1

    def decoder(self, room: int) -> EagerEngine:
        """This engine."""
        return self

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Decode one token for each row by the head at an exit layer; see `DraftEngine.draft`."""
        attachment, block, start = self.attachment, self.block, perf_counter()
        # Filling pending K/V of the block, beyond the last pass, is not part of a draft step's cost.
        is_usual = block is None or block.num_pending <= 1
        if self._draft_unembed is None:
            self._draft_unembed, is_usual = attachment.draft_unembed(), False
        cache, fed = self._slots.cache, len(self._fed)
        run = FixedDepthRun(attachment.structure, cache, exit_layer)
        run.execute_layer = self.run.execute_layer
        inputs = [[last, *tokens][fed:] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        with active(run):
            call = run.call_after(self._forward, inputs, start=fed)
        if cache.offloading:  # it has prefetched the next layer, not the first
            cache.prefetch(0, cache.only_non_sliding)
        if block is not None and exit_layer == block.block_layer:
            self._block_steps += 1
            top, log_probabilities = self._draft_unembed.top1(block.draft(call))
            scores = block.point.score(log_probabilities)
        else:
            state = call.state[:, -1]
            point = on_device(attachment.exit_point(exit_layer), state)
            scores = attachment.unembed.route(point.router, state)
            top = self._draft_unembed(point.head(state))
        tokens = top.tolist()
        self._draft_layers += run.layers_executed
        self._fed += [exit_layer] * len(inputs[0])
        if is_usual and len(inputs[0]) == 1:
            milliseconds = self.ranks.agree((perf_counter() - start) * 1000)
            self.costs_of(len(inputs)).record(("draft", exit_layer), milliseconds)
        return tokens, scores.tolist()

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Not supported: this engine reads each draft token."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Roll the draft tokens' K/V back."""
        # Each layer is cropped once: whenever a sliding-window layer is cropped, it drops tokens before the window.
        for layer_idx in range(max(self._fed, default=0)):
            num_steps = sum(exit_layer > layer_idx for exit_layer in self._fed)
            crop(self._slots.cache.layers[layer_idx], num_steps)
        if self.block is not None and self._block_steps:
            self.block.rollback(self._block_steps)
        self._fed.clear()
        self._block_steps = 0

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass over each row's last token and its draft."""
        self._started = perf_counter()
        self._width = width = 1 + max(map(len, drafted))
        fed = [[last, *tokens] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        # Padding of shorter drafts; its logits are not read.
        self._logits = self._forward([tokens + tokens[-1:] * (width - len(tokens)) for tokens in fed]).logits

    def drafted(self) -> None:
        """`None`: drafts were read when they were made."""

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) of the last pass."""
        assert self._logits is not None  # set by verify
        return self._logits

    def top_tokens(self) -> list[list[int]]:
        """The top-1 token at each position; reading them is the round's one host synchronisation."""
        return greedy_tokens(self.logits()).tolist()

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        accepted = [len(tokens) for tokens in new_tokens]
        self._slots.commit(self._width, accepted)
        if self.block is not None:
            self.block.commit(accepted)
        if self.positions is not None:
            self.positions += self.positions.new_tensor(accepted)
        self.last_tokens = [
            tokens[-1] if tokens else last for last, tokens in zip(self.last_tokens, new_tokens, strict=True)
        ]
        milliseconds = self.ranks.agree((perf_counter() - self._started) * 1000)
        self.costs_of(len(accepted)).record(("verify", self._width), milliseconds)
        self._logits = None

    def select(self, rows: list[int]) -> None:
        """Drop all other rows of the batch."""
        self.rows = [self.rows[row] for row in rows]
        self.last_tokens = [self.last_tokens[row] for row in rows]
        index = self._slots.select(rows)
        if self.block is not None:
            self.block.select(index)
        if self.positions is not None:
            self.positions = self.positions[..., index.to(self.positions.device)]

    def finish(self, settle: bool) -> Any:
        """Return the cache as plain decoding would leave it; see `Engine.finish`."""
        if settle:
            self._slots.settle()
        stop_recording(self._slots.cache)
        if self.block is not None and self.is_returned:
            self.block.remember()
        return self._slots.cache

    def inputs_of(self, tokens: list[list[int]], start: int = 0) -> dict[str, Any]:
        """Prepare the model's inputs of a pass over new tokens, after `start` draft tokens that the cache holds."""
        ids = self.input_ids.new_tensor(tokens)
        rows, width = ids.shape
        kwargs = {**self.model_kwargs, CACHE: self._slots.cache}
        kwargs["attention_mask"] = self._slots.mask_for(start + width)
        if self.positions is not None:
            steps = torch.arange(start, start + width, device=self.positions.device)
            kwargs["position_ids"] = self.positions[..., None] + steps
        for name, types in self.types.items():
            own = self.rows if len(types) > 1 else [0]
            kwargs[name] = types[own].expand(rows, width)
        inputs = self.model.prepare_inputs_for_generation(ids, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return inputs

    def _forward(self, tokens: list[list[int]], start: int = 0) -> Any:
        return self.model(**self.inputs_of(tokens, start), return_dict=True)

    def _attention(self) -> AbstractContextManager[None]:
        """The attention of the call: on CPUs, batches and long prompts use `gqa_attention`."""
        rows, length = self.input_ids.shape
        may_use_kernels = self.attachment.use_kernels is not False
        is_long = length >= LONG_PROMPT and may_use_kernels and is_loaded("prefill_attention", self.model.dtype)
        if self.name != EAGER or not (rows > 1 or is_long):
            return nullcontext()
        return gqa_attention(self.model, self.attachment.block_head, may_use_kernels=may_use_kernels)


def _last_positions(positions: Tensor, rows: int) -> Tensor:
    """(..., rows) of (..., rows or 1, length) positions, copied."""
    last = positions[..., -1]
    return last.expand(*last.shape[:-1], rows).clone()
