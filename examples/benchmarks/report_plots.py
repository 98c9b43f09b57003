"""The report's plots, as PNG files. They need matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tide_hf.common.display import DOTS_PER_INCH, figure_maker

from .measuring import result_speedups, spread

WIDE, HIGH = 7.2, 3.6  # inches


def save_plots(records: dict[str, dict[str, Any]], folder: Path, fingerprint: str) -> list[Path]:
    """Draw what was measured.

    Args:
        records: By suite.
        folder: Where to write; made where it does not exist.
        fingerprint: Of the results, kept in each file, so that one can tell what it was drawn from.

    Returns:
        The files.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    make_figure = figure_maker()
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for suite, draw in {"decode": draw_speeds, "quality": draw_quality, "overhead": draw_scaling}.items():
        if suite in records:
            figure = make_figure(figsize=(WIDE, HIGH), dpi=DOTS_PER_INCH, layout="constrained")
            draw(figure, records[suite])
            files.append(folder / f"{suite}.png")
            figure.savefig(files[-1], metadata={"Source": fingerprint, "Software": None})
    return files


def draw_speeds(figure: Any, record: dict[str, Any]) -> None:
    """Median speed of each way by category, the ends of the lines at the 10th and 90th percentile."""
    axes = figure.add_subplot()
    categories = record["categories"]
    names = list(dict.fromkeys(one["name"] for results in categories.values() for one in results))[1:]
    for position, name in enumerate(names):
        speedups = []
        for results in categories.values():
            one = next((one for one in results if one["name"] == name), None)
            if one is not None and len(one["prompts"]) == len(results[0]["prompts"]):
                speedups += result_speedups(results[0], one)
        if speedups:
            found = spread(speedups)
            axes.plot([found["p10"], found["p90"]], [position] * 2, color="C0")
            axes.plot(found["median"], position, "o", color="C0")
    axes.set_yticks(range(len(names)), names, fontsize="small")
    axes.invert_yaxis()
    axes.axvline(1, color="grey", linestyle="--")
    axes.set(xlabel="speed against generate (median, 10th to 90th percentile)")
    axes.grid(axis="x", alpha=0.3)


def draw_quality(figure: Any, record: dict[str, Any]) -> None:
    """Agreement with the base model, and perplexity over its own, against depth."""
    left, right = figure.subplots(1, 2)
    kinds = {"routers": "o", "confidence": "s", "fixed exit": "^", "static skipping": "x"}
    for kind, marker in kinds.items():
        rows = [row for row in record["rows"] if row["name"].startswith(kind)]
        depths = [100 * row["depth_fraction"]["value"] for row in rows]
        left.plot(depths, [100 * row["agreement"]["value"] for row in rows], marker=marker, label=kind)
        right.plot(depths, [row["ratio"]["value"] for row in rows], marker=marker)
    left.set(xlabel="depth (% of the layers)", ylabel="agreement with the base model (%)")
    right.set(xlabel="depth (% of the layers)", ylabel="perplexity over the base model's")
    right.set_yscale("log")
    left.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)


def draw_scaling(figure: Any, record: dict[str, Any]) -> None:
    """Speed by length of the prompt, and by depth of random models."""
    panels = {
        "tokens of the prompt": figure.add_subplot(1, 2, 1),
        "layers of a random model": figure.add_subplot(1, 2, 2),
    }
    for what, axes in panels.items():
        parts = record["scaling"][what]
        for name in [one["name"] for one in next(iter(parts.values()))][1:]:
            ratios = []
            for results in parts.values():
                one = next(one for one in results if one["name"] == name)
                ratios.append(spread(result_speedups(results[0], one))["median"])
            axes.plot([int(x) for x in parts], ratios, marker="o", label=name)
        axes.axhline(1, color="grey", linestyle="--")
        axes.set(xlabel=what, ylabel="speed against generate")
        axes.legend(fontsize="x-small")
        axes.grid(alpha=0.3)
