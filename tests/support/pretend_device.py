"""Devices for tests without an accelerator; see pretend_device.cpp. Importing this module registers them with PyTorch.

They become the accelerator of the whole process, so tests that use them run in a process of their own.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch
from torch._inductor.codecache import CppCodeCache

NAME = "pretend"

_library = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text(), device_type="cpu")
for _function in (_library.times_waited, _library.times_uploaded, _library.times_launched):
    _function.restype = ctypes.c_int64


@dataclass(frozen=True)
class Counts:
    """What the host has asked of the pretended devices."""

    waits: int  # reads of values from a tensor
    uploads: int  # copies of a tensor to a device
    launches: int  # operations on a device, other than views

    def __sub__(self, other: Counts) -> Counts:
        return Counts(self.waits - other.waits, self.uploads - other.uploads, self.launches - other.launches)


def counts() -> Counts:
    """What the host has asked so far."""
    return Counts(_library.times_waited(), _library.times_uploaded(), _library.times_launched())


def times_waited() -> int:
    """How often the host has read values from a tensor on a pretended device."""
    return counts().waits


def _module() -> ModuleType:
    """A device module such as `torch.cuda`, with only the functions that PyTorch calls."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # random numbers come from the CPU
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


torch.utils.rename_privateuse1_backend(NAME)
_library.start()
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()
