"""Quality against depth, as a PNG file. It needs matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import os
from typing import Any

from ..calibration.plots import DOTS_PER_INCH, SIZE, figure_maker

PANELS = {"perplexity": ("perplexity", 1.0), "exact_match": ("exact match (%)", 100.0)}


def save_quality_plot(record: dict[str, Any], file: str | os.PathLike[str]) -> None:
    """Draw perplexity and exact match against depth, whichever was measured, with the base model's at full depth.

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
    """One panel: a point per threshold with its interval, and a line at the base model's value."""
    label, scale = PANELS[name]
    base, *rows = part["rows"]
    depths = [100 * row["depth_fraction"]["value"] for row in rows]
    values = [scale * row[name]["value"] for row in rows]
    ends = [row[name]["interval"] or [row[name]["value"]] * 2 for row in rows]
    below = [max(0.0, value - scale * low) for value, (low, _) in zip(values, ends, strict=True)]
    above = [max(0.0, scale * high - value) for value, (_, high) in zip(values, ends, strict=True)]
    axes.errorbar(depths, values, yerr=[below, above], marker="o", capsize=2)
    for row, *point in zip(rows, depths, values, strict=True):
        text = f"{row['exit_threshold']:g}"
        axes.annotate(text, point, fontsize="small", textcoords="offset points", xytext=(4, 4))
    axes.axhline(scale * base[name]["value"], color="grey", linestyle="--", label="base model")
    axes.set(title=f"On {part['data']}", xlabel="depth (% of the layers)", ylabel=label)
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
