"""Facts about a base model and its routers, ready for JSON: structure, modes, kernels, convergence by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.parity import check_parity
from ..base_model.structure import DecoderStructure, find_structure, input_device
from ..base_model.unembed import Unembed
from ..calibration.documents import Document, plan_batches
from ..calibration.router_training import CONVERGENCE_THRESHOLD, cosine_similarity
from ..calibration.states import StateReader, full_depth
from ..common.choices import AUTO, MODES
from ..common.errors import CalibrationError, UnsupportedModelError
from ..kernels.ops import kernel_facts, load_kernels
from ..routers.config import NEVER_EXIT
from ..routers.routers import TIDERouters
from ..routers.tables import rows_by_layer
from ..speculation.attachment import Attachment, hybrid_drafter
from ..weights.compute_dtype import ComputeDtype
from ..weights.linear_gate import linears_to_gate, packable
from ..weights.reading import WeightReading


@dataclass(frozen=True)
class LayerConvergence:
    """Similarity of the states after `layer` executed layers to the final states."""

    layer: int
    converged: float  # share of the tokens whose cosine similarity with the final state exceeds the threshold
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
    """Compare the states after each layer but the last with the final states, both before the final norm.

    `convergence_threshold` is the cosine similarity above which a state has converged (0.98 in the TIDE paper). Texts
    are truncated to `max_length` tokens; empty texts are ignored. The model may have TIDE attached; it is not changed.
    Raises [`CalibrationError`] without any text, or if a state is NaN.
    """
    encoded = [tokenizer(text, truncation=True, max_length=max_length)["input_ids"] for text in texts]
    documents = [Document(tokens, first=0) for tokens in encoded if tokens]
    if not documents:
        problem = "convergence cannot be measured"
        raise CalibrationError(problem, got="no text", expected="at least one text", do="Pass another text.")
    with full_depth(model):
        structure = find_structure(model)
        check_parity(model, structure)
        layers = list(range(1, structure.num_layers))
        reader = StateReader(model, structure, Unembed(model, structure), layers)
        sums, count = torch.zeros(len(layers), 2, dtype=torch.float64), 0  # per layer: number converged, sum of cosines
        for rows in plan_batches(documents, batch_size):
            batch = reader.read(documents, rows)
            count += len(batch)
            for index, layer in enumerate(layers):
                cosine = cosine_similarity(batch.hidden_states[layer], batch.final_states)
                sums[index] += torch.stack([cosine > convergence_threshold, cosine]).cpu().double().sum(dim=1)
    return [LayerConvergence(layer, *row) for layer, row in zip(layers, (sums / count).tolist(), strict=True)]


def inspect_model(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, routers: TIDERouters | None, texts: Sequence[str]
) -> dict[str, Any]:
    """Gather everything that `tide-hf inspect` shows, ready for JSON; convergence is measured on `texts`.

    Raises [`UnsupportedModelError`], or [`BaseModelMismatchError`] if the routers belong to another model.
    """
    structure = find_structure(model)
    check_parity(model, structure)
    if routers is not None:
        routers.check_base_model(model)
    return {
        "structure": structure_facts(model, structure),
        "modes": mode_facts(model, structure, routers),
        "routers": router_facts(routers) if routers is not None else None,
        "packed_weights": packing_facts(structure),
        "kernels": kernel_facts(load_kernels(device=input_device(model)), input_device(model), model.dtype),
        "convergence": [asdict(row) for row in convergence_by_layer(model, tokenizer, texts)],
    }


def structure_facts(model: PreTrainedModel, structure: DecoderStructure) -> dict[str, Any]:
    """Family, size, dtype and device of the base model."""
    return {
        "family": model.config.get_text_config().model_type,
        "class": type(model).__name__,
        "layers": structure.num_layers,
        "hidden_size": structure.hidden_size,
        "vocab_size": structure.vocab_size,
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(input_device(model)),
        "parameters": model.num_parameters(),
    }


def mode_facts(
    model: PreTrainedModel, structure: DecoderStructure, routers: TIDERouters | None
) -> dict[str, dict[str, Any]]:
    """Whether the model supports each mode, and a note if it does not or if routers are missing."""
    weights = WeightReading(structure, routers, pack_weights=False)
    compute, unembed = ComputeDtype(structure, weights, AUTO), Unembed(model, structure)
    attachment = Attachment(
        type(model), structure, unembed, routers, weights, MODES[0], NEVER_EXIT, hybrid_drafter, compute
    )
    facts: dict[str, dict[str, Any]] = {}
    for mode in MODES:
        try:
            attachment.check_mode(mode)
        except UnsupportedModelError as error:
            facts[mode] = {"supported": False, "note": str(error).partition(": got ")[0]}
            continue
        needs_routers = routers is None and mode != "self_speculative"
        facts[mode] = {"supported": True, "note": "needs routers, and there are none" if needs_routers else None}
    return facts


def router_facts(routers: TIDERouters) -> dict[str, Any]:
    """Settings of the routers, and figures of their calibration record if they have one."""
    config = routers.config
    record = config.calibration or {}
    figures, threshold = dict(rows_by_layer(record)), record.get("threshold")
    tensors = [*routers.parameters(), *routers.buffers()]
    return {
        "base_model": config.base_model_name_or_path,
        "exit_strategy": config.exit_strategy,
        "exit_layers": {str(layer): figures.get(layer, {}) for layer in routers.exit_layers},
        "exit_threshold": config.exit_threshold,
        "threshold": threshold and {name: threshold[name] for name in ("tolerance", "confidence", "chosen")},
        "tolerances": record.get("tolerances", []),
        "draft_vocab_size": config.draft_vocab_size,
        "parameters": sum(parameter.numel() for parameter in routers.parameters()),
        "size_mb": round(sum(tensor.nbytes for tensor in tensors) / 1e6, 2),
    }


def packing_facts(structure: DecoderStructure) -> dict[str, Any]:
    """Whether `pack_weights="auto"` keeps prepacked copies of weights, and their size."""
    gated, may_copy = linears_to_gate(structure, "auto")
    linears = packable(gated)
    return {
        "packed": may_copy and bool(linears),
        "linear_layers": len(linears),
        "size_mb": round(sum(linear.weight.nbytes for linear in linears) / 1e6, 2),
    }
