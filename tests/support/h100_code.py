"""Code that Inductor would generate for steps on an H100, without a GPU: for the pretended device, in its place.

Importing this module makes Inductor take the pretended device for an H100 with Triton, in the whole process.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._inductor.runtime.triton_helpers
import torch._inductor.scheduler
import torch._inductor.utils
import torch.utils._triton
import triton.runtime
from pretend_device import NAME
from torch import Tensor, fx
from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
from torch._inductor.codegen.cuda.device_op_overrides import CUDADeviceOpOverrides
from torch._inductor.codegen.triton import TritonScheduling
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._inductor.exc import InductorError
from torch._inductor.graph import GraphLowering
from triton.backends.compiler import GPUTarget

from tide_hf.engines.steps.graphs import compile_graph

PROPERTIES = SimpleNamespace(
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132, "warp_size": 32},
    **{"max_threads_per_multi_processor": 2048, "max_threads_per_block": 1024, "regs_per_multiprocessor": 65536},
    shared_memory_per_block_optin=232448,
)
TRITON_KERNEL = re.compile(r"^\s+triton_\w+\.run\(", re.MULTILINE)
PRODUCT = re.compile(r"\b(?:extern_kernels|torch\.ops\.aten)\.(?:mm|addmm|bmm)\b\S*\(")
BUFFER = re.compile(r" = empty_strided\(\(([\d, ]*)\)")
LAYER = "torch.ops.tide_hf.layer.default("
# It complains that it has no heuristics for this device.
logging.getLogger("torch._inductor.template_heuristics.registry").disabled = True


class H100(DeviceInterface):
    """What Inductor asks of a device."""

    class Worker:
        """The same, in the processes that compile."""

        get_device_properties = staticmethod(lambda _device=None: PROPERTIES)

    current_device = staticmethod(lambda: 0)
    get_device_properties = staticmethod(lambda _device=None: PROPERTIES)
    get_compute_capability = staticmethod(lambda _device=None: 90)
    is_available = is_triton_capable = staticmethod(lambda _device=None: True)
    is_bf16_supported = staticmethod(lambda including_emulation=False: True)


for device in (NAME, f"{NAME}:0"):
    register_interface_for_device(device, H100)
register_backend_for_device(NAME, TritonScheduling, PythonWrapperCodegen)
register_device_op_overrides(NAME, CUDADeviceOpOverrides())
torch._inductor.utils.GPU_TYPES[:] = [NAME]
torch._inductor.scheduler.has_triton = lambda *_: True
torch._inductor.runtime.triton_helpers.set_driver_to_gpu = lambda: None
torch.utils._triton.triton_hash_with_backend = lambda: "h100"
triton.runtime.driver.set_active(SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))


class GeneratedError(Exception):
    """Ends compilation once code is generated, since there is nothing to run it on."""


@dataclass(frozen=True)
class Code:
    """Generated code, and what it launches."""

    text: str

    @property
    def is_layer(self) -> bool:
        """Whether this is the code of a decoder layer, and not of what comes before or after the layers."""
        return LAYER not in self.text and self.products > 1

    @property
    def kernels(self) -> int:
        """Number of Triton kernels."""
        return len(TRITON_KERNEL.findall(self.text))

    @property
    def products(self) -> int:
        """Number of matrix products, by PyTorch's libraries."""
        return len(PRODUCT.findall(self.text))

    @property
    def buffers(self) -> list[int]:
        """Numbers of values of the buffers that results are written to."""
        sizes = [found.replace(",", " ").split() for found in BUFFER.findall(self.text)]
        return [math.prod(map(int, size)) for size in sizes]


class CodeForH100:
    """Stands in for `graphs.compile_graph`: keeps the code in `found`, and returns the traced graph."""

    def __init__(self) -> None:
        self.found: list[Code] = []

    def __call__(self, graph: fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        """Generate the code of a graph."""

        def keep(lowering: GraphLowering) -> None:
            self.found.append(Code(lowering.codegen()[0].value))
            raise GeneratedError

        with patch.object(GraphLowering, "compile_to_module", keep):
            try:
                compile_graph(graph, inputs)
            except InductorError as error:
                if not isinstance(error.inner_exception, GeneratedError):
                    raise
        return graph
