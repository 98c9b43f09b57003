"""Where faults are provoked: files, and work on them in processes that may be killed."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from time import sleep

import torch

from tide_hf import TIDERouters

from .bench import Bench, CannotRunError
from .common import FOLDER, read_prompts
from .fault_worker import READY
from .random_models import random_llama

ROOT = FOLDER.parent.parent


class Place:
    """Files that the faults work on: a small model, two different routers for it, texts.

    Args:
        bench: For its tokenizer and a folder.
    """

    def __init__(self, bench: Bench) -> None:
        self.folder = bench.work
        self.model = random_llama(4, 64, len(bench.tokenizer))
        self.tokenizer = bench.tokenizer
        self.model.save_pretrained(self.folder / "small")
        bench.tokenizer.save_pretrained(self.folder / "small")
        self.routers = []
        for number, threshold in enumerate((0.25, 0.75)):
            torch.manual_seed(number)
            routers = TIDERouters.for_model(self.model, exit_layers=[1, 2, 3], exit_threshold=threshold)
            for tensor in routers.parameters():
                torch.nn.init.normal_(tensor)
            routers.save_pretrained(self.folder / f"routers-{number}")
            self.routers.append(TIDERouters.from_pretrained(self.folder / f"routers-{number}"))
        texts = [text for found in read_prompts().values() for text in found]
        (self.folder / "texts.json").write_text(json.dumps(texts), encoding="utf-8")

    def work(self, name: str, *arguments: object, environment: dict[str, str] | None = None) -> subprocess.Popen:
        """Start a worker, and wait until its work begins."""
        command = [sys.executable, "-m", "examples.benchmarks.fault_worker", name, *map(str, arguments)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = os.environ | {"PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"} | (environment or {})
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        process = subprocess.Popen(command, env=settings, **pipes)
        while process.poll() is None and process.stdout is not None and process.stdout.readline().strip() != READY:
            pass
        return process

    def calibrated(self) -> list[TIDERouters]:
        """Two different routers with the record of a calibration, which is what may be pushed; saved as well."""
        pair = []
        for number in range(2):
            routers = TIDERouters.from_pretrained(self.folder / "undisturbed")
            routers.config.base_model_name_or_path = "org/small"
            for tensor in routers.parameters():
                tensor.data.mul_(1 + number)
            routers.save_pretrained(self.folder / f"calibrated-{number}")
            pair.append(TIDERouters.from_pretrained(self.folder / f"calibrated-{number}"))
        return pair


def kill(process: subprocess.Popen, seconds: float) -> None:
    """Kill a worker so many seconds from now."""
    sleep(seconds)
    process.kill()
    process.communicate()


def end(process: subprocess.Popen) -> None:
    """Wait until a worker has done.

    Raises:
        CannotRunError: It failed.
    """
    _, said = process.communicate()
    if process.returncode != 0:
        raise CannotRunError(f"a worker failed: {said.strip().splitlines()[-1] if said.strip() else 'it said nothing'}")


def digest(folder: Path) -> str:
    """Names what a folder's weights are, byte for byte."""
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
