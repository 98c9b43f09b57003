"""Calibration: fit exit heads, routers and a threshold for a frozen model. [`calibrate`] holds the steps in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..modeling_tide import TIDERouters
from ..structure import find_structure
from ..unembed import Unembed, check_parity
from .data import Document, full_depth, load_documents, num_positions, seeded, split_documents, token_batches
from .fitting import FIT_CAPACITY, TUNE_CAPACITY, collect_moments, decide, fit_head, round_weights, train_routers
from .hidden_states import Reservoir, StateBatch, StateReader
from .labels import check_labels
from .report import Steps, calibration_record, print_report
from .threshold import check_bounds, choose_threshold

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
        labels: What a router predicts: `"agreement"`, that the exit head's top token is the full model's; `"cosine"`,
            that the layer's state is close to the final one (the published rule); `"kl"`, that the exit head's
            distribution is close to the full model's. The threshold is certified on agreement in any case.
        exit_strategy: Kind of exit head, `"linear"` or `"identity"`.
        exit_layers: Numbers of executed layers after which a token may leave; default: as [`TIDEConfig`] places them.
        tolerance: Largest expected share of a document's tokens that may come out differently in `early_exit`.
        confidence: Probability with which `tolerance` is kept.
        batch_size: Documents a forward pass.
        seed: Of everything random. On a CPU the same seed gives the same routers.
        progress: Show progress bars and a table at the end.

    Returns:
        The routers, on the CPU in bfloat16, with the full record in `routers.config.calibration`. They exit at
        `routers.config.exit_threshold`; where no threshold could be certified, never.

    Raises:
        CalibrationError: The data cannot be used, states are NaN, or the labels do not exist.
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
        layers = list(exit_layers) if exit_layers is not None else None
        routers = TIDERouters.for_model(model, exit_layers=layers, exit_strategy=exit_strategy).to(model.device)
        reader = StateReader(model, structure, unembed, routers.exit_layers)
        advance = steps.begin("Gathering text", samples)
        documents = load_documents(model, tokenizer, dataset, samples, max_length, batch_size, seed, advance)
        splits = split_documents(documents, seed)

        def states_of(description: str, split: list[Document]) -> Iterator[StateBatch]:
            batches = list(token_batches(split, batch_size))
            return steps.track(description, reader.read(batches), len(batches))

        tune_reservoir = Reservoir(num_positions(splits.tune), TUNE_CAPACITY, seed)
        for batch in states_of("Reading the tune split", splits.tune):
            tune_reservoir.add(batch)
        tune = tune_reservoir.states()
        fit_reservoir = Reservoir(num_positions(splits.fit), FIT_CAPACITY, seed)
        moments = collect_moments(states_of("Reading the fit split", splits.fit), routers, fit_reservoir)
        for layer in steps.track("Fitting exit heads", routers.exit_layers, len(routers.exit_layers)):
            states = tune.hidden_states[layer].to(model.device)
            fit_head(routers[layer].head, moments.pop(layer), states, tune.top_tokens, unembed)
        fit = fit_reservoir.states()
        trained = train_routers(routers, fit, tune, unembed, seed, labels)
        for layer in steps.track("Training routers", trained, len(routers.exit_layers)):
            round_weights(routers[layer].router)
        decisions = decide(states_of("Certifying the threshold", splits.certify), routers, unembed)
    choice = choose_threshold(decisions, tolerance=tolerance, confidence=confidence)
    routers.config.exit_threshold = choice.chosen
    settings = {"labels": labels, "max_length": max_length, "seed": seed, "dtype": str(model.dtype)}
    data = "the model's own answers to the package's prompts" if dataset is None else "texts given by the caller"
    record = calibration_record(decisions, choice, documents, splits, routers, structure)
    record |= settings | {"data": data, "seconds": round(perf_counter() - started, 1)}
    routers.config.calibration = record
    if progress:
        print_report(record, structure.num_layers)
    return routers.to("cpu", torch.bfloat16).requires_grad_(False).eval()
