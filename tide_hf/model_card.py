"""The Hub card of calibrated routers: what they are for, how they were made, what was measured."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from .calibration.plots import save_plots
from .calibration.tables import describe_threshold, tables_of
from .errors import ConfigurationError, MissingPackageError, describe
from .modeling_tide import TIDERouters

TEMPLATE = Path(__file__).parent / "model_card_template.md"


def write_model_card(
    routers: TIDERouters, folder: str | os.PathLike[str], *, repo_id: str | None = None, command: str | None = None
) -> Path:
    """Write `README.md` for calibrated routers, and its plots in `plots/` where matplotlib is installed.

    Args:
        routers: What `calibrate` made.
        folder: Where to write; made where it does not exist.
        repo_id: Hub repository that the card's example loads; default: `folder`'s name.
        command: The command that made the routers, if it is to be told.

    Returns:
        The file.

    Raises:
        ConfigurationError: The routers have not been calibrated.
    """
    record = routers.config.calibration
    if not record:
        raise ConfigurationError(
            describe(
                "these routers cannot have a card",
                got="no calibration record",
                expected="routers that tide_hf.calibrate() made",
                do="Run tide_hf.calibrate(model, tokenizer) first.",
            )
        )
    base = routers.config.base_model_name_or_path
    data = ModelCardData(
        base_model=base,
        base_model_relation="adapter" if base else None,
        library_name="tide_hf",
        license="apache-2.0",
        pipeline_tag="text-generation",
        tags=["early-exit", "self-speculative-decoding", "tide"],
    )
    file = Path(folder) / "README.md"
    file.parent.mkdir(parents=True, exist_ok=True)
    values = {
        "base": base or "the base model",
        "repo_id": repo_id or Path(folder).name,
        "command": command,
        "record": record | {"exit_layers": dict(sorted(record["exit_layers"].items(), key=lambda row: int(row[0])))},
        "config": routers.config,
        "tables": tables_of(record, routers.config.num_hidden_layers),
        "plots": _draw(record, file.parent),
        "threshold": describe_threshold(record["threshold"]),
        "threshold_rows": _sampled(record["threshold"]["table"]),
    }
    ModelCard.from_template(data, template_path=str(TEMPLATE), **values).save(file)
    return file


def _draw(record: dict[str, Any], folder: Path) -> list[Path]:
    """Draw the plots; their paths as seen from the card. None where matplotlib is missing, which the card says."""
    try:
        return [file.relative_to(folder) for file in save_plots(record, folder / "plots")]
    except MissingPackageError:
        return []


def _sampled(table: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """About ten rows of the grid, those around the last certified one among them."""
    last = max((index for index, row in enumerate(table) if row["certified"]), default=0)
    keep = set(range(0, len(table), max(1, len(table) // 8))) | {last, min(last + 1, len(table) - 1)}
    return [row for index, row in enumerate(table) if index in keep]
