"""Quality of early exits at several thresholds: perplexity, agreement and depth, from one pass over the text.

`measure_quality` makes the record, `quality_table` and `save_quality_plot` show it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.structure import find_structure, input_device
from ..base_model.unembed import Unembed
from ..calibration.documents import Document, describe_source, plan_batches, read_documents
from ..calibration.states import SLICE_ELEMENTS, StateBatch, StateReader, full_depth
from ..calibration.threshold import Bootstrap, exit_depths, exit_indices
from ..common.choices import check_counts, check_share
from ..common.display import DOTS_PER_INCH, SIZE, figure_maker
from ..common.errors import ConfigurationError, short
from ..common.progress import Steps
from ..depth.gates import on_device
from ..routers.config import check_exit_threshold
from ..routers.routers import TIDERouters
from ..routers.tables import MISSING, TextTable, shown_interval
from .benchmark import check_plain
from .teacher_forcing import scores_by_layer

ARRAYS_PER_LOGIT = 2  # logits and log-probabilities
THRESHOLDS = (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5)
DEPTH_NOTE = (
    "Depth: mean layer that tokens are read from, over the number of layers; counted, not timed. Intervals: "
    "{confidence:.0%} by resampling documents."
)
PERPLEXITY_NOTE = (
    "Perplexity of {num_tokens:,} tokens in {num_documents:,} documents of at most {max_length} tokens, each read by "
    "itself. Every token is scored as if decoded alone after exact K/V, as in post_hoc and "
    "early_exit. Agreement: the top token is the full model's."
)


@dataclass(frozen=True)
class TextScores:
    """Exit scores of E exit layers, and losses and agreement of these layers and the full model, at N tokens."""

    exit_layers: list[int]  # ascending
    num_layers: int
    scores: Tensor  # (N, E) float32
    losses: Tensor  # (N, E + 1) float32, negative log-likelihood of the next token in nats; full model last
    agrees: Tensor  # (N, E + 1) bool, whether the top token is the full model's
    confidences: Tensor  # (N, E) float32, the exit head's largest probability (CALM's score, arXiv 2207.07061)
    document_ids: Tensor  # (N,)

    def row(self, exit_threshold: float | None, confidence: float) -> dict[str, Any]:
        """Measure one threshold; `None` is the base model.

        Perplexity, its ratio to the base model's, agreement of the top token with the base model's and mean depth have
        a value and an interval each; `exit_rates` are shares of tokens by exit layer. Ready for JSON.
        """
        last = len(self.exit_layers)
        threshold = float("inf") if exit_threshold is None else exit_threshold
        indices = exit_indices(self.scores, threshold)[:, None]
        depths = exit_depths(indices[:, 0], self.exit_layers, self.num_layers)
        per_token = {
            "tokens": torch.ones_like(indices[:, 0]),
            "base_loss": self.losses[:, last],
            "loss": self.losses.gather(1, indices)[:, 0],
            "agrees": self.agrees.gather(1, indices)[:, 0],
            "depth": depths.double() / self.num_layers,
        }
        _, document = self.document_ids.unique(return_inverse=True)
        columns = {name: torch.bincount(document, weights=values.double()) for name, values in per_token.items()}
        bootstrap = Bootstrap(columns, confidence)
        row = {
            "exit_threshold": exit_threshold,
            "perplexity": bootstrap.figure(lambda sums: (sums["loss"] / sums["tokens"]).exp()),
        }
        if exit_threshold is None:
            return row
        shares = torch.bincount(indices[:, 0], minlength=last + 1).double() / len(indices)
        return row | {
            "ratio": bootstrap.figure(lambda sums: ((sums["loss"] - sums["base_loss"]) / sums["tokens"]).exp()),
            "agreement": bootstrap.figure(lambda sums: sums["agrees"] / sums["tokens"], limits=(0.0, 1.0)),
            "depth_fraction": bootstrap.figure(lambda sums: sums["depth"] / sums["tokens"], limits=(0.0, 1.0)),
            "exit_rates": {str(layer): float(shares[i]) for i, layer in enumerate(self.exit_layers)},
        }


def read_texts(
    dataset: object, tokenizer: PreTrainedTokenizerBase, *, samples: int, max_length: int, seed: int
) -> tuple[list[Document], int]:
    """Draw documents as calibration does; all tokens of a text are counted, but only the last answer of a chat.

    Returns the documents, and the number of rows that could not be used.
    """
    documents, num_skipped = read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)
    whole = [Document(one.tokens, first=0) if one.first <= 1 else one for one in documents]  # texts have first=1
    return whole, num_skipped


def score_texts(
    model: PreTrainedModel,
    routers: TIDERouters,
    documents: Sequence[Document],
    *,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
) -> TextScores:
    """Score every counted token of the documents at every exit layer, in one pass.

    The model may have TIDE attached. The routers are not changed. `advance` is called with each batch's size.
    """
    structure = find_structure(model)
    unembed = Unembed(model, structure)
    routers = copy.deepcopy(routers).place(input_device(model), model.dtype)  # the originals may be in use elsewhere
    reader = StateReader(model, structure, unembed, routers.exit_layers)
    parts = []
    with full_depth(model):
        for rows in plan_batches(documents, batch_size):
            parts.append(_score_batch(unembed, routers, reader.read(documents, rows)))
            advance(len(rows))
    columns = (torch.cat(column) for column in zip(*parts, strict=True))
    return TextScores(routers.exit_layers, structure.num_layers, *columns)


@torch.no_grad()
def _score_batch(unembed: Unembed, routers: TIDERouters, batch: StateBatch) -> tuple[Tensor, ...]:
    """The tensors of [`TextScores`] for one batch, at counted tokens that have a next token, on the CPU."""
    has_next = batch.counted.clone()
    has_next[:-1] &= batch.document_ids[:-1] == batch.document_ids[1:]
    has_next[-1] = False
    targets = batch.tokens.roll(-1)[has_next]
    batch = batch.select(has_next)
    scores = scores_by_layer(unembed, routers, batch.hidden_states, targets.device)
    read = [_losses(unembed, states, targets) for states in _heads(routers, batch)]
    losses, tops, confidences = (torch.stack(column, dim=1) for column in zip(*read, strict=True))
    agrees = tops == batch.top_tokens[:, None]
    columns = (scores, losses, agrees, confidences[:, :-1], batch.document_ids)
    return tuple(column.cpu() for column in columns)


def _heads(routers: TIDERouters, batch: StateBatch) -> Iterator[Tensor]:
    """Each exit head's output, then the final states."""
    for layer in routers.exit_layers:
        states = batch.hidden_states[layer]
        yield on_device(routers[layer], states).head(states)
    yield batch.final_states


