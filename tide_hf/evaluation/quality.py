"""Measure what early exits cost in quality, and what they save in depth, over thresholds."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.report import Steps
from ..calibration.resampling import Bootstrap
from ..calibration.sources import describe_source
from ..calibration.threshold import check_counts, check_share
from ..choices import MATCHES, check_choice
from ..contenders import check_plain, weight_sharing_copy
from ..errors import ConfigurationError, describe, short
from ..model import TIDEModelForCausalLM
from ..routers.configuration_tide import check_exit_threshold
from ..routers.modeling_tide import TIDERouters
from ..structure import find_structure
from .perplexity import read_texts, score_texts
from .questions import Answers, Question, QuestionColumns, answer_questions, is_right, read_questions

THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class QualityOptions:
    """What to measure, and on what.

    Attributes:
        text: Texts or chats for the perplexity: a list, a file, a folder or a Hub data set, as `calibrate` takes them.
        questions: Rows of questions and answers for the exact match, from the same kinds of places.
        thresholds: Exit thresholds to measure; the routers' calibrated one is added.
        samples: Most texts, and most questions.
        max_length: Tokens after which a text is cut.
        max_new_tokens: Most tokens of an answer.
        columns: Where the questions and answers stand.
        match: How answers are compared; see `questions.is_right`.
        confidence: Of all intervals.
        batch_size: Texts or questions at once.
        seed: Of the draw from the data.
    """

    text: object = None
    questions: object = None
    thresholds: Sequence[float] = THRESHOLDS
    samples: int = 200
    max_length: int = 512
    max_new_tokens: int = 128
    columns: QuestionColumns = field(default_factory=QuestionColumns)
    match: str = "exact"
    confidence: float = 0.95
    batch_size: int = 8
    seed: int = 0

    def check(self) -> None:
        """Refuse what makes no sense, before a model is loaded.

        Raises:
            ConfigurationError: There is nothing to measure on, or a setting has an impossible value.
        """
        if self.text is None and self.questions is None:
            raise ConfigurationError(
                describe(
                    "there is nothing to measure on",
                    got="neither texts nor questions",
                    expected="texts for the perplexity, questions with answers for the exact match, or both",
                    do="Pass --text FILE or --questions FILE, or the name of a Hub data set.",
                )
            )
        if not isinstance(self.thresholds, Collection):  # an iterator would be empty after this check
            raise ConfigurationError(
                describe(
                    "thresholds are no list",
                    got=short(self.thresholds),
                    expected="a list of exit thresholds",
                    do="Pass thresholds=(0.9, 0.8), say.",
                )
            )
        for threshold in self.thresholds:
            check_exit_threshold(threshold)
        check_choice("match", self.match, MATCHES)
        check_share("confidence", self.confidence, usual=0.95)
        names = ("samples", "max_length", "max_new_tokens", "batch_size")
        check_counts(**{name: getattr(self, name) for name in names})


def measure_quality(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: TIDERouters,
    options: QualityOptions,
    steps: Steps | None = None,
) -> dict[str, Any]:
    """Compare the base model with early exits at several thresholds.

    Args:
        model: The base model, not attached; it is not touched.
        tokenizer: Its tokenizer.
        routers: Its routers; they are not touched either.
        options: What to measure.
        steps: Shows the progress; default: nothing is shown.

    Returns:
        The record, ready for JSON: "perplexity" and "exact_match", each (where measured) with what it was measured on
        and one row per threshold, the base model's first; its "exit_threshold" is `None`.

    Raises:
        CalibrationError: The data cannot be read.
        BaseModelMismatchError: The routers belong to another model.
        ConfigurationError: A setting makes no sense, or TIDE is attached to the model.
    """
    options.check()
    check_plain(model)
    steps = steps if steps is not None else Steps(enabled=False)
    routers.check_base_model(model)
    calibrated = [routers.config.exit_threshold] if routers.config.exit_threshold <= 1 else []
    thresholds = sorted({float(threshold) for threshold in (*options.thresholds, *calibrated)}, reverse=True)
    record: dict[str, Any] = {
        "confidence": options.confidence,
        "exit_layers": routers.exit_layers,
        "num_hidden_layers": routers.config.num_hidden_layers,
        "kv_cache_strategy": routers.config.kv_cache_strategy,
        "calibrated_threshold": calibrated[0] if calibrated else None,
        "seed": options.seed,
    }
    if options.text is not None:
        record["perplexity"] = _measure_perplexity(model, tokenizer, routers, options, thresholds, steps)
    if options.questions is not None:
        record["exact_match"] = _measure_exact_match(model, tokenizer, routers, options, thresholds, steps)
    return record


def _measure_perplexity(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: TIDERouters,
    options: QualityOptions,
    thresholds: Sequence[float],
    steps: Steps,
) -> dict[str, Any]:
    documents, num_skipped = read_texts(
        options.text, tokenizer, samples=options.samples, max_length=options.max_length, seed=options.seed
    )
    advance = steps.begin("Reading texts", len(documents))
    scores = score_texts(model, routers, documents, batch_size=options.batch_size, advance=advance)
    return {
        "data": describe_source(options.text),
        "num_documents": len(documents),
        "num_skipped": num_skipped,
        "num_tokens": len(scores.document_ids),
        "max_length": options.max_length,
        "rows": [scores.row(threshold, options.confidence) for threshold in (None, *thresholds)],
    }


def _measure_exact_match(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    routers: TIDERouters,
    options: QualityOptions,
    thresholds: Sequence[float],
    steps: Steps,
) -> dict[str, Any]:
    questions = read_questions(options.questions, options.columns, samples=options.samples, seed=options.seed)
    mode = "post_hoc" if find_structure(model).is_recurrent else "early_exit"  # a recurrent state cannot be skipped
    attached = TIDEModelForCausalLM.attach(weight_sharing_copy(model), copy.deepcopy(routers), mode=mode)
    advance = steps.begin("Answering questions", len(questions) * (1 + len(thresholds)))
    limits: dict[str, Any] = {"max_new_tokens": options.max_new_tokens, "batch_size": options.batch_size}
    base = answer_questions(model, tokenizer, questions, **limits, advance=advance)
    rows = [_exact_match_row(None, questions, base, base, routers, options)]
    for threshold in thresholds:
        answers = answer_questions(attached, tokenizer, questions, **limits, advance=advance, exit_threshold=threshold)
        rows.append(_exact_match_row(threshold, questions, base, answers, routers, options))
    return {
        "data": describe_source(options.questions),
        "num_questions": len(questions),
        "max_new_tokens": options.max_new_tokens,
        "mode": mode,
        "match": options.match,
        "template": options.columns.template,
        "rows": rows,
    }


def _exact_match_row(
    threshold: float | None,
    questions: Sequence[Question],
    base: Answers,
    answers: Answers,
    routers: TIDERouters,
    options: QualityOptions,
) -> dict[str, Any]:
    """Figures of one threshold; `None` is the base model."""

    def right(said: Answers) -> torch.Tensor:
        pairs = zip(said.texts, questions, strict=True)
        return torch.tensor([is_right(text, question.answers, options.match) for text, question in pairs])

    lengths = torch.tensor([len(tokens) for tokens in answers.tokens])
    num_layers = routers.config.num_hidden_layers
    columns = {
        "items": torch.ones(len(questions)),
        "right": right(answers),
        "base_right": right(base),
        "same": torch.tensor([one == other for one, other in zip(answers.tokens, base.tokens, strict=True)]),
        "tokens": lengths,
        "depth": torch.tensor(answers.depths, dtype=torch.float64) * lengths / num_layers,
    }
    bootstrap = Bootstrap(columns, options.confidence)
    row = {
        "exit_threshold": threshold,
        "exact_match": bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=(0.0, 1.0)),
    }
    if threshold is None:
        return row
    executed = (answers.layers_executed or 0) / (num_layers * int(lengths.sum()))
    return row | {
        "difference": bootstrap.figure(
            lambda sums: (sums["right"] - sums["base_right"]) / sums["items"], limits=(-1.0, 1.0)
        ),
        "same_answers": bootstrap.figure(lambda sums: sums["same"] / sums["items"], limits=(0.0, 1.0)),
        "depth_fraction": bootstrap.figure(lambda sums: sums["depth"] / sums["tokens"], limits=(0.0, 1.0)),
        "layers_executed_fraction": executed,
    }
