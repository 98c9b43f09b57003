"""A repository of routers in transformers' auto classes and pipelines is its base model, with TIDE attached."""

import os
import subprocess
import sys

import pytest
import torch
from hub_repositories import OPTIONS, PROMPT, edit_config, plain_answer
from loopback_hub import TOKEN
from repository import ROOT
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tide_hf import TIDEConfig, TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError
from tide_hf.routers.files import write_speculators


def test_auto_classes_load_base_and_routers(on_hub):
    for source in ("org/base-tide", on_hub):
        own = TIDEModelForCausalLM.from_pretrained(source, mode="early_exit")
        assert (own._tide.mode, own._tide.default_threshold) == ("early_exit", 0.8)
    model = AutoModelForCausalLM.from_pretrained("org/base-tide")
    assert all(isinstance(model, one) for one in (TIDEModelForCausalLM, LlamaForCausalLM))
    assert model.config._name_or_path == "org/base"
    assert (model._tide.routers.exit_layers, model._tide.default_threshold) == ([1, 3], 0.8)
    tokenizer = AutoTokenizer.from_pretrained("org/base-tide")
    assert torch.equal(model.generate(**tokenizer(PROMPT, return_tensors="pt"), **OPTIONS), plain_answer())
    assert model.last_exit_stats.mode == "self_speculative"


def test_arguments_of_the_auto_class_reach_base_and_routers(
    model_hub, on_hub, hub_routers, tiny_llama, tiny_model_folder
):
    tiny_llama(seed=1).save_pretrained(tiny_model_folder)  # the base moves on; the routers name the older commit
    model_hub.add("org/base", tiny_model_folder)
    edit_config(on_hub, exit_threshold=0.5)
    repo = model_hub.repos["models", "org/base-tide"]
    repo.commit({"config.json": (on_hub / "config.json").read_bytes()}, "next")
    for repo in model_hub.repos.values():
        repo.private = True
    options = {"revision": "next", "token": TOKEN}
    model = AutoModelForCausalLM.from_pretrained("org/base-tide", mode="early_exit", dtype="bfloat16", **options)
    assert (model._tide.mode, model._tide.default_threshold, model.dtype) == ("early_exit", 0.5, torch.bfloat16)
    assert torch.equal(model._tide.routers[1].router.down.weight, hub_routers[1].router.down.weight)  # never rounded
    with pytest.raises(ConfigurationError, match="invalid exit_threshold"):
        AutoModelForCausalLM.from_pretrained("org/base-tide", exit_threshold=-1.0, **options)
    assert AutoTokenizer.from_pretrained("org/base-tide", **options).vocab_size == 256


def test_routers_that_vllm_loads_too_are_loaded_by_their_name(model_hub, served_routers, tmp_path):
    served_routers.save_pretrained(tmp_path / "served")
    model_hub.add("org/served", tmp_path / "served")
    for source in ("org/served", tmp_path / "served"):
        model = AutoModelForCausalLM.from_pretrained(source, mode="early_exit")
        assert (model._tide.mode, model._tide.default_threshold) == ("early_exit", 0.8)
        assert (model._tide.routers.exit_layers, model._tide.routers.draft_head is None) == ([2], False)
        config, options = AutoConfig.from_pretrained(source, exit_threshold=0.5, return_unused_kwargs=True, other=1)
        assert (type(config), config.exit_threshold, options) == (TIDEConfig, 0.5, {"other": 1})
    tokenizer = AutoTokenizer.from_pretrained("org/served")
    inputs = tokenizer(PROMPT, return_tensors="pt")
    assert torch.equal(model.generate(**inputs, **OPTIONS, tide_mode="self_speculative"), plain_answer())
    served_routers.config.base_model_name_or_path = "org/served"
    served_routers.save_pretrained(tmp_path / "served")
    model_hub.add("org/served", tmp_path / "served")
    for load in (AutoModelForCausalLM, AutoTokenizer):
        with pytest.raises(ConfigurationError, match="'org/served', which holds routers itself"):
            load.from_pretrained("org/served")


def test_a_draft_head_alone_is_no_model(served_routers, tmp_path):
    write_speculators(served_routers, tmp_path)
    edit_config(tmp_path, model_type="speculators")
    with pytest.raises(ConfigurationError, match=r"config of the routers cannot be used: got .*'speculators_config'"):
        AutoModelForCausalLM.from_pretrained(tmp_path)


FRESH = """
import sys
import tide_hf
assert "transformers" not in sys.modules
from transformers import pipeline
generator = pipeline("text-generation", model="org/base-tide", device="cpu")
answer = generator(sys.argv[1], return_tensors=True, max_new_tokens=12, do_sample=False, eos_token_id=None)
print(answer[0]["generated_token_ids"], generator.model.last_exit_stats.mode)
"""


def test_a_pipeline_needs_nothing_but_the_import_of_tide_hf(model_hub, on_hub, tmp_path):
    environment = {**os.environ, "HF_ENDPOINT": model_hub.address, "HF_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FRESH, PROMPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == f"{plain_answer()[0].tolist()} self_speculative\n", done.stderr
