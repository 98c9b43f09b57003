"""Compiled steps: layers share graphs, changes are noticed, and calls run eagerly where nothing can be traced.

Most tests run what was traced as it is, which takes no compiler. That the tokens are the base model's is in
tests/behaviour/test_lossless.py.
"""

import copy
import logging
import pickle

import pytest
import torch
from draft_heads import draft_head_for
from drafters import ScriptedDrafter, use_drafter, use_heads
from families import VOCAB, tiny_model
from on_steps import (
    LAYERS,
    NEW,
    OPTIONS,
    attach_captured,
    check_drafts,
    linear_heads,
    new_tokens,
    prompts,
    steps_of,
)
from on_steps import attach_compiled as attach
from recorded import KeyHeads
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.engines.steps.graphs import OperationLog, compile_graph, traced
from tide_hf.engines.steps.step_compiler import StepCompiler


def draft_nothing(model):
    """So that one width of steps is traced."""
    use_drafter(model, "right", [[0] * NEW], width=0)


def test_a_head_drafts_on_after_tokens_of_another_source(tiny_llama):
    model = tiny_llama(num_hidden_layers=LAYERS)
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model, linear_heads(model))
    found = {"eager": [], "compiled": []}
    for engine, heard in found.items():

        def make(_, call, engine, heard=heard):
            class Behind(ScriptedDrafter):
                def draft(self, rows, limits):
                    (draft,) = super().draft(rows, limits)
                    if len(draft.tokens) == 2 and limits[0] > 3:
                        heard.append(engine.draft(3, [draft.tokens]))
                        heard.append(engine.draft(3, [draft.tokens + heard[-1][0][0]]))
                    return [draft]

            return Behind("random", new_tokens(expected), VOCAB, 2)

        model._tide.make_drafter = make
        assert torch.equal(model.generate(**prompts(), **OPTIONS, tide_engine=engine), expected)
    assert len(found["eager"]) > 4
    assert [tokens for tokens, _ in found["compiled"]] == [tokens for tokens, _ in found["eager"]]
    scores, others = (torch.tensor([score for _, score in found[engine]]) for engine in found)
    torch.testing.assert_close(scores, others, atol=1e-4, rtol=0)


def test_layers_of_a_kind_are_compiled_once(tiny_llama):
    compiled = []

    def as_traced(graph, _inputs):
        compiled.append(any(node.target is torch.ops.tide_hf.layer.default for node in graph.graph.nodes))
        return graph

    model = tiny_llama(num_hidden_layers=6)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model, compile_graph=as_traced)
    use_drafter(model, "right", new_tokens(expected), width=3)
    model.generate(**prompts(), **OPTIONS)
    widths = {size for _, kind, size in steps._steps}
    # A layer, and what is before and around layers; and a layer that reads the prompt.
    assert len(compiled) == 3 * len(widths) + 1
    assert compiled.count(True) == len(widths)
    assert model.last_exit_stats.warm_up_s == steps.warm_up.seconds > 0


def test_layers_with_other_constants_or_shapes_share_no_graph(tiny_llama):
    model = tiny_llama()
    model.model.layers[1].self_attn.scaling *= 3
    mlp, size = model.model.layers[2].mlp, model.config.hidden_size
    mlp.gate_proj, mlp.up_proj = (torch.nn.Linear(size, 48, bias=False) for _ in range(2))
    mlp.down_proj = torch.nn.Linear(48, size, bias=False)
    steps = check_drafts(model, prompts(), attach, ("right",))
    assert steps.refused is None


@pytest.mark.usefixtures("no_fused_layers")
@pytest.mark.parametrize("family", ["llama", pytest.param("falcon", marks=pytest.mark.slow)])
def test_compiled_by_inductor(family):
    model = tiny_model(family, num_hidden_layers=2)
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_strategy="linear")
    batches = [prompts(length=length) for length in (9, 14)]
    expected = [model.generate(**batch, **OPTIONS) for batch in batches]
    TIDEModelForCausalLM.attach(model, routers, engine="compiled", pack_weights=True)
    use_heads(model, 1)
    for batch, tokens in zip(batches, expected, strict=True):
        assert torch.equal(model.generate(**batch, **OPTIONS), tokens)
        assert model.last_exit_stats.drafted > 0
    steps = steps_of(model)
    assert steps.refused is None
    assert steps.replays > 0
    assert steps.prompts.num_compiled == 2 * 2  # two layers, for two prompts
    assert not steps.prompts.refused


