"""What exits cost in quality at equal depth: `early_exit` against CALM's confidence, a fixed exit and fewer layers.

Perplexity and agreement come from one pass over a text, in which every policy reads each token where it would leave.
Multiple choice takes the likeliest ending by the same reading; maths questions are answered by `generate`. For every
threshold of ours, the alternatives are set to its depth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tide_hf.calibration.documents import Document
from tide_hf.calibration.threshold import Bootstrap
from tide_hf.evaluation.quality import TextScores, score_texts

from ..adapters import attached, without_layers
from ..bench import Bench, CannotRunError
from ..checks import Check
from ..common import markdown
from ..items import Choices, maths_questions, multiple_choice
from ..published import NAME, engine
from ..questions import answer_questions, is_right
from ..reading import plain_scores, reading_of

BASE = "base model"
ASKED = " Answer with the number alone."


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        thresholds: Of `early_exit`; every one is a depth that the alternatives are set to.
        documents: Texts.
        max_length: Tokens of a text, at most.
        maths: Maths questions.
        max_new_tokens: Of an answer.
        choices: Multiple-choice items.
        batch_size: Texts or questions at once.
        confidence: Of the intervals.
        published_samples: Texts that the published system is calibrated on.
    """

    thresholds: Sequence[float] = (0.95, 0.85, 0.7, 0.5)
    documents: int = 200
    max_length: int = 256
    maths: int = 200
    max_new_tokens: int = 48
    choices: int = 200
    batch_size: int = 8
    confidence: float = 0.95
    published_samples: int = 200


@dataclass
class Policy:
    """One way to decide how deep a token runs.

    Attributes:
        name: In words.
        text: What it reads in the texts, and the threshold to read it with.
        choices: The same of the multiple-choice items; `None` where they are not measured.
        model: What answers questions; `None` where none are asked.
        options: For its `generate`.
    """

    name: str
    text: tuple[TextScores, float]
    choices: tuple[TextScores, float] | None
    model: Any
    options: dict[str, Any]


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Measure all policies on all three kinds of data."""
    routers = bench.need_routers()
    documents, origin = bench.documents(settings.documents, settings.max_length)
    items = multiple_choice(settings.choices)
    item_documents = [document for item in items for document in choice_documents(bench.tokenizer, item)]
    text = score_texts(bench.model, routers, documents, batch_size=settings.batch_size)
    choices = score_texts(bench.model, routers, item_documents, batch_size=settings.batch_size)
    plain = {
        kind: plain_scores(reading_of(bench.model), found, settings.batch_size, bench.model.device)
        for kind, found in (("text", documents), ("choices", item_documents))
    }
    policies = [_never(bench, text, choices)]
    for threshold in settings.thresholds:
        policies += at_depth_of(threshold, bench, text, choices, plain, (documents, item_documents), settings)
    questions = maths_questions(settings.maths)
    record = {
        "text": origin,
        "num_documents": len(documents),
        "num_tokens": len(text.document_ids),
        "num_choices": len(items),
        "num_questions": len(questions),
        "rows": [measure(policy, bench, items, questions, settings) for policy in policies],
    }
    try:
        record["published"] = of_published(bench, documents, plain["text"], settings)
    except CannotRunError as error:
        record["published"] = {"left_out": str(error)}
    return record


def choice_documents(tokenizer: Any, item: Choices) -> list[Document]:
    """One document for each ending, of which the ending's tokens count."""
    start = tokenizer(item.context)["input_ids"]
    documents = []
    for ending in item.endings:
        tokens = tokenizer(item.context + ending)["input_ids"]
        documents.append(Document(tokens, first=min(len(start), len(tokens) - 1) - 1))
    return documents


def _never(bench: Bench, text: TextScores, choices: TextScores) -> Policy:
    """The base model, read as a policy that never leaves."""
    return Policy(BASE, (text, 2.0), (choices, 2.0), bench.model, {})


