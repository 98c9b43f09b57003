"""The README's Python snippets run as written, one after another, and so do the lines of its command-line section."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tide_hf import demo_model
from tide_hf.cli import main
from tide_hf.commands import COMMANDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.real_model
@pytest.mark.xdist_group("real_model")
def test_the_snippets_run(smollm2, tmp_path, monkeypatch, capsys):
    """Where the Hub cannot be reached, the base model's name stands for the cached copy of its weights."""
    smollm2[0].save_pretrained(tmp_path / "base")
    smollm2[1].save_pretrained(tmp_path / "base")
    shipped = ROOT / "model_cards" / "HuggingFaceTB--SmolLM2-135M-Instruct"
    (tmp_path / "model_cards").mkdir()
    (tmp_path / "model_cards" / shipped.name).symlink_to(shipped)
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    assert len(SNIPPETS) >= 4
    for snippet in (snippet for snippet in SNIPPETS if '"org/' not in snippet):  # those are run in test_hub.py
        local = snippet.replace(f'"{demo_model.DEFAULT_MODEL}"', f'"{tmp_path / "base"}"')
        exec(compile(local, "README.md", "exec"), namespace)
    assert "self_speculative: 64 tokens" in capsys.readouterr().out
    assert (tmp_path / "my-routers" / "model.safetensors").is_file()


def test_the_command_lines_run(tiny_model_folder, pipe_in, capsys):
    """A tiny model stands for the real one; a pipe and a redirection are done as the shell would do them."""
    section = README.partition("\n## Command line\n")[2].partition("\n## ")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", section, flags=re.DOTALL)
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


def test_the_command_line_section_names_every_command_and_option():
    section = README.partition("\n## Command line\n")[2].partition("\n## ")[0]
    for command in COMMANDS:
        assert f"`{command}`" in section
    shared = ("--routers", "--mode", "--exit-threshold", "--max-new-tokens", "--dtype", "--device", "--threads")
    for option in (*shared, "--json", "--debug", "--prompt-file", "--prompts", "--raw"):
        assert f"`{option}" in section
