"""Captured steps: how many there are, when they are made anew and released, and what they read back.

A recorder stands in for CUDA graphs (`recorded.py`): it runs a step's operations again on the same tensors. That the
tokens are the base model's is in tests/behaviour/test_lossless.py.
"""

import re
from functools import partial

import pytest
import torch
from drafters import use_drafter, use_heads
from on_steps import (
    LAYERS,
    NEW,
    OPTIONS,
    as_traced,
    attach_compiled,
    check_drafts,
    linear_heads,
    new_tokens,
    prompts,
)
from on_steps import attach_captured as attach
from quantized_weights import KINDS, Quantized, quantize
from recorded import as_it_is
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.speculation.policy import CostTable


def test_a_round_reads_once_and_a_draft_step_never(tiny_llama, monkeypatch):
    recorded, record = [], CostTable.record
    monkeypatch.setattr(CostTable, "record", lambda table, key, *ms: (recorded.append(key), record(table, key, *ms)))
    model = tiny_llama()
    steps = attach(model, linear_heads(model))
    use_heads(model, 1, width=7)
    model.generate(**prompts(), **OPTIONS)
    stats = model.last_exit_stats
    assert steps.reads == stats.rounds
    assert steps.replays == stats.rounds + stats.drafted
    assert stats.layers_executed == LAYERS + LAYERS * stats.rounds + stats.drafted
    kinds = [kind for kind, _ in recorded]  # costs leave out the passes that make steps ready
    assert steps.warm_up.num_prepared >= 2
    assert 0 < kinds.count("draft") < stats.rounds
    assert kinds.count("verify") < stats.rounds


def test_steps_serve_all_lengths_that_fit_into_the_buffers(tiny_llama):
    model = tiny_llama()
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * NEW], width=0)
    for length in (4, 90):
        model.generate(torch.arange(3, 3 + length)[None], **OPTIONS)
    assert steps.warm_up.num_prepared == 1
    model.generate(torch.arange(3, 253)[None], **OPTIONS)
    assert steps.warm_up.num_prepared == 2
    first, second = (recording.launches for recording in steps.make_replay.recordings)
    assert first == second  # larger buffers launch no more kernels


def no_compiler(_graph, _inputs):
    raise RuntimeError("no compiler")


@pytest.mark.parametrize("compile_graph", [as_traced, no_compiler])
def test_a_step_is_captured_compiled_or_if_that_fails_uncompiled(tiny_llama, caplog, compile_graph):
    caplog.set_level("INFO", logger="tide_hf")
    attach_to = partial(attach, make_replay=as_it_is, compile_graph=compile_graph)
    steps = check_drafts(tiny_llama(num_hidden_layers=LAYERS), prompts(pads=2), attach_to, ("right",))
    assert steps.refused is None
    assert steps.replays > 0
    is_compiled = compile_graph is as_traced
    assert (steps.compiler.graphs.num_compiled > 0) == is_compiled
    assert ("a step is captured uncompiled: no compiler" in caplog.text) != is_compiled


def test_steps_follow_a_changed_model_and_are_released(tiny_llama):
    model = tiny_llama()
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * NEW], width=0)
    model.generate(**prompts(), **OPTIONS)
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Linear(layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features)
    model.generate(**prompts(), **OPTIONS)
    with torch.no_grad():
        model.lm_head.weight.neg_()  # in place: graphs read the weights where they are
    before = steps.warm_up.num_prepared
    changed = model.generate(**prompts(), **OPTIONS)
    assert steps.warm_up.num_prepared == before
    model.tide_release()
    assert not steps._buffers
    assert torch.equal(model.generate(**prompts(), **OPTIONS), changed)
    assert torch.equal(TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS), changed)


def test_steps_and_buffers_used_least_recently_are_dropped(tiny_llama, monkeypatch):
    monkeypatch.setattr("tide_hf.engines.steps.step_store.MAX_GRAPHS", 2)
    monkeypatch.setattr("tide_hf.engines.steps.step_store.MAX_BUFFERS", 2)
    model = tiny_llama()
    steps = attach(model, None)
    for rows in (1, 2, 1, 4):
        model.generate(**prompts(rows), **OPTIONS)
    assert [buffers.rows for buffers in steps._buffers.values()] == [1, 4]
    (buffers, _) = steps._buffers.values()
    for width in (2, 4, 2, 8):
        steps.run(buffers, "verify", width)
    assert list(steps._steps) == [(buffers, "verify", 2), (buffers, "verify", 8)]


SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2}  # what int4 products have to be of


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", ["qdata", "scale"])
def test_quantised_weights_are_traced_and_followed_when_tensors_in_them_are_replaced(tiny_llama, kind, change):
    model = quantize(tiny_llama(num_hidden_layers=LAYERS, **SIZES), kind)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model, compile_graph=as_traced)
    use_drafter(model, "right", new_tokens(expected), width=3)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.refused is None
    assert steps.replays > 0
    assert 1 <= steps.compiler.graphs.num_compiled <= steps.warm_up.num_prepared  # layers share a graph
    name = {"scale": "scale_and_zero"}.get(change, change) if kind == "int4" else change
    for layer in model.model.layers:
        setattr(layer.self_attn.v_proj.weight, name, 2 + getattr(layer.self_attn.v_proj.weight, name))
    changed = model.generate(**prompts(), **OPTIONS)
    assert not torch.equal(changed, expected)
    assert torch.equal(TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS), changed)


class Opaque(nn.Parameter):
    """A weight of a class that traces cannot see into, like bitsandbytes' packed ones."""

    def __new__(cls, weight):
        return super().__new__(cls, weight.detach(), requires_grad=False)


class ReadByTheHost(Quantized):
    """A weight whose product asks the host."""

    def linear(self, state, bias=None):
        return super().linear(state, bias) if self.scale.amax().item() > 0 else state


def read_by_the_host(weight):
    integers = (weight.detach() * 99).to(torch.int8)
    return nn.Parameter(ReadByTheHost(integers, torch.full((len(integers), 1), 1 / 99)), requires_grad=False)


@pytest.mark.parametrize(
    ("kind", "engine", "refused", "uncompiled"),
    [
        (Opaque, "compiled", "Multiple dispatch failed", None),
        (Opaque, "captured", None, "Multiple dispatch failed"),  # captured as it is
        (read_by_the_host, "compiled", "data-dependent", None),
        (read_by_the_host, "captured", "its forward needs the host", "data-dependent"),
    ],
)
def test_weights_that_cannot_be_traced_are_refused_with_a_reason(tiny_llama, caplog, kind, engine, refused, uncompiled):
    caplog.set_level("INFO", logger="tide_hf")
    model = tiny_llama(num_hidden_layers=LAYERS)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight = kind(layer.mlp.down_proj.weight)
    expected = model.generate(**prompts(), **OPTIONS)
    steps = (attach_compiled if engine == "compiled" else partial(attach, compile_graph=as_traced))(model)
    use_drafter(model, "right", new_tokens(expected), width=3)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.refused is None if refused is None else refused in steps.refused
    assert uncompiled is None or re.search(f"a step is captured uncompiled: .*{uncompiled}", caplog.text)