def _losses(unembed: Unembed, states: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Negative log-likelihoods of `targets`, top tokens and their probabilities, computed in slices."""
    rows = max(1, SLICE_ELEMENTS // (ARRAYS_PER_LOGIT * unembed.structure.vocab_size))
    losses, tops, confidences = [], [], []
    for part, wanted in zip(states.split(rows), targets.split(rows), strict=True):
        logits = unembed(part).float().to(targets.device)
        losses.append(torch.nn.functional.cross_entropy(logits, wanted, reduction="none"))
        highest, top = logits.max(dim=-1)
        tops.append(top)
        confidences.append((highest - logits.logsumexp(dim=-1)).exp())
    return torch.cat(losses), torch.cat(tops), torch.cat(confidences)


@dataclass(frozen=True)
class QualityOptions:
    """Options of [`measure_quality`].

    Attributes:
        text: Texts or chats: a list, a file, a folder or a Hub data set, as for `calibrate`.
        thresholds: Exit thresholds to measure; the routers' calibrated threshold is added.
        samples: Maximum number of texts.
        max_length: Length in tokens at which a text is truncated.
        confidence: Confidence of all intervals.
        batch_size: Maximum number of texts per forward pass.
        seed: Seed of the sample of texts.
    """

    text: object
    thresholds: Sequence[float] = THRESHOLDS
    samples: int = 200
    max_length: int = 512
    confidence: float = 0.95
    batch_size: int = 8
    seed: int = 0

    def check(self) -> None:
        """Raise [`ConfigurationError`] for impossible values, before a model is loaded."""
        if not isinstance(self.thresholds, Collection):  # an iterator would be empty after this check
            expected, do = "a list of exit thresholds", "Pass thresholds=(0.9, 0.8), say."
            raise ConfigurationError("thresholds are no list", got=short(self.thresholds), expected=expected, do=do)
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
        model: The base model, without TIDE attached; it is not changed.
        tokenizer: The base model's tokenizer.
        routers: The base model's routers; they are not changed.
        options: What to measure.
        steps: Progress bars; default: none.

    Returns:
        The record, ready for JSON. Its entry "perplexity" describes the data and has a row for the base model, whose
        "exit_threshold" is `None`, followed by one row per threshold.

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
    documents, num_skipped = read_texts(
        options.text, tokenizer, samples=options.samples, max_length=options.max_length, seed=options.seed
    )
    advance = steps.begin("Reading texts", len(documents))
    scores = score_texts(model, routers, documents, batch_size=options.batch_size, advance=advance)
    return {
        "confidence": options.confidence,
        "exit_layers": routers.exit_layers,
        "num_hidden_layers": routers.config.num_hidden_layers,
        "calibrated_threshold": calibrated[0] if calibrated else None,
        "seed": options.seed,
        "perplexity": {
            "data": describe_source(options.text),
            "num_documents": len(documents),
            "num_skipped": num_skipped,
            "num_tokens": len(scores.document_ids),
            "max_length": options.max_length,
            "rows": [scores.row(threshold, options.confidence) for threshold in (None, *thresholds)],
        },
    }


def quality_table(record: dict[str, Any]) -> tuple[str, TextTable, str]:
    """Title, table and note that show the record of `measure_quality`."""
    part = record["perplexity"]
    note = f"{PERPLEXITY_NOTE.format(**part)} {DEPTH_NOTE.format(**record)}"
    headings = ["threshold", "perplexity", "interval", "over base", "interval", "agreement", "depth"]
    cells = [
        [
            "base" if row["exit_threshold"] is None else f"{row['exit_threshold']:g}",
            *_value_and_interval(row.get("perplexity"), ".2f", ".1f"),
            *_value_and_interval(row.get("ratio"), ".3f", ".3f"),
            _value_and_interval(row.get("agreement"), ".1%")[0],
            _value_and_interval(row.get("depth_fraction"), ".1%")[0],
        ]
        for row in part["rows"]
    ]
    return f"Perplexity on {part['data']}", TextTable(headings, cells), note


def _value_and_interval(figure: dict[str, Any] | None, form: str, interval_form: str = "") -> tuple[str, str]:
    if figure is None:
        return MISSING, MISSING
    return format(figure["value"], form), shown_interval(figure["interval"], interval_form)


def save_quality_plot(record: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Plot perplexity, divided by the base model's, against depth, as PNG; needs matplotlib (`tide-hf[plots]`)."""
    figure = figure_maker()(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    draw_curve(figure.subplots(), record["perplexity"])
    figure.savefig(file, format="png")


def draw_curve(axes: Any, part: dict[str, Any]) -> None:
    """Draw a point with its interval for each threshold, and a line for the base model."""
    rows = part["rows"][1:]
    depths = [100 * row["depth_fraction"]["value"] for row in rows]
    values = [row["ratio"]["value"] for row in rows]  # ratios have narrower intervals than perplexities
    intervals = [row["ratio"]["interval"] or [row["ratio"]["value"]] * 2 for row in rows]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, intervals, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, intervals, strict=True)]
    axes.errorbar(depths, values, yerr=[below, above], marker="o", capsize=2, label="TIDE at these thresholds")
    for row, *point in zip(rows, depths, values, strict=True):
        text = f"{row['exit_threshold']:g}"
        axes.annotate(text, point, fontsize="small", textcoords="offset points", xytext=(4, 4))
    axes.axhline(1.0, color="grey", linestyle="--", label="base model")
    axes.set(title=part["data"], xlabel="depth (% of the layers)", ylabel="perplexity over the base model's")
    axes.margins(x=0.1)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
