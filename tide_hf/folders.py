"""Where this library keeps what it makes, and how it writes it there."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants

UNFINISHED = ".unfinished"  # what files end in before they are whole


def cache_folder() -> Path:
    """The folder of converted models and kernels."""
    return Path(os.environ.get("TIDE_HF_HOME") or Path(constants.HF_HOME) / "tide_hf").expanduser()


def write_whole(file: Path, content: bytes) -> None:
    """Write a file that is there whole or not at all, for all who may read its folder, which is made if it has to be.

    Args:
        file: Where it goes; what is there is replaced.
        content: What it holds.

    Raises:
        OSError: The disk is full, or the folder takes no file.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_name(f"{file.name}.{os.getpid()}{UNFINISHED}")
    try:
        with unfinished.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # else a power cut could leave the name without the content
        os.replace(unfinished, file)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise
