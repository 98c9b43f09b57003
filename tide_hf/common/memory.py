"""How much memory this process may still take, and copies that are made only where memory holds them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import psutil

# Where a version of cgroups is mounted, its files for limit and usage, and its entry for the page cache of a whole
# branch that the kernel reclaims before it refuses memory.
CGROUPS_V1 = "sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
CGROUPS_V2 = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
RESERVED = 256 * 2**20  # bytes that copies leave for what passes allocate

Copy = TypeVar("Copy")
logger = logging.getLogger(__name__)


def free_host_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take: the least that machine, container and process limits leave.

    A container or a batch system limits memory below what the machine has. `root` is where /proc and /sys are.
    """
    process: Any = psutil.Process()
    used, left = process.memory_info(), [psutil.virtual_memory().available, *_left_in_cgroups(root)]
    if psutil.LINUX:
        for limit, taken in ((psutil.RLIMIT_AS, used.vms), (psutil.RLIMIT_DATA, used.data)):
            most, _ = process.rlimit(limit)
            left += [most - taken] if most != psutil.RLIM_INFINITY else []
    return max(0, int(min(left)))


def copy_if_it_fits(copy: Callable[[], Copy], num_bytes: int) -> Copy | None:
    """Return `copy()`, which takes `num_bytes`, and as much again for a while; `None` if memory does not hold it.

    That is logged once. Memory that no copy may take is left for passes, which would fail without. With 0 bytes, for
    what hardly takes any, nothing is asked beforehand.
    """
    if not num_bytes or 2 * num_bytes + RESERVED <= free_host_memory():
        try:
            return copy()
        except (RuntimeError, MemoryError) as error:  # RuntimeError: PyTorch's allocator
            if isinstance(error, RuntimeError) and "DefaultCPUAllocator: " not in str(error):
                raise
    _log_no_memory()
    return None


def _left_in_cgroups(root: Path) -> Iterator[int]:
    """Bytes that each limited cgroup leaves, among those of this process and all above them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # another system than Linux
        return
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        mount, limit, usage, reclaimable = CGROUPS_V1 if controllers else CGROUPS_V2
        names = PurePosixPath(path).parts[1:]
        for depth in range(len(names) + 1):  # a container may see its own folder only as the mount itself
            folder = root.joinpath(mount, *names[:depth])
            try:
                most, taken = int((folder / limit).read_text()), int((folder / usage).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                yield most - taken + int(stat[reclaimable])
            except (OSError, ValueError, KeyError):  # no such folder or controller, or "max", which is no limit
                continue


@cache
def _log_no_memory() -> None:
    logger.warning(
        "no memory is left for copies of weights, so some are read as the model stores them: the same output, but "
        "slower. Raise the limit of the container or the process, or pass pack_weights=False, which makes no copies."
    )
