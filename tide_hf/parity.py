"""Proof that the parts that were found in a model, and its unembedding, are the right ones."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from .errors import UnsupportedModelError, describe
from .structure import DecoderStructure, evaluating, input_device
from .unembed import Unembed

PROBE_LENGTH = 4


@torch.no_grad()
def check_parity(model: PreTrainedModel, structure: DecoderStructure) -> None:
    """Prove on a tiny probe that `structure` and [`Unembed`] give the model's own logits.

    Args:
        model: The base model.
        structure: What `find_structure` found.

    Raises:
        UnsupportedModelError: The logits differ, or a layer returns another kind than the structure says.
    """
    last: list[Any] = []
    probe = torch.arange(PROBE_LENGTH, device=input_device(model))[None]
    handle = structure.layers[-1].register_forward_hook(lambda _module, _args, output: last.append(output))
    with handle, evaluating(model):
        mask = torch.ones_like(probe)  # since one of the tokens may be the pad token, of which transformers warns
        try:
            output = model(input_ids=probe % structure.vocab_size, attention_mask=mask, use_cache=False)
        except ValueError as error:  # so models say that they want images or sound
            raise UnsupportedModelError(
                describe(
                    f"{type(model).__name__} does not run on text alone",
                    got=f"'{error}'",
                    expected="a causal language model, whatever else it takes",
                    do="Pass its text model, if it is one by itself.",
                )
            ) from error
        expected = output.logits.float()
    if isinstance(last[0], tuple) != structure.returns_tuple:
        raise _no_parity(
            model, f"layers that return {type(last[0]).__name__}", "the kind that structure.TUPLE_LAYERS says"
        )
    state = last[0][0] if isinstance(last[0], tuple) else last[0]
    logits = Unembed(model, structure)(state).float().to(expected.device)
    scale = float(expected.abs().max())
    tolerance = 1e-5 if model.dtype == torch.float32 else 2e-2
    difference = float((logits - expected).abs().max()) if logits.shape == expected.shape else float("nan")
    if not difference <= tolerance * max(scale, 1.0):  # also where it is NaN
        raise _no_parity(model, f"a difference of {difference:.3g}", f"at most {tolerance * max(scale, 1.0):.3g}")


def _no_parity(model: PreTrainedModel, got: str, expected: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        describe(
            f"the logits of {type(model).__name__} cannot be reproduced from its last decoder layer",
            got=got,
            expected=expected,
            do="Teach tide_hf the family: see 'Add a model family' in the README.",
        )
    )
