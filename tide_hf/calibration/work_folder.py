"""The work folder of a calibration, from which a killed run resumes, and the processes that share it."""

from __future__ import annotations

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate import PartialState
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, distributed
from transformers import PreTrainedModel

from ..base_model.structure import input_device
from ..common.errors import CalibrationError, UnsupportedModelError
from ..common.files import UNFINISHED, write_atomically
from ..speculation.ranks import ranks_of

Unit = TypeVar("Unit")
PATIENCE = timedelta(hours=24)  # a process may wait at a barrier while another generates text
FORMAT = 1  # format version of the files; increase it when a format changes
NAME = ".calibration"
FINGERPRINT = "fingerprint.json"
SPARE_BYTES = 16 * 2**20  # for heads, routers and decisions


@dataclass(frozen=True)
class Processes:
    """This process's rank, and the number of processes that `torchrun` or `accelerate launch` started."""

    rank: int = 0
    count: int = 1

    @classmethod
    def current(cls, model: PreTrainedModel) -> Processes:
        """Find this process's rank and the number of processes; initialise the process group if needed."""
        if ranks_of(model).many:
            raise UnsupportedModelError(
                "processes that share one model cannot share work",
                got="a model that was loaded with tp_plan",
                expected="a whole model in each process",
                do="Load it without tp_plan, with device_map='auto' where it needs several devices.",
            )
        if not distributed.is_available():
            return cls()
        if not distributed.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
            PartialState(cpu=input_device(model).type == "cpu", timeout=PATIENCE)
        return cls(distributed.get_rank(), distributed.get_world_size()) if distributed.is_initialized() else cls()

    @property
    def is_main(self) -> bool:
        """Whether this is the main process."""
        return self.rank == 0

    def share(self, units: Sequence[Unit]) -> Sequence[Unit]:
        """This process's share of the units: every `count`-th unit."""
        return units[self.rank :: self.count]

    @contextmanager
    def threads_for(self, num_units: int) -> Iterator[None]:
        """If there are fewer units than processes, let the busy processes use the threads of the idle processes."""
        before = torch.get_num_threads()
        here = min(self.count, int(os.environ.get("LOCAL_WORLD_SIZE", self.count)))
        torch.set_num_threads(before * max(1, here // max(1, num_units)))
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def wait(self) -> None:
        """Wait until all processes have called this method."""
        if self.count > 1:
            distributed.barrier()

    def from_main(self, value: Any) -> Any:
        """Return the main process's value in every process."""
        values = [value]
        if self.count > 1:
            distributed.broadcast_object_list(values, src=0)
        return values[0]


class WorkFolder:
    """Stores the results of named units of work, one safetensors file per unit, written atomically."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def has(self, name: str) -> bool:
        """Whether this unit is finished."""
        return self._file(name).is_file()

    def write(self, name: str, tensors: dict[str, Tensor], facts: dict[str, Any] | None = None) -> None:
        """Store a unit's tensors and its JSON-serialisable `facts`."""
        tensors = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        self._write_bytes(self._file(name), save(tensors, {"facts": json.dumps(facts or {})}))

    def read(self, name: str, keys: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Read tensors of a finished unit, by default all; [`CalibrationError`] if the file is damaged."""
        with self._opened(name) as file:
            return {key: file.get_tensor(key) for key in (file.keys() if keys is None else keys)}

    def facts(self, name: str) -> dict[str, Any]:
        """Read the facts of a finished unit; [`CalibrationError`] if the file is damaged."""
        with self._opened(name) as file:
            return json.loads(file.metadata()["facts"])

    def claim(self, fingerprint: dict[str, Any], processes: Processes) -> None:
        """Write `fingerprint`, or raise [`CalibrationError`] if the folder already has a different fingerprint."""
        ours = json.loads(json.dumps(fingerprint | {"format": FORMAT}))
        file = self.folder / FINGERPRINT
        if processes.is_main and not file.is_file():
            self._write_bytes(file, json.dumps(ours, indent=1).encode())
        processes.wait()
        if not file.is_file():
            raise CalibrationError(
                "the processes do not share their work folder",
                got=f"no {file} in process {processes.rank}, though the first process wrote it",
                expected="one folder that all processes see",
                do="Pass an output_dir on a file system that all of them share.",
            )
        try:
            theirs = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:
            theirs = {}
        names = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
        if names:
            raise CalibrationError(
                f"{self.folder} holds the unfinished work of a calibration with other inputs or settings",
                got=", ".join(f"{name}={theirs.get(name)!r} (now {ours.get(name)!r})" for name in names),
                expected="the same model, data and settings",
                do=f"Pass another output_dir, use the earlier settings, or delete {self.folder}.",
            )
        if processes.is_main:
            for unfinished in self.folder.glob(f"**/*{UNFINISHED}"):
                unfinished.unlink()
        processes.wait()

    @property
    def free_bytes(self) -> int:
        """Free space on the disk, in bytes."""
        return shutil.disk_usage(self.folder).free

    def check_space(self, needed: int) -> None:
        """Raise [`CalibrationError`] if fewer than `needed` bytes are free on the disk."""
        free, needed = self.free_bytes, needed + SPARE_BYTES
        if needed > free:
            raise CalibrationError(
                "hidden states do not fit on the disk",
                got=f"{free} bytes free at {self.folder}",
                expected=f"{needed} bytes",
                do="Make room, pass an output_dir (or set TMPDIR) on a larger disk, or use fewer samples.",
            )

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _write_bytes(self, file: Path, content: bytes) -> None:
        """Write a file atomically; raise [`CalibrationError`] if the disk is full."""
        try:
            write_atomically({file: content})
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise CalibrationError(
                f"the disk is full: {file} could not be written",
                got=f"{self.free_bytes} bytes free",
                expected=f"at least {len(content)} for this file",
                do="Make room and start again with the same arguments: with an output_dir it resumes here.",
            ) from error

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        try:
            with safe_open(self._file(name), framework="pt") as file:
                yield file
        except (SafetensorError, OSError) as error:
            raise CalibrationError(
                f"{self._file(name)} cannot be read",
                got=f"'{error}'",
                expected="a file that an earlier step of this calibration wrote",
                do="Delete that file and call calibrate() again, which makes it again.",
            ) from error


@contextmanager
def open_work_folder(output_dir: str | os.PathLike[str] | None, processes: Processes) -> Iterator[WorkFolder]:
    """Open the work folder in `output_dir`, which only a successful run deletes, or a temporary folder."""
    if output_dir is not None:
        work = WorkFolder(Path(output_dir) / NAME)
        work.folder.mkdir(parents=True, exist_ok=True)
        yield work
        processes.wait()
        if processes.is_main:
            shutil.rmtree(work.folder)
        return
    temporary = tempfile.TemporaryDirectory(prefix="tide_hf-") if processes.is_main else None
    try:
        yield WorkFolder(processes.from_main(temporary.name if temporary else None))
        processes.wait()
    finally:
        if temporary is not None:
            temporary.cleanup()
