"""Devices for tests without an accelerator; see pretend_device.cpp. Importing this module registers them with PyTorch.

They become the accelerator of the whole process, so tests that use them run in a process of their own.
"""

from __future__ import annotations

import ctypes
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from families import tiny_model
from recorded import Recorder
from torch._inductor.codecache import CppCodeCache

NAME = "pretend"

_library = CppCodeCache.load(Path(__file__).with_suffix(".cpp").read_text(), device_type="cpu")
_COUNTERS = (_library.times_waited, _library.times_uploaded, _library.bytes_uploaded, _library.times_launched)
for _counter in _COUNTERS:
    _counter.restype = ctypes.c_int64


class Counts(NamedTuple):
    """What the host has asked of the pretended devices."""

    waits: int  # reads of values from a tensor
    uploads: int  # copies of a tensor to a device
    uploaded_bytes: int
    launches: int  # operations on a device, other than views

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(one - before for one, before in zip(self, other, strict=True)))


def counts() -> Counts:
    """What the host has asked so far."""
    return Counts(*(counter() for counter in _COUNTERS))


class Passes:
    """What the host asked in the model's passes, and in the replays of steps."""

    def __init__(self):
        self.asked = Counts(0, 0, 0, 0)

    def run(self, function, *args, **kwargs):
        before = counts()
        found = function(*args, **kwargs)
        self.asked = Counts(*map(sum, zip(self.asked, counts() - before, strict=True)))
        return found

    def watch(self, model):
        forward = model.forward
        model.forward = wraps(forward)(partial(self.run, forward))

    def replay_of(self, *args):
        replay = self.run(Recorder(), *args)
        replay.run = partial(self.run, replay.run)
        return replay


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


def there(batch, device=NAME):
    """A batch on a device."""
    return {name: value.to(device) for name, value in batch.items()}


def two(family, **overrides):
    """The same model twice: on the CPU, and on a pretended device."""
    return tiny_model(family, **overrides), tiny_model(family, **overrides).to(NAME)


def answer(model, batch, **options):
    """The sequences of a call, on the CPU, with random numbers from the start."""
    torch.manual_seed(0)
    found = model.generate(**batch, **options)
    assert found.device == batch["input_ids"].device
    return found.cpu()
