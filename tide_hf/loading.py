"""Load a base model, one at a time; find the routers that come with this library."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import constants
from transformers import AutoModelForCausalLM

# While a model loads, transformers replaces `PreTrainedModel.tie_weights` and puts back what it found. Two loads that
# overlap put back each other's replacement: from then on no model in the process has its head tied to its embeddings.
# Where `name` is a repository of routers, the base model that they name is loaded within: hence the RLock.
_one_at_a_time = threading.RLock()


def load_base_model(name: str | os.PathLike[str], **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(name, **kwargs)`, safe to call from several threads at once."""
    if kwargs.get("local_files_only"):  # transformers looks for an adapter without it
        kwargs["adapter_kwargs"] = {"local_files_only": True} | (kwargs.get("adapter_kwargs") or {})
    with _one_at_a_time:
        return AutoModelForCausalLM.from_pretrained(name, **kwargs)


def cache_folder() -> Path:
    """Where this library keeps what it makes: converted models, measurements."""
    return Path(os.environ.get("TIDE_HF_HOME") or Path(constants.HF_HOME) / "tide_hf").expanduser()


def shipped_routers(model: str) -> str | None:
    """The folder of routers for `model` that comes with this library, in the source tree or installed, if any."""
    package = Path(__file__).parent
    for cards in (package.parent / "model_cards", package / "model_cards"):
        folder = cards / model.replace("/", "--")
        if (folder / "config.json").is_file():
            return str(folder)
    return None
