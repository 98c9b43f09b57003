"""Metric ``exit_agreement`` for `evaluate.load`: agreement of early exits with the full model, and their depth."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from numbers import Integral
from statistics import mean
from typing import Any

import datasets
import evaluate
import torch

from tide_hf.calibration.threshold import clopper_pearson, mean_interval
from tide_hf.common.choices import check_share
from tide_hf.common.errors import ConfigurationError

DESCRIPTION = """\
Agreement of tokens read from early exits with the tokens of the full model, with exact binomial intervals, and the
mean depth of the exits.
"""

KWARGS_DESCRIPTION = """
Args:
    predictions: For each answer, the tokens of the model with early exits (token ids).
    references: For each answer, as many tokens of the full model. If the full model chose each token after the same
        tokens (teacher forcing), all positions can be compared. If both models wrote freely, only the positions up to
        the first difference can be compared: use `same_start` and `equal_answers`.
    exit_layers: For each answer, the layer that each token was read from, such as `model.last_exit_stats.per_token`.
        Without it, no depth is computed.
    num_layers: Decoder layers of the model; needed with exit_layers.
    confidence: Confidence of the intervals, in (0, 1).
Returns:
    agreement: share of the tokens that are the full model's, over all positions.
    agreement_interval: exact (Clopper-Pearson), as if tokens were independent.
    disagreement_per_answer: mean share of an answer's tokens that differ.
    disagreement_per_answer_interval: by resampling answers, since tokens of one answer are not independent;
        if all answers have the same share, a wider interval that depends on the number of answers.
    equal_answers: share of the answers that are the full model's, token for token.
    equal_answers_interval: exact (Clopper-Pearson).
    same_start: mean share of an answer's tokens before the first that differs.
    num_answers, num_tokens: numbers of answers and tokens compared.
    With exit_layers:
    depth_fraction: mean layer that tokens were read from, over the number of layers.
    exited: share of the tokens that were read before the last layer.
    exited_interval: exact (Clopper-Pearson), as if tokens were independent.
    agreement_by_layer: by layer, the share of the tokens read there that agree, its exact interval, and their number.
Examples:
    >>> import evaluate
    >>> from tide_hf.evaluation.metrics import EXIT_AGREEMENT
    >>> metric = evaluate.load(EXIT_AGREEMENT)
    >>> found = metric.compute(
    ...     predictions=[[5, 6, 7, 9]], references=[[5, 6, 7, 8]], exit_layers=[[30, 12, 30, 12]], num_layers=30
    ... )
    >>> found["agreement"], found["depth_fraction"], found["agreement_by_layer"]["12"]["agreement"]
    (0.75, 0.7, 0.5)
"""

CITATION = """\
@misc{tide2026, title = {{TIDE}: Token-Informed Depth Execution}, eprint = {2603.21365}, archivePrefix = {arXiv}}
"""


@evaluate.utils.file_utils.add_start_docstrings(DESCRIPTION, KWARGS_DESCRIPTION)
class ExitAgreement(evaluate.Metric):
    """Compares tokens from early exits with those of the full model."""

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation=CITATION,
            inputs_description=KWARGS_DESCRIPTION,
            features=datasets.Features({"predictions": tokens, "references": tokens}),
            reference_urls=["https://arxiv.org/abs/2603.21365"],
        )

    def _compute(
        self,
        predictions: Sequence[Sequence[int]],
        references: Sequence[Sequence[int]],
        exit_layers: Sequence[Sequence[int]] | None = None,
        num_layers: int | None = None,
        confidence: float = 0.95,
    ) -> dict[str, Any]:
        check_share("confidence", confidence, usual=0.95)
        _check_lengths("references", predictions, references)
        agrees = [list(map(operator.eq, *pair)) for pair in zip(predictions, references, strict=True)]
        right, total, equal = sum(map(sum, agrees)), sum(map(len, agrees)), sum(map(all, agrees))
        losses = torch.tensor([1 - sum(answer) / len(answer) for answer in agrees], dtype=torch.float64)
        result: dict[str, Any] = {
            "agreement": right / total,
            "agreement_interval": list(clopper_pearson(right, total, confidence)),
            "disagreement_per_answer": float(losses.mean()),
            "disagreement_per_answer_interval": list(mean_interval(losses, confidence)),
            "equal_answers": equal / len(agrees),
            "equal_answers_interval": list(clopper_pearson(equal, len(agrees), confidence)),
            "same_start": mean([*answer, False].index(False) / len(answer) for answer in agrees),
            "num_answers": len(agrees),
            "num_tokens": total,
        }
        if exit_layers is None:
            return result
        _check_lengths("exit_layers", predictions, exit_layers)
        layers = [int(layer) for answer in exit_layers for layer in answer]
        is_depth = isinstance(num_layers, Integral) and num_layers >= 1
        if num_layers is None or not (is_depth and all(0 <= layer <= num_layers for layer in layers)):
            raise ConfigurationError(
                "exit_layers do not fit the model",
                got=f"layers {min(layers)} to {max(layers)} with num_layers={num_layers!r}",
                expected="numbers of executed layers, at most num_layers, a whole number of at least 1",
                do="Pass num_layers=model.config.num_hidden_layers.",
            )
        return result | _depth_figures(layers, list(itertools.chain(*agrees)), num_layers, confidence)


def _depth_figures(layers: Sequence[int], agrees: Sequence[bool], num_layers: int, confidence: float) -> dict[str, Any]:
    """The figures that need the layer of each token."""
    exited = sum(layer < num_layers for layer in layers)
    by_layer = {}
    for layer in sorted(set(layers)):
        here = [right for right, at in zip(agrees, layers, strict=True) if at == layer]
        interval = list(clopper_pearson(sum(here), len(here), confidence))
        by_layer[str(layer)] = {"agreement": sum(here) / len(here), "interval": interval, "num_tokens": len(here)}
    return {
        "depth_fraction": sum(layers) / len(layers) / num_layers,
        "exited": exited / len(layers),
        "exited_interval": list(clopper_pearson(exited, len(layers), confidence)),
        "agreement_by_layer": by_layer,
    }


def _check_lengths(name: str, predictions: Sequence[Sequence[int]], others: Sequence[Sequence[int]]) -> None:
    ours, theirs = [len(answer) for answer in predictions], [len(answer) for answer in others]
    if ours != theirs or 0 in ours or not ours:
        raise ConfigurationError(
            f"predictions and {name} cannot be compared",
            got=f"answers of {ours[:8]} and {theirs[:8]} tokens",
            expected="at least one answer, none empty, and equal lengths",
            do="Cut both to the shorter one, or let the full model read the same tokens.",
        )
