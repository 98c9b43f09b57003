"""Compiled layers: the base model's tokens in every family, few graphs, and eager where it cannot be otherwise.

Most tests trace layers and run what was traced as it is (`backend="eager"`), which takes no compiler.
"""

import copy
import logging
from functools import wraps

import pytest
import torch
from drafters import use_drafter
from families import slow_but, tiny_model
from test_linear_gate import let_pay

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.common.errors import ConfigurationError
from tide_hf.depth.linear_gate import linears_to_gate
from tide_hf.engines import shared_heads
from tide_hf.engines.steps.compiled_layers import CompiledLayers
from tide_hf.kernels.cpu.weight_forms import FORMS, PackedWeight, StoredWeight

SLIDING = {"mistral"}  # in every layer
FEW = ("llama", "mistral")  # the others take as long each, and are marked slow
FAMILIES = slow_but(FEW)
IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [0, 0, 9, 8, 7, 9, 8, 7]])
OPTIONS = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}


def attach(model, backend="eager", **settings):
    TIDEModelForCausalLM.attach(model, engine="compiled", **settings)
    model._tide.compiled_layers = CompiledLayers(backend)
    model._tide.compiled_steps.refused = "this is about layers"
    return model


def batch(rows):
    ids = IDS[:rows]
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_familys_tokens_are_the_base_models(family):
    model = tiny_model(family)
    options = {**OPTIONS, "min_new_tokens": 8}
    expected = model.generate(**batch(1), **options)
    attach(model)
    assert torch.equal(model.generate(**batch(1), **options), expected)
    layers = model._tide.compiled_layers
    assert layers.refused == {}
    assert (layers.num_compiled > 0) == (family not in SLIDING)


def test_rows_of_different_lengths_in_every_mode(tiny_llama):
    model = tiny_llama()
    expected = model.generate(**batch(2), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[1, 2])
    attach(model, routers=routers, exit_threshold=0.0)
    assert torch.equal(model.generate(**batch(2), **OPTIONS), expected)
    for mode in ("early_exit", "post_hoc"):
        compiled = model.generate(**batch(2), **OPTIONS, tide_mode=mode)
        before = model._tide.compiled_layers.num_compiled
        eager = model.generate(**batch(2), **OPTIONS, tide_mode=mode, tide_engine="eager")
        assert model._tide.compiled_layers.num_compiled == before > 0
        assert torch.equal(compiled, eager)


@pytest.mark.parametrize(("engine", "name"), [("eager", shared_heads.NAME), ("compiled", "sdpa")])
def test_layers_are_compiled_with_the_attention_they_have(tiny_llama, engine, name):
    model, names = attach(tiny_llama()), set()
    model.model.register_forward_pre_hook(lambda *_: names.add(model.config._attn_implementation))
    model.generate(**batch(2), **OPTIONS, tide_engine=engine)
    assert names == {name}


def test_tokens_that_leave_in_the_prompt(tiny_llama):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[1, 2], kv_cache_strategy="propagate", router_bottleneck_dim=8)
    for exit_layer in routers.exit_layers:
        torch.nn.init.normal_(routers[exit_layer].router.down.weight)
        torch.nn.init.normal_(routers[exit_layer].router.up.weight)
    attach(model, routers=routers, exit_threshold=0.5, mode="early_exit")
    options = {**OPTIONS, "exits_in_prompt": True}
    ids = torch.arange(5, 45).view(2, 20)
    compiled = model.generate(ids, **options)
    assert model.last_exit_stats.mlp_tokens_skipped > 0
    assert torch.equal(model.generate(ids, **options, tide_engine="eager"), compiled)


def test_the_layers_of_a_model_share_their_graphs(tiny_llama):
    graphs = []
    for num_layers in (3, 6):
        model = attach(tiny_llama(num_hidden_layers=num_layers))
        torch._dynamo.utils.counters.clear()
        model.generate(**batch(1), **OPTIONS)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert max(graphs) <= 6  # one or several tokens, with or without a mask, K/V behind a rollback or not


def test_rows_as_many_as_a_head_is_wide_make_no_graphs_of_their_own(tiny_llama):
    model = tiny_llama()
    rows = model.config.hidden_size // model.config.num_attention_heads
    ids = torch.arange(3, 3 + 2 * rows).view(rows, 2)
    attach(model, pack_weights=False)
    for fewer in (rows, rows - 1, rows - 2):
        continuations = [[5] * 32] * fewer
        use_drafter(model, "random", continuations)
        model.generate(ids[:fewer], **OPTIONS)
    assert model._tide.compiled_layers.warm_up.num_made <= 5  # one or several tokens, behind a rollback or not, masks


