"""Quality against depth, as a PNG file. It needs matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import os
from typing import Any

from ..display.plotting import DOTS_PER_INCH, SIZE, figure_maker

# What is drawn, in units of what, and where the base model stands: figures that are paired with the base model's, since
# their intervals are the narrower ones.
PANELS = {
    "perplexity": ("ratio", 1.0, 1.0, "perplexity over the base model's"),
    "exact_match": ("difference", 100.0, 0.0, "exact match, points over the base model"),
}


def save_quality_plot(record: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Draw perplexity and exact match against depth, whichever was measured, in relation to the base model's.

    Args:
        record: From `measure_quality`.
        file: Where to write.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    measured = [name for name in PANELS if name in record]
    width, height = SIZE
    figure = figure_maker()(figsize=(width * len(measured), height), dpi=DOTS_PER_INCH, layout="constrained")
    for axes, name in zip(figure.subplots(1, len(measured), squeeze=False)[0], measured, strict=True):
        draw_curve(axes, name, record[name])
    figure.savefig(file, format="png")


def draw_curve(axes: Any, name: str, part: dict[str, Any]) -> None:
    """One panel: a point per threshold with its interval, and a line where the base model is."""
    figure, scale, of_base, label = PANELS[name]
    rows = part["rows"][1:]
    depths = [100 * row["depth_fraction"]["value"] for row in rows]
    values = [scale * row[figure]["value"] for row in rows]
    ends = [row[figure]["interval"] or [row[figure]["value"]] * 2 for row in rows]
    below = [max(0.0, value - scale * low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, scale * high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(depths, values, yerr=[below, above], marker="o", capsize=2, label="TIDE at these thresholds")
    for row, *point in zip(rows, depths, values, strict=True):
        text = f"{row['exit_threshold']:g}"
        axes.annotate(text, point, fontsize="small", textcoords="offset points", xytext=(4, 4))
    axes.axhline(of_base, color="grey", linestyle="--", label="base model")
    axes.set(title=part["data"], xlabel="depth (% of the layers)", ylabel=label)
    axes.margins(x=0.1)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
