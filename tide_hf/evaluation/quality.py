"""Measure what early exits cost in quality, and what they save in depth, over thresholds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..calibration.sources import describe_source
from ..common.choices import check_counts, check_share
from ..common.display.progress import Steps
from ..common.errors import ConfigurationError, describe, short
from ..routers.config import check_exit_threshold
from ..routers.routers import TIDERouters
from .baselines import check_plain
from .perplexity import read_texts, score_texts

THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)


@dataclass(frozen=True)
class QualityOptions:
    """What to measure, and on what.

    Attributes:
        text: Texts or chats: a list, a file, a folder or a Hub data set, as `calibrate` takes them.
        thresholds: Exit thresholds to measure; the routers' calibrated one is added.
        samples: Most texts.
        max_length: Tokens after which a text is cut.
        confidence: Of all intervals.
        batch_size: Texts at once.
        seed: Of the draw from the data.
    """

    text: object
    thresholds: Sequence[float] = THRESHOLDS
    samples: int = 200
    max_length: int = 512
    confidence: float = 0.95
    batch_size: int = 8
    seed: int = 0

    def check(self) -> None:
        """Refuse what makes no sense, before a model is loaded.

        Raises:
            ConfigurationError: A setting has an impossible value.
        """
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
        check_share("confidence", self.confidence, usual=0.95)
        check_counts(**{name: getattr(self, name) for name in ("samples", "max_length", "batch_size")})


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
        The record, ready for JSON; its "perplexity" has what was measured on, and one row per threshold, the base
        model's first, whose "exit_threshold" is `None`.

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
    return record | {"perplexity": _measure_perplexity(model, tokenizer, routers, options, thresholds, steps)}


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
