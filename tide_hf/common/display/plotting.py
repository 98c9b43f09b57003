"""What all plots share. They need matplotlib: `pip install tide-hf[plots]`."""

from __future__ import annotations

import io
from functools import partial
from typing import Any

from ..errors import MissingPackageError, describe

SIZE = (5.6, 3.6)  # inches
DOTS_PER_INCH = 120


def figure_maker() -> Any:
    """Matplotlib's `Figure`.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # noqa: PLC0415  # not pyplot, which would keep state
    except ImportError as error:
        raise MissingPackageError(
            describe(
                "plots cannot be drawn",
                got="no matplotlib",
                expected="matplotlib 3.8 or later",
                do="Run: pip install tide-hf[plots]",
            )
        ) from error
    return Figure


def notebook_figure(**options: Any) -> Any:
    """Make a figure that a notebook shows by itself, although no pyplot knows of it.

    Args:
        **options: Of matplotlib's `Figure`.

    Returns:
        The figure.

    Raises:
        MissingPackageError: matplotlib is not installed.
    """
    figure = figure_maker()(dpi=DOTS_PER_INCH, layout="constrained", **options)
    figure._repr_png_ = partial(_png, figure)
    return figure


def _png(figure: Any) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png")
    return file.getvalue()
