"""The eager engine: the model's own forward, on the call's own cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..base_model.inputs import next_token_types, without_router_loss
from ..base_model.structure import (
    CACHE,
    bounds_positions,
    has_windows,
    last_position,
    may_replace_cache,
    uses_slot_positions,
)
from ..base_model.unembed import DraftUnembed, greedy_tokens, top_tokens
from ..common.choices import EAGER
from ..depth.gates import ExecuteLayer, FixedDepthRun, LayerRun, active, on_device
from ..depth.head_drafting import HeadRun, head_run
from ..depth.kv_cache import (
    MOVABLE,
    CacheSlots,
    add_layers,
    crop,
    last_slot,
    order_prefetch,
    start_recording,
    stop_recording,
)
from ..depth.masks import TREE_ATTENTION, PassTree, current_tree, reading_tree
from ..kernels.cpu.cpp_kernels import are_ready
from ..speculation.attachment import Attachment
from ..speculation.call import Call
from ..speculation.drafts import Accepted, Draft
from ..speculation.policy import TOP_DRAFTS, CostTable
from ..speculation.prefill import prefill
from ..speculation.protocols import Pass
from ..speculation.ranks import ranks_of
from ..weights.fused_passes import FusedPasses
from ..weights.upcast import dtype_now
from .direct_passes import DirectPasses, direct_passes
from .gqa_attention import gqa_attention
from .round_clock import RoundClock

PLAIN_INPUTS = {"use_cache", "logits_to_keep", "cache_position"}  # besides tokens, mask, positions and cache
LONG_PROMPT = 128  # tokens; for shorter prompts, switching the attention implementation saves no time


@dataclass(frozen=True)
class EagerPass:
    """See [`Pass`]."""

    drafts: list[Draft]
    inputs: Tensor
    logits: Tensor
    depths: list[int]

    @property
    def has_trees(self) -> bool:
        """Whether a row's draft has siblings."""
        return not all(draft.is_chain for draft in self.drafts)

    def tokens(self, chosen: Tensor | None = None) -> list[list[int]]:
        """Read the top-1 token at each position, or those `chosen`."""
        return (greedy_tokens(self.logits) if chosen is None else chosen).tolist()


def prefill_eagerly(
    model: Any,
    attachment: Attachment,
    call: Call,
    *,
    name: str = EAGER,
    layers: ExecuteLayer | None = None,
    drafts_with_head: bool = True,
    fills_head_lazily: bool = True,
) -> tuple[Pass, EagerEngine]:
    """Run the prompts of a call with the model's own forward; see `EngineKind.prefill`.

    Args, besides those of `EngineKind.prefill`:
        name: Name of the requested engine, under which costs are recorded.
        layers: What runs the layers for another engine's prompts, if not their own `forward`.
        drafts_with_head: Whether the draft head drafts.
        fills_head_lazily: Whether, in a call with one row, the head's K/V are filled only when the head drafts.
    """
    input_ids, model_kwargs, structure = call.input_ids, call.model_kwargs, attachment.structure
    cache, config = model_kwargs[CACHE], model.config.get_text_config()
    # The head's K/V are in the call's cache, so the head does not draft if the model may replace that cache.
    may_draft = drafts_with_head and not may_replace_cache(config, input_ids.shape[1])
    add_layers(cache, config)
    is_lazy = fills_head_lazily and input_ids.shape[0] == 1
    routers = attachment.routers if may_draft else None
    own: Any = {"execute_layer": attachment.weights.execute_layer() if name == EAGER else layers}
    lazy = {"is_lazy": is_lazy, "fuse": attachment.weights.fused_head}
    head = head_run(structure, cache, routers, model.get_input_embeddings(), **own, **lazy)
    run = head or LayerRun(structure, cache, **own)
    try:
        with active(run), _attention(attachment, call, model, name):
            run.cache, logits = prefill(model, run, input_ids, call.generation_config, model_kwargs)
    except BaseException:
        if head is not None:
            head.finish()
        raise
    depths = [structure.num_layers] * len(input_ids)
    return EagerPass([Draft() for _ in depths], input_ids[:, -1:], logits, depths), EagerEngine(
        model, attachment, call, run, name
    )


def _attention(attachment: Attachment, call: Call, model: Any, name: str) -> AbstractContextManager[None]:
    """Use `gqa_attention` for batches and long prompts on CPUs."""
    rows, length = call.input_ids.shape
    may_use_kernels = attachment.weights.use_kernels is not False
    is_long = length >= LONG_PROMPT and may_use_kernels and are_ready(dtype_now(model))
    if name != EAGER or not (rows > 1 or is_long):
        return nullcontext()
    return gqa_attention(model, may_use_kernels=may_use_kernels)


