"""`generate(custom_generate=...)`: plain generate's tokens from a repository's code, for those who trust it."""

import re
from types import SimpleNamespace

import pytest
import torch
from hub_repositories import OPTIONS, PROMPT, plain_answer
from huggingface_hub import ModelCard
from loopback_hub import TOKEN
from repository import ROOT, SNIPPETS
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf import TIDEModelForCausalLM, __version__
from tide_hf.cli import main as cli


@pytest.fixture
def custom_generate(model_hub, tmp_path, monkeypatch):
    """The name of a custom_generate repository that the command has uploaded; tide-hf counts as installed."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert cli.main(["push", str(ROOT / "examples" / "custom_generate"), "org/decoding", "--custom-generate"]) == 0
    (tmp_path / f"tide_hf-{__version__}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: tide-hf\nVersion: {__version__}\n"
    (tmp_path / f"tide_hf-{__version__}.dist-info" / "METADATA").write_text(metadata)
    monkeypatch.syspath_prepend(str(tmp_path))
    return {"custom_generate": "org/decoding", "trust_remote_code": True}


def test_custom_generate_gives_the_tokens_of_plain_generate(model_hub, on_hub, custom_generate):
    expected = plain_answer()
    model, tokenizer = AutoModelForCausalLM.from_pretrained("org/base"), AutoTokenizer.from_pretrained("org/base")
    inputs, pieces, ends = tokenizer(PROMPT, return_tensors="pt"), [], []
    streamer = SimpleNamespace(put=lambda piece: pieces.append(piece.reshape(-1)), end=lambda: ends.append(True))
    assert torch.equal(model.generate(**inputs, **OPTIONS, **custom_generate, streamer=streamer), expected)
    assert ends == [True]
    assert torch.equal(torch.cat(pieces), expected[0])
    assert model._tide.routers is None
    options = {**OPTIONS, **custom_generate, "routers": "org/base-tide"}
    assert torch.equal(model.generate(**inputs, **options), expected)
    attachment = model._tide
    assert attachment.routers.exit_layers == [1, 3]
    model.generate(**inputs, **options, tide_mode="early_exit", exit_threshold=0.0, revision="main")
    assert set(model.last_exit_stats.exits_per_layer) == {1}
    assert model._tide is attachment  # and its measured costs are kept
    readme = model_hub.repos["models", "org/decoding"].files()["README.md"].decode()
    assert 'custom_generate="org/decoding"' in readme
    assert "org/tide" not in readme


def test_custom_generate_takes_trust(on_hub, custom_generate, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    model = AutoModelForCausalLM.from_pretrained("org/base")
    with pytest.raises(ValueError, match="trust_remote_code"):
        model.generate(torch.tensor([[1, 2]]), **{**custom_generate, "trust_remote_code": False})
    assert not isinstance(model, TIDEModelForCausalLM)


def test_a_source_without_code_is_not_uploaded(model_hub, on_hub, capsys):
    assert cli.main(["push", str(on_hub), "org/decoding", "--custom-generate"]) == 2
    assert "is no source of a custom_generate repository: got no generate.py" in capsys.readouterr().err
    assert ("models", "org/decoding") not in model_hub.repos


def test_the_snippets_of_the_hub_guide(model_hub, hub_routers, custom_generate, monkeypatch):
    """Those that name a repository, as they are written; `org/tide` is the custom_generate repository."""
    model_hub.repos["models", "org/tide"] = model_hub.repos["models", "org/decoding"]
    namespace = {"own": hub_routers, "base": "org/base", "tokenizer": AutoTokenizer.from_pretrained("org/base")}
    snippets = [snippet for snippet in SNIPPETS if '"org/' in snippet]
    assert len(snippets) == 3
    for snippet in snippets:
        exec(compile(snippet, "hub.md", "exec"), namespace)
    assert isinstance(namespace["generator"].model, TIDEModelForCausalLM)
    assert isinstance(namespace["plain"], TIDEModelForCausalLM)
    card = ModelCard.load("org/SmolLM2-135M-Instruct-tide")
    for snippet in re.findall(r"```python\n(.*?)```", card.text, flags=re.DOTALL):
        exec(compile(snippet, "card", "exec"), namespace)
    assert namespace["model"]._tide.routers.exit_layers == [1, 3]
