"""Compile the Triton kernels for GPUs that are not there: `python compile_for.py VARIANT CAPABILITY [DTYPE ...]`.

The ops are called on CPU tensors, and what they would launch is compiled instead. Prints JSON: for each launch its
kernel, dtype, and resources, as `cuobjdump` lists them, or why it cannot be compiled.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent))

import stage
from reference64 import norm_route_arguments

POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
ALIGNMENT = 16  # in bytes of pointers, and of integers as multiples; Triton makes use of it
CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
RESOURCES = re.compile(r"REG:(?P<registers>\d+) STACK:(?P<stack>\d+) SHARED:(?P<shared>\d+) LOCAL:(?P<local>\d+)")
AMPERE = 80  # the first compute capability on which halves are multiplied
SIZE, VOCAB_SIZE, RANK = 2048, 8192, 128
HEADS, SLOTS, HEAD_SIZE = 4, 256, 128


def main() -> None:
    """Parse the command line, compile, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variant", type=Path)
    parser.add_argument("capability", type=int, help="such as 90")
    parser.add_argument("dtypes", nargs="*", default=["float32", "float16", "bfloat16"])
    options = parser.parse_args()
    kernels = stage.load_variant(options.variant)
    # In place of what the tensors' own device, the CPU, would say.
    kernels.vocabulary.multiplies_halves = lambda states: options.capability >= AMPERE and states.dtype != torch.float32
    found = [
        {"kernel": kernel.fn.__name__, "dtype": name} | compiled(kernel, arguments, options.capability)
        for name in options.dtypes
        for kernel, arguments in launches(kernels, getattr(torch, name))
    ]
    print(json.dumps(found))


def launches(kernels: Any, dtype: torch.dtype) -> Iterator[tuple[JITFunction, dict[str, Any]]]:
    """The kernels that the ops launch for states of `dtype`, few and many rows, with their arguments by name."""
    found: list[tuple[JITFunction, dict[str, Any]]] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | constants))

    with patch.object(JITFunction, "run", record):
        for num_rows in (3, 1500):
            router = norm_route_arguments(dtype, num_rows, SIZE, RANK)
            for norm in ("rms", "layer"):
                kernels.norm_route(*router, eps=1e-5, norm=norm)
        kernels.draft_top1(torch.zeros(3, SIZE, dtype=dtype), torch.zeros(VOCAB_SIZE, SIZE, dtype=dtype))
        keys, values = torch.zeros(2, 1, HEADS, SLOTS, HEAD_SIZE, dtype=dtype)
        kernels.kv_compact(keys, values, torch.arange(SLOTS)[None])
    yield from found


def compiled(kernel: JITFunction, arguments: dict[str, Any], capability: int) -> dict[str, Any]:
    """Compile one launch as Triton would at its first run; return registers and bytes of memory, or `refused`."""
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        value = arguments[name]
        if kernel.params[i].is_constexpr or value is None or (isinstance(value, int) and value == 1):
            signature[name], constants[name] = "constexpr", value
            continue
        signature[name] = kind_of(value)
        if isinstance(value, Tensor) or (isinstance(value, int) and value % ALIGNMENT == 0):
            attributes[(i,)] = [["tt.divisibility", ALIGNMENT]]
    source, target = ASTSource(kernel, signature, constants, attributes), GPUTarget("cuda", capability, 32)
    try:
        built = triton.compile(source, target=target)
    except (RuntimeError, triton.TritonError) as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    return resources(built.asm["cubin"]) | {"asynchronous_copies": "cp.async" in built.asm["ptx"]}


def kind_of(value: Any) -> str:
    """Triton's name for the type of an argument."""
    if isinstance(value, Tensor):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def resources(cubin: bytes) -> dict[str, int]:
    """Registers of a thread, and bytes of its stack and local memory and of a block's shared memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(CUOBJDUMP), "-res-usage", file.name]
        listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = RESOURCES.search(listed)
    if found is None:
        raise ValueError(f"cuobjdump lists no resources: {listed}")
    return {name: int(number) for name, number in found.groupdict().items()}


if __name__ == "__main__":
    main()