def at_depth_of(
    threshold: float,
    bench: Bench,
    text: TextScores,
    choices: TextScores,
    plain: dict[str, tuple[Tensor, Tensor]],
    documents: tuple[list[Document], list[Document]],
    settings: Settings,
) -> list[Policy]:
    """Ours at a threshold, and each alternative at the depth on the texts that comes nearest to ours."""
    model, num_layers = attached(bench), bench.num_layers
    depth = mean_depth(text, threshold)
    router = {"tide_mode": "early_exit", "exit_threshold": threshold}
    policies = [Policy(f"routers {threshold:g}", (text, threshold), (choices, threshold), model, router)]
    calm_text, calm_choices = (replace(one, scores=one.confidences) for one in (text, choices))
    calm = nearest_threshold(calm_text, depth)
    options = {"tide_mode": "early_exit", "exit_criterion": "confidence", "exit_threshold": calm}
    policies.append(Policy(f"confidence {calm:.3g} (CALM)", (calm_text, calm), (calm_choices, calm), model, options))
    layer = min(text.exit_layers, key=lambda one: abs(one - depth))
    options = {"tide_mode": "early_exit", "exit_criterion": "fixed", "exit_threshold": 1.0, "min_layers": layer}
    fixed = tuple((only_layer(one, layer), 0.0) for one in (text, choices))
    policies.append(Policy(f"fixed exit at {layer}", *fixed, model, options))
    fewer = max(1, min(num_layers - 1, round(depth)))
    truncated = without_layers(bench.model, fewer)
    read = reading_of(truncated)
    skipped = []
    for scores, found, kind in zip((text, choices), documents, plain, strict=True):
        losses, tops = plain_scores(read, found, settings.batch_size, bench.model.device)
        skipped.append((as_scores(scores, fewer, losses, tops == plain[kind][1]), 0.0))
    policies.append(Policy(f"static skipping, {fewer} layers", *skipped, truncated, {}))
    return policies


def mean_depth(scores: TextScores, threshold: float) -> float:
    """Mean layer that tokens are read from."""
    reached = scores.scores >= threshold
    layers = torch.tensor([*scores.exit_layers, scores.num_layers])
    first = torch.where(reached.any(dim=1), reached.int().argmax(dim=1), len(scores.exit_layers))
    return float(layers[first].double().mean())


def nearest_threshold(scores: TextScores, depth: float) -> float:
    """The threshold at which the mean depth comes nearest to `depth`, to three digits."""
    return min((step / 1000 for step in range(1001)), key=lambda one: abs(mean_depth(scores, one) - depth))


def only_layer(scores: TextScores, layer: int) -> TextScores:
    """The same tokens, all of which leave at one layer at any threshold."""
    i = scores.exit_layers.index(layer)
    columns = [i, len(scores.exit_layers)]
    always = torch.full((len(scores.document_ids), 1), float("inf"))
    losses, agrees = scores.losses[:, columns], scores.agrees[:, columns]
    return replace(scores, exit_layers=[layer], scores=always, losses=losses, agrees=agrees, confidences=always.clone())


def as_scores(scores: TextScores, layer: int, losses: Tensor, agrees: Tensor) -> TextScores:
    """Another model's losses on the same tokens, as if read at `layer`."""
    always = torch.full((len(losses), 1), float("inf"))
    both = torch.stack([losses, scores.losses[:, -1]], dim=1)
    kept = torch.stack([agrees, torch.ones_like(agrees)], dim=1)
    return replace(scores, exit_layers=[layer], scores=always, losses=both, agrees=kept, confidences=always.clone())


