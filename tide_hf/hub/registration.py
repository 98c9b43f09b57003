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

# Auto classes by their module of transformers.
AUTO_CLASSES = {
    "transformers.models.auto.configuration_auto": "AutoConfig",
    "transformers.models.auto.modeling_auto": "AutoModelForCausalLM",
    "transformers.models.auto.tokenization_auto": "AutoTokenizer",
}


def register_with_transformers(source: str) -> None:
    """Register TIDE's classes with the auto classes: now if these are imported, else once they are.

    `source` is the module whose `REGISTERED` has the classes for each auto class, imported only then.
    """
    finder = _Finder(source)
    for module in AUTO_CLASSES:
        if module in sys.modules:
            _register(module, source)
        else:
            finder.waiting.add(module)
    if finder.waiting:
        sys.meta_path.insert(0, finder)


def _register(module: str, source: str) -> None:
    name = AUTO_CLASSES[module]
    for key, registered in import_module(source).REGISTERED[name].items():
        getattr(sys.modules[module], name).register(key, registered, exist_ok=True)


class _Finder:
    """Import hook that registers TIDE's classes with a module's auto class, right after the module is imported."""

    def __init__(self, source: str) -> None:
        self.source, self.waiting = source, set[str]()

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name not in self.waiting:
            return None
        self.waiting.remove(name)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            run_module = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run_module(module)
                _register(name, self.source)

            spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
