"""Files of routers, damaged in many ways: each is refused by an error of the library, or loads as it reads."""

import json
import shutil
from contextlib import suppress

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from tide_hf import TIDERouters
from tide_hf.common.errors import TIDEError

quick = settings(max_examples=25, database=None, deadline=None, suppress_health_check=list(HealthCheck))
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner))


@pytest.fixture(autouse=True)
def _no_reports():
    """transformers has a report for every file that does not fit."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    yield
    transformers_logging.set_verbosity(verbosity)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4)
    )


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    TIDERouters.for_model(model, exit_layers=[1, 2, 3], exit_threshold=0.25).save_pretrained(folder)
    return folder


def cut_off(content, length):
    return content[: length % len(content)]


def flipped(content, place, bits):
    return content[:place] + bytes([content[place] ^ bits]) + content[place + 1 :]


def load_damaged(saved, tmp_path, name, content):
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    (folder / name).write_bytes(content)
    return TIDERouters.from_pretrained(folder)


@quick
@given(data=st.data())
def test_damaged_weights_are_refused(saved, tmp_path, data):
    weights = (saved / "model.safetensors").read_bytes()
    place, bits = data.draw(st.integers(0, len(weights) - 1)), data.draw(st.integers(1, 255))
    put = data.draw(st.binary(min_size=1, max_size=64))
    header = place % (8 + int.from_bytes(weights[:8], "little"))  # the format begins with the length of its header
    for content in (
        cut_off(weights, place),
        flipped(weights, place, bits),
        flipped(weights, header, bits),
        weights[:place] + put + weights[place:],
    ):
        with pytest.raises(TIDEError):
            load_damaged(saved, tmp_path, "model.safetensors", content)


@quick
@given(data=st.data())
def test_a_config_that_says_anything_breaks_nothing(saved, tmp_path, data):
    config = json.loads((saved / "config.json").read_text(encoding="utf-8"))
    name = data.draw(st.sampled_from(sorted(config)) | st.text(min_size=1, max_size=12))
    changed = json.dumps(config | {name: data.draw(VALUES)}).encode()
    for content in (changed, data.draw(st.binary(max_size=200))):
        with suppress(TIDEError):
            load_damaged(saved, tmp_path, "config.json", content)


@quick
@given(place=st.integers(0, 10**6), bits=st.integers(1, 255))
def test_a_damaged_router_pt_loads_as_it_was_or_is_refused(model, tmp_path, place, bits):
    file = tmp_path / "router.pt"
    torch.manual_seed(0)
    layer = {"down.weight": torch.randn(128, 32), "up.weight": torch.randn(1, 128)}
    torch.save({"hidden_dim": 32, "bottleneck_dim": 128, "router_layers": {1: layer}}, file)
    content = file.read_bytes()
    original = TIDERouters.from_router_pt(file, model).state_dict()
    file.write_bytes(cut_off(content, place))
    with pytest.raises(TIDEError):
        TIDERouters.from_router_pt(file, model)
    file.write_bytes(flipped(content, place % len(content), bits))
    with suppress(TIDEError):
        found = TIDERouters.from_router_pt(file, model).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in original.items())
