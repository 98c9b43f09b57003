"""Times measured on this machine, kept on disk, since measuring takes as long as a short answer."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

from .files import cache_folder, parse_json, write_atomically
from .version import __version__

KEPT_DAYS = 30  # for a cooler, a driver or a kernel update may change what is the fastest
FILE = "measurements.json"


def measured(name: str, count: int, measure: Callable[[], list[float]]) -> list[float]:
    """The `count` positive numbers that `measure()` returns, or returned to an earlier process under the same name.

    They hold for this CPU, PyTorch, version of the library and number of threads. None is kept while the machine is
    busy, which distorts them, or if the file cannot be written.
    """
    path, key = cache_folder() / FILE, f"{name}, {torch.get_num_threads()} threads"
    kept = _read(path).get(_machine(), {}).get(key)
    if _is_valid(kept, count):
        return list(kept["found"])
    found = measure()
    if load_average() <= (os.cpu_count() or 1):
        content = _read(path)  # again, since other processes may have written
        content[_machine()] = content.get(_machine(), {}) | {key: {"found": found, "time": time.time()}}
        with suppress(OSError):
            path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)  # compiled code is kept in it, too
            write_atomically({path: json.dumps(content, indent=1).encode()})
    return found


def load_average() -> float:
    """The load average of the last minute; 0 where the system has none, as on Windows."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0


def cpu_name(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name."""
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _read(path: Path) -> dict[str, Any]:
    """The file's content by machine; empty if it cannot be read."""
    with suppress(OSError, ValueError):
        content = parse_json(path.read_bytes())
        if isinstance(content, dict) and all(isinstance(known, dict) for known in content.values()):
            return content
    return {}


def _is_valid(kept: Any, count: int) -> bool:
    """Whether an entry is well-formed and recent; it may have been written by anything."""
    if not isinstance(kept, dict) or not isinstance(kept.get("time"), float):
        return False
    found = kept.get("found")
    if not isinstance(found, list) or len(found) != count:
        return False
    numbers = all(isinstance(number, float) and number > 0 for number in found)
    return numbers and 0 <= time.time() - kept["time"] < KEPT_DAYS * 86_400


@cache
def _machine() -> str:
    """What results depend on: home folders may be shared by machines."""
    versions = f"tide-hf {__version__}, torch {torch.__version__}"
    return f"{cpu_name()}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {versions}"
