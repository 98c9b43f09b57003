"""What ends or interrupts at awkward moments: a caller's criterion, a save between two files, threads that switch."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor

from transformers import StoppingCriteria

from tide_hf.common import files


class Stops(StoppingCriteria):
    """A stopping criterion of the caller's own, made of a function of the token ids."""

    def __init__(self, stops):
        self.stops = stops

    def __call__(self, input_ids, scores, **kwargs):
        return self.stops(input_ids)


def stop_at(number, monkeypatch, counts=lambda target: True):
    """Stop a save before the file of that number takes its place, of those that count; return those that did."""
    replace, replaced = os.replace, []

    def stop(source, target):
        if counts(target):
            if len(replaced) == number:
                raise KeyboardInterrupt
            replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", stop)
    return replaced


def in_three_threads(use):
    """Call `use` with 3, 5 and 7 in threads that switch as often as they can."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(3) as threads:
            assert list(threads.map(use, (3, 5, 7))) == [None] * 3
    finally:
        sys.setswitchinterval(interval)
