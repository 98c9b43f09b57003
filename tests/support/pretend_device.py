"""Devices for tests where there is no accelerator; see pretend_device.cpp. Importing this makes them known to PyTorch.

They change which accelerator the whole process has, so what uses them runs in a process of its own.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import ModuleType

import torch
from torch._inductor.codecache import CppCodeCache

NAME = "pretend"

_library = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text(), device_type="cpu")
_library.times_waited.restype = ctypes.c_int64


def times_waited() -> int:
    """How often the host has asked for what a tensor of such a device holds."""
    return _library.times_waited()


def _module() -> ModuleType:
    """What `torch.cuda` is to a GPU, as far as it is asked for."""
    module = ModuleType(f"torch.{NAME}")
    module.is_available = module.is_initialized = lambda: True
    module.device_count = lambda: 2
    module.current_device = lambda: 0
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()  # the CPU draws
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


torch.utils.rename_privateuse1_backend(NAME)
_library.start()
torch._register_device_module(NAME, _module())
torch.utils.generate_methods_for_privateuse1_backend()
