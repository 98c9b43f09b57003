"""What is uploaded: routers with their card, by their method and by the command."""

import sys

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import TOKEN

from tide_hf import TIDERouters
from tide_hf.cli import main as cli
from tide_hf.common.errors import ConfigurationError, HubError


@pytest.fixture
def without_matplotlib(monkeypatch):
    """Cards without plots take less time."""
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)


def test_push_to_hub_uploads_routers_and_their_card(model_hub, hub_routers, tmp_path):
    commit = hub_routers.push_to_hub("org/new-tide", token=TOKEN)
    repo = model_hub.repos["models", "org/new-tide"]
    assert commit == f"{model_hub.address}/org/new-tide/commit/{repo.refs['main']}"
    assert {"config.json", "model.safetensors", "README.md"} <= set(repo.files())
    assert any(name.startswith("plots/") for name in repo.files())
    assert repo.messages[-1] == "Upload routers"
    assert not repo.private
    loaded = TIDERouters.from_pretrained("org/new-tide")
    assert loaded.config.calibration == hub_routers.config.calibration
    for name, tensor in hub_routers.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor)
    assert ModelCard.load("org/new-tide").data.base_model == "org/base"
    hub_routers.save_pretrained(tmp_path / "again", push_to_hub=True, repo_id="org/again", token=TOKEN)
    assert set(model_hub.repos["models", "org/again"].files()) == set(repo.files())


def test_refused_pushes_make_no_repository(model_hub, hub_routers, tmp_path):
    with pytest.raises(HubError, match=r"org/new-tide cannot be uploaded to: got .*401.*Expected the Hub within reach"):
        hub_routers.push_to_hub("org/new-tide")
    with pytest.raises(ConfigurationError, match=r"invalid repo_id: got '\.\./x'"):
        hub_routers.push_to_hub("../x", token=TOKEN)
    hub_routers.config.base_model_name_or_path = str(tmp_path)
    with pytest.raises(ConfigurationError, match=r"do not name a base model that others can load: got .*Expected the"):
        hub_routers.push_to_hub("org/new-tide", token=TOKEN)
    hub_routers.config.base_model_name_or_path, hub_routers.config.calibration = "org/base", None
    with pytest.raises(ConfigurationError, match="these routers cannot have a card"):
        hub_routers.push_to_hub("org/new-tide", token=TOKEN)
    assert ("models", "org/new-tide") not in model_hub.repos


@pytest.mark.usefixtures("without_matplotlib")
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (({"errors": [{"message": '"tags" is bad'}]}, 400), r'does not take .*"tags" is bad.*Expected a commit'),
        ((b"<html>of a proxy</html>", 502), "cannot be uploaded to: got .*Expected the Hub within reach"),
        (None, "cannot be uploaded to"),
    ],
)
def test_a_hub_that_refuses_the_card_or_cannot_be_reached(model_hub, hub_routers, monkeypatch, answer, message):
    model_hub.metadata_answer = answer
    if answer is None:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=f"org/new-tide {message}"):
        hub_routers.push_to_hub("org/new-tide", token=TOKEN)


@pytest.mark.usefixtures("without_matplotlib")
def test_the_push_command(model_hub, on_hub, monkeypatch, capsys, refused):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    options = ["--private", "--revision", "next", "--commit-message", "From the command line"]
    assert cli.main(["push", str(on_hub), "org/by-command", *options]) == 0
    repo = model_hub.repos["models", "org/by-command"]
    assert capsys.readouterr().out == f"{model_hub.address}/org/by-command/commit/{repo.refs['next']}\n"
    assert repo.private
    assert (set(repo.files("main")), repo.messages[-1]) == ({".gitattributes"}, "From the command line")
    assert TIDERouters.from_pretrained("org/by-command", revision="next", token=TOKEN).exit_layers == [1, 3]
    assert cli.main(["push", str(on_hub), "org/by-command", "--create-pr"]) == 0
    assert "/org/by-command/discussions/" in capsys.readouterr().out
    assert set(repo.files("main")) == {".gitattributes"}
    monkeypatch.delenv("HF_TOKEN")
    assert cli.main(["push", str(on_hub), "org/by-command"]) == 2
    assert "tide-hf: org/by-command cannot be uploaded to" in capsys.readouterr().err
    command = ["push", "folder", "org/by-command", "--custom-generate", "--license", "mit"]
    refused(command, "no effect with --custom-generate: got --license.")
