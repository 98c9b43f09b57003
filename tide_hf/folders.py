"""Where this library keeps what it makes."""

from __future__ import annotations

import os
from pathlib import Path

from huggingface_hub import constants


def cache_folder() -> Path:
    """The folder of converted models, measurements and kernels."""
    return Path(os.environ.get("TIDE_HF_HOME") or Path(constants.HF_HOME) / "tide_hf").expanduser()
