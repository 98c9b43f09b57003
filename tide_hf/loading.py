"""Load a base model, one at a time; find out what the Hub has, and the routers that come with this library."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HTTPError, RepositoryNotFoundError
from huggingface_hub.utils import HFValidationError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from .errors import quoted
from .routers.configuration_tide import FOR_BOTH
from .routers.modeling_tide import TIDERouters
from .routers.router_files import routers_not_found

# Which of `from_pretrained`'s options tell how to find a config.
CONFIG_OPTIONS = (*FOR_BOTH, "gguf_file", "revision", "subfolder", "trust_remote_code")
REACH_TIMEOUT = 5.0  # seconds that the Hub has to answer

# While a model loads, transformers replaces `PreTrainedModel.tie_weights` and puts back what it found. Two loads that
# overlap put back each other's replacement: from then on no model in the process has its head tied to its embeddings.
# Where `name` is a repository of routers, the base model that they name is loaded within: hence the RLock.
_one_at_a_time = threading.RLock()


def load_base_model(name: str | os.PathLike[str], **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(name, **kwargs)`, safe to call from several threads at once.

    Models that also take images, and that this class does not know, come from `AutoModelForImageTextToText`.
    """
    if kwargs.get("local_files_only"):  # transformers looks for an adapter without it
        kwargs["adapter_kwargs"] = {"local_files_only": True} | (kwargs.get("adapter_kwargs") or {})
    with _one_at_a_time:
        try:
            return AutoModelForCausalLM.from_pretrained(name, **kwargs)
        except ValueError:
            if not _takes_images(name, kwargs):
                raise
        return AutoModelForImageTextToText.from_pretrained(name, **kwargs)


def _takes_images(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> bool:
    """Whether it is a model for images and text, and no causal language model besides; its config has been fetched."""
    config = kwargs.get("config")
    if config is None:
        options = {option: kwargs[option] for option in CONFIG_OPTIONS if option in kwargs}
        config = AutoConfig.from_pretrained(name, **options)
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def is_kept_only(name: str) -> bool:
    """Whether the Hub cannot be asked about a repository that was fetched from it earlier.

    Raises:
        HTTPError, OSError: It cannot be asked, and nothing was fetched; or it has no such repository.
        HFValidationError: It cannot have one of that name.
    """
    try:
        HfApi().model_info(name, timeout=REACH_TIMEOUT)  # one try, where from_pretrained would retry for half a minute
    except (HTTPError, OSError):
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            raise
        return True
    return False


def load_routers(name: str) -> TIDERouters:
    """Load routers; without a network, those that were fetched earlier, and at once.

    Raises:
        RoutersNotFoundError, RoutersFileError: There are none, or they cannot be read.
    """
    if Path(name).is_dir():
        return TIDERouters.from_pretrained(name)
    try:
        kept = is_kept_only(name)
    except (HTTPError, OSError, HFValidationError) as error:
        raise routers_not_found(name, why_not_found(error)) from error
    return TIDERouters.from_pretrained(name, local_files_only=kept)


def why_not_found(error: Exception) -> str:
    """What an error of `is_kept_only`, or of loading, says, in one line."""
    if isinstance(error, HFValidationError):
        return "no such folder, and no name that a repository could have"
    if type(error) is RepositoryNotFoundError:
        return "no such repository on the Hub, or a private one"
    return quoted(error)


def shipped_routers(model: str) -> str | None:
    """The folder of routers for `model` that comes with this library, in the source tree or installed, if any."""
    package = Path(__file__).parent
    for cards in (package.parent / "model_cards", package / "model_cards"):
        folder = cards / model.replace("/", "--")
        if (folder / "config.json").is_file():
            return str(folder)
    return None
