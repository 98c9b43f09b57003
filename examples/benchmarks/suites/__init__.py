"""The suites by name. Each has `Settings`, `run(bench, settings)`, `tables(record)` and `checks(record)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..bench import Bench
from ..checks import Check
from . import decode, overhead, passes, published_report, published_tables, quality


@dataclass(frozen=True)
class Suite:
    """What can be measured, and shown.

    Attributes:
        settings: Its dataclass of settings.
        run: Measures.
        tables: Renders a record as Markdown tables by name.
        checks: What has to hold in a record before its figures may be shown.
    """

    settings: type
    run: Callable[[Bench, Any], dict[str, Any]]
    tables: Callable[[dict[str, Any]], dict[str, str]]
    checks: Callable[[dict[str, Any]], list[Check]]


SUITES = {
    "decode": Suite(decode.Settings, decode.run, decode.tables, decode.checks),
    "published": Suite(
        published_tables.Settings, published_tables.run, published_report.tables, published_report.checks
    ),
    "quality": Suite(quality.Settings, quality.run, quality.tables, quality.checks),
    "overhead": Suite(overhead.Settings, overhead.run, overhead.tables, overhead.checks),
    "passes": Suite(passes.Settings, passes.run, passes.tables, passes.checks),
}
