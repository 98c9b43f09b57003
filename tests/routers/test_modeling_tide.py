"""Routers and heads: what they compute, how they are stored, and which files are refused."""

import json
import os
from pathlib import Path

import pytest
import torch
from families import tiny_model
from router_folders import edit_config
from safetensors.torch import load_file, save_file

from tide_hf import TIDERouters
from tide_hf.common import files as folders
from tide_hf.common.errors import (
    BaseModelMismatchError,
    ConfigurationError,
    RoutersFileError,
    RoutersNotFoundError,
    RoutersNotSavedError,
    TIDEError,
)


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


@pytest.mark.parametrize("config", [{}, {"translator_rank": 4}, {"exit_strategy": "identity"}])
def test_save_and_load(model, tmp_path, config):
    routers = routers_of(model, calibration={"exit_layers": {"1": {"agreement": 0.5}}}, **config)
    routers.save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    loaded = TIDERouters.from_pretrained(tmp_path)
    assert loaded.config.calibration == routers.config.calibration
    assert loaded.config.unembed_hash == routers.config.unembed_hash
    for name, parameter in routers.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter)


def test_bfloat16_is_kept(model, tmp_path):
    routers_of(model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).dtype == torch.bfloat16


@pytest.mark.parametrize("number", [1, 2])
def test_a_failed_save_leaves_the_old_files(model, tmp_path, monkeypatch, number):
    old, written = routers_of(model), []
    old.save_pretrained(tmp_path)

    def fail(_file):
        written.append(1)
        if len(written) == number:
            raise OSError("disk full")

    monkeypatch.setattr(folders.os, "fsync", fail)
    with pytest.raises(RoutersNotSavedError, match="disk full"):
        routers_of(model, exit_layers=[2]).save_pretrained(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]
    assert TIDERouters.from_pretrained(tmp_path).exit_layers == old.exit_layers


def killed_at(routers, folder, monkeypatch, number):
    """Save, but stop before the file of that number takes its place, and leave everything as it is then."""
    replace, replaced = os.replace, []

    def stop(source, target):
        if len(replaced) == number:
            raise KeyboardInterrupt
        replaced.append(target)
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "replace", stop)
        patch.setattr(Path, "unlink", lambda *_args, **_kwargs: None)
        with pytest.raises(KeyboardInterrupt):
            routers.save_pretrained(folder)


@pytest.mark.parametrize("number", [0, 1])
def test_a_save_that_is_killed_leaves_the_old_routers_or_the_new(model, tmp_path, monkeypatch, caplog, number):
    old, new = routers_of(model, exit_layers=[2]), routers_of(model)
    old.save_pretrained(tmp_path)
    killed_at(new, tmp_path, monkeypatch, number)
    expected = (old, new)[number]
    before = {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()}
    loaded = TIDERouters.from_pretrained(tmp_path)
    assert {file: (file.stat().st_mtime_ns, file.read_bytes()) for file in tmp_path.iterdir()} == before
    assert ("belongs to other weights, as a save that was killed leaves it" in caplog.text) == (expected is new)
    others = {"weights_sha256": None, "_name_or_path": None}
    assert loaded.config.to_dict() | others == expected.config.to_dict() | others
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    caplog.clear()
    later = routers_of(model, exit_threshold=0.9)
    later.save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).config.exit_threshold == 0.9
    assert caplog.text == ""


def test_a_first_save_that_is_killed_leaves_nothing_to_load(model, tmp_path, monkeypatch):
    killed_at(routers_of(model), tmp_path, monkeypatch, 0)
    with pytest.raises(RoutersNotFoundError):
        TIDERouters.from_pretrained(tmp_path)