def measure(
    policy: Policy, bench: Bench, items: Sequence[Choices], questions: Sequence[dict[str, str]], settings: Settings
) -> dict[str, Any]:
    """One policy: perplexity and agreement on the texts, and how many items and questions it gets right."""
    scores, threshold = policy.text
    row = scores.row(threshold, settings.confidence)
    row = {"name": policy.name} | {name: row[name] for name in ("perplexity", "ratio", "agreement", "depth_fraction")}
    if policy.choices is not None and items:
        row["multiple_choice"] = share(picked_right(*policy.choices, items), settings.confidence)
    if questions:
        limits = {"max_new_tokens": settings.max_new_tokens, "batch_size": settings.batch_size}
        asked = [one["question"] + ASKED for one in questions]
        answers, depths = answer_questions(policy.model, bench.tokenizer, asked, **limits, **policy.options)
        pairs = zip(answers, questions, strict=True)
        row["maths"] = share(torch.tensor([is_right(said, one["answer"]) for said, one in pairs]), settings.confidence)
        row["maths_depth_fraction"] = sum(depths) / len(depths) / bench.num_layers
    return row


def picked_right(scores: TextScores, threshold: float, items: Sequence[Choices]) -> Tensor:
    """(items,) whether the likeliest ending is the right one, by the sum over its tokens."""
    reached = scores.scores >= threshold
    index = torch.where(reached.any(dim=1), reached.int().argmax(dim=1), len(scores.exit_layers))
    losses = scores.losses.gather(1, index[:, None])[:, 0].double()
    sums = torch.bincount(scores.document_ids, weights=losses)
    starts = torch.tensor([len(item.endings) for item in items]).cumsum(dim=0)
    endings = sums.tensor_split(starts[:-1])
    return torch.tensor([int(part.argmin()) == item.right for part, item in zip(endings, items, strict=True)])


def share(right: Tensor, confidence: float) -> dict[str, Any]:
    """A share and its interval, by resampling items."""
    bootstrap = Bootstrap({"items": torch.ones(len(right)), "right": right}, confidence)
    return bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=(0.0, 1.0))


def of_published(
    bench: Bench, documents: list[Document], plain: tuple[Tensor, Tensor], settings: Settings
) -> dict[str, Any]:
    """The published system's forward pass on the same texts, at its default threshold and with exits off."""
    rows = []
    for threshold in (1.0, 0.85, 0.5):
        running = engine(bench, settings.published_samples, settings.max_length, threshold)
        losses, tops = plain_scores(running, documents, settings.batch_size, bench.model.device)
        ratio = float((losses.double().mean() - plain[0].double().mean()).exp())
        agreement = float((tops == plain[1]).double().mean())
        rows.append({"name": NAME, "exit_threshold": threshold, "ratio": ratio, "agreement": agreement})
    return {"rows": rows}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    rows = []
    for row in record["rows"]:
        cells = [row["name"], f"{row['depth_fraction']['value']:.1%}", _figure(row, "ratio", ".3f")]
        cells += [
            _figure(row, "agreement", ".1%"),
            _figure(row, "multiple_choice", ".1%"),
            _figure(row, "maths", ".1%"),
        ]
        rows.append([*cells, f"{row['maths_depth_fraction']:.1%}" if "maths_depth_fraction" in row else "-"])
    headings = ["", "depth", "perplexity over base", "agreement", "multiple choice", "maths", "depth in maths"]
    found = {"quality": markdown(headings, rows)}
    published = record["published"]
    if "rows" in published:
        cells = [
            [row["name"], f"{row['exit_threshold']:g}", "100%", f"{row['ratio']:.3f}", f"{row['agreement']:.1%}"]
            for row in published["rows"]
        ]
    else:
        cells = [[NAME, published["left_out"], "-", "-", "-"]]
    headings = ["", "threshold", "layers that run", "perplexity over base", "agreement"]
    return found | {"quality_published": markdown(headings, cells)}


def _figure(row: dict[str, Any], name: str, form: str) -> str:
    if name not in row:
        return "-"
    value, interval = row[name]["value"], row[name]["interval"]
    if interval is None:
        return format(value, form)
    return f"{value:{form}} ({interval[0]:{form}} to {interval[1]:{form}})"


def checks(record: dict[str, Any]) -> list[Check]:
    """The base model, read as a policy, is the base model."""
    base = record["rows"][0]
    return [Check("quality: the base model agrees with itself", base["agreement"]["value"] == 1.0)]
