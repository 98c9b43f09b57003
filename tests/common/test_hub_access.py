"""A mistyped folder and an unreachable Hub are reported at once, not after many retries."""

import re
import traceback

import pytest
from huggingface_hub import HfApi

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common import hub_access
from tide_hf.common.choices import DEFAULT_MODEL
from tide_hf.common.errors import ModelNotFoundError, RoutersNotFoundError, TIDEError

PATHS = ["../nowhere/model", "~/models/nowhere", "models\\nowhere", "a/b/c", "nowhere/"]


def load_base(name, **options):
    return TIDEModelForCausalLM.from_pretrained(name, **options)


def load_routers(name, **options):
    return TIDEModelForCausalLM.from_pretrained("org/base", routers=name, **options)


KINDS = [(load_base, ModelNotFoundError), (load_routers, RoutersNotFoundError)]


def unreachable(*_args, **_options):
    raise ConnectionError("the network is down")


def test_the_error_comes_without_the_clients_traceback_and_names_a_way_forward(monkeypatch, tmp_path):
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path))
    for load, error in KINDS:
        with pytest.raises(error) as caught:
            load("models/nowhere")
        written = "".join(traceback.format_exception(caught.value))
        assert written.count("Traceback") == 1
    with pytest.raises(ModelNotFoundError, match=r"network, or name a local folder\.$"):
        load_base("models/nowhere")
    with pytest.raises(ModelNotFoundError, match=r"or name a local folder; `tide-hf demo` makes one from PyPI\.$"):
        load_base(DEFAULT_MODEL)
    copy = tmp_path / f"{DEFAULT_MODEL.replace('/', '--')}--made-by-the-demo"
    copy.mkdir()
    with pytest.raises(ModelNotFoundError, match=re.escape(f"or name a local folder, such as {copy}.")):
        load_base(DEFAULT_MODEL)


@pytest.mark.parametrize(("load", "error"), KINDS)
def test_what_is_not_found_costs_at_most_one_request(model_hub, monkeypatch, load, error):
    for name in PATHS:
        with pytest.raises(error, match="got no such folder, and not a valid name of a repository") as caught:
            load(name)
        assert isinstance(caught.value, FileNotFoundError)
    assert model_hub.asked == []
    with pytest.raises(error, match="got no such folder, and no such repository on the Hub, or a private one"):
        load("models/nowhere")
    assert [path for path in model_hub.asked if "nowhere" in path] == ["api/models/models/nowhere"]
    model_hub.asked.clear()
    asked = []
    monkeypatch.setattr(HfApi, "model_info", lambda api, name, **options: asked.append(name) or unreachable())
    with pytest.raises(error, match="got no such folder, and the Hub cannot be reached: 'the network is down'"):
        load("models/nowhere")
    assert (asked, model_hub.asked) == (["models/nowhere"], [])


def test_cached_files_are_loaded_without_further_requests(model_hub, on_hub, monkeypatch, tmp_path):
    commit = model_hub.repos["models", "org/base-tide"].refs["main"]
    TIDERouters.from_pretrained("org/base-tide", revision=commit, cache_dir=tmp_path / "commit")
    for where in ({}, {"cache_dir": str(tmp_path / "elsewhere")}):
        TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where)
    monkeypatch.setattr(HfApi, "model_info", unreachable)
    model_hub.asked.clear()
    for where in ({}, {"cache_dir": str(tmp_path / "elsewhere")}):
        model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where)
        assert model._tide.routers.exit_layers == [1, 3]
    assert [path for path in model_hub.asked if not path.endswith("adapter_config.json")] == []
    with pytest.raises(RoutersNotFoundError, match="the network is down"):
        TIDERouters.from_pretrained("org/base-tide", cache_dir=tmp_path / "empty")
    at_commit = {"revision": commit, "cache_dir": tmp_path / "commit"}  # a cache without `main`
    assert TIDERouters.from_pretrained("org/base-tide", **at_commit).exit_layers == [1, 3]
    for options in ({"local_files_only": True}, {"force_download": True}):  # the caller says where to look
        assert hub_access.hub_options("org/name", options, lambda *_: TIDEError()) == {}
