"""Puts the routers of `model_cards/` into the wheel, as `tide_hf/model_cards`. All else is said in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRouters(build_py):
    """`build_py`, which packs what lies in `tide_hf/` alone."""

    def run(self) -> None:
        """Build, and put card, config and weights where `loading.shipped_routers` looks."""
        super().run()
        for file in [] if self.editable_mode else sorted(Path("model_cards").glob("*/*.*")):
            target = Path(self.build_lib, "tide_hf", file)
            self.mkpath(str(target.parent))
            self.copy_file(str(file), str(target))


setup(cmdclass={"build_py": BuildWithRouters})
