"""Interruptions at awkward moments: a save that stops between two files, threads that switch all the time."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from tide_hf.common import files


def stop_at(number, monkeypatch):
    """Stop a save before the file of that number takes its place."""
    replace, replaced = os.replace, []

    def stop(source, target):
        if len(replaced) == number:
            raise KeyboardInterrupt
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", stop)


def in_three_threads(use):
    """Call `use` with 3, 5 and 7 in threads that switch as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(use, (3, 5, 7))) == [None] * 3
    finally:
        sys.setswitchinterval(interval)