def test_damaged_weights_are_not_taken_for_those_of_a_killed_save(model, tmp_path, monkeypatch):
    routers_of(model, exit_layers=[2]).save_pretrained(tmp_path)
    killed_at(routers_of(model), tmp_path, monkeypatch, 1)
    whole = (tmp_path / "model.safetensors").read_bytes()
    threshold = whole.index(b"exit_threshold") + len(b'exit_threshold\\": ')
    for position in (len(whole) - 5, threshold):
        damaged = bytearray(whole)
        damaged[position] ^= 1
        (tmp_path / "model.safetensors").write_bytes(damaged)
        with pytest.raises(RoutersFileError, match="weights with SHA-256"):
            TIDERouters.from_pretrained(tmp_path)


def test_a_save_clears_away_what_killed_ones_left_and_nothing_else(model, tmp_path, monkeypatch):
    folder = tmp_path / "routers"
    killed_at(routers_of(model), folder, monkeypatch, 0)
    left = sorted(folder.glob("*.unfinished"))
    assert len(left) == 2
    outside = tmp_path / "outside"
    outside.write_text("mine")
    stranger = folder / "model.safetensors.novel.unfinished"
    link = folder / f"model.safetensors.7{folders.UNFINISHED}"
    link.symlink_to(outside)
    stranger.write_text("mine")
    for file in (*left[:1], stranger, outside):
        os.utime(file, (0, 0))
    routers_of(model).save_pretrained(folder)
    assert sorted(folder.iterdir()) == sorted(
        [folder / "config.json", folder / "model.safetensors", left[1], stranger, link]
    )
    assert outside.read_text() == stranger.read_text() == "mine"


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


@pytest.mark.parametrize("rank", [None, 4])
def test_a_fresh_head_is_the_identity_and_a_fresh_router_undecided(model, rank):
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_strategy="linear", translator_rank=rank)
    state = torch.randn(2, 5, 32)
    assert torch.equal(routers[1].head(state), state)
    scores = routers[1].router(state.to(torch.bfloat16))
    assert scores.shape == (2, 5)
    assert scores.dtype == torch.float32
    assert torch.equal(scores, torch.full((2, 5), 0.5))


def test_exit_layers_are_placed_by_interval_and_floor(model):
    deep = tiny_model("llama", num_hidden_layers=30)
    assert TIDERouters.for_model(deep).exit_layers == [8, 12, 16, 20, 24, 28]
    assert TIDERouters.for_model(deep, checkpoint_interval=10, min_layers=20).exit_layers == [20]
    assert TIDERouters.for_model(deep, exit_layers=[3, 1, 3]).exit_layers == [1, 3]  # named ones are honoured
    assert TIDERouters.for_model(model).exit_layers == [2]


@pytest.mark.parametrize("layers", [[0], [4], [-1], [1.5], ["1"], [True], []])
def test_exit_layers_out_of_range(model, layers):
    with pytest.raises(
        (ConfigurationError, Exception), match=r"(exit layer out of range: got .* Expected|exit_layers)"
    ):
        TIDERouters.for_model(model, exit_layers=layers)
    if all(type(layer) is int for layer in layers):
        with pytest.raises(ConfigurationError, match="Expected whole numbers from 1 to 3"):
            TIDERouters.for_model(model, exit_layers=layers)


def test_no_routers_there(tmp_path):
    with pytest.raises(RoutersNotFoundError, match=r"no routers at .*got .*Expected config.json and model.safetensors"):
        TIDERouters.from_pretrained(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such file"):
        TIDERouters.from_router_pt(tmp_path / "router.pt", tiny_model("llama"))


def test_a_pickle_in_place_of_safetensors_is_not_read(model, tmp_path):
    routers_of(model).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(RoutersNotFoundError, match=r"Expected config\.json and model\.safetensors"):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_link_to_a_file_that_is_no_routers_tells_nothing_of_it(model, tmp_path, name):
    (tmp_path / "secret").write_text("the password is swordfish")
    TIDERouters.for_model(model, exit_layers=[2]).save_pretrained(tmp_path / "routers")
    (tmp_path / "routers" / name).unlink()
    (tmp_path / "routers" / name).symlink_to(tmp_path / "secret")
    with pytest.raises(TIDEError) as caught:
        TIDERouters.from_pretrained(tmp_path / "routers")
    assert "Expected" in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_a_corrupt_safetensors_file(model, tmp_path):
    routers_of(model).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"\xff" * 64, b""):
        file.write_bytes(damaged)
        with pytest.raises(RoutersFileError, match=r"cannot be used: got .*Expected the config and tensors"):
            TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "unexpected", "shape"])
