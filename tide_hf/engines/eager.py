"""The eager engine: the model's own forward, on the call's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from ..base_model.inputs import next_token_types, without_router_loss
from ..base_model.structure import CACHE, bounds_positions, has_windows, last_position, may_replace_cache
from ..base_model.unembed import DraftUnembed, greedy_tokens
from ..common.choices import EAGER
from ..depth.gates import FixedDepthRun, LayerRun, active, on_device
from ..depth.head_drafting import HeadRun, head_run
from ..depth.kv_cache import CacheSlots, add_layers, crop, last_slot, order_prefetch, start_recording, stop_recording
from ..kernels.cpu.cpp_kernels import are_ready
from ..speculation.attachment import Attachment
from ..speculation.call import Call
from ..speculation.policy import CostTable
from ..speculation.prefill import prefill
from ..speculation.ranks import ranks_of
from .gqa_attention import gqa_attention

LONG_PROMPT = 128  # tokens; for shorter prompts, switching the attention implementation saves no time


class EagerEngine:
    """Runs one call with the model's own forward.

    Args, besides those of `EngineKind.engine`:
        name: Name of the requested engine, under which costs are recorded.
        fills_head_lazily: Whether, in a call with one row, the head's K/V are filled only when the head drafts.
        drafts_with_head: Whether the draft head drafts.
    """

    reads_drafts = True
    widths: tuple[int, ...] = ()  # of verify passes; empty if any width is allowed

    def __init__(
        self,
        model: Any,
        attachment: Attachment,
        call: Call,
        *,
        name: str = EAGER,
        fills_head_lazily: bool = True,
        drafts_with_head: bool = True,
    ) -> None:
        self.model, self.attachment, self.name = model, attachment, name
        self.input_ids, self.config, self.model_kwargs = call.input_ids, call.generation_config, call.model_kwargs
        cache, structure = self.model_kwargs[CACHE], attachment.structure
        text_config = model.config.get_text_config()
        self.ranks = ranks_of(model)
        # The head's K/V are in the call's cache, so the head does not draft if the model may replace that cache.
        may_draft = drafts_with_head and not may_replace_cache(text_config, self.input_ids.shape[1])
        routers = attachment.routers if may_draft else None
        add_layers(cache, text_config)
        is_lazy = fills_head_lazily and self.input_ids.shape[0] == 1
        self.head = head_run(structure, cache, routers, model.get_input_embeddings(), is_lazy=is_lazy)
        self.run = self.head or LayerRun(structure, cache)
        self.is_returned, self.max_new_tokens = call.cache_is_returned, call.max_new_tokens
        self.temperature = float(self.config.temperature or 1.0) if self.config.do_sample else 0.0
        self.last_slot = last_slot(cache)
        self._slots: CacheSlots | None = None  # set by prefill
        self.positions: Tensor | None = None  # of the next tokens, (rows,); (kinds, rows) for mRoPE
        self.highest_position: Tensor | None = None  # (), that passes may use; `None` if higher ones do no harm
        self.types: dict[str, Tensor] = {}  # token types of generated tokens, by input name
        self.rows = list(range(self.input_ids.shape[0]))  # for each row still in the batch, its index in the call
        self.last_tokens: list[int] = []  # each row's last token, the next pass's input
        self._fed: list[int] = []  # exit layer of each token that draft steps have processed since the last rollback
        self._head_steps, self._draft_layers = 0, 0
        self._draft_unembed: DraftUnembed | None = None
        self._logits: Tensor | None = None
        self._inputs: Tensor | None = None  # of the last verify pass
        self._width, self._started = 0, 0.0

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.run.layers_executed + self._draft_layers

    @property
    def head_layer(self) -> int | None:
        """Exit layer of the head with K/V of its own; see `DraftEngine.head_layer`."""
        return self.head.exit_layer if self.head is not None else None

    @property
    def free_slots(self) -> int | None:
        """How many draft tokens a static cache or learned position embeddings still allow; `None` without a limit."""
        return None if self.last_slot is None else max(0, self.last_slot - self.slots.length - 1)

    @property
    def slots(self) -> CacheSlots:
        """The slots of the call's cache, after prefill."""
        assert self._slots is not None  # set by prefill
        return self._slots

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of passes over `num_rows` rows."""
        return self.attachment.costs_of(num_rows, self.name, self.widths)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Activate the call's `LayerRun`; see `Engine.running`."""
        if self.name == EAGER:
            self.run.execute_layer = self.attachment.execute_layer()
        try:
            with active(self.run), self._attention():
                yield
        except BaseException:  # from a streamer, a criterion or Ctrl-C: the caller may reuse the cache
            if self._slots is not None and self.is_returned:
                self._slots.break_off()
            raise
        finally:
            if self.head is not None:
                self.head.finish()

    def decoding(self) -> AbstractContextManager[None]:
        """For a single row, run MoE experts as `generate` does in decode on GPUs, with expert weights copied per token.

        In a batch, verify passes have so many tokens that the copies might not fit into memory.
        """
        return nullcontext() if self.input_ids.shape[0] > 1 else self.model._optimize_model_for_decode()

    def prefill(self) -> Tensor:
        """Run prefill; return the logits of the last prompt tokens, (rows, 1, vocabulary)."""
        cache, logits = prefill(self.model, self.run, self.input_ids, self.config, self.model_kwargs)
        self.run.cache = cache  # the model may have replaced its cache
        start_recording(cache)
        mask, positions = (self.model_kwargs.pop(name, None) for name in ("attention_mask", "position_ids"))
        for name in ("inputs_embeds", CACHE):
            self.model_kwargs.pop(name, None)
        self.types = next_token_types(self.model, self.model_kwargs)
        threshold, ops = float(self.attachment.config.compaction_threshold), self.attachment.unembed.ops
        config = self.model.config.get_text_config()
        length, windows = int(cache.get_seq_length()), has_windows(config)
        self._slots = CacheSlots(cache, length, mask, threshold, self.input_ids.device, ops, windows)
        self.positions = None if positions is None else _last_positions(positions, len(self.rows))
        if (most := last_position(config)) is not None:  # as a limit on slots, which is lower if positions are ahead
            ahead = 0 if positions is None else max(0, int(positions.max()) + 1 - length)
            self.last_slot = min(most - ahead, self.last_slot or most)
        return logits

    def begin(self, tokens: list[int]) -> None:
        """Set each row's first generated token."""
        self.last_tokens = tokens
        if self.positions is not None:
            self.positions += 1
            if bounds_positions(self.model.config.get_text_config()):  # the answer's last token is never fed
                self.highest_position = self.positions.max() + max(0, self.max_new_tokens - 2)

    def decoder(self, room: int) -> EagerEngine:
        """Return this engine."""
        return self

    def draft(self, exit_layer: int, drafted: list[list[int]]) -> tuple[list[int], list[float]]:
        """Draft one token for each row with the head at an exit layer; see `DraftEngine.draft`."""
        head, start, fed = self.head, perf_counter(), len(self._fed)
        # A step that fills the head's K/V of several passes takes longer, so estimates of a step's cost ignore it.
        is_usual = head is None or head.num_pending <= 1
        inputs = [[last, *tokens][fed:] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        if isinstance(head, HeadRun) and exit_layer == head.exit_layer:
            self._head_steps += 1
            top, scores = head.draft(self._upload(inputs), self.slots.mask_for(fed + 1))
        else:
            is_usual &= self._draft_unembed is not None
            top, scores = self._draft_from(exit_layer, inputs)
        # One read for both; float32 holds token ids exactly.
        found, survivals = torch.stack([top.float(), scores.to(top.device, torch.float32)]).tolist()
        self._fed += [exit_layer] * len(inputs[0])
        milliseconds = self.ranks.agree((perf_counter() - start) * 1000)
        is_usual &= len(inputs[0]) == 1
        self.costs_of(len(inputs)).record(("draft", exit_layer), milliseconds, is_usual=is_usual)
        return list(map(int, found)), survivals

    def draft_logits(self, drafted: list[list[int]]) -> Tensor:
        """Logits of the draft head; see `DraftEngine.draft_logits`."""
        head, fed = self.head, len(self._fed)
        assert isinstance(head, HeadRun)  # `head_layer` is 0
        inputs = [[last, *tokens][fed:] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        logits = head.draft_logits(self._upload(inputs), self.slots.mask_for(fed + 1))
        self._fed.append(head.exit_layer)
        self._head_steps += 1
        return head.head.whole_vocab(logits, self.attachment.structure.vocab_size)

    def _draft_from(self, exit_layer: int, inputs: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Run the layers up to an exit layer; return the tokens (rows) that its head drafts, and their scores."""
        attachment, cache = self.attachment, self.slots.cache
        if self._draft_unembed is None:
            self._draft_unembed = attachment.draft_unembed()
        run = FixedDepthRun(attachment.structure, cache, exit_layer)
        run.execute_layer = self.run.execute_layer
        with active(run):
            state = run.states_after(self._forward, self._upload(inputs), start=len(self._fed))[:, -1]
        self._draft_layers += run.layers_executed
        if cache.offloading:  # it has prefetched the next layer, not the first
            order_prefetch(cache, self.input_ids.device)
            cache.prefetch(0, cache.only_non_sliding)
        point = on_device(attachment.exit_point(exit_layer), state)
        scores = attachment.unembed.route(point.router, state)
        return self._draft_unembed(point.head(state)), scores

    def draft_unread(self, exit_layer: int, num_tokens: int) -> None:
        """Not supported: this engine reads each draft token."""
        raise NotImplementedError

    def rollback(self) -> None:
        """Roll back the draft tokens' K/V."""
        # Each layer is cropped only once, since every crop lets a sliding-window layer drop tokens before its window.
        for layer_idx in range(max(self._fed, default=0)):
            num_steps = sum(exit_layer > layer_idx for exit_layer in self._fed)
            crop(self.slots.cache.layers[layer_idx], num_steps)
        if self.head is not None and self._head_steps:
            self.head.rollback(self._head_steps)
        self._fed.clear()
        self._head_steps = 0

    def verify(self, drafted: list[list[int]]) -> None:
        """Run one full-depth pass over each row's last token and draft."""
        self._started = perf_counter()
        self._width = width = 1 + max(map(len, drafted))
        fed = [[last, *tokens] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        # Shorter drafts are padded; the logits of the padding are not read.
        self._inputs = self._upload([tokens + tokens[-1:] * (width - len(tokens)) for tokens in fed])
        self._logits = self._forward(self._inputs).logits

    def drafted(self) -> None:
        """Return `None`, since drafts were read when they were made."""

    def logits(self) -> Tensor:
        """(rows, width, vocabulary) logits of the last pass."""
        assert self._logits is not None  # set by verify
        return self._logits

    def depths(self) -> None:
        """Return `None`: every token is chosen after all layers."""

    def inputs(self) -> Tensor:
        """(rows, width) tokens that the last pass read."""
        assert self._inputs is not None  # set by verify
        return self._inputs

    def top_tokens(self, chosen: Tensor | None = None, *, runs_ahead: bool = False) -> list[list[int]]:
        """The top-1 token at each position of the last pass, or the `chosen` one; see `Engine.top_tokens`."""
        return (greedy_tokens(self.logits()) if chosen is None else chosen).tolist()

    def commit(self, new_tokens: list[list[int]]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        accepted = [len(tokens) for tokens in new_tokens]
        self.slots.commit(self._width, accepted)
        if self.head is not None:
            self.head.commit(accepted)
        if self.positions is not None:
            self.positions += self.positions.new_tensor(accepted)
        self.last_tokens = [
            tokens[-1] if tokens else last for last, tokens in zip(self.last_tokens, new_tokens, strict=True)
        ]
        milliseconds = self.ranks.agree((perf_counter() - self._started) * 1000)
        self.costs_of(len(accepted)).record(("verify", self._width), milliseconds)
        self._logits = None

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.rows = [self.rows[row] for row in rows]
        self.last_tokens = [self.last_tokens[row] for row in rows]
        index = self.slots.select(rows)
        if self.head is not None:
            self.head.select(index)
        if self.positions is not None:
            self.positions = self.positions[..., index.to(self.positions.device)]

    def finish(self, settle: bool) -> Any:
        """Return the cache as plain decoding would leave it; see `Engine.finish`."""
        if settle:
            self.slots.settle()
        stop_recording(self.slots.cache)
        if self.head is not None and self.is_returned:
            self.head.remember()
        return self.slots.cache

    def inputs_of(self, ids: Tensor, start: int = 0) -> dict[str, Any]:
        """Prepare the model's inputs for a pass over `ids` (rows, width), which follow `start` draft tokens."""
        rows, width = ids.shape
        kwargs = {**self.model_kwargs, CACHE: self.slots.cache}
        kwargs["attention_mask"] = self.slots.mask_for(start + width)
        if self.positions is not None:
            steps = torch.arange(start, start + width, device=self.positions.device)
            positions = self.positions[..., None] + steps
            if self.highest_position is not None:  # padding of shorter drafts, and stopped rows, may lie beyond
                positions = positions.clamp(max=self.highest_position)
            kwargs["position_ids"] = positions
        for name, types in self.types.items():
            own = self.rows if len(types) > 1 else [0]
            kwargs[name] = types[own].expand(rows, width)
        inputs = self.model.prepare_inputs_for_generation(ids, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return without_router_loss(self.model, inputs)

    def _upload(self, tokens: list[list[int]]) -> Tensor:
        """Tokens on the device of the prompt, (rows, width)."""
        return self.input_ids.new_tensor(tokens)

    def _forward(self, ids: Tensor, start: int = 0) -> Any:
        return self.model(**self.inputs_of(ids, start), return_dict=True)

    def _attention(self) -> AbstractContextManager[None]:
        """Use `gqa_attention` for batches and long prompts on CPUs."""
        rows, length = self.input_ids.shape
        may_use_kernels = self.attachment.use_kernels is not False
        is_long = length >= LONG_PROMPT and may_use_kernels and are_ready(self.model.dtype)
        if self.name != EAGER or not (rows > 1 or is_long):
            return nullcontext()
        return gqa_attention(self.model, may_use_kernels=may_use_kernels)


def _last_positions(positions: Tensor, rows: int) -> Tensor:
    """Copy the last position of each row, (..., rows), from (..., rows or 1, length) positions."""
    last = positions[..., -1]
    return last.expand(*last.shape[:-1], rows).clone()
