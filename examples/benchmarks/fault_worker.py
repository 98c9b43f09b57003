"""What the suite `faults` runs in a process of its own, to kill it: `python -m examples.benchmarks.fault_worker`."""

from __future__ import annotations

import argparse
import json
import resource
import signal
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import torch

from tide_hf import TIDERouters, calibrate
from tide_hf.demo_model import load_demo_model

READY = "ready"  # said when the work begins, so that a kill falls into it and not into imports


def do_calibrate(model: str, texts: str, output_dir: str) -> None:
    """Calibrate on a file of texts, going on where an earlier process was."""
    base, tokenizer = load_demo_model(model, dtype="float32")
    print(READY, flush=True)
    calibrate(base, tokenizer, json.loads(Path(texts).read_text()), output_dir=output_dir, progress=False)


def do_save(first: str, second: str, folder: str, times: str) -> None:
    """Save two different routers over each other; 0 times is until killed."""
    both = [TIDERouters.from_pretrained(one) for one in (first, second)]
    print(READY, flush=True)
    for number, routers in enumerate(cycle(both), start=1):
        routers.save_pretrained(folder)
        if number == int(times):
            return


def do_push(first: str, second: str, repo_id: str, token: str) -> None:
    """Push two different routers over each other until killed."""
    both = [TIDERouters.from_pretrained(one) for one in (first, second)]
    print(READY, flush=True)
    for routers in cycle(both):
        routers.push_to_hub(repo_id, token=token)


WORK = {"calibrate": do_calibrate, "save": do_save, "push": do_push}


def main(argv: Sequence[str] | None = None) -> int:
    """Do one kind of work; say in a line what it failed with."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("work", choices=WORK)
    parser.add_argument("arguments", nargs="*")
    parser.add_argument("--file-limit", type=int, help="bytes that a file may have, as if the disk were full behind it")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.file_limit is not None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, options.file_limit))
    try:
        WORK[options.work](*options.arguments)
    except (OSError, ValueError, RuntimeError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
