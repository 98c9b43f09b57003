"""Draft heads for vLLM: alone, and in the folder of the routers' other parts, which TIDE loads as it saved them."""

import json
import os
import shlex

import pytest
import torch
from draft_heads import HEADS, REFERENCE, base_model, draft_head_for
from hub_repositories import edit_config
from interruptions import stop_at
from safetensors.torch import load_file, save_file
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEConfig, TIDERouters
from tide_hf.common.errors import ConfigurationError, RoutersFileError, RoutersNotFoundError
from tide_hf.routers.eagle3 import read_foreign
from tide_hf.routers.files import write_speculators
from tide_hf.routers.speculators import vllm_command


def routers_of(seed=0, exit_threshold=0.75, **changes):
    """Routers with an exit layer and a draft head for 20 of 32 tokens."""
    routers = draft_head_for(base_model(), seed, draft_vocab_size=20, **changes)
    routers.config.exit_threshold = exit_threshold
    routers.draft_head.d2t += 12
    with torch.no_grad():
        routers[2].router.down.weight.normal_()
    return routers


def assert_same(loaded, routers):
    others = {"weights_sha256": None, "others_sha256": None, "_name_or_path": None}
    assert loaded.config.to_dict() | others == routers.config.to_dict() | others
    assert loaded.state_dict().keys() == routers.state_dict().keys()
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in routers.state_dict().items())


def others_of(folder):
    (file,) = (folder / "tide").iterdir()
    return file


@pytest.mark.parametrize("name", HEADS)
def test_a_head_is_written_as_it_was_read(name, tmp_path):
    model = base_model()
    routers = read_foreign(REFERENCE / name).routers_for(model)
    write_speculators(routers, tmp_path)
    again = read_foreign(tmp_path).routers_for(model)
    assert again.config.draft_head == routers.config.draft_head
    for key, tensor in routers.state_dict().items():
        assert torch.equal(again.state_dict()[key], tensor), key
    written = json.loads((tmp_path / "config.json").read_text())
    original = json.loads((REFERENCE / name / "config.json").read_text())
    assert written["speculators_config"].keys() == original["speculators_config"].keys()


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True, "norm_output": True}, {"tap_layers": [1, 4]}])
def test_saved_routers_are_what_vllm_loads_and_load_as_they_were(changes, tmp_path):
    """vLLM takes the config of `model_type` "speculators", and every safetensors file at the top of the folder."""
    routers = routers_of(**changes)
    routers.save_pretrained(tmp_path)
    write_speculators(routers, tmp_path / "alone")
    head = load_file(tmp_path / "alone" / "model.safetensors")
    assert [file.name for file in tmp_path.glob("*.safetensors")] == ["model.safetensors"]
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == head.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in head.items())
    config = json.loads((tmp_path / "config.json").read_text())
    alone = json.loads((tmp_path / "alone" / "config.json").read_text())
    assert config.pop("model_type") == "speculators"
    assert config.pop("tide")["exit_layers"] == [2]
    assert config == alone
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(routers.config.draft_head["tap_layers"])
    assert read_foreign(tmp_path) is None
    assert TIDEConfig.from_pretrained(tmp_path).exit_threshold == 0.75
    assert_same(TIDERouters.from_pretrained(tmp_path), routers)


def test_a_head_for_the_whole_vocabulary_has_no_map_of_it(tmp_path):
    """vLLM refuses one there."""
    routers = draft_head_for(base_model())
    routers.save_pretrained(tmp_path)
    assert {"d2t", "t2d"} & set(load_file(tmp_path / "model.safetensors")) == set()
    loaded = TIDERouters.from_pretrained(tmp_path)
    assert_same(loaded, routers)
    state, kv = torch.ones(1, 1, 16), DynamicLayer()
    assert loaded.draft_head.draft(loaded.draft_head(state, state, torch.tensor([[0]]), kv, None))[0] < 32


