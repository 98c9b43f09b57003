"""Quality against depth, as a PNG file. It needs matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import os
from typing import Any

from ..common.display.plotting import DOTS_PER_INCH, SIZE, figure_maker


def save_quality_plot(record: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Draw perplexity over the base model's against depth.

    Args:
        record: From `measure_quality`.
        file: Where to write.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = figure_maker()(figsize=SIZE, dpi=DOTS_PER_INCH, layout="constrained")
    draw_curve(figure.subplots(), record["perplexity"])
    figure.savefig(file, format="png")


def draw_curve(axes: Any, part: dict[str, Any]) -> None:
    """A point per threshold with its interval, and a line where the base model is."""
    rows = part["rows"][1:]
    depths = [100 * row["depth_fraction"]["value"] for row in rows]
    values = [row["ratio"]["value"] for row in rows]  # paired with the base model's, so the intervals are narrower
    ends = [row["ratio"]["interval"] or [row["ratio"]["value"]] * 2 for row in rows]
    below = [max(0.0, value - low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(depths, values, yerr=[below, above], marker="o", capsize=2, label="TIDE at these thresholds")
    for row, *point in zip(rows, depths, values, strict=True):
        text = f"{row['exit_threshold']:g}"
        axes.annotate(text, point, fontsize="small", textcoords="offset points", xytext=(4, 4))
    axes.axhline(1.0, color="grey", linestyle="--", label="base model")
    axes.set(title=part["data"], xlabel="depth (% of the layers)", ylabel="perplexity over the base model's")
    axes.margins(x=0.1)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
