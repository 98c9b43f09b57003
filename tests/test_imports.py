"""The laws of the house that imports show: rooms stand in one order, and no module needs itself."""

import ast
import re
from importlib import import_module

import pytest
from repository import ROOT

PACKAGE = ROOT / "tide_hf"
# Each room imports from those before it alone, within functions and for type checkers too.
ORDER = (
    "common",
    "kernels",
    "base_model",
    "routers",
    "hub",
    "depth",
    "weights",
    "speculation",
    "engines",
    "modes",
    "generation",
    "model",
    "auto_classes",
    "logits_process",
    "calibration",
    "evaluation",
    "cli",
)
ROOMS = [path.parent for path in sorted(PACKAGE.rglob("__init__.py")) if path.parent != PACKAGE]


def module_of(file):
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in PACKAGE.rglob("*.py")}
NODES = {m: list(ast.walk(ast.parse(file.read_text(encoding="utf-8")))) for m, file in MODULES.items()}


def imports_of(module):
    """The modules of the package that one imports, anywhere in its file."""
    package = module.split(".") if MODULES[module].name == "__init__.py" else module.split(".")[:-1]
    for node in NODES[module]:
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = base + (node.module.split(".") if node.module else [])
            for alias in node.names:
                inner = ".".join([*base, alias.name])
                yield inner if inner in MODULES else ".".join(base)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


IMPORTS = {module: {need for need in imports_of(module) if need in MODULES} - {module} for module in MODULES}
ROOT_IMPORTS = IMPORTS.pop("tide_hf")


def test_rooms_import_one_way():
    room = {module: module.split(".")[1] for module in IMPORTS}
    pairs = [(module, need) for module, needed in IMPORTS.items() for need in needed]
    assert len(pairs) > 300  # they are found at all
    assert set(room.values()) == set(ORDER)
    assert [pair for pair in pairs if ORDER.index(room[pair[1]]) > ORDER.index(room[pair[0]])] == []


def test_no_module_imports_the_root_which_imports_them():
    """Its own imports come before every module's, so they are few and need no other."""
    assert [module for module, needed in IMPORTS.items() if "tide_hf" in needed] == []
    at_once = {"tide_hf.common.version", "tide_hf.hub.registration"}
    assert at_once <= ROOT_IMPORTS
    assert [need for module in at_once for need in IMPORTS[module]] == []


def test_no_module_needs_itself():
    needs = dict(IMPORTS)
    while ends := {module for module, needed in needs.items() if not needed & needs.keys()}:
        needs = {module: needed for module, needed in needs.items() if module not in ends}
    assert needs == {}


def test_one_place_hooks_layers_and_one_replaces_their_forward():
    attributes = [(m, node) for m, nodes in NODES.items() for node in nodes if isinstance(node, ast.Attribute)]
    hooks = {module for module, node in attributes if node.attr.startswith("register_forward_")}
    replaced = {module for module, node in attributes if node.attr == "forward" and isinstance(node.ctx, ast.Store)}
    assert hooks == {"tide_hf.base_model.hooks"}
    assert replaced == {"tide_hf.depth.gates"}


def test_one_place_decides_how_a_weight_is_read():
    """What else is in the room multiplies, measures and probes."""
    names = {m: {getattr(node, "id", getattr(node, "name", "")) for node in nodes} for m, nodes in NODES.items()}
    layouts = ("LOSSLESS_LAYOUTS", "PYTORCH_LAYOUTS", "PROMPT_LAYOUTS", "KERNEL_LAYOUTS", "DRAFT_LAYOUTS")
    for name in ("allowed_layouts", "fastest_layout", "clearly_faster_layout", *layouts):
        users = {module for module in MODULES if name in names[module]}
        assert users
        assert [module for module in users if not module.startswith("tide_hf.weights.")] == []


def test_no_room_sets_variables_inside_another():
    """What a room needs of another is an argument, or in an object that is handed on."""
    stores = [
        (module, ast.unparse(node.value), node.attr)
        for module, nodes in NODES.items()
        for node in nodes
        if isinstance(node, ast.Attribute) and (isinstance(node.ctx, ast.Store) or node.attr == "set")
    ]
    imported = {
        (module, alias.asname or alias.name)
        for module, nodes in NODES.items()
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.level
        for alias in node.names
    }
    assert [store for store in stores if store[:2] in imported] == []  # modules, context variables, classes
    of_weights = {attr for module, owner, attr in stores if owner == "self" and module.startswith("tide_hf.weights.")}
    of_others = {attr for module, owner, attr in stores if owner == "self" and "tide_hf.weights." not in module}
    from_outside = [store for store in stores if store[1] != "self"]
    assert [store for store in from_outside if store[2] in ("execute_layer", "fused", "has_room", "may_copy")] == []
    kept_by_weights = of_weights - of_others
    assert {"copies_at_once", "converted"} <= kept_by_weights
    assert {store[0] for store in from_outside if store[2] in kept_by_weights} <= {"tide_hf.weights.fused_layers"}


def test_nothing_is_a_kind_of_the_loop_or_of_an_engine():
    """They are composed of parts, and the parts hold no owner."""
    classes = [node for nodes in NODES.values() for node in nodes if isinstance(node, ast.ClassDef)]
    whole = {"SpeculativeDecoder", "EagerEngine", "StaticEngine"}
    assert whole <= {node.name for node in classes}
    assert [node.name for node in classes for base in node.bases if ast.unparse(base).split(".")[-1] in whole] == []


def test_the_architecture_lists_the_rooms_in_their_order():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = text.partition("| room | what is in it |")[2].partition("\n\n")[0]
    cells = [line.split("|")[1] for line in table.splitlines()[2:]]
    assert tuple(name for cell in cells for name in re.findall(r"`(\w+)/?`", cell)) == ORDER


def test_no_test_module_imports_another():
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("hub_kernels/*/tests/*.py")]
    found = [
        (file.name, re.findall(r"^ *(?:from|import) (test_\w+)", file.read_text(), re.MULTILINE)) for file in files
    ]
    assert [(name, imported) for name, imported in found if imported] == []


@pytest.mark.parametrize("room", ROOMS, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_room_says_what_each_of_its_modules_is_for(room):
    said = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
    modules = {path.stem for path in room.glob("*.py")} - {"__init__", "__main__"}
    assert modules <= set(re.findall(r"`(\w+)`", said))


@pytest.mark.parametrize(
    "path", sorted((ROOT / "examples").rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT))
)
def test_examples_import_what_there_is(path):
    """Also those that cannot run here, for want of a package of theirs."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tide_hf":
            module = import_module(node.module)
            assert [one.name for one in node.names if not hasattr(module, one.name)] == []