@pytest.mark.parametrize(
    ("had_head", "has_head", "number"),
    [
        *((True, True, number) for number in range(4)),
        (False, True, 2),
        (False, True, 3),
        (True, False, 1),
        (True, False, 2),
    ],
)
def test_a_killed_save_leaves_the_old_routers_or_the_new(had_head, has_head, number, tmp_path, monkeypatch):
    """Of a save with a draft head the third file, and of one without it the second, is what makes the routers new."""
    plain = TIDERouters.for_model(base_model(), exit_layers=[1])
    old, new = routers_of(0) if had_head else plain, routers_of(1) if has_head else plain
    with torch.no_grad():
        new.exits["2" if has_head else "1"].router.up.bias.fill_(3)
    old.save_pretrained(tmp_path)
    before = TIDERouters.from_pretrained(tmp_path)
    with monkeypatch.context() as patch:
        stop_at(number, patch)
        with pytest.raises(KeyboardInterrupt):
            new.save_pretrained(tmp_path)
    assert_same(TIDERouters.from_pretrained(tmp_path), new if number > 1 + has_head else before)
    new.save_pretrained(tmp_path)
    assert_same(TIDERouters.from_pretrained(tmp_path), new)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors", *(["tide"] if has_head else [])]
    if has_head:
        assert others_of(tmp_path).stem == new.config.others_sha256


def test_a_save_removes_what_former_ones_left_and_nothing_else(tmp_path):
    routers_of().save_pretrained(tmp_path)
    old = others_of(tmp_path)
    names = (f"{old.name}.7.unfinished", f"{'a' * 64}.safetensors.7.unfinished", "mine.safetensors")
    names += (f"{'b' * 64}.json.7.unfinished", f"{'b' * 64}.json")
    left, young, mine, unfinished, copy = map(old.with_name, names)
    for file in (left, young, mine, unfinished, copy):
        file.write_text("")
    os.utime(left, (0, 0))
    os.utime(unfinished, (0, 0))
    routers = routers_of()
    with torch.no_grad():
        routers[2].router.up.bias.fill_(3)
    routers.save_pretrained(tmp_path)
    current = old.with_name(f"{routers.config.others_sha256}.safetensors")
    assert current != old
    assert set((tmp_path / "tide").iterdir()) == {current, young, mine}


def test_other_parts_that_are_missing_or_damaged_are_refused(tmp_path):
    routers_of().save_pretrained(tmp_path)
    file = others_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(RoutersFileError, match=rf"cannot be used: got tide/{file.name} with SHA-256"):
        TIDERouters.from_pretrained(tmp_path)
    file.unlink()
    with pytest.raises(RoutersNotFoundError, match=f"got 'a folder without tide/{file.name}'"):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize("shift", [-13, 20])
def test_a_map_of_the_vocabulary_to_no_tokens_is_refused(shift, tmp_path):
    routers = routers_of()
    routers.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["d2t"] += shift
    save_file(tensors, tmp_path / "model.safetensors")
    own = json.loads((tmp_path / "config.json").read_text())["tide"]
    edit_config(tmp_path, tide=own | {"weights_sha256": None})
    with pytest.raises(RoutersFileError, match="a d2t with other than token ids"):
        TIDERouters.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("tide", "message"),
    [
        (["exit_layers"], r"config of the routers cannot be used: got \['exit_layers'\]"),
        ({"model_type": "llama"}, "invalid model_type: got 'llama'"),
        ({"auto_map": {}}, r"got \['auto_map'\], which it must not have"),
        ({"others_sha256": "../outside"}, "invalid others_sha256"),
        ({"draft_head": None, "exit_layers": [2]}, "tensors that do not fit its config"),
    ],
)
def test_the_own_fields_of_a_shared_config_are_checked(tide, message, tmp_path):
    routers_of().save_pretrained(tmp_path)
    own = json.loads((tmp_path / "config.json").read_text())["tide"]
    edit_config(tmp_path, tide=tide if isinstance(tide, list) else own | tide)
    with pytest.raises((ConfigurationError, RoutersFileError), match=message):
        TIDERouters.from_pretrained(tmp_path)


def test_the_command_for_vllm_quotes_what_a_shell_would_read():
    words = shlex.split(vllm_command("org/base; rm -rf /", "v1.0", "org/it's"))
    assert words[:6] == ["vllm", "serve", "org/base; rm -rf /", "--revision", "v1.0", "--speculative-config"]
    assert json.loads(words[6]) == {"model": "org/it's", "method": "eagle3", "num_speculative_tokens": 3}
