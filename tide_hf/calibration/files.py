"""Rows of local files: .txt, .jsonl, .json and .parquet."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ..errors import CalibrationError, MissingPackageError, describe


def read_rows(path: Path, columns: Sequence[str]) -> Iterator[object]:
    """Yield the rows of a file, or of all files below a folder in the order of their names.

    Args:
        path: It exists. In a folder, files of other kinds are passed over.
        columns: What is wanted of a row. Files that can do so leave the other columns unread, where they have one
            of these at all.

    Raises:
        CalibrationError: There is no file of a known kind, or one cannot be read.
        MissingPackageError: A .parquet file is to be read without the package that reads it.
    """
    for file in _find_files(path):
        try:
            yield from READERS[file.suffix.lower()](file, columns)
        except (OSError, ValueError) as error:  # ValueError: what does not decode, parse, or fit
            raise CalibrationError(
                describe(
                    f"cannot read {file}",
                    got=f"{type(error).__name__}: {error}",
                    expected=f"a readable {file.suffix.lower()} file",
                    do="Check the file, or leave it out.",
                )
            ) from error


def import_extra(name: str, purpose: str) -> Any:
    """Import a module that the `calibrate` extra brings.

    Args:
        name: Of the module.
        purpose: What it is needed for, to go after "to".

    Raises:
        MissingPackageError: It is not installed.
    """
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingPackageError(
            describe(
                f"a package is missing to {purpose}",
                got=str(error),
                expected=f"{name.partition('.')[0]} to be installed",
                do="Run: pip install tide-hf[calibrate]",
            )
        ) from error


def _find_files(path: Path) -> list[Path]:
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
    readable = [file for file in files if file.suffix.lower() in READERS]
    if not readable:
        kinds = sorted({file.suffix or file.name for file in files})
        raise CalibrationError(
            describe(
                f"no file to read in {path}" if path.is_dir() else f"cannot read this kind of file: {path}",
                got=", ".join(kinds) or "an empty folder",
                expected=f"{', '.join(READERS)}",
                do="Convert the data to one of these, or pass a list of texts.",
            )
        )
    return readable


def _read_text(file: Path, _columns: Sequence[str]) -> Iterator[str]:
    """Split at blank lines; where there are none, every line is a document."""
    text = file.read_text(encoding="utf-8-sig").strip()
    if not text:
        return
    documents = re.split(r"\n\s*\n", text)
    yield from documents if len(documents) > 1 else text.split("\n")


def _read_json_lines(file: Path, _columns: Sequence[str]) -> Iterator[object]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"line {number}: {error}") from error


def _read_json(file: Path, _columns: Sequence[str]) -> Iterator[object]:
    rows = json.loads(file.read_text(encoding="utf-8-sig"))
    if not isinstance(rows, list):
        raise ValueError(f"it holds a {type(rows).__name__}, not a list of rows")
    yield from rows


def _read_parquet(file: Path, columns: Sequence[str]) -> Iterator[object]:
    parquet = import_extra("pyarrow.parquet", f"read {file.name}")
    with parquet.ParquetFile(file) as table:
        known = [name for name in columns if name in table.schema_arrow.names]
        for batch in table.iter_batches(batch_size=1000, columns=known or None):
            yield from batch.to_pylist()


READERS: dict[str, Callable[[Path, Sequence[str]], Iterator[object]]] = {
    ".txt": _read_text,
    ".jsonl": _read_json_lines,
    ".json": _read_json,
    ".parquet": _read_parquet,
}