def test_tensors_that_do_not_fit_the_config(model, tmp_path, damage):
    routers_of(model).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "exits.1.router.down.weight"
    if damage == "missing":
        del tensors[name]
    elif damage == "unexpected":
        tensors["exits.2.router.down.weight"] = tensors[name].clone()
    else:
        tensors[name] = torch.zeros(3, 3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, weights_sha256=None)
    with pytest.raises(RoutersFileError, match=r"cannot be used: got .*Expected the config and tensors"):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        {"exit_layers": [99]},
        {"exit_layers": "all"},
        {"exit_threshold": "high"},
        {"exit_threshold": None},
        {"exit_strategy": "magic"},
        {"kv_cache_strategy": "forget"},
        {"hidden_size": -3},
        {"router_bottleneck_dim": 0},
        {"translator_rank": 0},
        {"draft_vocab_size": 0},
        {"draft_vocab_size": 10**6},
        {"checkpoint_interval": 0},
    ],
    ids=str,
)
def test_a_config_with_impossible_values(model, tmp_path, change):
    routers_of(model).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    with pytest.raises(ConfigurationError, match=r"got .*Expected"):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize("wrong", [torch.tensor([3, -1]), torch.tensor([3, 10**6])], ids=str)
def test_a_draft_vocabulary_is_checked_and_kept(model, tmp_path, wrong):
    routers = TIDERouters.for_model(model, exit_layers=[1], draft_vocab_size=2)
    routers.draft_vocab.copy_(torch.tensor([9, 4]))
    routers.save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).draft_vocab.tolist() == [9, 4]
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"draft_vocab": wrong}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    edit_config(tmp_path, weights_sha256=None)
    with pytest.raises(RoutersFileError, match="a draft_vocab with other than token ids"):
        TIDERouters.from_pretrained(tmp_path)


def test_a_config_that_is_no_json(model, tmp_path):
    routers_of(model).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(RoutersFileError, match=r"got a config\.json that is no JSON \(Expecting property name"):
        TIDERouters.from_pretrained(tmp_path)


def test_weights_other_than_those_that_were_saved_are_refused(model, tmp_path):
    routers = TIDERouters.for_model(model, exit_layers=[2])
    routers.save_pretrained(tmp_path)
    content = bytearray((tmp_path / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(RoutersFileError, match="weights with SHA-256"):
        TIDERouters.from_pretrained(tmp_path)
    routers.save_pretrained(tmp_path)
    assert TIDERouters.from_pretrained(tmp_path).config.weights_sha256 == routers.config.weights_sha256


def test_a_quantised_head_counts_as_the_same_base_and_another_does_not(model):
    routers = routers_of(model)
    rounded = tiny_model("llama")
    with torch.no_grad():
        weight = rounded.lm_head.weight
        scale = weight.abs().amax(dim=1, keepdim=True) / 7
        weight.copy_((weight / scale).round() * scale)
    routers.check_base_model(rounded)
    routers.check_base_model(tiny_model("llama").to(torch.float16))
    with pytest.raises(BaseModelMismatchError, match="fingerprint"):
        routers.check_base_model(tiny_model("llama", seed=5))


def test_without_a_fingerprint_the_name_decides(model):
    routers = routers_of(model)
    routers.config.unembed_hash, routers.config.base_model_name_or_path = None, "org/other"
    with pytest.raises(BaseModelMismatchError, match=r"got ''\. Expected 'org/other'"):
        routers.check_base_model(model)
    routers.check_base_model(model, ignore_base_mismatch=True)