@pytest.mark.parametrize("reason", ["asks for a value", "leaves out a layer"])
def test_what_cannot_be_traced_runs_layer_by_layer_and_is_logged_once(tiny_llama, monkeypatch, caplog, reason):
    model = tiny_llama(num_hidden_layers=LAYERS)
    kind = type(model.model.norm)
    native = kind.forward

    def forward(self, hidden_states):
        print(end="", flush=bool(hidden_states.sum().item() > 1e9))
        return native(self, hidden_states)

    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model)
    if reason == "asks for a value":
        monkeypatch.setattr(kind, "forward", forward)
    else:
        trace = StepCompiler._trace
        monkeypatch.setattr(
            StepCompiler, "_trace", lambda self, function, regions: trace(self, function, [*regions, regions[0]])
        )
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        tokens = [model.generate(**prompts(), **OPTIONS) for _ in range(2)]
    assert all(torch.equal(found, expected) for found in tokens)
    assert sum("runs without compiled steps" in record.message for record in caplog.records) == 1
    assert steps.refused is not None


def test_copies_and_released_models_compile_again(tiny_llama):
    model = tiny_llama(num_hidden_layers=LAYERS)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model)
    draft_nothing(model)
    model.generate(**prompts(), **OPTIONS)
    other = copy.deepcopy(model)
    assert steps_of(other) is not steps
    assert steps_of(other).warm_up.num_prepared == 0
    assert pickle.loads(pickle.dumps(steps)).warm_up.num_prepared == 0
    assert torch.equal(other.generate(**prompts(), **OPTIONS), expected)
    made = steps.warm_up.num_prepared
    model.tide_release()
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.warm_up.num_prepared == 2 * made


def test_inference_mode_and_other_calls_share_steps(tiny_llama):
    model = tiny_llama(num_hidden_layers=LAYERS)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model, linear_heads(model))
    use_heads(model, 3)
    with torch.inference_mode():
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    made = steps.warm_up.num_prepared
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.warm_up.num_prepared == made > 0
    assert steps.refused is None


@pytest.mark.parametrize("attach_to", [attach, attach_captured])
def test_grouped_query_heads_attend_without_copies_of_kv(tiny_llama, attach_to):
    model = tiny_llama(num_hidden_layers=LAYERS)
    attach_to(model, draft_head_for(model))
    use_heads(model, 0)
    with KeyHeads() as heads:
        model.generate(**prompts(), **OPTIONS)
    assert heads.found == {model.config.num_key_value_heads}
    assert model.config._attn_implementation == "sdpa"


def test_logs_are_equal_for_functions_that_compute_the_same():
    one, other = torch.rand(3), torch.rand(3)

    def key(function, *inputs):
        with OperationLog(list(inputs)) as log:
            function(*inputs)
        return log.key

    assert key(lambda x: x + one, other) == key(lambda x: x + other, one)
    expected = key(lambda x: x * 2.0 + one, other)
    for function in (
        lambda x: x * 2.5 + one,
        lambda x: x * 2.0 + x,
        lambda x: x * 2.0 - one,
        lambda x: x * 2.0 + one[:1],
        lambda x: x * 2.0 + one.double(),
        lambda x: one * 2.0 + x,
    ):
        assert key(function, other) != expected


def test_compiled_graphs_are_for_one_shape_and_found_on_disk():
    inputs = [torch.randn(3, 517)]
    graph = make_fx(lambda tensor: (tensor.sin() + 1).cos(), tracing_mode="fake")(*inputs)
    torch._dynamo.utils.counters.clear()
    first, (code,) = run_and_get_code(lambda: compile_graph(copy.deepcopy(graph), inputs)(*inputs))
    second = compile_graph(copy.deepcopy(graph), inputs)(*inputs)
    torch.testing.assert_close([first, second], [graph(*inputs)] * 2)
    assert "empty_strided_cpu((3, 517)" in code
    assert ".size()" not in code
    counted = torch._dynamo.utils.counters["inductor"]
    assert counted["fxgraph_cache_bypass"] == 0
    assert counted["fxgraph_cache_hit"] >= 1


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_products_of_experts_are_traced_in_every_dtype(dtype, dynamic):
    """Tracing by PyTorch 2.13 alone takes bfloat16."""
    states, experts = torch.randn(6, 16).to(dtype), torch.randn(3, 16, 32).to(dtype)
    ends = torch.tensor([2, 2, 6], dtype=torch.int32)
    graph = traced(torch._grouped_mm, states, experts, ends, dynamic=dynamic)
    assert torch.equal(graph(states, experts, ends), torch._grouped_mm(states, experts, ends))


def test_a_model_that_cannot_be_traced_runs_eagerly_from_its_second_call_on(caplog):
    """Experts one by one, for example: how many tokens each gets is known to the host alone."""
    model = tiny_model("qwen3_moe")
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model)
    model.set_experts_implementation("eager")
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for engine in ("compiled", "eager"):
            assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
            assert model.last_exit_stats.engine == engine
    assert "data-dependent" in steps.refused
    assert f"Qwen3MoeForCausalLM runs without compiled steps: {steps.refused}" in caplog.text
    assert f"engine='compiled' runs eagerly: {steps.refused}" in caplog.text
