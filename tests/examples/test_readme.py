"""README and guides: snippets and commands run as written, references are complete, links resolve."""

import ast
import dataclasses
import json
import re
import shlex

import pytest
from repository import GUIDES, PAGES, ROOT, SNIPPETS
from transformers import GenerationConfig

from tide_hf import TIDEConfig, TIDERouters
from tide_hf.cli import demo_model
from tide_hf.cli.main import main
from tide_hf.cli.parser import COMMANDS
from tide_hf.generation import CALL_OPTIONS, TIDEGenerationMixin
from tide_hf.hub import load as loading
from tide_hf.model import AttachOptions

LINKED = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "hub_kernels/README.md")),
    *sorted((ROOT / "examples").glob("*.md")),
    *sorted(GUIDES.glob("*.md")),
    *sorted((ROOT / "examples" / "benchmarks").glob("*.md")),
]


def test_the_snippets_run(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch, capsys):
    """As written, but on a tiny model with enough layers, for which the library ships routers here."""
    model, base = tiny_llama(num_hidden_layers=25, eos_token_id=None), str(tmp_path / "base")
    for part in (model, tiny_tokenizer):
        part.save_pretrained(base)
    package = tmp_path / "site-packages" / "tide_hf"
    TIDERouters.for_model(model, exit_layers=[2]).save_pretrained(package / "model_cards" / "org--tiny")
    monkeypatch.setattr(loading, "__file__", str(package / "hub" / "load.py"))
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    for snippet in (snippet for snippet in SNIPPETS if '"org/' not in snippet):  # test_custom_generate.py runs those
        exec(compile(snippet.replace(f'"{demo_model.DEFAULT_MODEL}"', repr(base)), "a page", "exec"), namespace)
    assert "self_speculative: 64 tokens" in capsys.readouterr().out
    assert (tmp_path / "my-routers" / "model.safetensors").is_file()


def test_the_command_lines_run(tiny_model_folder, pipe_in, monkeypatch, capsys):
    """A tiny model stands for the real one; the test does the pipe and the redirection instead of a shell."""
    monkeypatch.setattr(TIDEGenerationMixin, "tide_warm_up", lambda model: None)  # which test_serve runs
    text = (GUIDES / "command-line.md").read_text(encoding="utf-8")
    block = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)[0]
    commands = []
    for line in block.splitlines():
        feed, _, rest = line.rpartition(" | ")
        words = shlex.split(rest.partition(" > ")[0].replace(demo_model.DEFAULT_MODEL, str(tiny_model_folder)))
        pipe_in(feed.removeprefix("echo ").strip('"').encode())
        assert words[0] == "tide-hf"
        assert main(words[1:]) == 0
        out = capsys.readouterr().out
        if "--json" in words:
            assert json.loads(out)["prompt"] == "Name three colours."
        commands.append(words[1])
    assert commands == ["generate", "generate", "chat", "benchmark"]


def test_pages_are_complete():
    """CONTRIBUTING and the pages of the benchmarks have no Python; that of the others is run."""
    assert {page for page in LINKED if "```python" in page.read_text(encoding="utf-8")} == set(PAGES)
    readme, guides = (ROOT / "README.md").read_text(encoding="utf-8"), list(GUIDES.glob("*.md"))
    assert len(readme.splitlines()) <= 250
    assert [page.name for page in guides if f"(examples/guides/{page.name})" not in readme] == []
    audiences = [page.read_text(encoding="utf-8").split("\n\n", 2)[1] for page in guides]
    assert [first for first in audiences if not first.startswith("For ")] == []


def test_the_command_line_guide_names_every_command_and_option():
    section = (GUIDES / "command-line.md").read_text(encoding="utf-8").partition("\n## ")[0]
    named = ("--routers", "--mode", "--exit-threshold", "--max-new-tokens", "--dtype", "--device", "--threads")
    named += ("--json", "--debug", "--prompt-file", "--prompts", "--raw", *(f"{command}`" for command in COMMANDS))
    assert [name for name in named if f"`{name}" not in section] == []


def rows_of(first):
    """The rows of the table in the configuration guide whose first column is called so: lists of cells."""
    text = (GUIDES / "configuration.md").read_text(encoding="utf-8")
    lines = text.partition(f"| {first} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def read(cell):
    return ast.literal_eval(cell.strip("`"))


def test_the_configuration_reference_names_every_field_option_and_argument_with_its_default():
    fields = {name.strip("`"): (kind, read(default)) for name, kind, default, _ in rows_of("field")}
    kinds = {name: kind for name, kind in TIDEConfig.__annotations__.items() if name != "model_type"}
    said = {name: kind.replace(" | ", " or ").replace("[str, Any]", "") for name, kind in kinds.items()}
    assert fields == {name: (said[name].replace("float or int", "float"), getattr(TIDEConfig, name)) for name in kinds}

    options = {name.strip("`"): read(default) for name, _, default, _ in rows_of("option")}
    assert options == dict.fromkeys(CALL_OPTIONS)
    assert not any(hasattr(GenerationConfig(), name) for name in CALL_OPTIONS)  # so that None is what a call gets

    arguments = {name.strip("`"): read(default) for name, _, default, _ in rows_of("argument")}
    assert arguments == {field.name: field.default for field in dataclasses.fields(AttachOptions)} | {
        "routers_revision": None
    }


def anchors_of(page):
    """What the headings of a page are called in links, as GitHub makes it."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_resolve(page):
    text = page.read_text(encoding="utf-8")
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        name, _, anchor = link.partition("#")
        if not link.startswith("http"):
            there = page.parent / name if name else page
            assert there.exists(), link
            assert not anchor or (there.suffix == ".md" and anchor in anchors_of(there)), link
