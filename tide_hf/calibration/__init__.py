"""Calibration: fit exit heads, routers and an exit threshold for a frozen model. [`calibrate`] runs all steps.

`text` collects the user's documents or lets the model generate some, on CPUs by `fused_writing`; `documents` reads,
splits and batches documents. `states` computes and stores hidden states. `heads` fits exit heads, `draft_head_training`
trains a head that drafts with a layer of its own (by what `training` has), `router_training` trains the routers.
`threshold` selects exit layers and certifies the exit threshold; `record` builds the calibration record. `arguments`
checks arguments; `pipeline` runs the stages in a resumable `work_folder`, which processes may share.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.parity import check_parity
from ..base_model.structure import DecoderStructure, find_structure, input_device, output_device
from ..base_model.unembed import Unembed, weights_hash
from ..base_model.wrappers import base_inside, check_wrapper
from ..common.progress import Steps
from ..routers.card import write_model_card
from ..routers.config import NEVER_EXIT, TIDEConfig, default_exit_layers
from ..routers.routers import TIDERouters
from ..speculation.policy import MIN_GAIN
from ..weights.linear_gate import faster_passes
from .arguments import Settings, check_arguments, check_for_model, check_positions, check_precision
from .draft_head_training import draft_head_shape, head_to_train_further
from .heads import frequent_tokens
from .pipeline import Pipeline
from .record import calibration_record, layer_figures, print_report
from .states import full_depth
from .text import Text, load_documents
from .threshold import candidates_on, choose_threshold, expected_gain, useful_exit_layers
from .work_folder import Processes, open_work_folder

__all__ = ["calibrate"]

logger = logging.getLogger(__name__)


def calibrate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: str | os.PathLike[str] | Iterable[object] | None = None,
    *,
    start_from: TIDERouters | str | os.PathLike[str] | None = None,
    tolerance: float = 0.02,
    confidence: float = 0.95,
    output_dir: str | os.PathLike[str] | None = None,
    max_minutes: float | None = 15,
    notes: Mapping[str, Any] | None = None,
    progress: bool = True,
    **settings: Any,
) -> TIDERouters:
    """Fit exit heads and train routers for a frozen model, and certify their exit threshold.

    Finished units of work are stored in `output_dir`, so a killed calibration resumes when it is called again with the
    same arguments. Under `torchrun` or `accelerate launch` the processes share the work; each returns the routers.

    Args:
        model: A causal language model of transformers, or a `PeftModel` around it; the adapter then counts as part of
            the model. The model is not changed, and may have TIDE attached.
        tokenizer: The model's tokenizer.
        dataset: By default (`None`) the model generates the text, so that it resembles later output: answers to
            built-in prompts and, if the tokenizer has a chat template, to prompts sampled from the model. Or one of:

            - a list of texts, or of chats (each a list of `{"role": ..., "content": ...}`);
            - a local file: .txt (documents separated by blank lines, or one per line if there are none), .jsonl,
              .json, .csv or .parquet; or a folder of such files;
            - the name of a Hub data set, `"org/name"`, `"org/name:config"`, `"org/name[split]"` or
              `"org/name:config[split]"` (default split: train), which is streamed;
            - a `datasets.Dataset` or `IterableDataset`, or any other iterable of rows; of an iterable without a
              length, at most the first 10,000 + 10 * `samples` rows are read.

            Rows have a `text` column, or a `messages` column for the tokenizer's chat template; only the last answer
            of a chat is used to fit and measure. Duplicates are dropped. Unusable rows are skipped with a warning.
        start_from: Routers for this model, or their folder or Hub repository. Their draft head is trained further,
            which takes less text and time than training a new one; if the result is worse, the old weights are kept.
            Exit heads and routers are new. Figures are optimistic on text that the head was trained on before: draw
            other prompts with another `seed`.
        tolerance: Largest expected share of a document's tokens for which `early_exit` differs from the full model.
        confidence: Probability with which `tolerance` holds.
        output_dir: Folder for routers, model card and unfinished work (in `.calibration`); `None` saves nothing and
            works in a temporary folder. Hidden states take disk space: `hidden_size` numbers of 2 or 4 bytes per token
            for each exit layer and the last layer.
        max_minutes: Time budget; `None` for none. It decides how much text is generated, unless `samples` does. To stay
            within it, less text is generated or used, by rates measured on the way, and heads are trained for a shorter
            time. The record lists what was cut short. Results then depend on machine speed.
        notes: Further JSON-serialisable entries of the record, such as the `"command"` that the card shows. They do
            not replace the calibration's own entries.
        progress: Show progress bars, and a table at the end.
        **settings: The fields of [`arguments.Settings`]: `samples`, `max_length`, `exit_strategy` and so on.

    Returns:
        The routers, on the CPU in bfloat16, with the full record in `routers.config.calibration`, and the certified
        `routers.config.exit_threshold`, which is above 1 (no token exits) if no threshold could be certified.

    Raises:
        CalibrationError: The data cannot be found, reached or used, states are NaN or infinite, the disk is full, or
            `output_dir` holds another calibration's unfinished work.
        BaseModelMismatchError: `start_from` belongs to another model.
        ConfigurationError: An argument is invalid, or `start_from` has no draft head that can be trained, or one of
            another width than `draft_intermediate_size`.
        MissingPackageError: A package that reads this kind of data is not installed (`pip install tide-hf[calibrate]`).
        RoutersNotFoundError: There are no routers at `start_from`.
        UnsupportedModelError: The model is not supported, is tensor-parallel (`tp_plan`), or cannot have a draft head.
    """
    chosen = Settings(**settings)
    check_arguments(chosen, tolerance, confidence, max_minutes, output_dir, notes)
    started = perf_counter()
    end = math.inf if max_minutes is None else started + 60.0 * max_minutes
    check_wrapper(model)
    model = base_inside(model)
    processes = Processes.current(model)
    with full_depth(model):
        structure = find_structure(model)
        check_precision(model, structure)
        check_parity(model, structure)
        check_for_model(structure, chosen)
        start = head_to_train_further(start_from, model, chosen) if start_from is not None else None
        routers = _fresh_routers(model, structure, chosen, start)
        text = load_documents(dataset, tokenizer, chosen)
        check_positions(model, text.longest(chosen.max_length), chosen.max_length)
        start_hash = weights_hash(start.draft_head) if start is not None else None  # type: ignore[arg-type]
        used = replace(chosen, exit_layers=routers.exit_layers, start_from=start_hash)
        with open_work_folder(output_dir, processes) as work, Steps(progress and processes.is_main) as steps:
            work.claim(_fingerprint(model, routers, used, text), processes)
            unembed = Unembed(model, structure)
            pipeline = Pipeline(model, tokenizer, unembed, routers, used, work, processes, steps, end)
            record = dict(notes or {}) | _run(pipeline, text, chosen.exit_layers is None, tolerance, confidence)
            if start is not None:
                before = start.config.calibration or {}
                earlier = before.get("draft_head", {}).get("documents_before", 0)
                record["draft_head"]["documents_before"] = before.get("num_documents", 0) + earlier
            record |= {"max_minutes": max_minutes, "seconds": round(perf_counter() - started, 1)}
            routers.config.calibration = record
            if output_dir is not None and processes.is_main:
                routers.save_pretrained(output_dir)
                write_model_card(routers, output_dir)
    if progress and processes.is_main:
        print_report(record, structure.num_layers)
    if "draft_head" in record and processes.is_main:
        _warn_if_useless(record["draft_head"], sum(parameter.numel() for parameter in model.parameters()))
    return routers


def _warn_if_useless(head: Mapping[str, Any], num_parameters: int) -> None:
    """Say so if a draft head, by its figures in the record, will not make decoding faster."""
    gain = expected_gain(head["agreement"], head["parameters"] / num_parameters)
    if gain < MIN_GAIN:
        logger.warning(
            "The draft head is not worth loading: %.0f%% of its first drafts are right. With the cost of its steps, "
            "decoding would be %.2f times as fast; the policy drafts from %.2f on. Calibrate with more max_minutes or "
            "samples; without routers, n-grams draft.",
            100 * head["agreement"],
            gain,
            MIN_GAIN,
        )


def _run(pipeline: Pipeline, text: Text, select: bool, tolerance: float, confidence: float) -> dict[str, Any]:
    """Run the stages, convert the routers to the form that is saved, and return the record without its timing."""
    structure, settings = pipeline.structure, pipeline.settings
    written = pipeline.write_text(text)
    with faster_passes(structure):
        documents = pipeline.documents_in_time(written)
        store = pipeline.read_states(documents)
        read, chosen = store.count_tokens("fit", structure.vocab_size)
        draft_vocab = frequent_tokens(read + chosen, settings.draft_vocab_size or structure.vocab_size)
        draft_head = pipeline.train_draft_head(store, draft_vocab)
        figures: dict[str, Any] = {"heads": pipeline.fit_heads(store), "routers": pipeline.train_routers(store)}
        if draft_head is not None:
            figures["draft_head"] = draft_head
        kept = pipeline.routers.exit_layers
        if select:
            tune = pipeline.decide(store, "tune")
            kept = useful_exit_layers(candidates_on(tune, structure, len(draft_vocab), tolerance))
        decisions = pipeline.decide(store, "certify")
    choice = choose_threshold(decisions.only(kept), tolerance=tolerance, confidence=confidence)
    measured = calibration_record(decisions.only(kept), choice, documents, store.splits, pipeline.routers, structure)
    dropped = [layer for layer in decisions.exit_layers if layer not in kept]
    _finish(pipeline.routers, kept, choice.chosen, draft_vocab)
    facts = {
        "dropped_exit_layers": layer_figures(decisions.only(dropped), NEVER_EXIT) if dropped else {},
        "dtype": str(pipeline.model.dtype),
        "labels": settings.labels,
        "max_length": settings.max_length,
        "seed": settings.seed,
        "data": text.description,
        "rows_skipped": text.num_skipped,
        "cut_short": pipeline.cut_short,
        "num_processes": pipeline.processes.count,
        "resumed_units": pipeline.resumed_units,
    }
    return measured | figures | facts


def _fresh_routers(
    model: PreTrainedModel, structure: DecoderStructure, settings: Settings, start: TIDERouters | None
) -> TIDERouters:
    """Untrained routers on the model's output device, with the draft head of `start` if given."""
    layers, size = settings.exit_layers, settings.draft_vocab_size
    if layers is None:
        layers = default_exit_layers(structure.num_layers, TIDEConfig.checkpoint_interval, min_layers=1)
    config: dict[str, Any] = {
        "exit_strategy": settings.exit_strategy,
        "exit_layers": list(layers),
        "translator_rank": settings.translator_rank,
        "draft_vocab_size": None if size is None else min(size, structure.vocab_size),
    }
    if start is not None:
        config |= {"exit_strategy": "linear", "draft_head": start.config.draft_head}
    elif settings.exit_strategy == "eagle3":
        vocab_size = config["draft_vocab_size"] or structure.vocab_size
        shape = draft_head_shape(model, structure, vocab_size, settings.draft_intermediate_size)
        config |= {"exit_strategy": "linear", "draft_head": shape}
    routers = TIDERouters.for_model(model, **config)
    if start is not None:
        routers.draft_head.load_state_dict(start.draft_head.state_dict())  # type: ignore[union-attr]
    return routers.to(output_device(structure))


def _fingerprint(model: PreTrainedModel, routers: TIDERouters, settings: Settings, text: Text) -> dict[str, Any]:
    """Facts about model, settings and text on which the results of work units depend."""
    config = routers.config
    base = {
        "model": type(model).__name__,
        "unembed_hash": config.unembed_hash,
        "weights_hash": weights_hash(model),
        "shape": [config.num_hidden_layers, config.hidden_size, config.vocab_size],
        "dtype": str(model.dtype),
        "device": input_device(model).type,
    }
    return asdict(settings) | base | {"data_hash": text.digest()}


def _finish(routers: TIDERouters, kept: list[int], exit_threshold: float, draft_vocab: Tensor) -> None:
    """Convert `routers` in place to the form that is saved: only the `kept` exit layers, in bfloat16 on the CPU."""
    for layer in set(routers.exit_layers) - set(kept):
        del routers.exits[str(layer)]
    routers.config.exit_layers = kept
    routers.config.exit_threshold = exit_threshold
    if routers.draft_vocab is not None:
        routers.draft_vocab = draft_vocab
    routers.to("cpu", torch.bfloat16).requires_grad_(False).eval()
