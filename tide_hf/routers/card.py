"""The Hub's model card for calibrated routers: use, calibration, measurements, and plots if matplotlib is installed."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from jinja2 import TemplateError
from transformers import PreTrainedModel

from ..common.display import DOTS_PER_INCH, SIZE, figure_maker
from ..common.errors import ConfigurationError, MissingPackageError
from .config import NEVER_EXIT, TIDEConfig
from .speculators import vllm_command
from .tables import describe_threshold, rows_by_layer, tables_of

TEMPLATE = Path(__file__).parent / "model_card_template.md"
HEAD_TEMPLATE = Path(__file__).parent / "head_card_template.md"
MARKUP = re.compile(r'[<>`"\[\]\\]')
MAX_CURVES = 8  # more curves would not have distinguishable colours


def write_model_card(
    routers: PreTrainedModel, folder: str | os.PathLike[str], *, repo_id: str | None = None, license: str | None = None
) -> Path:
    """Write `README.md` for calibrated routers, and plots in `plots/` if matplotlib is installed.

    `repo_id`, the Hub repository in the card's example, defaults to `folder`'s name. `license`, a license identifier of
    the Hub, is left out by default: heads derive from the base model, so the publisher has to decide.
    Raises [`ConfigurationError`] if the routers have not been calibrated.
    """
    record = routers.config.calibration
    if not record:
        raise ConfigurationError(
            "these routers cannot have a card",
            got="no calibration record",
            expected="routers that tide_hf.calibrate() made",
            do="Run tide_hf.calibrate(model, tokenizer) first.",
        )
    repo_id = repo_id or Path(folder).resolve().name
    file = Path(folder) / "README.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        card = _render(routers, record, repo_id, license, file.parent)
    except (AttributeError, LookupError, TypeError, ValueError, TemplateError) as error:
        raise ConfigurationError(
            "the calibration record cannot be shown on a card",
            got=f"{type(error).__name__} '{error}'",
            expected="the record that tide_hf.calibrate() makes",
            do="Make new routers with tide_hf.calibrate().",
        ) from error
    file.unlink(missing_ok=True)  # do not write through a link
    card.save(file)
    return file


def write_head_card(
    config: TIDEConfig, folder: str | os.PathLike[str], *, repo_id: str, license: str | None = None
) -> None:
    """Write `README.md` for the draft head of routers alone; `repo_id` and `license` are as for `write_model_card`."""
    base = config.base_model_name_or_path
    data = ModelCardData(
        base_model=base,
        base_model_relation="adapter",
        library_name="speculators",
        license=license,
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "eagle3", "tide"],
        model_name=repo_id.rpartition("/")[2],
    )
    values = {"base": base, "repo_id": repo_id, "vllm": _vllm(config, repo_id)}
    ModelCard.from_template(data, template_path=str(HEAD_TEMPLATE), **values).save(Path(folder) / "README.md")


def _render(
    routers: PreTrainedModel, record: dict[str, Any], repo_id: str, license: str | None, folder: Path
) -> ModelCard:
    command = " ".join((record.get("command") or "").split()).replace("`", "'")  # the card has it in backticks
    record = _without_markup(record)
    base = routers.config.base_model_name_or_path
    data = ModelCardData(
        base_model=base,
        base_model_relation="adapter" if base else None,
        library_name="tide_hf",
        license=license,
        pipeline_tag="text-generation",
        tags=["early-exit", "self-speculative-decoding", "tide"],
        model_name=repo_id.rpartition("/")[2],
        eval_results=_eval_results(record),
    )
    plots: list[Path] = []
    with suppress(MissingPackageError):  # the card then says that matplotlib is missing
        plots = save_plots(record, folder / "plots")
    values = {
        "base": _without_markup(base) or "the base model",
        "repo_id": _without_markup(repo_id),
        "vllm": _vllm(routers.config, repo_id) if routers.config.draft_head else None,
        "command": command,
        "record": record | {"exit_layers": dict(sorted(record["exit_layers"].items(), key=lambda row: int(row[0])))},
        "tables": tables_of(record, routers.config.num_hidden_layers),
        "plots": [file.relative_to(folder) for file in plots],
        "threshold": describe_threshold(record["threshold"]),
        "threshold_rows": _sampled(record["threshold"]["table"]),
    }
    return ModelCard.from_template(data, template_path=str(TEMPLATE), **values)


def _vllm(config: TIDEConfig, repo_id: str) -> str:
    base = _without_markup(config.base_model_name_or_path) or "BASE"
    return vllm_command(base, config.base_model_revision, _without_markup(repo_id))


def _without_markup(value: Any) -> Any:
    """Put each string in `value` on one line, and replace markup characters of Markdown and HTML by `?`.

    The record may come from a stranger, while readers of the card trust its publisher.
    """
    if isinstance(value, dict):
        return {key: _without_markup(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_markup(one) for one in value]
    return MARKUP.sub("?", " ".join(value.split())) if isinstance(value, str) else value


def _eval_results(record: dict[str, Any]) -> list[EvalResult]:
    """Figures measured on the certify split, as evaluation results for the Hub."""
    figures = [
        ("agreement", f"Agreement with the full model at exit layer {layer}", row["agreement"])
        for layer, row in rows_by_layer(record)
    ]
    head = record.get("draft_head") or {}
    if "agreement" in head:
        figures.append(
            ("agreement", "Agreement of the draft head's first drafts with the full model", head["agreement"])
        )
    chosen = record["threshold"]["chosen"]
    for row in record["threshold"]["table"]:
        if row["exit_threshold"] == chosen != NEVER_EXIT:
            where = f"in early_exit at exit_threshold {chosen:g}"
            figures.append(("disagreement", f"Disagreement with the full model {where}", row["disagreement"]))
            figures.append(("depth", f"Share of the layers that run {where}", row["depth_fraction"]))
    documents = {"dataset_type": "tide-calibration", "dataset_name": record["data"], "dataset_split": "certify"}
    return [
        EvalResult(
            task_type="text-generation", metric_type=kind, metric_name=name, metric_value=round(value, 5), **documents
        )
        for kind, name, value in figures
    ]


def _sampled(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """About ten rows of the threshold table, including the last certified row and the row after it."""
    last = max((index for index, row in enumerate(table) if row["certified"]), default=0)
    shown = set(range(0, len(table), max(1, len(table) // 8))) | {last, min(last + 1, len(table) - 1)}
    return [row for index, row in enumerate(table) if index in shown]


def save_plots(record: dict[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Draw the calibration record: exit depths, agreement by depth, reliability, and risk against threshold.

    A plot is left out if an older record lacks its figures. Raises [`MissingPackageError`] without matplotlib.
    """
    make_figure = figure_maker()
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for name, (draw, figure) in PLOTS.items():
        if _has(record, figure):
            axes = make_figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained").add_subplot()
            draw(axes, record)
            files.append(Path(folder) / f"{name}.png")
            files[-1].unlink(missing_ok=True)  # do not write through a link
            axes.figure.savefig(files[-1])
    return files


