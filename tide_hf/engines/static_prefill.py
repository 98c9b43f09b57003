"""Prefill of calls that run on steps: the eager engine's, over compiled layers."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import Any

from ..base_model.structure import last_position
from ..common.errors import UnsupportedOptionError
from ..kernels.cpu.attention import MIN_QUERIES, is_faster
from ..kernels.cpu.cpp_kernels import CPU_DTYPES, are_ready, build_kernels
from ..speculation.attachment import Attachment
from ..speculation.call import Call
from ..speculation.protocols import Engine, Pass
from ..weights.upcast import dtype_now
from .eager import EagerEngine, prefill_eagerly
from .exit_passes import ExitPasses
from .gqa_attention import can_skip_rejected, gqa_attention, is_replaced
from .static import StaticEngine
from .step_rows import StepRows
from .steps.static_cache import FilledCache, static_cache_bytes
from .steps.step_store import StepStore, free_memory
from .steps.step_tensors import BufferKind, ModelParts

logger = logging.getLogger(__name__)


def prefill_on_steps(
    model: Any, attachment: Attachment, call: Call, steps: StepStore, **exits: Any
) -> tuple[Pass, Engine]:
    """Run the prompts of a call that holds the steps; see `EngineKind.prefill`.

    It lets them go if the engine that is returned does not need them. `exits` are the arguments of
    [`engine_on_steps`] for calls of `early_exit`.
    """
    keeps_steps = False
    try:
        steps.refresh(lambda: _parts(model, attachment))
        prompts, eager = _prefill(model, attachment, call, steps, drafts_with_head=not exits)
        engine = engine_on_steps(eager, steps, **exits)
        keeps_steps = isinstance(engine, StaticEngine)
        return prompts, engine
    finally:
        if not keeps_steps:
            steps.let_go(model.device)


def prefill_without_steps(model: Any, attachment: Attachment, call: Call) -> tuple[Pass, EagerEngine]:
    """Run the prompts of a call that would run on steps, if another call did not hold them."""
    return prefill_eagerly(model, attachment, call, name="compiled", fills_head_lazily=False)


def _prefill(
    model: Any, attachment: Attachment, call: Call, steps: StepStore, **options: Any
) -> tuple[Pass, EagerEngine]:
    """Run prefill, with compiled layers and kernels where available, whose compilation counts as warm-up."""
    options |= {"name": "compiled", "fills_head_lazily": steps.reads_drafts}
    if steps.prompts is None:
        return prefill_eagerly(model, attachment, call, **options)
    dtype = dtype_now(model)
    if dtype in CPU_DTYPES and not are_ready(dtype):
        start = perf_counter()
        build_kernels(dtype)
        steps.warm_up.add(0, perf_counter() - start)
    if call.input_ids.shape[1] >= MIN_QUERIES:
        is_faster(dtype)  # measured here, outside of any trace
    with attachment.weights.in_short_prompt():
        fused = attachment.weights.execute_layer()
        if fused is not None and call.input_ids.numel() <= fused.most_tokens:
            return prefill_eagerly(model, attachment, call, layers=fused, **options)
    with gqa_attention(model), attachment.weights.in_compiled_prompt():
        return prefill_eagerly(model, attachment, call, layers=steps.prompts.run, **options)


def engine_on_steps(
    eager: EagerEngine, steps: StepStore, passes: ExitPasses | None = None, requires_steps: bool = False
) -> Engine:
    """The engine of the rounds after a prefill: static, or eager if the call cannot go on on steps.

    Args:
        eager: The engine that prefill gave.
        steps: The steps of the model, which the call holds.
        passes: The passes of `early_exit`, where tokens may exit.
        requires_steps: Whether the call cannot run eagerly, but raises [`UnsupportedOptionError`].
    """
    call, cache, mask = eager.call, eager.slots.cache, eager.slots.mask
    rows, length, most = len(eager.rows), eager.slots.length, call.max_new_tokens - 1
    if most < 1:  # prefill gives the answer's only token
        return eager
    positions, is_known = _positions(eager)
    is_filled = all(getattr(layer, "is_initialized", True) for layer in cache.layers)
    if not is_filled or not is_known:
        reason = "the model computes positions by itself" if is_filled else "some cache layers are empty"
        logger.info("the call runs eagerly after prefill: %s", reason)
        return _eager(eager, requires_steps)
    is_causal = steps.reads_lengths and is_replaced(eager.model) and rows == 1 and (mask is None or bool(mask.all()))
    kind = BufferKind(
        position_shape=None if positions is None else tuple(positions.shape[:-1]),
        has_head=eager.head is not None and not eager.head.is_lazy,
        tap_layers=tuple(eager.head.tap_layers) if eager.head is not None and eager.head.is_lazy else (),
        has_scores=steps.reads_drafts,
        exit_layers=() if passes is None else passes.kept_layers,
        is_causal=is_causal and not eager.slots.has_windows,
        takes_trees=eager.takes_trees and passes is None and steps.reads_drafts,
        skips_rejected=rows > 1 and eager.slots.has_windows and can_skip_rejected(eager.model),
    )
    filled = FilledCache(cache, length, is_spare=not eager.is_returned)
    slots = steps.slots_for(filled, rows, length + most, kind)
    if not steps.fits(filled, rows, slots, kind):
        needed, free = static_cache_bytes(filled, rows, slots), free_memory(eager.input_ids.device)
        text = "the call runs eagerly: K/V buffers of %d slots would take %.1f GB of %.1f GB that are free"
        logger.warning(text, slots, needed / 1e9, free / 1e9)
        return _eager(eager, requires_steps)
    own = [[0]] * rows if positions is None else positions.reshape(-1, rows).T.tolist()
    table = last_position(eager.model.config.get_text_config())
    step_rows = StepRows(rows, own, most, table, checks_positions=positions is not None)
    return StaticEngine(eager, steps, passes, step_rows, filled, steps.buffers(filled, rows, slots, kind))


def _eager(eager: EagerEngine, requires_steps: bool) -> EagerEngine:
    if requires_steps:
        raise UnsupportedOptionError(
            "early_exit cannot run on steps of fixed shape here",
            got="no memory for them, or a cache or positions that they do not have",
            expected="a model that the compiled engine supports, and memory for a static cache",
            do="Pass tide_engine='eager' in this call.",
        )
    return eager


def _positions(eager: EagerEngine) -> tuple[Any, bool]:
    """Positions of the next tokens, (..., rows), `None` if the model takes none; and whether they are known."""
    if eager.positions is None:
        return None, True
    # The model prepares positions, since PaliGemma counts from 1.
    prepared = eager.inputs_of(eager.input_ids[:, -1:]).get("position_ids")
    return (None, False) if prepared is None else (prepared[..., 0], True)


def _parts(model: Any, attachment: Attachment) -> ModelParts:
    tide = attachment
    return ModelParts(model, tide.structure, tide.unembed, tide.draft_unembed(), tide.routers, tide.weights)
