"""Lazy registration with transformers' auto classes, through an import hook.

`import tide_hf` makes `AutoModelForCausalLM.from_pretrained("org/routers")` work, but must not import the auto classes
itself, which takes seconds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Modules of transformers, and the function of auto_classes.py to call once each is loaded.
REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": "register_config",
    "transformers.models.auto.modeling_auto": "register_model",
    "transformers.models.auto.tokenization_auto": "register_tokenizer",
}


def register_with_transformers() -> None:
    """Register with the auto classes that are loaded, and with the others once they are."""
    finder = _Finder()
    for module in REGISTRATIONS:
        if module in sys.modules:
            _register(module)
        else:
            finder.waiting.add(module)
    if finder.waiting:
        sys.meta_path.insert(0, finder)


def _register(module: str) -> None:
    getattr(import_module(".auto_classes", __package__), REGISTRATIONS[module])()


class _Finder:
    """Import hook that registers after a module has run."""

    def __init__(self) -> None:
        self.waiting: set[str] = set()

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run_module(module)
                _register(name)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
