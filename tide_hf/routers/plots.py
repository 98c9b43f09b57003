"""Plots of a calibration record, as PNG files. They need matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..common.display.plotting import DOTS_PER_INCH, SIZE, figure_maker
from .tables import rows_by_layer

MOST_CURVES = 8  # the colours that one can tell apart


def save_plots(record: dict[str, Any], folder: str | os.PathLike[str]) -> list[Path]:
    """Draw what a calibration measured: exit depths, agreement by depth, reliability, and risk against threshold.

    Args:
        record: `routers.config.calibration`. A plot for which an older record lacks the figures is left out.
        folder: Where to write; made where it does not exist.

    Returns:
        The files.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    make_figure = figure_maker()
    Path(folder).mkdir(parents=True, exist_ok=True)
    files = []
    for name, (draw, has_figures) in PLOTS.items():
        if has_figures(record):
            figure = make_figure(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
            draw(figure.add_subplot(), record)
            files.append(Path(folder) / f"{name}.png")
            files[-1].unlink(missing_ok=True)  # where it is a link, what it points to is left alone
            figure.savefig(files[-1])
    return files


def _draw_exit_depths(axes: Any, record: dict[str, Any]) -> None:
    rates = {str(layer): row["exit_rate"] for layer, row in rows_by_layer(record)}
    rates["none"] = max(0.0, 1.0 - sum(rates.values()))
    bars = axes.bar(list(rates), [100 * rate for rate in rates.values()])
    axes.bar_label(bars, fmt="%.1f", fontsize="small")
    axes.set(title="Where tokens leave", xlabel="exit layer", ylabel="tokens (%)")
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
    for layer, row in layers[:: -(-len(layers) // MOST_CURVES)]:
        scores, shares, _ = zip(*row["reliability"], strict=True)
        axes.plot(scores, shares, marker=".", label=f"exit layer {layer}")
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", label="as promised")
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


def _all_layers_have(figure: str) -> Callable[[dict[str, Any]], bool]:
    def has_figures(record: dict[str, Any]) -> bool:
        layers = rows_by_layer(record)
        return bool(layers) and all(figure in row for _, row in layers)

    return has_figures


PLOTS: dict[str, tuple[Callable[[Any, dict[str, Any]], None], Callable[[dict[str, Any]], bool]]] = {
    "exit_depth": (_draw_exit_depths, _all_layers_have("exit_rate")),
    "agreement": (_draw_agreement, _all_layers_have("agreement")),
    "reliability": (_draw_reliability, _all_layers_have("reliability")),
    "risk": (_draw_risk, lambda record: bool((record.get("threshold") or {}).get("table"))),
}
