"""Upload to the Hub: routers with their card, a draft head alone, or the code of `generate(custom_generate=...)`."""

from __future__ import annotations

import os
import tempfile
from json import JSONDecodeError
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, HfApi
from huggingface_hub.errors import HTTPError  # from httpx or httpx2, depending on the version
from huggingface_hub.utils import HFValidationError, validate_repo_id
from transformers import PreTrainedModel

from ..common.errors import ConfigurationError, HubError, quoted
from ..common.version import __version__
from .card import write_head_card, write_model_card
from .config import invalid
from .files import OTHERS, write_speculators

# Where transformers looks for the files of a custom_generate repository; requirements.txt is optional.
CUSTOM_GENERATE = {
    "generate.py": "custom_generate/generate.py",
    "README.md": "README.md",
    "requirements.txt": "custom_generate/requirements.txt",
}
PLACEHOLDER = "org/tide"  # replaced by `repo_id` in the uploaded files


def push_routers(routers: PreTrainedModel, repo_id: str, *, license: str | None = None, **options: Any) -> CommitInfo:
    """Upload config, weights and card; see `TIDERouters.push_to_hub`."""
    _check_repo_id(repo_id)
    _check_base(routers.config.base_model_name_or_path)
    with tempfile.TemporaryDirectory() as folder:
        # The card comes first, since writing it fails for routers without a calibration record.
        write_model_card(routers, folder, repo_id=repo_id, license=license)
        routers.save_pretrained(folder)
        # Files there are named by what they hold, so that a push replaces none.
        options = {"commit_message": "Upload routers", **options, "delete_patterns": f"{OTHERS}/*.safetensors"}
        return _upload(folder, repo_id, **options)


def push_speculators(routers: Any, repo_id: str, *, license: str | None = None, **options: Any) -> CommitInfo:
    """Upload the draft head alone, in the format of the `speculators` package, with a card.

    The arguments and errors are those of `TIDERouters.push_to_hub`, and those of `files.write_speculators`. Routers
    without a calibration record are taken as well.
    """
    _check_repo_id(repo_id)
    _check_base(routers.config.base_model_name_or_path)
    with tempfile.TemporaryDirectory() as folder:
        write_speculators(routers, folder)
        write_head_card(routers.config, folder, repo_id=repo_id, license=license)
        return _upload(folder, repo_id, **{"commit_message": "Upload draft head", **options})


def push_custom_generate(source: str | os.PathLike[str], repo_id: str, **options: Any) -> CommitInfo:
    """Upload a `custom_generate` repository from a folder: `generate.py`, `README.md`, perhaps `requirements.txt`.

    `repo_id`, `options` and errors are those of `TIDERouters.push_to_hub`.
    """
    _check_repo_id(repo_id)
    missing = [name for name in ("generate.py", "README.md") if not Path(source, name).is_file()]
    if missing:
        raise ConfigurationError(
            f"{source} is no source of a custom_generate repository",
            got=f"no {' and no '.join(missing)}",
            expected="generate.py and README.md, as in examples/custom_generate",
            do="Name such a folder; for a folder of routers leave --custom-generate out.",
        )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "custom_generate").mkdir()
        for name, path in CUSTOM_GENERATE.items():
            if Path(source, name).is_file():
                text = Path(source, name).read_text(encoding="utf-8")
                Path(folder, path).write_text(text.replace(PLACEHOLDER, repo_id), encoding="utf-8")
        return _upload(folder, repo_id, **{"commit_message": "Upload custom_generate", **options})


def _upload(
    folder: str,
    repo_id: str,
    *,
    private: bool | None = None,
    revision: str | None = None,
    token: str | bool | None = None,
    **options: Any,
) -> CommitInfo:
    """Commit a folder; create repository and branch if needed. `options` go to `HfApi.upload_folder`."""
    api = HfApi(library_name="tide_hf", library_version=__version__, token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None and not (options.get("create_pr") or revision.startswith("refs/")):
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.upload_folder(repo_id=repo_id, folder_path=folder, revision=revision, **options)
    except (HTTPError, OSError, JSONDecodeError) as error:
        raise HubError(
            f"{repo_id} cannot be uploaded to",
            got=quoted(error),
            expected="the Hub within reach, and a token that may write there",
            do="Check the name and the network, and log in with: hf auth login",
        ) from error
    except ValueError as error:  # HfApi lets the Hub check the card's metadata before the upload
        raise HubError(
            f"{repo_id} does not take what is to be uploaded",
            got=f"'{' '.join(str(error).split())}'",
            expected="a commit message, and a README.md whose metadata the Hub accepts",
            do="Correct what it names; the metadata of routers is made of their config.json.",
        ) from error


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise invalid("repo_id", repo_id, "a name of a Hub repository, such as org/name") from error


def _check_base(base: str | None) -> None:
    """Refuse a base model that others cannot load, since a repository of routers does not contain the base model."""
    try:
        validate_repo_id(base or "")
        valid = not os.path.isdir(base or "")
    except HFValidationError:
        valid = False
    if not valid:
        raise ConfigurationError(
            "these routers do not name a base model that others can load",
            got=f"base_model_name_or_path={base!r}",
            expected="the base model's name on the Hub",
            do="Set it: routers.config.base_model_name_or_path = 'org/name', or in config.json.",
        )
