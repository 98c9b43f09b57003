"""Calibration: fit exit heads, routers and a threshold for a frozen base model. [`calibrate`] holds the steps in order."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_tide import TIDERouters
from ..structure import find_structure
from ..unembed import Unembed, check_parity
from .data import full_depth, load_documents, seeded, split_documents, token_batches
from .hidden_states import Reservoir, StateReader
from .labels import check_labels
from .report import Steps, calibration_record, print_report
from .threshold import check_bounds, choose_threshold
from .training import FIT_CAPACITY, TUNE_CAPACITY, HeadFitter, decide, place, store, train_routers

__all__ = ["calibrate"]


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Sequence[str] | None = None,
    *,
    samples: int = 600,
    max_length: int = 64,
    labels: str = "agreement",
    exit_strategy: str = "linear",
    exit_layers: Sequence[int] | None = None,
    tolerance: float = 0.02,
    confidence: float = 0.95,
    batch_size: int = 64,
    seed: int = 0,
    progress: bool = True,
) -> TIDERouters:
    """Make routers for `model`. The model itself stays as it is, attached or not.

    Args:
        model: A causal language model of transformers.
        tokenizer: Its tokenizer.
        dataset: A list of texts; `None` lets the model answer the package's own prompts, which gives the kind of text
            that it will see when it decodes.
        samples: Documents to use. Half of them fit, a tenth tunes, the rest certifies the threshold. To certify a
            tolerance of 2% with 95% confidence takes at least 373; the more there are, the more tokens may leave.
        max_length: Longest document in tokens; of self-written ones, longest answer.
        labels: What a router predicts: `"agreement"`, that the exit head's top token is the full model's.
        exit_strategy: Kind of exit head, `"linear"` or `"identity"`.
        exit_layers: Numbers of executed layers after which a token may leave; default: as [`TIDEConfig`] places them.
        tolerance: Largest expected share of a document's tokens that may come out differently in `early_exit`.
        confidence: Probability with which `tolerance` is kept.
        batch_size: Documents a forward pass.
        seed: Of everything random. On a CPU the same seed gives the same routers.
        progress: Show progress bars and a table at the end.

    Returns:
        The routers, on the CPU, with the full record in `routers.config.calibration`. They exit at
        `routers.config.exit_threshold`; where no threshold could be certified, never.

    Raises:
        CalibrationError: The data cannot be used, states are NaN, or the labels are not built.
        ConfigurationError: An exit layer, strategy or bound makes no sense.
        UnsupportedModelError: The model is not supported.
    """
    started = perf_counter()
    check_labels(labels)
    check_bounds(tolerance, confidence)
    with full_depth(model), seeded(seed, model.device), Steps(progress) as steps:
        structure = find_structure(model)
        check_parity(model, structure)
        unembed = Unembed(model, structure)
        routers = TIDERouters.for_model(model, exit_layers=exit_layers, exit_strategy=exit_strategy)
        place(routers, model)
        reader = StateReader(model, structure, unembed, routers.exit_layers)

        documents = load_documents(
            model,
            tokenizer,
            dataset,
            samples=samples,
            max_length=max_length,
            batch_size=batch_size,
            seed=seed,
            steps=steps,
        )
        splits = split_documents(documents, seed)
    return routers