def test_layers_that_compute_with_their_number_share_graphs(tiny_llama, monkeypatch):
    model = tiny_llama(num_hidden_layers=12)
    native = type(model.model.layers[0]).forward

    @wraps(native)
    def forward(self, hidden_states, *args, **kwargs):
        return native(self, hidden_states * (1 + self.self_attn.layer_idx), *args, **kwargs)

    monkeypatch.setattr(type(model.model.layers[0]), "forward", forward)
    expected = model.generate(**batch(1), **OPTIONS)
    attach(model, pack_weights=False)
    assert torch.equal(model.generate(**batch(1), **OPTIONS), expected)
    layers = model._tide.compiled_layers
    assert layers.num_compiled > 0
    assert layers.warm_up.num_made < model.config.num_hidden_layers


def test_a_call_tells_what_it_spent_on_compiling(tiny_llama):
    model = attach(tiny_llama())
    model.generate(**batch(1), **OPTIONS)
    warm_up, stats = model._tide.compiled_layers.warm_up, model.last_exit_stats
    assert warm_up.num_made > 0
    assert (stats.engine, stats.warm_up_s) == ("compiled", warm_up.seconds)
    assert "went into making engine='compiled' ready" in stats.summary()
    model.generate(**batch(1), **OPTIONS)
    assert model.last_exit_stats.warm_up_s == 0
    assert "ready" not in model.last_exit_stats.summary()
    model.generate(**batch(1), **OPTIONS, tide_engine="eager")
    assert model.last_exit_stats.engine == "eager"


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("form", [PackedWeight, StoredWeight])
def test_weights_in_another_form_are_used_and_changed_ones_are_noticed(tiny_llama, monkeypatch, form):
    let_pay(monkeypatch, order=(form, None, *(other for other in FORMS if other is not form)))
    model = attach(tiny_llama(), pack_weights=True)
    eight = {"input_ids": torch.arange(3, 67).view(8, 8), "attention_mask": torch.ones(8, 8, dtype=torch.int64)}
    assert linears_to_gate(find_structure(model), True)[0]
    model.generate(**eight, **OPTIONS)
    parts = next(iter(model._tide.compiled_layers._linears.values()))
    assert parts[0].form == FORMS.index(form)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    changed = model.generate(**eight, **OPTIONS)
    plain = TIDEModelForCausalLM.detach(copy.deepcopy(model))
    assert torch.equal(changed, plain.generate(**eight, **OPTIONS))


def test_modules_that_are_replaced_are_noticed(tiny_llama):
    model = attach(tiny_llama(), pack_weights=False)
    model.generate(**batch(1), **OPTIONS)
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Linear(layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features)
    changed = model.generate(**batch(1), **OPTIONS)
    assert torch.equal(changed, TIDEModelForCausalLM.detach(model).generate(**batch(1), **OPTIONS))


def test_what_cannot_be_traced_runs_eagerly_and_says_so_once(tiny_llama, monkeypatch, caplog):
    model = attach(tiny_llama(), pack_weights=False)
    kind = type(model.model.layers[0])
    native = kind.forward

    def forward(self, hidden_states, *args, **kwargs):
        print(end="", flush=bool(hidden_states.sum().item() > 1e9))
        return native(self, hidden_states, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", forward)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        tokens = [model.generate(**batch(1), **OPTIONS) for _ in range(2)]
    (record,) = [record for record in caplog.records if record.name == "tide_hf.engines.steps.compiled_layers"]
    assert "LlamaDecoderLayer cannot be compiled and runs eagerly: " in record.message
    assert model._tide.compiled_layers.num_compiled == 0
    plain = TIDEModelForCausalLM.detach(model).generate(**batch(1), **OPTIONS)
    assert all(torch.equal(one, plain) for one in tokens)


def test_copies_compile_for_themselves_and_release_forgets(tiny_llama):
    options = {**OPTIONS, "max_new_tokens": 4}  # each graph takes seconds
    model = attach(tiny_llama())
    expected = model.generate(**batch(1), **options)
    other = copy.deepcopy(model)
    assert other._tide.compiled_layers is not model._tide.compiled_layers
    assert torch.equal(other.generate(**batch(1), **options), expected)
    model.tide_release()
    assert model._tide.compiled_layers._twins == {}
    assert torch.equal(model.generate(**batch(1), **options), expected)


def test_compiled_by_inductor(tiny_llama, caplog):
    options = {**OPTIONS, "max_new_tokens": 4}
    model = tiny_llama()
    expected = model.generate(**batch(1), **options)
    attach(model, "inductor")
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        assert torch.equal(model.generate(**batch(1), **options), expected)
    layers = model._tide.compiled_layers
    assert (layers.num_compiled > 0) == (layers.refused == {})  # a machine without a C++ compiler runs eagerly
    assert layers.refused or "compiled 1 graphs for a pass over 1 tokens" in caplog.text


def test_another_engine_is_refused(tiny_llama):
    with pytest.raises(ConfigurationError, match="unknown engine"):
        TIDEModelForCausalLM.attach(tiny_llama(), engine="warp")
    model = TIDEModelForCausalLM.attach(tiny_llama())
    with pytest.raises(ConfigurationError, match="unknown tide_engine"):
        model.generate(**batch(1), **OPTIONS, tide_engine="warp")
