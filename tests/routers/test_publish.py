"""What is uploaded: routers with their card, by their method and by the command."""

import pytest
import torch
from huggingface_hub import ModelCard
from loopback_hub import TOKEN

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.cli import main as cli
from tide_hf.common.errors import ConfigurationError, HubError
from tide_hf.routers.eagle3 import read_foreign


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


@pytest.mark.usefixtures("without_matplotlib")
def test_routers_with_a_draft_head_are_one_repository_for_vllm_and_for_tide(model_hub, served_routers):
    served_routers.push_to_hub("org/served", token=TOKEN)
    repo = model_hub.repos["models", "org/served"]
    parts = {"config.json", "model.safetensors", "README.md", ".gitattributes"}
    others = [f"tide/{served_routers.config.others_sha256}.safetensors"]
    assert set(repo.files()) == {*parts, *others}
    loaded = TIDERouters.from_pretrained("org/served")
    assert (loaded.exit_layers, loaded.config.exit_threshold) == ([2], 0.8)
    assert loaded.state_dict().keys() == served_routers.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], one) for name, one in served_routers.state_dict().items())
    with torch.no_grad():
        served_routers[2].router.up.bias.fill_(3)
    served_routers.push_to_hub("org/served", token=TOKEN)
    assert set(repo.files()) == {*parts, f"tide/{served_routers.config.others_sha256}.safetensors"} != {*parts, *others}
    assert TIDERouters.from_pretrained("org/served")[2].router.up.bias.tolist() == [3]


def test_a_draft_head_alone_by_the_command(model_hub, served_routers, tmp_path, monkeypatch, capsys, refused):
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    served_routers.config.calibration = None  # which the card of a head does without
    served_routers.save_pretrained(tmp_path / "served")
    command = ["push", str(tmp_path / "served"), "org/head", "--format", "speculators", "--license", "mit"]
    assert cli.main([*command, "--create-pr"]) == 0
    assert "/org/head/discussions/" in capsys.readouterr().out
    assert cli.main(command) == 0
    repo = model_hub.repos["models", "org/head"]
    assert capsys.readouterr().out == f"{model_hub.address}/org/head/commit/{repo.refs['main']}\n"
    assert set(repo.files()) == {"config.json", "model.safetensors", "README.md", ".gitattributes"}
    assert repo.messages[-1] == "Upload draft head"
    card = ModelCard.load("org/head")
    assert (card.data.base_model, card.data.library_name, card.data.license) == ("org/base", "speculators", "mit")
    options = '{"model": "org/head", "method": "eagle3", "num_speculative_tokens": 3}'
    assert f"\nvllm serve org/base --speculative-config '{options}'\n" in card.text
    assert read_foreign("org/head") is not None
    head = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/head")._tide.routers.draft_head.state_dict()
    del head["confidence"]  # which has no place in the format
    assert all(torch.equal(one, served_routers.draft_head.state_dict()[name]) for name, one in head.items())
    refused(["push", "folder", "org/head", "--custom-generate", *command[3:5]], "custom-generate: got --format.")


def test_a_draft_head_alone_needs_a_head_and_a_base(model_hub, on_hub, served_routers, tmp_path, refused):
    command = ["push", str(on_hub), "org/none", "--format", "speculators"]
    refused(command, "there is no draft head to write: got routers without one")
    served_routers.config.base_model_name_or_path = str(tmp_path)
    served_routers.save_pretrained(tmp_path / "served")
    command[1] = str(tmp_path / "served")
    refused(command, "these routers do not name a base model that others can load")
    assert ("models", "org/none") not in model_hub.repos