class EagerEngine:
    """Runs one call after its prefill with the model's own forward.

    Args:
        model: The attached model.
        attachment: What TIDE has added to it.
        call: The call, whose `model_kwargs` are those after prefill.
        run: The run that prefilled the cache.
        name: Name of the requested engine, under which costs are recorded.
    """

    reads_drafts = True

    def __init__(self, model: Any, attachment: Attachment, call: Call, run: LayerRun, name: str) -> None:
        self.model, self.attachment, self.call, self.run, self.name = model, attachment, call, run, name
        self.head = run if isinstance(run, HeadRun) else None
        self.is_returned = call.cache_is_returned  # to the caller, who may continue from it
        self.input_ids, self.model_kwargs, cache = call.input_ids, call.model_kwargs, run.cache
        start_recording(cache)
        mask, positions = (self.model_kwargs.pop(name, None) for name in ("attention_mask", "position_ids"))
        for passed in ("inputs_embeds", CACHE):
            self.model_kwargs.pop(passed, None)
        self.types = next_token_types(model, self.model_kwargs)  # of generated tokens, by input name
        threshold, ops = float(attachment.config.compaction_threshold), attachment.unembed.ops
        config = model.config.get_text_config()
        length, windows = int(cache.get_seq_length()), has_windows(config)
        passes, is_whole = run.execute_layer, self.input_ids.shape[0] == 1 and mask is None and not windows
        keep = passes.await_keep() if isinstance(passes, FusedPasses) and is_whole and name == EAGER else None
        self.slots = CacheSlots(cache, length, mask, threshold, self.input_ids.device, ops, windows, keep)
        self.rows = list(range(self.input_ids.shape[0]))  # for each row still in the batch, its index in the call
        # Of the next tokens, (rows,); (kinds, rows) for mRoPE.
        self.positions = None if positions is None else _last_positions(positions, len(self.rows)) + 1
        self.highest_position: Tensor | None = None  # (), that passes may use; `None` if higher ones do no harm
        if self.positions is not None and bounds_positions(config):  # the answer's last token is never read
            self.highest_position = self.positions.max() + max(0, call.max_new_tokens - 2)
        self.last_slot = last_slot(cache)
        if (most := last_position(config)) is not None:  # as a limit on slots, which is lower if positions are ahead
            ahead = 0 if positions is None else max(0, int(positions.max()) + 1 - length)
            self.last_slot = min(most - ahead, self.last_slot or most)
        self.last_tokens: list[int] = []  # each row's last token, the next pass's input
        self.takes_trees = self._takes_trees(config)
        has_text_alone = not self.types and self.model_kwargs.keys() <= PLAIN_INPUTS
        is_plain = len(self.rows) == 1 and self.positions is not None and self.positions.dim() == 1
        self._may_be_direct = is_plain and has_text_alone  # until a pass has shown whether they may
        self._direct: DirectPasses | None = None
        self._width = 0  # of the last verify pass; 0 after prefill
        self._logits: Tensor | None = None  # of that pass, (rows, width, vocabulary)
        self._inputs: list[list[int]] = []  # the tokens that it read
        self._drafted: list[int] = []  # exit layer of each token that draft steps have read since the last pass
        self._draft_layers = 0
        self._draft_unembed: DraftUnembed | None = None
        ranks = ranks_of(model)
        self._clock = RoundClock(self.costs_of, ranks.agree if ranks.many else float)

    def _takes_trees(self, config: Any) -> bool:
        """Whether passes can verify trees: positions and masks are passed, and the cache holds nothing but K/V."""
        attention = config._attn_implementation
        obstacles = {
            f"its {attention!r} attention": attention not in TREE_ATTENTION,
            "its positions, or masks of its own": not self.attachment.takes_trees or self.positions is None,
            "a cache of this kind": self.slots.cache.offloading
            or any(type(layer) not in MOVABLE for layer in self.slots.cache.layers),
            "attention that counts slots": uses_slot_positions(config, self.call.generation_config.max_length),
        }
        found = [reason for reason, holds in obstacles.items() if holds]
        if found:
            self.attachment.note_chains(found[0])
        return not found

    @property
    def layers_executed(self) -> int:
        """Decoder layers executed, counted once per row and pass."""
        return self.run.layers_executed + self._draft_layers

    @property
    def head_layer(self) -> int | None:
        """Exit layer of the head with K/V of its own; see `DraftEngine.head_layer`."""
        return self.head.exit_layer if self.head is not None else None

    @property
    def max_draft_tokens(self) -> int | None:
        """How many draft tokens a static cache or learned position embeddings still allow; `None` without a limit."""
        return None if self.last_slot is None else max(0, self.last_slot - self.slots.length - 1)

    def costs_of(self, num_rows: int) -> CostTable:
        """Measured costs of passes over `num_rows` rows, of any width."""
        return self.attachment.costs_of(num_rows, self.name, self.input_ids.device.type != "cpu")

    @contextmanager
    def running(self) -> Iterator[None]:
        """Activate the call's `LayerRun`; see `Engine.running`.

        For a single row, MoE experts run as in `generate`'s decode on GPUs, with expert weights copied per token. In a
        batch, verify passes have so many tokens that the copies might not fit into memory.
        """
        is_one = self.input_ids.shape[0] == 1
        experts = self.model._optimize_model_for_decode() if is_one else nullcontext()
        try:
            with active(self.run), self._exact(), experts:
                yield
        except BaseException:  # from a streamer, a criterion or Ctrl-C: the caller may reuse the cache
            if self.is_returned:
                self.slots.recover()
            raise
        finally:
            if self.head is not None:
                self.head.finish()

    @contextmanager
    def _exact(self) -> Iterator[None]:
        """The context of passes whose logits do not depend on their width, where kernels are at hand."""
        weights, rows = self.attachment.weights, self.input_ids.shape[0]
        with weights.in_decode(rows) as is_alike:
            if not is_alike:
                with _attention(self.attachment, self.call, self.model, self.name):
                    yield
                return
            with gqa_attention(self.model, is_decode=True):
                yield

    def draft(
        self, exit_layer: int, drafted: list[list[int]], num_tokens: int = 1
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Draft next tokens for each row with the head at an exit layer; see `DraftEngine.draft`."""
        self._clock.begin()
        head, start = self.head, len(self._drafted)
        # A step that fills the head's K/V of several passes takes longer, so estimates of a step's cost ignore it.
        is_usual = head is None or head.num_pending <= 1
        inputs = [[last, *tokens][start:] for last, tokens in zip(self.last_tokens, drafted, strict=True)]
        if head is not None and exit_layer == head.exit_layer:
            top, scores = head.draft(self._upload(inputs), self.slots.mask_for(start + 1), TOP_DRAFTS)
        else:
            is_usual &= self._draft_unembed is not None
            top, scores = self._draft_from(exit_layer, inputs)
        if top.is_cpu:
            found, probabilities = top.tolist(), scores.tolist()
        else:  # one read for both; float32 holds token ids exactly
            both, probabilities = torch.stack([top.float(), scores.to(top.device, torch.float32)]).tolist()
            found = [list(map(int, row)) for row in both]
        self._drafted += [exit_layer] * len(inputs[0])
        self._clock.end_draft(exit_layer, len(inputs), is_usual=is_usual and len(inputs[0]) == 1)
        return found, probabilities

    def likeliest(self) -> list[tuple[list[int], list[list[int]]]]:
        """See `DraftEngine.likeliest`."""
        if self._logits is None or self._logits.device.type != "cpu":
            return []
        after = top_tokens(self._logits, TOP_DRAFTS)[1].tolist()
        return [(tokens, found[: len(tokens)]) for tokens, found in zip(self._inputs, after, strict=True)]

    def _draft_from(self, exit_layer: int, inputs: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Run the layers up to an exit layer; return the tokens (rows, 1) that its head drafts, and their scores."""
        attachment, cache = self.attachment, self.slots.cache
        if self._draft_unembed is None:
            self._draft_unembed = attachment.draft_unembed()
        run = FixedDepthRun(attachment.structure, cache, exit_layer, execute_layer=self.run.execute_layer)
        with active(run):
            state = run.states_after(self._forward, self._upload(inputs), start=len(self._drafted))[:, -1]
        self._draft_layers += run.layers_executed
        if cache.offloading:  # it has prefetched the next layer, not the first
            order_prefetch(cache, self.input_ids.device)
            cache.prefetch(0, cache.only_non_sliding)
        point = on_device(attachment.exit_point(exit_layer), state)
        scores = attachment.unembed.route(point.router, state)
        return self._draft_unembed(point.head(state))[:, None], scores[:, None]

    def _forget_drafts(self) -> None:
        """Roll back the K/V of draft steps."""
        # Each layer is cropped only once, since every crop lets a sliding-window layer drop tokens before its window.
        for layer_idx in range(max(self._drafted, default=0)):
            num_steps = sum(exit_layer > layer_idx for exit_layer in self._drafted)
            crop(self.slots.cache.layers[layer_idx], num_steps)
        if self.head is not None:
            self.head.rollback()
        self._drafted.clear()

    def verify(self, drafts: list[Draft]) -> EagerPass:
        """Run one full-depth pass over each row's last token and draft; see `Engine.verify`."""
        self._forget_drafts()
        self._clock.begin()
        if not self.takes_trees:
            drafts = [draft.chain() for draft in drafts]
        self._inputs = tokens = [[last, *draft.tokens] for last, draft in zip(self.last_tokens, drafts, strict=True)]
        self._width = width = max(map(len, tokens))
        # Shorter drafts are padded; the logits of the padding are not read.
        inputs = self._upload([row + row[-1:] * (width - len(row)) for row in tokens])
        tree = None
        if not all(draft.is_chain for draft in drafts):
            tree = PassTree.of([draft.parents(width) for draft in drafts], inputs.device)
        with reading_tree(tree):
            self._logits = logits = self._run_pass(inputs)
        return EagerPass(drafts, inputs, logits, [self.run.num_layers] * len(drafts))

    def _run_pass(self, ids: Tensor) -> Tensor:
        """The logits of a verify pass."""
        if self._direct is not None and self.slots.mask is None:
            return self._direct(ids, self._position_ids(0, ids.shape[1]))
        logits: Tensor = self._forward(ids).logits
        if self._may_be_direct and self.slots.mask is None:
            self._may_be_direct = False
            direct = direct_passes(self.model, self.attachment.unembed, self.run)
            if direct is not None and direct.give(ids, self._position_ids(0, ids.shape[1]), logits):
                self._direct = direct
        return logits

    def commit(self, accepted: list[Accepted]) -> None:
        """Keep the K/V of the accepted tokens of the last pass; see `Engine.commit`."""
        self.last_tokens = last_tokens(self.last_tokens, accepted)
        if not self._width:  # all K/V of the prompt stay
            return
        kept = [one.kept for one in accepted]
        counts = list(map(len, kept))
        self.slots.commit(self._width, kept)
        if self.head is not None:
            self.head.commit(kept)
        if self.positions is not None:
            self.positions += self.positions.new_tensor(counts)
        self._clock.end_round(self._width, len(counts))

    def select(self, rows: list[int]) -> None:
        """Keep only these rows of the batch."""
        self.rows = [self.rows[row] for row in rows]
        self.last_tokens = [self.last_tokens[row] for row in rows]
        index = self.slots.select(rows)
        if self.head is not None:
            self.head.select(index)
        if self.positions is not None:
            self.positions = self.positions[..., index.to(self.positions.device)]

    def finish(self, compact: bool) -> Any:
        """Return the cache as plain decoding would leave it; see `Engine.finish`."""
        if compact:
            self.slots.compact()
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
            kwargs["position_ids"] = self._position_ids(start, width)
        for name, types in self.types.items():
            own = self.rows if len(types) > 1 else [0]
            kwargs[name] = types[own].expand(rows, width)
        inputs = self.model.prepare_inputs_for_generation(ids, **kwargs)
        if "logits_to_keep" in inputs:
            inputs["logits_to_keep"] = width
        return without_router_loss(self.model, inputs)

    def _position_ids(self, start: int, width: int) -> Tensor:
        """(..., rows, width) positions of a pass over `width` tokens for each row, behind `start` draft tokens."""
        own: Any = self.positions
        tree, steps = current_tree(), torch.arange(start, start + width, device=own.device)
        positions: Tensor = own[..., None] + (steps if tree is None else tree.depths.to(steps.device))
        if self.highest_position is not None:  # padding of shorter drafts, and stopped rows, may lie beyond
            positions = positions.clamp(max=self.highest_position)
        return positions

    def _upload(self, tokens: list[list[int]]) -> Tensor:
        """Tokens on the device of the prompt, (rows, width)."""
        return self.input_ids.new_tensor(tokens)

    def _forward(self, ids: Tensor, start: int = 0) -> Any:
        return self.model(**self.inputs_of(ids, start), return_dict=True)


def last_tokens(before: list[int], accepted: list[Accepted]) -> list[int]:
    """Each row's last token: that of its new tokens, or as `before`, which is empty before the first."""
    return [one.tokens[-1] if one.tokens else before[row] for row, one in enumerate(accepted)]


def _last_positions(positions: Tensor, rows: int) -> Tensor:
    """Copy the last position of each row, (..., rows), from (..., rows or 1, length) positions."""
    last = positions[..., -1]
    return last.expand(*last.shape[:-1], rows).clone()
