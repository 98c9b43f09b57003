"""Mode `self_speculative`: the speculative loop, or transformers' own where it does not support a call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ..base_model.structure import rope_limits, uses_slot_positions
from ..base_model.wrappers import has_adapters_by_row
from ..common.errors import TIDEError
from ..common.stats import ExitStats
from ..speculation.call import Call
from ..speculation.loop import SpeculativeDecoder
from ..speculation.protocols import DrafterFactory
from ..speculation.ranks import ranks_of
from .plain_loop import add_tokens, new_tokens


def speculate(
    model: Any, call: Call, engine_name: str, make_drafter: DrafterFactory | None = None
) -> tuple[Any, ExitStats]:
    """Decode a call that the speculative loop supports.

    Calls with a drafter of their own are warm-ups, whose tokens nobody asked for, and nothing remembers.
    """
    attachment, decoder = model._tide, decoder_of(model, call, "self_speculative")
    kind, make = attachment.engines[engine_name], make_drafter or attachment.make_drafter
    with kind.showing_warm_up(), attachment.weights.in_call(engine_name, call.max_new_tokens):
        result = decoder.decode(
            lambda: kind.prefill(model, attachment, call), lambda engine: make(attachment, call, engine)
        )
    if make_drafter is None:
        attachment.remember(call.prompts, decoder.rows)
    return result, decoder.stats


def decoder_of(model: Any, call: Call, mode: str) -> SpeculativeDecoder:
    """Compose the decoder of one call."""
    attachment, config = model._tide, model.config.get_text_config()
    same_length = attachment.needs_same_length or uses_slot_positions(config, call.generation_config.max_length)
    rule = attachment.make_rule(call, ranks_of(model), same_length)
    # Ended rows also stay in the batch if rotary embeddings depend on the longest row, or each row has an adapter.
    must_stay = "longrope" in rope_limits(config) or has_adapters_by_row(model, attachment.structure)
    stats = ExitStats(mode, attachment.structure.num_layers, rule_is_exact=rule.is_exact)
    return SpeculativeDecoder(call, rule, stats, drops_ended=not (rule.keeps_ended_rows or must_stay))


def decode_plainly(model: Any, call: Call, error: TIDEError, sample: Callable[[], Any]) -> tuple[Any, ExitStats]:
    """Decode at full depth by transformers' own loop, `sample`, since the speculative loop refuses model or call."""
    structure, reason = model._tide.structure, model._tide.note_fallback(error)
    result = sample()
    depth, rows = structure.num_layers, call.input_ids.shape[0]
    stats = ExitStats("self_speculative", depth, fallback_reason=reason)
    if isinstance(result, Tensor | GenerateDecoderOnlyOutput):
        passes = new_tokens(result, call).shape[1]
        stats.layers_executed = depth * rows * passes
        add_tokens(stats, [[depth] * rows] * passes, result, call)
    return result, stats
