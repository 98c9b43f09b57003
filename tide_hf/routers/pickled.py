"""A guard before `torch.load` for files that strangers made.

`torch.load` verifies no checksum, inflates compressed records, and allocates whatever a pickle asks for, also with
`weights_only=True`. So the archive and the pickle's names are checked before, and afterwards that all tensors together
are no larger than the file.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import struct
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.errors import first_line, short

MAX_PICKLE = 2**17  # bytes; it takes about 250 for each tensor
MAX_READ = 2**20  # bytes at a time, so that the directory of an archive cannot be larger
END_OF_ARCHIVE = b"PK\x05\x06"  # of 22 bytes where there is no comment
STORAGES = ("Double", "Float", "BFloat16", "Half", "Long", "Int", "Bool")
NAMES: tuple[str, ...] = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
NAMES += tuple(f"torch {kind}Storage" for kind in STORAGES)
# What a damaged file can raise here.
DAMAGE: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError)
DAMAGE += (TypeError, ValueError, struct.error, zipfile.BadZipFile, pickle.UnpicklingError)


def read_pickled(file: Path) -> Any:
    """Read dictionaries, numbers, text and dense tensors that `torch.save` wrote.

    Raises:
        ValueError: The file is damaged, holds anything else, or its tensors are larger than the file.
    """
    try:
        _check_archive(file)
        found = torch.load(file, map_location="cpu", weights_only=True)
        if sum(tensor.numel() * tensor.element_size() for tensor in _tensors(found)) > file.stat().st_size:
            raise ValueError("tensors that are larger than the file")
    except DAMAGE as error:
        raise ValueError(f"{file.name}: {type(error).__name__}: {first_line(error)}") from error
    return found


class _SmallReads(io.BufferedReader):
    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_READ:
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size)


def _check_archive(file: Path) -> None:
    """Raise unless the records are stored as they are and undamaged, and the pickle makes tensors alone."""
    size = file.stat().st_size
    with _SmallReads(io.FileIO(file)) as stream, zipfile.ZipFile(stream) as archive:
        stream.seek(-22, io.SEEK_END)
        if stream.read(4) != END_OF_ARCHIVE:  # so that there is no other directory, which torch.load might read
            raise ValueError("an archive that does not end with its directory")
        records = archive.infolist()
        is_stored = all(
            one.compress_type == zipfile.ZIP_STORED and one.compress_size == one.file_size for one in records
        )
        if not is_stored or sum(one.file_size for one in records) > size:
            raise ValueError("records that are compressed or overlap")
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} differs from its checksum")
        pickles = [one for one in records if one.filename.endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].file_size > MAX_PICKLE:
            raise ValueError(f"{len(pickles)} pickles, or one of over {MAX_PICKLE} bytes")
        for operation, argument, _ in pickletools.genops(archive.read(pickles[0])):
            is_known = operation.name != "GLOBAL" or argument in NAMES
            if not is_known or operation.name in ("INST", "STACK_GLOBAL", "LONG4", "BYTEARRAY8"):
                raise ValueError(f"a pickle with {operation.name} {short(argument)}")


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in nested dictionaries, each as often as it stands there."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
