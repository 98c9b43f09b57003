"""Tell transformers about routers without importing it: its auto classes hear of them once they are loaded.

`import tide_hf` is to make `AutoModelForCausalLM.from_pretrained("org/routers")` work, and is to stay as quick as it
is; importing transformers' auto classes takes seconds.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

# Modules of transformers, and what to call in auto_classes.py once they are loaded.
REGISTRATIONS = {
    "transformers.models.auto.configuration_auto": "register_config",
    "transformers.models.auto.modeling_auto": "register_model",
    "transformers.models.auto.tokenization_auto": "register_tokenizer",
}


def register_with_transformers() -> None:
    """Register with the auto classes that are loaded, and with the others when they will be."""
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
    """Finds modules where Python would, and registers after they have run."""

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
