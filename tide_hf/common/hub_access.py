"""Check with one short request whether the Hub can be reached; transformers would retry for most of a minute."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError, HTTPError, RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.utils import HFValidationError

from .errors import TIDEError, quoted

REACH_TIMEOUT = 5.0  # seconds


def hub_options(
    name: str | os.PathLike[str],
    options: Mapping[str, Any],
    not_found: Callable[[str | os.PathLike[str], str], TIDEError],
) -> dict[str, Any]:
    """Additional options for `from_pretrained`, so that an unreachable Hub causes no retries.

    Returns `local_files_only=True` if the request to the Hub fails and the repository is cached, otherwise no options.
    `options` are the caller's options for `from_pretrained`. If `name` is neither a folder nor a repository on the Hub
    or in the cache, raises the error that `not_found(name, reason)` returns.
    """
    if os.path.exists(name) or options.get("local_files_only") or options.get("force_download"):
        return {}
    try:
        HfApi(token=options.get("token")).model_info(os.fspath(name), timeout=REACH_TIMEOUT)
    except (HTTPError, OSError, HFValidationError) as error:
        if not isinstance(error, HFValidationError) and _is_cached(os.fspath(name), options.get("cache_dir")):
            return {"local_files_only": True}
        if isinstance(error, HfHubHTTPError) and type(error) is not RepositoryNotFoundError:
            return {}  # the Hub can be reached; transformers will report its error
        # The client's error would precede this one with a traceback of a hundred lines.
        raise not_found(name, f"no such folder, and {why_not_found(error)}") from None
    return {}


def why_not_found(error: Exception) -> str:
    """Explain in one line why a request to the Hub, or loading a model, failed."""
    if isinstance(error, HFValidationError):
        return "not a valid name of a repository"
    if type(error) is RepositoryNotFoundError:
        return "no such repository on the Hub, or a private one"
    if isinstance(error, (HTTPError, ConnectionError)) and not isinstance(error, HfHubHTTPError):
        return f"the Hub cannot be reached: {quoted(error)}"
    return quoted(error)


def _is_cached(name: str, cache_dir: str | os.PathLike[str] | None) -> bool:
    """Whether the cache has any file of the repository, at any revision."""
    folder = Path(cache_dir or constants.HF_HUB_CACHE) / repo_folder_name(repo_id=name, repo_type="model")
    return any(folder.glob("snapshots/*/*"))
