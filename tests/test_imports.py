"""The rooms of the package stand in one order, which the README shows, and import in that direction alone."""

import ast
import re
from importlib import import_module

import pytest
from repository import ROOT
from test_readme import rows_of

PACKAGE = ROOT / "tide_hf"


def rows_of_readme():
    """By room, the row of the README's table that it stands in."""
    table = enumerate(rows_of("Development", "room"))
    return {name.rstrip("/"): row for row, (names, _) in table for name in re.findall(r"`([^`]+)`", names)}


def rooms():
    """Modules at the top of the package, and its folders, each with its files."""
    for path in sorted(PACKAGE.iterdir()):
        if path.suffix == ".py" and path.stem != "__init__":
            yield path.stem, [path]
        elif (path / "__init__.py").exists():
            yield path.name, sorted(path.rglob("*.py"))


def needed_rooms(file):
    """What a file imports when it is itself imported, as rooms; `from .. import __version__` needs none."""
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and node.level:
            package = file.parent.relative_to(PACKAGE).parts
            place = package[: len(package) - node.level + 1] + tuple((node.module or "").split("."))
            if place[0]:
                yield place[0]


def test_every_room_stands_in_the_readme():
    assert {name for name, _ in rooms()} == set(rows_of_readme())


@pytest.mark.parametrize("room", ["routers", "depth", "cpu", "steps", "decoding", "engines", "display"])
def test_a_room_says_what_each_of_its_modules_is_for(room):
    said = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text(encoding="utf-8")))
    modules = {path.stem for path in (PACKAGE / room).glob("*.py")} - {"__init__"}
    assert modules <= set(re.findall(r"`(\w+)`", said))


def test_no_room_needs_one_below_it():
    rows = rows_of_readme()
    pairs = [(name, need) for name, files in rooms() for file in files for need in needed_rooms(file)]
    assert len(pairs) > 300  # they are found at all
    assert [(name, need) for name, need in pairs if rows[need] > rows[name]] == []


def test_no_two_rooms_need_each_other():
    needs = {name: {need for file in files for need in needed_rooms(file)} - {name} for name, files in rooms()}
    while ends := {name for name, needed in needs.items() if not needed}:
        needs = {name: needed - ends for name, needed in needs.items() if name not in ends}
    assert needs == {}


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_examples_import_what_there_is(path):
    """Also those that cannot run here, for want of a package of theirs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tide_hf":
            module = import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []
