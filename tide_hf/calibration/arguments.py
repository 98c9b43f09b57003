"""Check the arguments of `calibrate`, and whether its model can be calibrated, before any work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ..base_model.structure import DecoderStructure, last_position
from ..common.choices import LABELS, STRATEGIES, check_choice, check_counts, check_minutes, check_share
from ..common.errors import CalibrationError, ConfigurationError, UnsupportedModelError, quoted, short
from .heads import can_distil

USUAL_SAMPLES = 2000
LARGEST_SEED = 2**62  # stages add to the seed, and PyTorch's generators take 64 bits


@dataclass(frozen=True)
class Settings:
    """The arguments of `calibrate` on which the results of its work units depend.

    Attributes:
        samples: Number of documents; by default 2,000, or of text that the model writes within `max_minutes`, as many
            as its share of the time allows. A tenth is to tune (at most 150), four tenths to certify (at most 500), the
            rest to fit. Certifying a tolerance of 2% with 95% confidence needs at least 373 documents; more documents
            give better heads and more exits.
        max_length: Maximum document length in tokens; for generated documents and chats, maximum answer length.
        labels: What routers predict. `"agreement"`: that the exit head's top token is the full model's; `"cosine"`:
            that the hidden state is close to the final hidden state (the TIDE paper's rule); `"kl"`: that the exit
            head's distribution is close to the full model's. The threshold is always certified on agreement.
        exit_strategy: `"eagle3"`: linear exit heads, and a head that drafts with a decoder layer of its own (see
            [`routers.draft_head.DraftHead`]), which takes most of the time; or exit heads alone, `"linear"` or
            `"identity"`.
        exit_layers: Numbers of executed layers after which a token may exit; by default every fourth layer is tried
            and the useful layers are kept (see [`threshold.useful_exit_layers`]).
        draft_vocab_size: Size of the draft vocabulary, the most frequent tokens of the fit split; `None`: all tokens.
        draft_intermediate_size: Width of the draft head's MLP; `None`: that of the model's layers. Together with
            `draft_vocab_size` it says how large the head is.
        translator_rank: Rank of a linear head's translator; `None` for full rank.
        batch_size: Documents per forward pass.
        seed: Random seed. On a CPU the same seed gives the same routers.
        start_from: Hash of the draft head that is trained further; `calibrate` sets it.
    """

    samples: int | None = None
    max_length: int = 128
    batch_size: int = 128
    seed: int = 0
    labels: str = "agreement"
    exit_strategy: str = "eagle3"
    exit_layers: Sequence[int] | None = None
    translator_rank: int | None = None
    draft_vocab_size: int | None = 8192
    draft_intermediate_size: int | None = None
    start_from: str | None = None


def check_arguments(
    settings: Settings,
    tolerance: float,
    confidence: float,
    max_minutes: float | None,
    output_dir: str | os.PathLike[str] | None,
    notes: Mapping[str, Any] | None,
) -> None:
    """Raise [`ConfigurationError`] if an argument is invalid, independently of the model."""
    check_choice("labels", settings.labels, LABELS)
    check_choice("exit_strategy", settings.exit_strategy, STRATEGIES)
    check_share("tolerance", tolerance, usual=0.02)
    check_share("confidence", confidence, usual=0.95)
    check_counts(**{name: getattr(settings, name) for name in ("max_length", "batch_size")})
    names = ("samples", "translator_rank", "draft_vocab_size", "draft_intermediate_size")
    sizes = {name: getattr(settings, name) for name in names}
    check_counts(**{name: size for name, size in sizes.items() if size is not None})
    width = settings.draft_intermediate_size
    if width is not None and settings.exit_strategy != "eagle3":
        do = "Leave it out, or pass exit_strategy='eagle3'."
        raise _unusable("draft_intermediate_size", width, "None without a draft head", do)
    check_minutes(max_minutes)
    layers, seed = settings.exit_layers, settings.seed
    if layers is not None and (isinstance(layers, str) or not isinstance(layers, Iterable)):
        raise _unusable("exit_layers", layers, "a list of numbers of layers", "Pass exit_layers=[8, 16], say.")
    if type(seed) is not int or abs(seed) >= LARGEST_SEED:
        raise _unusable("seed", seed, "a whole number of at most 62 bits", "Pass seed=0, say.")
    if output_dir is not None and Path(output_dir).exists() and not Path(output_dir).is_dir():
        raise _unusable("output_dir", output_dir, "a folder, which may be new", "Name another, or move the file.")
    try:
        json.dumps(dict(notes or {}))
    except (TypeError, ValueError) as error:
        raise _unusable("notes", error, "what JSON can hold", "Turn the values into text or numbers.") from error


def _unusable(name: str, value: object, expected: str, do: str) -> ConfigurationError:
    got = value if isinstance(value, Exception) else short(value)
    return ConfigurationError(f"{name} makes no sense", got=got, expected=expected, do=do)


def check_for_model(structure: DecoderStructure, settings: Settings) -> None:
    """Refuse a rank above the hidden size, and heads with a layer if norm or output head cannot be differentiated."""
    rank = settings.translator_rank
    if rank is not None and rank > structure.hidden_size:
        expected = f"at most {structure.hidden_size}, the hidden size"
        raise _unusable("translator_rank", rank, expected, "Leave it out for full rank.")
    if settings.exit_strategy == "eagle3" and not can_distil(structure):
        raise UnsupportedModelError(
            "a head with a decoder layer cannot be trained here",
            got="an output head or final norm in 8 or 4 bits, or offloaded",
            expected="both in floating point, and not offloaded",
            do="Pass exit_strategy='linear', or load the model without quantising its head and without offloading.",
        )


@torch.no_grad()
def check_precision(model: PreTrainedModel, structure: DecoderStructure) -> None:
    """Raise [`CalibrationError`] if no weight is floating-point, or a quantised output head rejects float states.

    A head whose own forward dequantises is accepted; exit heads are then fitted in closed form, not distilled.
    """
    dtypes = list(dict.fromkeys(weight.dtype for weight in model.parameters()))
    problem = None
    head: Any = structure.head
    if not any(dtype.is_floating_point for dtype in dtypes):
        problem = "nothing but " + " and ".join(map(str, dtypes)) + " weights"
    elif not head.weight.is_floating_point():
        state = torch.zeros(1, structure.hidden_size, dtype=model.dtype, device=head.weight.device)
        try:
            head(state if structure.projection is None else structure.projection(state))
        except (RuntimeError, NotImplementedError) as error:
            problem = f"{type(head).__name__} with {head.weight.dtype} weights ({quoted(error)})"
    if problem is not None:
        raise CalibrationError(
            f"{type(model).__name__} cannot be calibrated in this precision",
            got=problem,
            expected="float32, bfloat16 or float16 weights, or layers that dequantise their own weights",
            do="Load the model with dtype=torch.bfloat16, or leave its output head unquantised.",
        )


def check_positions(model: PreTrainedModel, longest: int, max_length: int) -> None:
    """Raise [`ConfigurationError`] if documents of up to `longest` tokens exceed the model's position embeddings."""
    most = last_position(model.config.get_text_config())
    if most is not None and longest > most:
        raise ConfigurationError(
            "documents may be longer than the model has positions for",
            got=f"up to {longest} tokens",
            expected=f"at most {most}",
            do=f"Pass a max_length below {max_length}, or leave long prompts out.",
        )
