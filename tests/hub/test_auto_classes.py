"""A repository of routers in transformers' auto classes and pipelines is its base model, with TIDE attached."""

import os
import subprocess
import sys

import pytest
import torch
from hub_repositories import OPTIONS, PROMPT, edit_config, plain_answer
from loopback_hub import TOKEN
from repository import ROOT
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError


def test_auto_classes_load_base_and_routers(on_hub):
    for source in ("org/base-tide", on_hub):
        own = TIDEModelForCausalLM.from_pretrained(source, mode="early_exit")
        assert (own._tide.mode, own._tide.exit_threshold) == ("early_exit", 0.8)
    model = AutoModelForCausalLM.from_pretrained("org/base-tide")
    assert all(isinstance(model, one) for one in (TIDEModelForCausalLM, LlamaForCausalLM))
    assert model.config._name_or_path == "org/base"
    assert (model._tide.routers.exit_layers, model._tide.exit_threshold) == ([1, 3], 0.8)
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
    assert (model._tide.mode, model._tide.exit_threshold, model.dtype) == ("early_exit", 0.5, torch.bfloat16)
    assert torch.equal(model._tide.routers[1].router.down.weight, hub_routers[1].router.down.weight)  # never rounded
    with pytest.raises(ConfigurationError, match="invalid exit_threshold"):
        AutoModelForCausalLM.from_pretrained("org/base-tide", exit_threshold=-1.0, **options)
    assert AutoTokenizer.from_pretrained("org/base-tide", **options).vocab_size == 256


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
