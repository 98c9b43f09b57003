"""Models that change between calls: each call uses the hooks, scales, weights, layers and head of its time."""

import copy

import pytest
import torch
from families import prompt, tiny_model
from on_steps import ATTACH
from packed_weights import set_fastest_layouts
from torch.nn.modules.module import register_module_forward_hook

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common.errors import UnsupportedModelError
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights import linear_gate
from tide_hf.weights.layouts import PlainWeight, PrepackedWeight
from tide_hf.weights.lossless import HalfWeight

OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SHIFT = 3 * torch.randn(32, generator=torch.Generator().manual_seed(0))


def answer(model):
    return model.generate(prompt(), **OPTIONS)


def shift(_module, _args, output):
    return output + SHIFT


def shift_mlps(module, _args, output):
    return output + SHIFT if type(module).__name__ == "LlamaMLP" else None


HOOKS = {
    "embeddings": lambda model: model.model.embed_tokens.register_forward_hook(shift),
    "layer": lambda model: model.model.layers[1].register_forward_hook(shift),
    "mlp": lambda model: model.model.layers[1].mlp.register_forward_hook(shift),
    "all modules": lambda _: register_module_forward_hook(shift_mlps),
}


@pytest.mark.parametrize(("engine", "place"), [*(("captured", place) for place in HOOKS), ("compiled", "mlp")])
def test_steps_run_hooks_that_come_and_go(engine, place):
    model = tiny_model("llama")
    plain = answer(model)
    with HOOKS[place](model):
        shifted = answer(model)
    assert not torch.equal(plain, shifted)
    ATTACH[engine](model)
    assert torch.equal(answer(model), plain)
    with HOOKS[place](model):
        assert torch.equal(answer(model), shifted)
    assert torch.equal(answer(model), plain)


WRITES = {
    "a row": lambda weight: weight.data[7].zero_(),
    "a column": lambda weight: weight.data[:, 7].zero_(),
    "all of it": lambda weight: setattr(weight, "data", weight.data.neg()),
    "through numpy": lambda weight: weight.detach().numpy()[7].fill(0),
}


@pytest.mark.parametrize("layout", [PrepackedWeight, PlainWeight, HalfWeight])
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_stored_weights_follow_writes_that_pytorch_does_not_count(monkeypatch, layout, write):
    set_fastest_layouts(monkeypatch)  # so that nothing is measured with the product below
    monkeypatch.setattr(linear_gate, "fastest_layout", lambda *_: layout)

    def product(state, stored, bias, _scales):
        weights = [
            one.transpose(1, 2).reshape(16 * len(one), -1) if one.dim() == 4 else one for one in stored
        ]  # panels
        return torch.nn.functional.linear(state, torch.cat(weights).to(state.dtype), bias)

    monkeypatch.setattr(weight_layouts, "load_op", lambda name, _: product if name == "skinny_gemm" else None)
    model, other = (tiny_model("llama").bfloat16().float() for _ in range(2))
    TIDEModelForCausalLM.attach(model, pack_weights=True)
    before = answer(model)
    assert torch.equal(before, answer(other))
    assert all(layout in one.self_attn.o_proj.forward.converted for one in model.model.layers)
    for one in (model, other):
        for layer in one.model.layers:
            write(layer.self_attn.o_proj.weight)
    assert torch.equal(answer(model), answer(other))


def test_a_vocabulary_that_has_shrunk_is_refused():
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(
        model, TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear"), strict=True
    )
    model.resize_token_embeddings(120, mean_resizing=False)
    assert len(answer(model)[0]) == 19
    model.resize_token_embeddings(64, mean_resizing=False)
    with pytest.raises(UnsupportedModelError, match=r"got 64 tokens\. Expected 96 tokens\. Detach TIDE"):
        answer(model)


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda layers: layers.__delitem__(3), r"without what was model\.layers\.3\."),
        (lambda layers: layers.__delitem__(0), r"without what was model\.layers\.0\."),
        (lambda layers: layers.__delitem__(slice(1, 3)), r"without what was model\.layers\.1, model\.layers\.2\."),
        (lambda layers: layers.__setitem__(2, copy.deepcopy(layers[2])), r"without what was model\.layers\.2\."),
        (lambda layers: layers.append(layers[0]), r"5 layers, added or moved\."),
    ],
    ids=["last", "first", "two", "replaced", "added"],
)
@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_missing_layers_are_named(mode, change, got):
    model = tiny_model("llama")
    routers = TIDERouters.for_model(model, exit_layers=[1, 3])
    TIDEModelForCausalLM.attach(model, routers, mode=mode, exit_threshold=0.0, strict=True)
    change(model.model.layers)
    with pytest.raises(UnsupportedModelError, match=f"got (a model )?{got}"):
        answer(model)
    TIDEModelForCausalLM.detach(model)


class Wrapped(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *args, **kwargs):
        return self.layer(*args, **kwargs)


def test_wrapped_layers_still_run():
    model = tiny_model("llama")
    plain = answer(model)
    TIDEModelForCausalLM.attach(model)
    for number, layer in enumerate(model.model.layers):
        model.model.layers[number] = Wrapped(layer)
    assert torch.equal(answer(model), plain)
