"""The learned parts: one router and one exit head per exit layer, in a small ``PreTrainedModel`` of their own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import CommitInfo
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..base_model.structure import find_structure
from ..base_model.unembed import hash_distance, unembed_hash
from ..base_model.wrappers import base_inside
from ..common.errors import BaseModelMismatchError, UnsupportedModelError, UnsupportedOptionError
from ..common.hub_access import hub_options
from .config import WHERE, TIDEConfig, bad_file, read_config
from .draft_head import DraftHead
from .draft_head_config import DraftHeadConfig
from .exit_points import ExitPoint
from .files import misfit, read_router_pt, read_weights, routers_not_found, translated_errors, write_routers

MAX_HASH_DISTANCE = 0.15  # 4-bit quantisation flips about 3% of the bits; another model's head differs in half


class TIDERouters(PreTrainedModel):
    """Routers and exit heads of one base model.

    The routers are indexed by exit layer: `routers[12].router`, `routers[12].head`.

    Attributes:
        draft_head: The draft head; `None` where there is none.
        draft_vocab: (draft_vocab_size,) int64 token ids of the draft vocabulary; `None`: all tokens.
    """

    draft_vocab: Tensor | None

    config_class = TIDEConfig
    base_model_prefix = "tide"
    main_input_name = "hidden_states"

    def __init__(self, config: TIDEConfig) -> None:
        super().__init__(config)
        self.exits = nn.ModuleDict({str(layer): ExitPoint(config) for layer in config.exit_layers or []})
        self.draft_head = None
        if config.draft_head is not None:
            self.draft_head = DraftHead(DraftHeadConfig(**config.draft_head), config.vocab_size)
        size = config.draft_vocab_size
        self.register_buffer("draft_vocab", torch.arange(size) if size is not None else None)
        self.post_init()

    @property
    def exit_layers(self) -> list[int]:
        """The exit layers, ascending."""
        return list(self.config.exit_layers)

    def __getitem__(self, exit_layer: int) -> ExitPoint:
        return self.exits[str(exit_layer)]  # type: ignore[return-value]

    def _init_weights(self, module: nn.Module) -> None:
        """Do nothing, since modules initialise themselves and loading refuses files that lack a tensor."""

    def place(self, device: torch.device, dtype: torch.dtype) -> TIDERouters:
        """Move and cast the routers for decoding with a base model on `device` in `dtype`; return self.

        Heads get the model's dtype, since the model's final norm reads their output; routers compute in float32.
        """
        self.to(device)
        for point in self.exits.values():
            point.float()
            point.head.to(dtype)
        if self.draft_head is not None:
            self.draft_head.to(dtype)
        return self.requires_grad_(False)

    @classmethod
    def for_model(cls, model: PreTrainedModel, **config: Any) -> TIDERouters:
        """Fresh routers for `model`, not yet calibrated.

        Args:
            model: The base model, or a `PeftModel` around it.
            **config: Fields of [`TIDEConfig`], such as `exit_layers` and `exit_strategy`.

        Returns:
            Routers on the CPU in float32, whose heads start as the identity.
        """
        return cls(config_for(base_inside(model), **config)).eval()

    @classmethod
    def from_router_pt(
        cls, path: str | os.PathLike[str], base_model: PreTrainedModel, exit_threshold: float = 0.85
    ) -> TIDERouters:
        """Read the `router.pt` of the published system (`tide-inference`).

        The file numbers layers from 0, so its router at layer i becomes the router of exit layer i + 1. Biases, which
        the file lacks, become zero. A router after the last layer has nothing to skip and is left out.

        Args:
            path: The file. Code inside it cannot run.
            base_model: The model that the routers were calibrated for.
            exit_threshold: Exit threshold; 0.85 is the published default.

        Returns:
            Routers with identity heads.

        Raises:
            RoutersFileError: The file is not a `router.pt`, holds code, or does not fit `base_model`.
        """
        structure = find_structure(base_model)
        bottleneck_dim, published = read_router_pt(path, structure.hidden_size, structure.num_layers)
        config = {"router_bottleneck_dim": bottleneck_dim, "exit_threshold": exit_threshold}
        routers = cls.for_model(base_model, exit_layers=sorted(published), **config)
        with torch.no_grad():
            for exit_layer, (down, up) in published.items():
                router = routers[exit_layer].router
                router.down.weight.copy_(down)
                router.down.bias.zero_()
                router.up.weight.copy_(up)
        return routers

    @classmethod
    def from_pretrained(cls, name_or_path: str | os.PathLike[str], **kwargs: Any) -> TIDERouters:
        """Load routers from a folder or a Hub repository; nothing is written except to the Hub's cache.

        Nothing is read but `config.json`, `model.safetensors` and, beside a draft head, the safetensors file in `tide/`
        that the config names.

        Args:
            name_or_path: Folder or repository.
            **kwargs: As in `PreTrainedModel.from_pretrained`: `revision`, `token`, `cache_dir`, `local_files_only`.

        Returns:
            The routers, in evaluation mode.

        Raises:
            RoutersNotFoundError: There is no `config.json` or no safetensors file, or the Hub cannot be reached.
            RoutersFileError: A file is damaged, or its tensors do not have the names and shapes of its config.
            ConfigurationError: The config has impossible values.
        """
        kwargs |= hub_options(name_or_path, kwargs, routers_not_found)
        where = {name: kwargs.pop(name) for name in WHERE if name in kwargs}
        changes = {name: kwargs.pop(name) for name in TIDEConfig.__annotations__ if name in kwargs}
        with translated_errors(name_or_path):
            config = kwargs.pop("config", None)
            if config is None:
                content, commit = read_config(name_or_path, **where)
                config = TIDEConfig.from_dict(content)
                where |= {"revision": commit} if commit else {}  # a push between the reads must not mix two commits
            config, tensors = read_weights(name_or_path, config, **where)
            if changes:
                config = TIDEConfig.from_dict(config.to_dict() | changes)
            with torch.device("meta"):
                wrong = misfit(tensors, cls(config).state_dict())
            if wrong:
                raise bad_file(name_or_path, f"tensors that do not fit its config ({wrong})")
            tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}  # see `no_offsets`
            # Without a name, transformers looks for no other files, such as an adapter_config.json, whose adapter it
            # would load into the routers.
            routers = super().from_pretrained(None, config=config, state_dict=tensors, **kwargs)
        routers.config.name_or_path = routers.name_or_path = str(name_or_path)
        for name, tokens in routers._token_ids().items():
            if not 0 <= int(tokens.min()) <= int(tokens.max()) < config.vocab_size:
                raise bad_file(name_or_path, f"a {name} with other than token ids")
        return routers.eval()

    def _token_ids(self) -> dict[str, Tensor]:
        """The token ids among the tensors, by the name of the tensor that holds them."""
        found = {} if self.draft_vocab is None else {"draft_vocab": self.draft_vocab}
        if self.draft_head is not None:
            found["d2t"] = self.draft_head.tokens
        return found

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, is_main_process: bool = True, **kwargs: Any
    ) -> None:
        """Write config and safetensors. Readers see either the old or the new routers, even if the process is killed.

        With a draft head, a reader that the save overtakes may find the old file in `tide/` gone, and gets a
        [`RoutersNotFoundError`]; it can read again.

        Where there is a draft head, vLLM loads it from the same folder or repository (see [`files.write_routers`]); it
        does not use the exit heads, routers and thresholds.

        Args:
            save_directory: Folder; created if it does not exist.
            is_main_process: Whether this process writes the files.
            **kwargs: `push_to_hub=True` uploads the routers as well, with `repo_id` and options of `push_to_hub()`.

        Raises:
            RoutersNotSavedError: The files could not be written.
        """
        folder = Path(save_directory)
        self.config.architectures, self.config.dtype = [type(self).__name__], str(self.dtype).removeprefix("torch.")
        if is_main_process:
            write_routers(folder, self.config, self.state_dict())
        if kwargs.pop("push_to_hub", False) and is_main_process:
            self.push_to_hub(kwargs.pop("repo_id", folder.name), **kwargs)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        license: str | None = None,
        private: bool | None = None,
        create_pr: bool = False,
        commit_message: str = "Upload routers",
        revision: str | None = None,
        token: str | bool | None = None,
    ) -> CommitInfo:
        """Upload config, weights and the card that `card.write_model_card` writes, in one commit.

        vLLM loads a draft head from the same repository; `publish.push_speculators` uploads the head alone.

        Args:
            repo_id: Hub repository, such as `"org/name"`; created if it does not exist.
            license: License identifier for the card, such as `"apache-2.0"`; default: none (see `write_model_card`).
            private: Whether a newly created repository is private; `None`: the default of the organisation.
            create_pr: Open a pull request instead of committing.
            commit_message: Message of the commit.
            revision: Branch to commit to, created if it does not exist; default: `main`.
            token: As in huggingface_hub; default: that of `hf auth login` or `HF_TOKEN`.

        Returns:
            The commit: a string with its URL; the attribute `pr_url` is the URL of a pull request, if any.

        Raises:
            ConfigurationError: The routers were not calibrated, or their base model is not on the Hub.
            HubError: The Hub refused the upload, or cannot be reached.
        """
        from .publish import push_routers  # noqa: PLC0415 - cards need jinja2

        options = {"private": private, "create_pr": create_pr, "commit_message": commit_message}
        return push_routers(self, repo_id, license=license, revision=revision, token=token, **options)

    def check_base_model(self, model: PreTrainedModel, *, ignore_base_mismatch: bool = False) -> None:
        """Refuse a base model that these routers were not made for.

        Args:
            model: The base model.
            ignore_base_mismatch: Accept another model of the same shape.

        Raises:
            BaseModelMismatchError: Shapes or, without `ignore_base_mismatch`, heads differ ([`unembed.unembed_hash`]).
        """
        check_base_model(self.config, model, ignore_base_mismatch=ignore_base_mismatch)

    def check_exit_layers(self, needed_by: str) -> None:
        """Raise [`UnsupportedOptionError`], which says that `needed_by` needs exit layers, if there are none."""
        if not self.exit_layers:
            raise UnsupportedOptionError(
                f"{needed_by} has no layer at which tokens could exit",
                got="routers without exit layers",
                expected="routers with exit layers; a draft head alone only drafts",
                do="Make routers with tide_hf.calibrate(), or choose another mode.",
            )


def config_for(model: PreTrainedModel, **config: Any) -> TIDEConfig:
    """The config of routers for a model, with the given fields."""
    structure = find_structure(model)
    identity = {
        "base_model_name_or_path": model.config._name_or_path or None,
        "unembed_hash": unembed_hash(structure.head),
        "hidden_size": structure.hidden_size,
        "num_hidden_layers": structure.num_layers,
        "vocab_size": structure.vocab_size,
    }
    return TIDEConfig(**identity, **config)


def check_base_model(config: TIDEConfig, model: PreTrainedModel, *, ignore_base_mismatch: bool = False) -> None:
    """Refuse a base model that the routers of `config` were not made for; see `TIDERouters.check_base_model`."""
    structure = find_structure(model)
    ours = (config.num_hidden_layers, config.hidden_size, config.vocab_size)
    theirs = (structure.num_layers, structure.hidden_size, structure.vocab_size)
    if ours != theirs:
        raise _mismatch(config, f"one with (layers, hidden size, vocabulary) {theirs}", f"{ours}")
    _check_embedding(config, model)
    if ignore_base_mismatch:
        return
    known, actual = config.unembed_hash, unembed_hash(structure.head)
    if known is not None and actual is not None:
        distance = hash_distance(known, actual)
        if distance > MAX_HASH_DISTANCE:
            got = f"one whose head differs in {distance:.0%} of the fingerprint's bits"
            raise _mismatch(config, got, f"at most {MAX_HASH_DISTANCE:.0%}")
    elif config.base_model_name_or_path not in (None, model.config._name_or_path):
        raise _mismatch(config, repr(model.config._name_or_path), repr(config.base_model_name_or_path))


def _check_embedding(config: TIDEConfig, model: PreTrainedModel) -> None:
    """Refuse a draft head that cannot read the base model's input embeddings."""
    head = config.draft_head
    if head is None or head["has_embedding"]:
        return
    table: Any = model.get_input_embeddings()
    width = getattr(table, "embedding_dim", None)
    if width != head["hidden_size"]:
        raise UnsupportedModelError(
            f"the draft head cannot read the input embeddings of {type(model).__name__}",
            got=f"embeddings of width {width}",
            expected=f"the head's {head['hidden_size']}, or a head with embeddings of its own",
            do="Load a head that has them, or draft with exit heads: calibrate(exit_strategy='linear').",
        )


def _mismatch(config: TIDEConfig, got: str, expected: str) -> BaseModelMismatchError:
    return BaseModelMismatchError(
        f"these routers belong to another base model ({config.base_model_name_or_path})",
        got=got,
        expected=expected,
        do="Load this model's routers or run tide_hf.calibrate(); if shapes agree, ignore_base_mismatch=True insists.",
    )
