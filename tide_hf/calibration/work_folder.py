"""The work folder of a calibration, from which a killed run resumes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from ..common.errors import CalibrationError, describe
from ..common.files import UNFINISHED, write_whole
from .processes import Processes

FORMAT = 1  # version of the files; raise it when one of them changes
NAME = ".calibration"
FINGERPRINT = "fingerprint.json"
SPARE_BYTES = 16 * 2**20  # for heads, routers and decisions


class WorkFolder:
    """Results of units of work by name, one safetensors file each, written atomically.

    Args:
        folder: The folder; created if needed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def has(self, name: str) -> bool:
        """Whether this unit is finished."""
        return self._file(name).is_file()

    def write(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any] | None = None) -> None:
        """Store the result of a unit.

        Args:
            name: Name of the unit.
            tensors: Its tensors.
            facts: Its other results, ready for JSON.

        Raises:
            CalibrationError: The disk is full.
        """
        tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        self._write_bytes(f"{name}.safetensors", save(tensors, {"facts": json.dumps(facts or {})}))

    def read(self, name: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read tensors of a finished unit; all of them by default.

        Raises:
            CalibrationError: The file is damaged.
        """
        with self._opened(name) as file:
            return {key: file.get_tensor(key) for key in (file.keys() if keys is None else keys)}

    def facts(self, name: str) -> dict[str, Any]:
        """Read the facts of a finished unit.

        Raises:
            CalibrationError: The file is damaged.
        """
        with self._opened(name) as file:
            return json.loads(file.metadata()["facts"])

    def claim(self, fingerprint: dict[str, Any], processes: Processes) -> None:
        """Write this calibration's fingerprint, or check that the one in the folder is the same.

        Args:
            fingerprint: Everything that results depend on, ready for JSON.
            processes: The processes that share the folder.

        Raises:
            CalibrationError: The folder holds another calibration's work, or processes see different folders.
        """
        ours = json.loads(json.dumps(fingerprint | {"format": FORMAT}))
        file = self.folder / FINGERPRINT
        if file.is_file():
            self._compare(ours, file)
        processes.wait()
        if processes.is_main:
            for unfinished in self.folder.glob(f"**/*{UNFINISHED}"):
                unfinished.unlink()
            if not file.is_file():
                self._write_bytes(FINGERPRINT, json.dumps(ours, indent=1).encode())
        processes.wait()
        if not file.is_file():
            raise CalibrationError(
                describe(
                    "the processes do not share their work folder",
                    got=f"no {file} in process {processes.rank}, though the first process wrote it",
                    expected="one folder that all processes see",
                    do="Pass an output_dir on a file system that all of them share.",
                )
            )
        self._compare(ours, file)

    def check_space(self, needed: int) -> None:
        """Check the free disk space.

        Args:
            needed: Bytes to be written.

        Raises:
            CalibrationError: There is less.
        """
        free = shutil.disk_usage(self.folder).free
        if needed + SPARE_BYTES > free:
            raise CalibrationError(
                describe(
                    "hidden states do not fit on the disk",
                    got=f"{free} bytes free at {self.folder}",
                    expected=f"{needed + SPARE_BYTES} bytes",
                    do="Make room, pass an output_dir (or set TMPDIR) on a larger disk, or use fewer samples or "
                    "exit_layers. What has been done so far is kept in output_dir.",
                )
            )

    def remove(self) -> None:
        """Delete the folder."""
        shutil.rmtree(self.folder)

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write_bytes(self, name: str, content: bytes) -> None:
        """Write a file atomically; a full disk is a `CalibrationError`."""
        file = self.folder / name
        try:
            write_whole(file, content)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise CalibrationError(
                    describe(
                        f"the disk is full: {file} could not be written",
                        got=f"{shutil.disk_usage(self.folder).free} bytes free",
                        expected=f"at least {len(content)} for this file",
                        do="Make room and start again with the same arguments: with an output_dir it goes on from "
                        "here.",
                    )
                ) from error
            raise

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        try:
            with safe_open(self._file(name), framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CalibrationError(
                describe(
                    f"{self._file(name)} cannot be read",
                    got=f"'{error}'",
                    expected="a file that an earlier step of this calibration wrote",
                    do="Delete that file and call calibrate() again: it is made anew.",
                )
            ) from error

    def _compare(self, ours: dict[str, Any], file: Path) -> None:
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            theirs = {}
        names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if names:
            differences = ", ".join(f"{name}={theirs.get(name)!r} (now {ours.get(name)!r})" for name in names)
            raise CalibrationError(
                describe(
                    f"{self.folder} holds the work of another calibration, or one by other settings",
                    got=differences,
                    expected="the same model, data and settings, to go on with it",
                    do=f"Pass another output_dir, start it as it was started then, or delete {self.folder} if what is "
                    "there is of no use.",
                )
            )


@contextmanager
def open_work_folder(output_dir: str | os.PathLike[str] | None, processes: Processes) -> Iterator[WorkFolder]:
    """The work folder in `output_dir`, which a failed run leaves for the next one, or a temporary one."""
    if output_dir is not None:
        folder = Path(output_dir) / NAME
        folder.mkdir(parents=True, exist_ok=True)
        yield WorkFolder(folder)
        processes.wait()
        if processes.is_main:
            WorkFolder(folder).remove()
        return
    temporary = tempfile.TemporaryDirectory(prefix="tide_hf-") if processes.is_main else None
    try:
        yield WorkFolder(processes.from_main(temporary.name if temporary else None))
        processes.wait()
    finally:
        if temporary is not None:
            temporary.cleanup()
