"""The README's Python snippets run as written, one after another."""

import re
from pathlib import Path

import pytest

from tide_hf import demo_model

ROOT = Path(__file__).parent.parent
SNIPPETS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL)


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
