"""Attach and detach: the same object, its own class, and nothing left behind."""

import copy
import inspect
import pickle

import pytest
import torch
from families import FAMILIES, RECURRENT, prompt, tiny_model
from skipping_calls import OPTIONS, attached
from torch import nn
from transformers import AutoModelForCausalLM

from tide_hf import TIDEModelForCausalLM, TIDERouters, UnsupportedModelError
from tide_hf.common.choices import MODES
from tide_hf.common.errors import BaseModelMismatchError, ConfigurationError


def traces(model) -> dict:
    """All that attaching could leave on a model."""
    return {
        "class": type(model),
        "attributes": sorted(model.__dict__),
        "generation config": model.generation_config.to_dict(),
        "hooks": [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
        ],
        "forwards": [name for name, module in model.named_modules() if "forward" in module.__dict__],
        "weights": sorted(model.state_dict()),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_leaves_an_untouched_model(family):
    model = tiny_model(family)
    expected, before = model.generate(prompt(), **OPTIONS), traces(model)
    mode = "post_hoc" if family in RECURRENT else "early_exit"
    routers = TIDERouters.for_model(model, exit_layers=[2], exit_threshold=0.0)
    base_class, base_name = type(model), str(type(model))
    assert TIDEModelForCausalLM.attach(model, routers, mode=mode) is model
    assert isinstance(model, TIDEModelForCausalLM)
    assert isinstance(model, base_class)
    assert str(type(model)) == base_name  # transformers keys its registry of outputs on it
    model.generate(prompt(), **OPTIONS)
    assert TIDEModelForCausalLM.detach(model) is model
    assert not isinstance(model, TIDEModelForCausalLM)
    assert traces(model) == before
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    assert TIDEModelForCausalLM.detach(model) is model  # a second time does nothing


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_attached_and_independent(clone):
    model = attached("gpt2", exit_threshold=0.0)  # some other families cannot be pickled without TIDE either
    twin = clone(model)
    assert isinstance(twin, TIDEModelForCausalLM)
    own = {id(module) for module in twin.modules()}
    assert all(id(layer.forward.module) in own for layer in twin._tide.structure.layers)
    for mode in MODES:
        expected = model.generate(prompt(), tide_mode=mode, **OPTIONS)
        assert torch.equal(twin.generate(prompt(), tide_mode=mode, **OPTIONS), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    TIDEModelForCausalLM.detach(model)
    assert twin.generate(prompt(), tide_mode="early_exit", **OPTIONS).unique().numel() > 9
    assert twin.last_exit_stats.exits_per_layer == {1: 9}
    TIDEModelForCausalLM.detach(twin)
    assert not hasattr(twin, "_tide")


def test_save_pretrained_writes_the_base_model_alone(tmp_path):
    model = attached()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(tiny_model("llama"))
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert not any("tide" in name or "router" in name for name in loaded.state_dict())
    assert "tide_mode" not in (tmp_path / "generation_config.json").read_text()


def test_routers_follow_the_model():
    model = attached(exit_threshold=0.0)
    model.to(torch.float64)
    assert {parameter.dtype for parameter in model._tide.routers.parameters()} == {torch.float64}
    for mode in MODES:
        model.generate(prompt(), tide_mode=mode, **OPTIONS)
    model.to("meta")
    assert model._tide.routers.device.type == "meta"


def test_attaching_again_replaces_the_settings():
    model = attached(mode="early_exit", exit_threshold=0.0)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=0.0)
    model.generate(prompt(), **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {2: 9}


def test_routers_of_another_base_model_are_refused():
    routers = TIDERouters.for_model(tiny_model("llama", seed=1), exit_layers=[2])
    model = tiny_model("llama", seed=2)
    with pytest.raises(BaseModelMismatchError, match=r"another base model.*fingerprint.*ignore_base_mismatch=True"):
        TIDEModelForCausalLM.attach(model, routers)
    assert "forward" not in model.model.layers[0].__dict__
    TIDEModelForCausalLM.attach(model, routers, ignore_base_mismatch=True)
    other_shape = tiny_model("llama", num_hidden_layers=6)
    with pytest.raises(BaseModelMismatchError, match=r"\(6, 32, 96\)\. Expected \(4, 32, 96\)"):
        TIDEModelForCausalLM.attach(other_shape, routers, ignore_base_mismatch=True)


def test_what_is_no_language_model_is_refused():
    for model in (nn.Linear(2, 2), object()):
        with pytest.raises(UnsupportedModelError, match=r"it is no transformers model\. Expected a list of config"):
            TIDEModelForCausalLM.attach(model)
    bare = tiny_model("llama").model
    with pytest.raises(UnsupportedModelError, match="got a model without transformers' generate"):
        TIDEModelForCausalLM.attach(bare)
    with pytest.raises(ConfigurationError, match="from_pretrained"):
        TIDEModelForCausalLM()


def test_a_new_model_of_an_attached_models_class_has_nothing_attached(tmp_path):
    """As code makes them that knows a model by its class: `type(model)(config)`, `type(model).from_pretrained(...)`."""
    model = tiny_model("llama")
    expected, base_class, signature = model.generate(prompt(), **OPTIONS), type(model), inspect.signature(type(model))
    TIDEModelForCausalLM.attach(model)
    model.save_pretrained(tmp_path)
    made = [type(model)(model.config).eval(), type(model)._from_config(model.config).eval()]
    for one in made:
        one.load_state_dict(model.state_dict())
    for one in (*made, type(model).from_pretrained(tmp_path)):
        assert type(one) is base_class
        assert not isinstance(one, TIDEModelForCausalLM)
        assert torch.equal(one.generate(prompt(), **OPTIONS), expected)
    assert inspect.signature(type(model)) == signature
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    assert model.last_exit_stats is not None
