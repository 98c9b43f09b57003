"""Check on a probe that the decoder structure found in a model reproduces the logits of the model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from ..common.errors import UnsupportedModelError, quoted
from .hooks import hook_layers
from .inputs import without_router_loss
from .structure import CACHE, DecoderStructure, evaluating, input_device
from .unembed import Unembed

PROBE_LENGTH = 4


@torch.no_grad()
def check_parity(
    model: PreTrainedModel, structure: DecoderStructure, length: int = PROBE_LENGTH, cache: Cache | None = None
) -> Tensor:
    """Check on a probe of `length` tokens that `structure` and [`Unembed`] reproduce the model's own logits.

    Also check the return type of layers, and that the model runs on text alone. `cache`, if any, is empty and receives
    the probe's K/V. Returns the model's logits, (length, vocab_size).
    """
    last: list[Any] = []
    with hook_layers(structure, [structure.num_layers], lambda _, output: last.append(output)):
        expected = probe(model, structure, 0, length, cache)
    if not last:  # Mllama, whose last layer is cross-attention to images
        raise _no_parity(model, "a last layer that does not run on text alone", "one that does")
    if isinstance(last[0], tuple) != structure.returns_tuple:
        raise _no_parity(
            model, f"layers that return {type(last[0]).__name__}", "the kind that structure.TUPLE_LAYERS says"
        )
    state = last[0][0] if isinstance(last[0], tuple) else last[0]
    with evaluating(model):
        logits = Unembed(model, structure)(state)[0].float().to(expected.device)
    scale = float(expected.abs().max())
    tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
    difference = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("nan")
    if not difference <= tolerance * max(scale, 1.0):  # true for NaN, too
        raise _no_parity(model, f"a difference of {difference:.3g}", f"at most {tolerance * max(scale, 1.0):.3g}")
    return expected


@torch.no_grad()
def probe(model: PreTrainedModel, structure: DecoderStructure, start: int, end: int, cache: Cache | None) -> Tensor:
    """Run the model on tokens `start` to `end` - 1 of the probe; return their logits, (end - start, vocab_size).

    The `cache`, if any, holds the tokens before `start`. Refuses a model that does not run on text alone.
    """
    tokens = torch.arange(start, end, device=input_device(model))
    return probe_tokens(model, structure, tokens, tokens, end, cache)


@torch.no_grad()
def probe_tokens(
    model: PreTrainedModel,
    structure: DecoderStructure,
    tokens: Tensor,
    positions: Tensor,
    slots: int,
    cache: Cache | None,
) -> Tensor:
    """As [`probe`], for any tokens (width,), modulo the vocabulary, at any positions, the last `slots` of the cache."""
    try:
        inputs = _probe_inputs(model, structure, tokens, positions, slots, cache)
        with evaluating(model):
            logits = model(**without_router_loss(model, inputs)).logits[0].float()
        if len(logits) != len(tokens):  # CPM-Ant, with tokens of its own before the prompt
            raise ValueError(f"{len(logits)} logits for {len(tokens)} tokens")
        return logits
    except torch.OutOfMemoryError:  # says nothing about the model
        raise
    # Errors that models raise if they require images or audio.
    except (AssertionError, AttributeError, IndexError, RuntimeError, TypeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} does not run on text alone",
            got=quoted(error),
            expected="a causal language model, whatever else it takes",
            do="Pass its text model, if it is one by itself.",
        ) from error


def uses_slot_positions(model: PreTrainedModel, structure: DecoderStructure, end: int, cache: Cache) -> bool:
    """Whether the model, after the `end` tokens of a cache, may take the number of slots for the position.

    It does if `generate` passes it no positions, unless it finds them in the mask, as Bloom's ALiBi does.
    """
    has_alibi = hasattr(model.base_model, "build_alibi_tensor")
    next_one = torch.full((1,), end, device=input_device(model))
    inputs = _probe_inputs(model, structure, next_one, next_one, end + 1, cache)
    return not has_alibi and inputs.get("position_ids") is None


def _probe_inputs(
    model: PreTrainedModel,
    structure: DecoderStructure,
    tokens: Tensor,
    positions: Tensor,
    slots: int,
    cache: Cache | None,
) -> dict[str, Any]:
    positions, tokens = positions[None], tokens[None] % structure.vocab_size
    # The mask is explicit, since transformers warns if the probe contains the pad token and no mask is passed.
    inputs: dict[str, Any] = {"attention_mask": tokens.new_ones(1, slots)}
    if cache is None:
        return {**inputs, "input_ids": tokens, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:  # as `generate` does
        inputs["position_ids"] = positions
    return model.prepare_inputs_for_generation(tokens, use_cache=True, **{CACHE: cache}, **inputs)


def _no_parity(model: PreTrainedModel, got: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"the logits of {type(model).__name__} cannot be reproduced from its last decoder layer",
        got=got,
        expected=expected,
        do="Teach tide_hf the family: see 'Add a model family' in CONTRIBUTING.md.",
    )
