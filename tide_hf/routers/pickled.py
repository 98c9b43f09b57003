"""A reader of `torch.save` files that strangers made.

`torch.load` verifies no checksum, inflates compressed records, and allocates whatever a pickle asks for, also with
`weights_only=True`. Here the operations of a pickle are interpreted one by one, and all tensors together may be no
larger than the file.
"""

from __future__ import annotations

import io
import math
import pickletools
import struct
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..common.errors import first_line, short

MAX_PICKLE = 2**17  # bytes; it takes about 250 for each tensor
MAX_READ = 2**20  # bytes at a time, so that the directory of an archive cannot be larger
MAX_DIMENSIONS = 8
DTYPES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch BFloat16Storage": torch.bfloat16,
    "torch HalfStorage": torch.float16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch BoolStorage": torch.bool,
}
DICTIONARY, TENSOR, PARAMETER = (
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
)
GLOBALS = (*DTYPES, DICTIONARY, TENSOR, PARAMETER)
# Operations of a pickle: those that push their argument, and by how many entries those take that make a tuple of them.
TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
PUSHED = ("BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "NONE", "NEWTRUE", "NEWFALSE")
WITHOUT_EFFECT = ("PROTO", "STOP", "BINPERSID")  # the description of a storage stands for the storage
# What a damaged file can raise in this module.
DAMAGE: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, EOFError, LookupError, OSError, RuntimeError)
DAMAGE += (TypeError, ValueError, struct.error, zipfile.BadZipFile)


def read_pickled(file: Path) -> Any:
    """Read dictionaries, numbers, text and dense tensors that `torch.save` wrote.

    Raises:
        ValueError: The file is damaged, holds anything else, or its tensors are larger than the file.
    """
    try:
        with _SmallReads(io.FileIO(file)) as stream, zipfile.ZipFile(stream) as archive:
            return _Reader(archive, file.stat().st_size).read()
    except DAMAGE as error:
        raise ValueError(f"{file.name}: {type(error).__name__}: {first_line(error)}") from error


class _SmallReads(io.BufferedReader):
    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > MAX_READ:
            raise ValueError(f"a directory of {size} bytes")
        return super().read(size)


class _Reader:
    """Reads one archive. Only text and numbers are hashed or printed: a tuple may hold another thousands of times."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        self.archive, self.unclaimed = archive, size
        records = archive.infolist()
        is_stored = all(
            one.compress_type == zipfile.ZIP_STORED and one.compress_size == one.file_size for one in records
        )
        if not is_stored or sum(one.file_size for one in records) > size:
            raise ValueError("records that are compressed or overlap")
        self.storages: dict[str, Tensor] = {}  # by name
        self.stack: list[Any] = []  # as the pickle's own machine has it
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def read(self) -> Any:
        """The content of the pickle."""
        names = [name for name in self.archive.namelist() if name.endswith("/data.pkl")]
        if len(names) != 1 or self.archive.getinfo(names[0]).file_size > MAX_PICKLE:
            raise ValueError(f"{len(names)} pickles, or one of over {MAX_PICKLE} bytes")
        self.folder = names[0].removesuffix(".pkl")
        for operation, argument, _ in pickletools.genops(bytes(self._record(names[0]))):
            self._run(operation.name, argument)
        return self.stack.pop()

    def _run(self, name: str, argument: Any) -> None:
        """Run an operation of the pickle."""
        if name in ("BINPUT", "LONG_BINPUT"):
            self.memo[argument] = self.stack[-1]
        elif name == "MARK":
            self.marks.append(len(self.stack))
        elif name in ("SETITEM", "SETITEMS"):
            items = self._from(len(self.stack) - 2 if name == "SETITEM" else self.marks.pop())
            self._set(self.stack[-1], items)
        elif name == "BUILD":  # would set attributes of the dictionary
            self.stack.pop()
        elif name not in WITHOUT_EFFECT:
            self.stack.append(self._made(name, argument))

    def _made(self, name: str, argument: Any) -> Any:
        """What an operation pushes on the stack."""
        if name in PUSHED or (name == "GLOBAL" and argument in GLOBALS):
            return argument
        if name in ("BINGET", "LONG_BINGET"):
            return self.memo[argument]
        if name == "EMPTY_DICT":
            return {}
        if name in TUPLES or name == "TUPLE":
            return self._from(len(self.stack) - TUPLES[name] if name in TUPLES else self.marks.pop())
        if name == "REDUCE":
            arguments, function = self.stack.pop(), self.stack.pop()
            return self._call(function, arguments)
        raise ValueError(f"a pickle with {name} {short(argument)}")

    def _from(self, start: int) -> tuple[Any, ...]:
        """Take what the stack has from a position on."""
        if not 0 <= start <= len(self.stack):
            raise ValueError("a pickle that takes more than it has")
        taken = tuple(self.stack[start:])
        del self.stack[start:]
        return taken

    def _set(self, values: Any, items: tuple[Any, ...]) -> None:
        if type(values) is not dict or not all(isinstance(key, (str, int)) for key in items[::2]):
            raise ValueError("a pickle with other keys than text and numbers")
        values.update(zip(items[::2], items[1::2], strict=True))

    def _call(self, function: Any, arguments: Any) -> Any:
        if function == DICTIONARY:
            return {}
        if function == PARAMETER:
            return arguments[0]
        if function == TENSOR:
            return self._tensor(*arguments[:4])
        raise ValueError("a pickle with other calls than those that make tensors")

    def _tensor(self, storage: Any, offset: Any, size: Any, stride: Any) -> Tensor:
        _, kind, key, *_ = storage
        is_text = isinstance(kind, str) and isinstance(key, str)
        if not (is_text and len(size) <= MAX_DIMENSIONS and all(type(one) is int for one in (offset, *size, *stride))):
            raise ValueError("a tensor without a storage or a shape")
        dtype = DTYPES[kind]
        self.unclaimed -= math.prod(size) * dtype.itemsize
        if self.unclaimed < 0:
            raise ValueError("tensors that are larger than the file")
        if key not in self.storages:
            content = self._record(f"{self.folder}/{key}")
            self.storages[key] = (
                torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
            )
        return self.storages[key].view(dtype).as_strided(size, stride, offset).contiguous()

    def _record(self, name: str) -> bytearray:
        """The content of a record, whose checksum is verified."""
        content = bytearray()
        with self.archive.open(name) as stream:
            while part := stream.read(MAX_READ):
                content += part
        return content
