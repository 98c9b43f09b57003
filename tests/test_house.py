"""The laws of the house that its functions show: how long they are, what they take, and which kernels they call."""

import ast
import re
from itertools import product

from repository import ROOT

PACKAGE = ROOT / "tide_hf"
MAX_LINES = 60  # of a function, without its docstring
MAX_ARGUMENTS = 8
MANY_ARGUMENTS = 3  # functions may take more
KERNELS = ROOT / "hub_kernels"


def functions(node, prefix=""):
    """The functions of a module or class, and those within them, by qualified name."""
    for child in ast.iter_child_nodes(node):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, ast.FunctionDef):
            yield name, child
        is_scope = isinstance(child, (ast.FunctionDef, ast.ClassDef))
        yield from functions(child, f"{name}." if is_scope else prefix)


FUNCTIONS = {
    f"{path.relative_to(PACKAGE)}: {name}": function
    for path in PACKAGE.rglob("*.py")
    for name, function in functions(ast.parse(path.read_text(encoding="utf-8")))
}


def num_lines(function):
    docstring = function.body[0] if ast.get_docstring(function) else None
    return function.end_lineno - function.lineno + 1 - (docstring.end_lineno - docstring.lineno + 1 if docstring else 0)


def num_arguments(function):
    arguments = function.args
    names = [one.arg for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def quoted(cell):
    return re.findall(r"`(.+?)`", cell)


def test_no_function_is_long():
    assert len(FUNCTIONS) > 1000  # they are found at all
    assert {name for name, function in FUNCTIONS.items() if num_lines(function) > MAX_LINES} == set()


def test_few_functions_take_many_arguments():
    many = {name for name, function in FUNCTIONS.items() if num_arguments(function) > MAX_ARGUMENTS}
    assert len(many) <= MANY_ARGUMENTS, many


def test_each_kernel_is_called_where_the_readme_of_the_kernels_says():
    text = (KERNELS / "README.md").read_text(encoding="utf-8")
    rows = [map(quoted, cells) for cells in re.findall(r"^\| (`.*?) \| (`.*?) \|", text, re.MULTILINE)]
    calls = [(op, place) for ops, places in rows for op, place in product(ops, places)]
    assert [(op, place) for op, place in calls if op not in ast.unparse(FUNCTIONS[place])] == []
    exported = (KERNELS / "tide-kernels" / "torch-ext" / "tide_kernels" / "__init__.py").read_text(encoding="utf-8")
    lists = re.findall(r"__all__ = (\[.+?\])", exported, re.DOTALL)
    assert {op for op, _ in calls} == {name for one in lists for name in ast.literal_eval(one)} - {"implementations"}
