"""Token-informed depth (TIDE): self-speculative decoding and early exit for Hugging Face causal language models."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .common.version import __version__
from .hub.registration import register_with_transformers

if TYPE_CHECKING:
    from .calibration import calibrate
    from .common.draft_streamer import DraftStreamer
    from .common.errors import TIDEError, UnsupportedModelError
    from .common.stats import ExitStats
    from .logits_process import TIDELogitsProcessor
    from .model import TIDEModelForCausalLM
    from .routers.config import TIDEConfig
    from .routers.routers import TIDERouters

__all__ = [
    "DraftStreamer",
    "ExitStats",
    "TIDEConfig",
    "TIDEError",
    "TIDELogitsProcessor",
    "TIDEModelForCausalLM",
    "TIDERouters",
    "UnsupportedModelError",
    "__version__",
    "calibrate",
]

# The module of each name, imported at first use: torch and transformers are slow, and `tide-hf --help` needs neither.
_MODULES = {
    "DraftStreamer": "common.draft_streamer",
    "ExitStats": "common.stats",
    "TIDEConfig": "routers.config",
    "TIDEError": "common.errors",
    "TIDELogitsProcessor": "logits_process",
    "TIDEModelForCausalLM": "model",
    "TIDERouters": "routers.routers",
    "UnsupportedModelError": "common.errors",
    "calibrate": "calibration",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers(f"{__name__}.auto_classes")
