"""Routers on the Hub: revisions, tokens, offline use, and what a malicious repository cannot do."""

import json

import pytest
from hub_repositories import edit_config
from loopback_hub import TOKEN
from transformers import AutoModelForCausalLM, AutoTokenizer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common.errors import ConfigurationError, RoutersFileError, RoutersNotFoundError


def test_a_revision_is_a_commit_or_a_branch(model_hub, on_hub):
    old = model_hub.repos["models", "org/base-tide"].refs["main"]
    edit_config(on_hub, exit_threshold=0.5)
    model_hub.add("org/base-tide", on_hub)
    model_hub.repos["models", "org/base-tide"].refs["older"] = old
    assert TIDERouters.from_pretrained("org/base-tide").config.exit_threshold == 0.5
    for revision in (old, "older"):
        assert TIDERouters.from_pretrained("org/base-tide", revision=revision).config.exit_threshold == 0.8
        model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", routers_revision=revision)
        assert model._tide.default_threshold == 0.8
    with pytest.raises(RoutersNotFoundError, match=r"no routers at org/base-tide: got .*Expected config\.json"):
        TIDERouters.from_pretrained("org/base-tide", revision="newer")


def test_private_repositories_need_a_token(model_hub, on_hub):
    for repo in model_hub.repos.values():
        repo.private = True
    with pytest.raises(RoutersNotFoundError, match="no routers at org/base-tide"):
        TIDERouters.from_pretrained("org/base-tide", token="hf_another")
    model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", token=TOKEN)
    assert model._tide.routers.exit_layers == [1, 3]


@pytest.mark.parametrize("how", ["local_files_only", "HF_HUB_OFFLINE"])
def test_cached_routers_need_no_network(model_hub, on_hub, tmp_path, monkeypatch, how):
    where = {"cache_dir": str(tmp_path / "elsewhere")}
    TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where)
    offline = {"local_files_only": True} if how == "local_files_only" else {}
    if not offline:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    model_hub.asked.clear()
    model = TIDEModelForCausalLM.from_pretrained("org/base", routers="org/base-tide", **where, **offline)
    assert model._tide.routers is not None
    assert AutoModelForCausalLM.from_pretrained("org/base-tide", **where, **offline)._tide.routers is not None
    with pytest.raises(RoutersNotFoundError, match="no routers at org/base-tide"):
        TIDERouters.from_pretrained("org/base-tide", **offline)  # in the other cache
    # Where peft is installed, transformers' own auto class looks for an adapter without local_files_only.
    assert [path for path in model_hub.asked if not path.endswith("adapter_config.json")] == []


def test_an_adapter_in_a_repository_of_routers_changes_nothing(model_hub, on_hub, hub_routers):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(target_modules=["exits.1.router.down"], init_lora_weights=False)
    peft.get_peft_model(TIDERouters(hub_routers.config), settings).save_pretrained(on_hub)
    assert (on_hub / "adapter_config.json").is_file()
    model_hub.add("org/base-tide", on_hub)
    for source in (on_hub, "org/base-tide"):
        loaded = TIDERouters.from_pretrained(source)
        assert loaded.state_dict().keys() == hub_routers.state_dict().keys()
    with pytest.raises(RoutersFileError, match=r"got an adapter_config\.json beside them"):
        AutoModelForCausalLM.from_pretrained(on_hub)  # where it would reach the base model


def test_a_weights_index_leads_out_of_no_folder_and_no_cache(model_hub, on_hub, tmp_path):
    outside = tmp_path / "outside.safetensors"
    (on_hub / "model.safetensors").rename(outside)
    index = {"metadata": {}, "weight_map": {"exits.1.router.up.bias": "../outside.safetensors"}}
    (on_hub / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(RoutersNotFoundError, match=r"got 'a folder without model\.safetensors'"):
        TIDERouters.from_pretrained(on_hub)
    model_hub.repos.pop(("models", "org/base-tide"))
    model_hub.add("org/base-tide", on_hub)
    model_hub.repos["models", "org/base-tide"].commit({"../outside.safetensors": outside.read_bytes()})  # can be sent
    with pytest.raises((RoutersFileError, RoutersNotFoundError), match="org/base-tide"):
        TIDERouters.from_pretrained("org/base-tide")
    assert list((tmp_path / "cache").rglob("outside.safetensors")) == []


@pytest.mark.parametrize(
    "change",
    [
        {"transformers_weights": "../outside.safetensors"},
        {"attn_implementation": "org/kernel"},
        {"auto_map": {"AutoModelForCausalLM": "code.Model"}},
        {"quantization_config": {"quant_method": "bitsandbytes"}},
        {"custom_pipelines": {}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_config_names_no_files_and_no_code(model_hub, on_hub, change):
    edit_config(on_hub, **change)
    model_hub.add("org/base-tide", on_hub)
    for load in (TIDERouters.from_pretrained, AutoModelForCausalLM.from_pretrained):
        with pytest.raises(ConfigurationError, match=rf"got \['{next(iter(change))}'\], which it must not have"):
            load("org/base-tide", trust_remote_code=True)


def test_a_repository_names_its_base_on_the_hub(model_hub, on_hub, tiny_model_folder):
    for base, got in {
        str(tiny_model_folder): "tiny-llama'",
        "../tiny-llama": "'../tiny-llama'",
        "org/base-tide": "'org/base-tide', which holds routers itself",
        None: "no base_model_name_or_path",
    }.items():
        edit_config(on_hub, base_model_name_or_path=base, base_model_revision=None)
        model_hub.add("org/base-tide", on_hub)
        for load in (AutoModelForCausalLM.from_pretrained, AutoTokenizer.from_pretrained):
            with pytest.raises(ConfigurationError, match=f"which model to load: got .*{got}.* Expected the name"):
                load("org/base-tide")
    edit_config(on_hub, base_model_name_or_path=str(tiny_model_folder))
    assert isinstance(AutoModelForCausalLM.from_pretrained(on_hub), TIDEModelForCausalLM)  # a folder may name one
    edit_config(on_hub, base_model_name_or_path="org/none")
    with pytest.raises(OSError, match="org/none is not"):  # transformers' own error
        AutoModelForCausalLM.from_pretrained(on_hub)
