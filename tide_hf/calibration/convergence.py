"""How soon hidden states come close to the final one: the convergence that the published system exits by."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.parity import check_parity
from ..base_model.structure import find_structure
from ..base_model.unembed import Unembed
from ..common.errors import CalibrationError, describe
from .data import Document, full_depth, plan_batches, token_batch
from .hidden_states import StateReader
from .labels import CONVERGENCE_THRESHOLD, cosine_similarity


@dataclass(frozen=True)
class LayerConvergence:
    """How close the states after one layer are to the final ones.

    Attributes:
        layer: Number of layers executed.
        converged: Share of the tokens whose state has a cosine similarity above the threshold with the final one.
        mean_cosine: Mean cosine similarity.
    """

    layer: int
    converged: float
    mean_cosine: float


def convergence_by_layer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    *,
    convergence_threshold: float = CONVERGENCE_THRESHOLD,
    max_length: int = 512,
    batch_size: int = 4,
) -> list[LayerConvergence]:
    """Compare the states after each layer with the final one, both before the final norm.

    Args:
        model: A causal language model, attached or not; it stays as it is.
        tokenizer: Its tokenizer.
        texts: What to read; texts without any token are passed over.
        convergence_threshold: The published rule takes 0.98.
        max_length: Tokens after which a text is cut.
        batch_size: Texts a forward pass.

    Returns:
        One entry per layer, the last one left out, since its state is the final one.

    Raises:
        CalibrationError: There is no text, or a state is NaN.
        UnsupportedModelError: The model is not supported.
    """
    encoded = [tokenizer(text, truncation=True, max_length=max_length)["input_ids"] for text in texts]
    documents = [Document(tokens, first=0) for tokens in encoded if tokens]
    if not documents:
        raise CalibrationError(
            describe(
                "convergence cannot be measured", got="no text", expected="at least one text", do="Pass another text."
            )
        )
    with full_depth(model):
        structure = find_structure(model)
        check_parity(model, structure)
        layers = list(range(1, structure.num_layers))
        reader = StateReader(model, structure, Unembed(model, structure), layers)
        converged, total = torch.zeros(len(layers)).double(), torch.zeros(len(layers)).double()
        count = 0
        for batch in reader.read(token_batch(documents, rows) for rows in plan_batches(documents, batch_size)):
            count += len(batch)
            for index, layer in enumerate(layers):
                cosine = cosine_similarity(batch.hidden_states[layer], batch.final_states)
                converged[index] += int((cosine > convergence_threshold).sum())
                total[index] += float(cosine.cpu().double().sum())
    shares, means = (converged / count).tolist(), (total / count).tolist()
    return [LayerConvergence(*row) for row in zip(layers, shares, means, strict=True)]
