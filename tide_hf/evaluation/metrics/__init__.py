"""Metrics for the `evaluate` library, as folders that `evaluate.load` takes."""

from __future__ import annotations

from pathlib import Path

EXIT_AGREEMENT = str(Path(__file__).parent / "exit_agreement")
