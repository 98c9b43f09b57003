"""Routers and heads: what they compute, how they are stored, and which files are refused."""

import os
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from draft_heads import draft_head_for
from families import tiny_model
from hub_repositories import edit_config
from interruptions import stop_at
from safetensors.torch import load_file, save_file
from transformers.utils import logging as transformers_logging

from tide_hf import TIDEConfig, TIDERouters
from tide_hf.common import files as folders
from tide_hf.common.errors import (
    BaseModelMismatchError,
    ConfigurationError,
    RoutersFileError,
    RoutersNotFoundError,
    RoutersNotSavedError,
    TIDEError,
)

CANNOT_BE_USED = r"cannot be used: got (.|\n)*Expected the config and tensors"


@pytest.fixture(autouse=True)
def _no_load_reports():
    """transformers prints a report for every file that does not fit."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


def routers_of(model, **config):
    torch.manual_seed(0)
    routers = TIDERouters.for_model(model, **{"exit_layers": [1, 3], "exit_strategy": "linear", **config})
    with torch.no_grad():
        for parameter in routers.parameters():
            parameter.normal_()
    return routers


@pytest.fixture
def folder(model, tmp_path):
    """Saved routers, to be damaged."""
    routers_of(model).save_pretrained(tmp_path / "routers")
    return tmp_path / "routers"


@pytest.mark.parametrize(
    "make",
    [
        lambda model: routers_of(model, calibration={"exit_layers": {"1": {"agreement": 0.5}}}),
        lambda model: routers_of(model, translator_rank=4),
        lambda model: routers_of(model, exit_strategy="identity"),
        draft_head_for,
        lambda model: draft_head_for(model).to(torch.bfloat16),
    ],
    ids=["linear", "rank", "identity", "draft head", "draft head in bfloat16"],
)
def test_saved_routers_load_as_they_were(model, tmp_path, make):
    routers = make(model)
    routers.save_pretrained(tmp_path)
    others = ["tide"] if routers.draft_head is not None else []
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", *others]
    loaded = TIDERouters.from_pretrained(tmp_path)
    for name in ("calibration", "unembed_hash", "weights_sha256", "draft_head"):
        assert getattr(loaded.config, name) == getattr(routers.config, name)
    for name, parameter in routers.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[name], parameter, rtol=0, atol=0)  # dtypes as well


def test_a_failed_save_leaves_the_old_files(folder, model, monkeypatch):
    before = TIDERouters.from_pretrained(folder).exit_layers
    monkeypatch.setattr(folders.os, "fsync", Mock(side_effect=[None, OSError("disk full")]))
    with pytest.raises(RoutersNotSavedError, match="disk full"):
        routers_of(model, exit_layers=[2]).save_pretrained(folder)
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]
    assert TIDERouters.from_pretrained(folder).exit_layers == before


def killed_at(routers, folder, monkeypatch, number):
    """Save, but stop before the file of that number takes its place, and leave everything as it is then."""
    with monkeypatch.context() as patch:
        stop_at(number, patch)
        patch.setattr(Path, "unlink", lambda *_args, **_kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            routers.save_pretrained(folder)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_killed_save_leaves_the_old_routers_or_the_new(model, tmp_path, monkeypatch, caplog, number):
    old, new = routers_of(model, exit_layers=[2]), routers_of(model)
    old.save_pretrained(tmp_path)
    killed_at(new, tmp_path, monkeypatch, number)
    expected = (old, old, new)[number]
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")}
    loaded = TIDERouters.from_pretrained(tmp_path)
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*")} == before
    assert ("belongs to other weights, as after a save that was killed" in caplog.text) == (expected is new)
    others = {"weights_sha256": None, "_name_or_path": None}
    assert loaded.config.to_dict() | others == expected.config.to_dict() | others
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    caplog.clear()
    routers_of(model, exit_threshold=0.9).save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).config.exit_threshold == 0.9
    assert caplog.text == ""


def test_a_reader_that_a_save_overtakes_gets_the_new_routers(model, tmp_path, caplog):
    routers_of(model, exit_layers=[2]).save_pretrained(tmp_path)
    before = TIDEConfig.from_pretrained(tmp_path)
    routers_of(model).save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path, config=before).exit_layers == [1, 3]
    assert caplog.text == ""


def test_a_save_removes_old_unfinished_files_and_nothing_else(model, tmp_path, monkeypatch):
    folder = tmp_path / "routers"
    killed_at(routers_of(model), folder, monkeypatch, 0)
    left = sorted(folder.glob("*.unfinished"))
    assert len(left) == 2
    stranger = folder / "model.safetensors.novel.unfinished"
    stranger.write_text("mine")
    for file in (left[0], stranger):
        os.utime(file, (0, 0))
    routers_of(model).save_pretrained(folder)
    young = folder / "tide"  # what the killed save left there
    assert set(folder.iterdir()) == {folder / "config.json", folder / "model.safetensors", left[1], stranger, young}


def test_a_save_follows_no_links(model, tmp_path, monkeypatch):
    folder, outside = tmp_path / "routers", tmp_path / "outside"
    folder.mkdir()
    outside.write_text("mine")
    monkeypatch.setattr(folders.secrets, "randbelow", lambda _: 7)
    for name in ("config.json", "model.safetensors"):
        (folder / name).symlink_to(outside)
    routers_of(model).save_pretrained(folder)
    (folder / f"config.json.7{folders.UNFINISHED}").symlink_to(outside)
    with pytest.raises(RoutersNotSavedError, match="File exists"):
        routers_of(model).save_pretrained(folder)
    assert outside.read_text() == "mine"


def test_a_fresh_head_is_the_identity_and_a_fresh_router_scores_one_half(model):
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_strategy="linear", translator_rank=4)
    state = torch.randn(2, 5, 32)
    assert torch.equal(routers[1].head(state), state)
    scores = routers[1].router(state.to(torch.bfloat16))
    assert scores.shape == (2, 5)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.full((2, 5), 0.5))


def test_folders_without_config_or_safetensors_are_not_found(folder, tmp_path):
    with pytest.raises(RoutersNotFoundError, match=r"no routers at .*got .*Expected config.json and model.safetensors"):
        TIDERouters.from_pretrained(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")  # a pickle is not read
    with pytest.raises(RoutersNotFoundError, match=r"Expected config\.json and model\.safetensors"):
        TIDERouters.from_pretrained(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_errors_quote_nothing_of_a_file_that_a_link_leads_to(folder, tmp_path, name):
    (tmp_path / "secret").write_text("the password is swordfish")
    (folder / name).unlink()
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(TIDEError) as caught:
        TIDERouters.from_pretrained(folder)
    assert "Expected" in str(caught.value)
    assert "swordfish" not in str(caught.value)


def flipped(content, position):
    return content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: b"",
        lambda content: content + b"0",
        lambda content: content[:-50] + b"0" + content[-50:],
        lambda content: flipped(content, 0),  # the length of the header
        lambda content: flipped(content, content.index(b"exits.1")),
        lambda content: flipped(content, content.index(b"format")),
        lambda content: flipped(content, len(content) - 5),
        lambda content: content.replace(b'"F32"', b'"I32"', 1),
    ],
)
def test_damaged_weights_are_refused(folder, damage):
    weights = folder / "model.safetensors"
    weights.write_bytes(damage(weights.read_bytes()))
    with pytest.raises(RoutersFileError, match=CANNOT_BE_USED):
        TIDERouters.from_pretrained(folder)


@pytest.mark.parametrize("kind", [TIDERouters, TIDEConfig])
def test_a_config_file_without_a_json_object_is_refused(folder, kind):
    (folder / "config.json").write_text("{not json")
    with pytest.raises(RoutersFileError, match=r"got a config\.json that is no JSON \(Expecting property name"):
        kind.from_pretrained(folder)
    for text in ("null", "[1]", "[" * 10**5, '{"hidden_size": 1' + "0" * 5000 + "}"):
        (folder / "config.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"the config of the routers cannot be used: got (.|\n)*Expected"):
            kind.from_pretrained(folder)


NAME = "exits.1.router.down.weight"


def test_tensors_that_do_not_fit_the_config_are_refused(model, tmp_path):
    routers = routers_of(model, draft_vocab_size=2)
    routers.draft_vocab.copy_(torch.tensor([9, 4]))
    routers.save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).draft_vocab.tolist() == [9, 4]
    tensors = load_file(tmp_path / "model.safetensors")
    edit_config(tmp_path, weights_sha256=None)
    for changed, message in (
        ({name: tensor for name, tensor in tensors.items() if name != NAME}, CANNOT_BE_USED),
        (tensors | {"exits.2.router.down.weight": tensors[NAME].clone()}, CANNOT_BE_USED),
        (tensors | {NAME: torch.zeros(3, 3)}, CANNOT_BE_USED),
        (tensors | {"draft_vocab": torch.tensor([3, 10**6])}, "a draft_vocab with other than token ids"),
    ):
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(RoutersFileError, match=message):
            TIDERouters.from_pretrained(tmp_path)


def test_the_fingerprint_tells_a_quantised_head_from_that_of_another_model(model):
    routers = routers_of(model)
    quantised = tiny_model("llama")
    with torch.no_grad():
        weight = quantised.lm_head.weight
        scale = weight.abs().amax(dim=1, keepdim=True) / 7
        weight.copy_((weight / scale).round() * scale)
    routers.check_base_model(quantised)
    routers.check_base_model(tiny_model("llama").to(torch.float16))
    with pytest.raises(BaseModelMismatchError, match="fingerprint"):
        routers.check_base_model(tiny_model("llama", seed=5))


def test_without_a_fingerprint_the_name_of_the_base_model_decides(model):
    routers = routers_of(model)
    routers.config.unembed_hash, routers.config.base_model_name_or_path = None, "org/other"
    with pytest.raises(BaseModelMismatchError, match=r"got ''\. Expected 'org/other'"):
        routers.check_base_model(model)
    routers.check_base_model(model, ignore_base_mismatch=True)
