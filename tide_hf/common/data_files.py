"""Rows read from local files: .txt, .csv, .json, .jsonl and .parquet."""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from .errors import CalibrationError, MissingPackageError

# For each suffix, the builder of the datasets library; `None` for files read without that library.
FORMATS = {".txt": None, ".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def read_rows(path: Path) -> Iterator[object]:
    """Yield the rows of an existing file, or of all files of known kinds below a folder, in order of name.

    Raises [`CalibrationError`] if no file is found or a file is unreadable, [`MissingPackageError`] without `datasets`.
    """
    for file in _find_files(path):
        builder = FORMATS[file.suffix.lower()]
        try:
            yield from _documents(file) if builder is None else _rows(file, builder)
        except (OSError, ValueError, RuntimeError) as error:
            raise CalibrationError(
                f"cannot read {file}",
                got=f"{type(error).__name__}: {error}",
                expected=f"a readable {file.suffix.lower()} file",
                do="Check the file, or leave it out.",
            ) from error


def import_extra(name: str, purpose: str) -> Any:
    """Import a module of the `calibrate` extra; [`MissingPackageError`] names `purpose` ("read a file")."""
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            f"a package is missing to {purpose}",
            got=str(error),
            expected=f"{name.partition('.')[0]} to be installed",
            do="Run: pip install tide-hf[calibrate]",
        ) from error


def _find_files(path: Path) -> list[Path]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    readable = [file for file in files if file.suffix.lower() in FORMATS]
    if not readable:
        kinds = sorted({file.suffix or file.name for file in files})
        raise CalibrationError(
            f"no file to read in {path}" if path.is_dir() else f"cannot read this kind of file: {path}",
            got=", ".join(kinds) or "an empty folder",
            expected=", ".join(FORMATS),
            do="Convert the data to one of these, or pass a list of texts.",
        )
    return readable


def _documents(file: Path) -> Iterator[str]:
    """Split a text file at blank lines, or into lines if it has no blank lines."""
    text = file.read_text(encoding="utf-8-sig").strip()
    documents = re.split(r"\n\s*\n", text)
    if text:
        yield from documents if len(documents) > 1 else text.split("\n")


def _rows(file: Path, builder: str) -> Iterator[object]:
    datasets = import_extra("datasets", f"read {file.name}")
    if file.stat().st_size > 0:  # most builders fail on empty files
        pattern = glob.escape(str(file.absolute()))
        logging.getLogger("datasets.packaged_modules").setLevel(logging.CRITICAL)  # errors that it logs are also raised
        yield from datasets.load_dataset(builder, data_files=pattern, split="train", streaming=True)