def _has(record: dict[str, Any], figure: str) -> bool:
    """Whether a record has `figure` for every exit layer, or, for `"table"`, the table of thresholds."""
    if figure == "table":
        return bool((record.get("threshold") or {}).get("table"))
    layers = rows_by_layer(record)
    return bool(layers) and all(figure in row for _, row in layers)


def _draw_exit_depths(axes: Any, record: dict[str, Any]) -> None:
    rates = {str(layer): row["exit_rate"] for layer, row in rows_by_layer(record)}
    rates["none"] = max(0.0, 1.0 - sum(rates.values()))
    bars = axes.bar(list(rates), [100 * rate for rate in rates.values()])
    axes.bar_label(bars, fmt="%.1f", fontsize="small")
    axes.set(title="Where tokens exit", xlabel="exit layer", ylabel="tokens (%)")
    axes.margins(y=0.1)


def _draw_agreement(axes: Any, record: dict[str, Any]) -> None:
    layers = rows_by_layer(record)
    depths = [layer for layer, _ in layers]
    axes.plot(depths, [100 * row["agreement"] for _, row in layers], marker="o")
    axes.set(title="Agreement with the full model", xlabel="exit layer", ylabel="tokens (%)", ylim=(0, 100))
    axes.set_xticks(depths)
    axes.grid(alpha=0.3)


def _draw_reliability(axes: Any, record: dict[str, Any]) -> None:
    layers = rows_by_layer(record)
    for layer, row in layers[:: -(-len(layers) // MAX_CURVES)]:
        scores, shares, _ = zip(*row["reliability"], strict=True)
        axes.plot(scores, shares, marker=".", label=f"exit layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="calibrated")
    axes.set(title="Reliability of the routers", xlabel="mean score", ylabel="share that agrees")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


def _draw_risk(axes: Any, record: dict[str, Any]) -> None:
    threshold = record["threshold"]
    for name, certified in (("certified", True), ("not certified", False)):
        rows = [row for row in threshold["table"] if row["certified"] == certified]
        points = [row["exit_threshold"] for row in rows], [100 * row["disagreement"] for row in rows]
        axes.plot(*points, marker=".", linestyle="", label=name)
    axes.axhline(100 * threshold["tolerance"], color="grey", linestyle="--", label="tolerance")
    axes.set(title="Risk against threshold", xlabel="exit threshold", ylabel="tokens that differ (%)")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)


# For each plot, the function that draws it and the figure that the plot needs.
PLOTS: dict[str, tuple[Callable[[Any, dict[str, Any]], None], str]] = {
    "exit_depth": (_draw_exit_depths, "exit_rate"),
    "agreement": (_draw_agreement, "agreement"),
    "reliability": (_draw_reliability, "reliability"),
    "risk": (_draw_risk, "table"),
}
