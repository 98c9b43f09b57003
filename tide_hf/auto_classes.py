"""Classes registered with transformers' auto classes: a repository of routers loads as its base model with TIDE.

The routers' config names the base model. This library's model classes are imported only when a model is loaded.
"""

from __future__ import annotations

import os
from typing import Any

import transformers  # not `from transformers import`, since its auto classes may be half loaded at this moment
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedConfig

from .common.errors import ConfigurationError
from .routers.config import FOR_BOTH, TIDEConfig, bad_file, check_exit_threshold, holds_routers
from .routers.files import SPECULATORS

# Arguments of `from_pretrained` that concern the routers' repository only, or that transformers' auto class adds.
OWN = ("revision", "subfolder", "code_revision", "config", "_commit_hash", "_from_auto")


class ServedConfig(TIDEConfig):
    """Registered with `AutoConfig` for the `model_type` of routers whose draft head vLLM loads; reads `TIDEConfig`."""

    model_type = SPECULATORS

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """`TIDEConfig.from_dict`, which refuses the config of a draft head alone."""
        return TIDEConfig.from_dict(config_dict, **kwargs)


class TIDEAutoModel:
    """Registered with `AutoModelForCausalLM` for the `model_type` of routers."""

    config_class = TIDEConfig

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], *, config: TIDEConfig, **kwargs: Any) -> Any:
        """Load the base model that the routers at `name_or_path` were made for, and attach them.

        `config` is the routers' config with the caller's changes. Other arguments and errors are those of
        `TIDEModelForCausalLM.from_pretrained`. `revision` applies to the routers, `config.base_model_revision` to the
        base model; `token`, `cache_dir`, `local_files_only` and similar options apply to both.

        Raises:
            ConfigurationError: The config names no base model that can be loaded.
            RoutersFileError: The repository also has an adapter, which transformers would load into the base model.
        """
        from .model import TIDEModelForCausalLM  # noqa: PLC0415 (torch takes seconds, and configs do not need it)
        from .routers.routers import TIDERouters  # noqa: PLC0415

        shared = _chosen(kwargs, FOR_BOTH)
        base = base_of(name_or_path, config, **shared)
        options = {name: value for name, value in kwargs.items() if name not in OWN}
        check_exit_threshold(config.exit_threshold)  # the caller's changes have not been checked
        if options.get("adapter_kwargs"):
            if options["adapter_kwargs"].get("_adapter_model_path") == name_or_path:
                raise bad_file(name_or_path, "an adapter_config.json beside them")
            options["adapter_kwargs"] = {**options["adapter_kwargs"], "revision": config.base_model_revision}
        # In float32, since the config's dtype is that requested for the base model; `attach` casts the routers.
        where = shared | _chosen(kwargs, ("revision", "subfolder"))
        routers = TIDERouters.from_pretrained(name_or_path, config=config, dtype="float32", **where)
        return TIDEModelForCausalLM.from_pretrained(base, routers, revision=config.base_model_revision, **options)


class TIDEAutoTokenizer:
    """Registered with `AutoTokenizer` for the `model_type` of routers."""

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], *inputs: Any, **kwargs: Any) -> Any:
        """Load the tokenizer of the base model that the routers at `name_or_path` were made for.

        Arguments are those of `AutoTokenizer.from_pretrained`; `revision` and `subfolder` are the routers'.
        """
        shared = _chosen(kwargs, FOR_BOTH)
        config = TIDEConfig.from_pretrained(name_or_path, **shared, **_chosen(kwargs, ("revision", "subfolder")))
        options = {name: value for name, value in kwargs.items() if name not in OWN}
        base = base_of(name_or_path, config, **shared)
        return transformers.AutoTokenizer.from_pretrained(base, *inputs, revision=config.base_model_revision, **options)


def base_of(name_or_path: str | os.PathLike[str], config: TIDEConfig, **hub_kwargs: Any) -> str:
    """The base model that the config of the routers at `name_or_path` names.

    Raises [`ConfigurationError`] if it names no model, other routers, or a folder while the routers are on the Hub.
    """
    base = config.base_model_name_or_path
    if base is None:
        raise _no_base(name_or_path, "no base_model_name_or_path")
    if not os.path.isdir(name_or_path):
        try:
            validate_repo_id(base)
        except HFValidationError as error:
            raise _no_base(name_or_path, f"base_model_name_or_path={base!r}") from error
    found, _ = PreTrainedConfig.get_config_dict(base, revision=config.base_model_revision, **hub_kwargs)
    if holds_routers(found):
        raise _no_base(name_or_path, f"base_model_name_or_path={base!r}, which holds routers itself")
    return base


def _no_base(name_or_path: str | os.PathLike[str], got: str) -> ConfigurationError:
    return ConfigurationError(
        f"the routers at {name_or_path} do not say which model to load",
        got=got,
        expected="the name of a base model on the Hub (or a folder, for routers in a folder)",
        do="Name the base model yourself: TIDEModelForCausalLM.from_pretrained(base, routers=...).",
    )


# The keys and classes to register with each of transformers' auto classes.
REGISTERED: dict[str, dict[Any, type]] = {
    "AutoConfig": {TIDEConfig.model_type: TIDEConfig, ServedConfig.model_type: ServedConfig},
    "AutoModelForCausalLM": {TIDEConfig: TIDEAutoModel},
    "AutoTokenizer": {TIDEConfig: TIDEAutoTokenizer},
}


def _chosen(kwargs: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: kwargs[name] for name in names if kwargs.get(name) is not None}
