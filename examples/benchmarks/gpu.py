"""All that needs a GPU, in one run of under ten minutes: `python -m examples.benchmarks.gpu OUTPUT`.

Correctness comes first, then launches, then times. Each step is a process of its own with a time limit, since one
illegal access would end all that follows it in a process. A step that fails or is cut off leaves what it has found; the
rest goes on. OUTPUT gets each step's log and results, `summary.json`, written after every step, and
`everything.tar.gz`. On a machine without a GPU, `--rehearse` runs every step on small shapes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from tide_hf.hub.provenance import commit

from .common import FOLDER, write_record
from .gpu_lines import DEPTHS
from .gpu_speed import LLAMA

ROOT = FOLDER.parent.parent
TAIL = 2000  # characters of a step's log in the summary
GRACE = 2  # seconds to print a stack
OURS = ("eager generate$", "our plain decoding$", "our scripted")
FAMILIES = "llama or gemma2 or gpt2 or falcon or mistral or qwen3_moe"
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # or each request is tried again for seconds
    "TORCHINDUCTOR_COMPILE_THREADS": "4",
    "PYTHONFAULTHANDLER": "1",  # prints the stack of a process that is cut off
    "PYTHONPATH": str(ROOT),
}


@dataclass(frozen=True)
class Step:
    """One process: its name, its time limit, and its arguments after `python -m`. `{output}` stands for the folder."""

    name: str
    seconds: int
    command: Sequence[str]


def pytest_step(name: str, seconds: int, *arguments: str) -> Step:
    """A step that runs tests, apart from the project's own options, which are for other versions of the packages."""
    plain = ("-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=", "-m", "not slow")
    return Step(name, seconds, ("pytest", *plain, *arguments))


def steps(rehearse: bool) -> list[Step]:
    """What runs, in this order: what later steps build on, and what is most worth knowing, first."""
    here = "examples.benchmarks"
    small = ("--rehearse",) if rehearse else ()
    speed = (f"{here}.gpu_speed", "--models", LLAMA, *(("--tokens", "6", "--prompt", "8", *small) if rehearse else ()))
    depths = [f"at {depth:.0%} depth$" for depth in DEPTHS]
    long = () if rehearse else ("--prompt", "4096")
    wanted = "captured_steps or capture_that_fails or launch or draft_head or draws or slots"
    kernels = "hub_kernels/tide-kernels/tests"
    workers = ("-n", "0") if rehearse else ("-n", "6")
    return [
        Step("facts", 30, (f"{here}.gpu_probe", "facts", "--output", "{output}/facts.json", *small)),
        Step("smoke", 90, (f"{here}.gpu_probe", "smoke", "--output", "{output}/smoke.json", *small)),
        pytest_step("tests", 110, *workers, "tests/behaviour/test_gpu.py", "-k", f"({FAMILIES}) or ({wanted})"),
        pytest_step("kernels", 70, *workers, kernels if not rehearse else f"{kernels}/test_kernel_registration.py"),
        Step("attention", 40, (f"{here}.gpu_probe", "attention", "--output", "{output}/attention.json", *small)),
        Step(
            "speed",
            200,
            (*speed, "--lines", *OURS, "replays", "^(eager|our plain).*batch 8$", "--output", "{output}/speed.json"),
        ),
        Step("int8", 80, (*speed, "--lines", *OURS, "--quantize", "int8", "--output", "{output}/int8.json")),
        Step("long", 80, (*speed, *long, "--lines", *OURS, "--output", "{output}/long.json")),
        Step("exits", 60, (*speed, "--lines", OURS[0], *depths, "never exit", "--output", "{output}/exits.json")),
        Step("static-cache", 100, (*speed, "--lines", "static-cache generate", "--output", "{output}/static.json")),
    ]


def run(step: Step, output: Path, seconds: float) -> dict[str, Any]:
    """Run a step for at most `seconds`; its log goes to `output`. Returns its exit status and the end of its log."""
    command = [sys.executable, "-m", *(part.replace("{output}", str(output)) for part in step.command)]
    start, log = perf_counter(), output / f"{step.name}.log"
    with log.open("w") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ENVIRONMENT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status: int | str = process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGABRT)  # its log then tells what it was at
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
            with contextlib.suppress(ProcessLookupError):  # there are none
                os.killpg(process.pid, signal.SIGKILL)  # with the processes that it has started
            process.wait()
            status = f"cut off after {seconds:.0f} s"
    return {"status": status, "seconds": perf_counter() - start, "log": log.read_text(errors="replace")[-TAIL:]}


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line, and run the steps; return the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, metavar="OUTPUT", help="folder for results and logs")
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--seconds", type=float, default=530, help="limit of the whole run (default: %(default)s)")
    names = [step.name for step in steps(rehearse=False)]
    parser.add_argument("--steps", nargs="+", choices=names, help="only these, say those that failed before")
    parser.add_argument("--rehearse", action="store_true", help="small shapes, for a machine without a GPU")
    options = parser.parse_args(arguments)
    start, output = perf_counter(), options.output.absolute()
    output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"commit": options.commit or commit(), "steps": {}}
    console = Console(stderr=True)
    chosen = [step for step in steps(options.rehearse) if options.steps is None or step.name in options.steps]
    for step in chosen:
        left = options.seconds - (perf_counter() - start)
        found = run(step, output, min(step.seconds, left)) if left > 0 else {"status": "no time left"}
        summary["steps"][step.name] = found
        summary["seconds"] = perf_counter() - start
        write_record(summary, output / "summary.json")
        console.print(f"{summary['seconds']:6.1f} s  {step.name}: {found['status']}", highlight=False)
    with tarfile.open(output / "everything.tar.gz", "w:gz") as tar:
        for file in sorted(output.glob("*.json")) + sorted(output.glob("*.log")):
            tar.add(file, file.name)
    return sum(found["status"] != 0 for found in summary["steps"].values())


if __name__ == "__main__":
    sys.exit(main())
