"""Prefill by compiled layers: the base model's logits in every family, and one graph for many lengths.

Most tests run what was traced as it is, which takes no compiler.
"""

import logging

import pytest
import torch
from families import ATTENTION, MIXTURES, SDPA, slow_but, tiny_model
from on_steps import FEW, LAYERS, OPTIONS, WINDOWED, steps_of
from on_steps import attach_compiled as attach
from on_steps import prompts as short_prompts
from torch.utils.flop_counter import FlopCounterMode

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.engines.steps import step_compiler
from tide_hf.kernels.cpu.attention import MIN_QUERIES

ONE = {**OPTIONS, "max_new_tokens": 1}  # what prefill gives
SCORED = {**ONE, "return_dict_in_generate": True, "output_logits": True}


def prompts(length, rows=1, pads=0):
    return short_prompts(rows, pads, length)


class Graphs:
    """Stands in for Inductor; counts what it is given with sizes that are left open."""

    def __init__(self):
        self.num_sized = 0

    def __call__(self, graph, _inputs):
        values = [node.meta.get("val") for node in graph.graph.nodes if node.op == "placeholder"]
        self.num_sized += any(isinstance(size, torch.SymInt) for one in values if one is not None for size in one.shape)
        return graph


def check(model, batches):
    """Generate a token for each of the prompts; return the compiled prefill, and how many graphs each compiled."""
    expected = [model.generate(**batch, **SCORED) for batch in batches]
    graphs, counts = Graphs(), []
    steps = attach(model, compile_graph=graphs)
    for batch, plain in zip(batches, expected, strict=True):
        before = graphs.num_sized
        found = model.generate(**batch, **SCORED)
        assert torch.equal(found.sequences, plain.sequences)
        torch.testing.assert_close(found.logits[0], plain.logits[0], atol=1e-3, rtol=1e-4)
        counts.append(graphs.num_sized - before)
    return steps.prompts, counts


@pytest.mark.parametrize("family", slow_but(FEW, ATTENTION))  # test_lossless compiles the prefill of all
def test_the_graphs_of_one_length_serve_others(family):
    attention = "sdpa" if family in SDPA else "eager"
    prefill, counts = check(tiny_model(family, attention=attention), [prompts(length) for length in (9, 14)])
    if family in MIXTURES:  # some versions cannot trace some of them
        return
    assert not prefill.refused
    assert counts[0] > 0
    assert counts[1] == 0
    assert prefill.num_compiled == LAYERS


@pytest.mark.parametrize("family", [family for family in FEW if family not in (*MIXTURES, *WINDOWED)])
def test_the_graphs_of_a_batch_serve_other_batches(family):
    prefill, counts = check(tiny_model(family), [prompts(length, rows, pads=3) for length, rows in ((9, 3), (12, 4))])
    assert counts[0] > 0
    assert counts[1] == 0
    assert prefill.num_compiled == LAYERS


def test_one_row_and_several_have_graphs_of_their_own(tiny_llama):
    batches = [prompts(9), prompts(9), prompts(9, 2), prompts(9, 3), prompts(40, 3), prompts(70, 2)]
    _, counts = check(tiny_llama(), batches)
    assert counts == [1, 0, 1, 0, 1, 0]


def test_a_graph_serves_lengths_on_one_side_of_what_its_layers_compare_them_with(tiny_llama):
    lengths = (MIN_QUERIES - 1, MIN_QUERIES, MIN_QUERIES + 20, MIN_QUERIES - 2, 5)
    prefill, counts = check(tiny_llama(), [prompts(length) for length in lengths])
    assert counts == [1, 1, 0, 0, 0]
    assert prefill.num_compiled == 3 * LAYERS


def test_compiled_by_inductor(tiny_llama):
    model = tiny_llama()
    batches = [prompts(length) for length in (40, 40, 57, 90)]
    expected = [model.generate(**batch, **OPTIONS) for batch in batches]
    TIDEModelForCausalLM.attach(model, engine="compiled", pack_weights=False)
    found = []
    for batch, tokens in zip(batches, expected, strict=True):
        output = model.generate(**batch, **OPTIONS, return_dict_in_generate=True)
        assert torch.equal(output.sequences, tokens)
        found.append(output[CACHE])
    steps = steps_of(model)
    assert steps.prompts.num_compiled == 3 * LAYERS
    plain = TIDEModelForCausalLM.detach(model)(**batches[2], use_cache=True)[CACHE]
    for layer, own in zip(plain.layers, found[2].layers, strict=True):
        torch.testing.assert_close(own.keys[:, :, :57], layer.keys)
        torch.testing.assert_close(own.values[:, :, :57], layer.values)


def test_making_graphs_is_part_of_the_warm_up(tiny_llama):
    model = tiny_llama()
    attach(model)
    seconds = []
    for length in (9, 9, MIN_QUERIES, MIN_QUERIES):
        model.generate(**prompts(length), **ONE)
        seconds.append(model.last_exit_stats.warm_up_s)
    assert [second > 0 for second in seconds] == [True, False, True, False]


def test_the_number_of_graphs_of_a_layer_is_bounded(tiny_llama, monkeypatch):
    monkeypatch.setattr(step_compiler, "MAX_PREFILL_GRAPHS", 1)
    prefill, counts = check(tiny_llama(), [prompts(length) for length in (9, MIN_QUERIES, MIN_QUERIES, 9)])
    assert counts == [1, 0, 0, 0]
    assert prefill.num_compiled == LAYERS


@pytest.mark.parametrize("change", ["in place", "data"])
def test_weights_may_change_between_calls(tiny_llama, change):
    model = tiny_llama()
    other = tiny_llama(seed=7)
    check(model, [prompts(40)] * 2)
    with torch.no_grad():
        for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
            if change == "data":
                parameter.data = new.data
            else:
                parameter.copy_(new)
    assert torch.equal(model.generate(**prompts(40), **ONE), other.generate(**prompts(40), **ONE))


def test_layers_that_cannot_be_traced_run_natively_and_are_logged_once(tiny_llama, monkeypatch, caplog):
    model = tiny_llama()
    kind = type(model.model.layers[0].mlp)
    native = kind.forward

    def forward(self, states):
        print(end="", flush=bool(states.sum().item() > 1e9))
        return native(self, states)

    monkeypatch.setattr(kind, "forward", forward)
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        prefill, counts = check(model, [prompts(9), prompts(12)])
    assert counts == [0, 0]
    assert prefill.num_compiled == 0
    assert list(prefill.refused) == [type(model.model.layers[0])]
    assert sum("runs prefill uncompiled" in record.message for record in caplog.records) == 1


def test_a_flop_counter_counts_all_operations(tiny_llama):
    model = tiny_llama()
    with FlopCounterMode(display=False) as plain:
        model.generate(**prompts(40), **ONE)
    attach(model)
    for _ in range(2):
        model.generate(**prompts(40), **ONE)
    before = steps_of(model).prompts
    with FlopCounterMode(display=False) as counted:
        model.generate(**prompts(40), **ONE)
    assert counted.get_total_flops() == plain.get_total_flops()
    # The counter puts hooks on all modules, so that what was compiled without them is forgotten.
    assert (before.num_compiled, steps_of(model).prompts.num_compiled) == (LAYERS, 0)


def test_prefill_behind_a_filled_cache_runs_natively(tiny_llama):
    model = tiny_llama()
    batch = prompts(20)
    expected = model.generate(**batch, **ONE)
    attach(model)
    for _ in range(2):
        read = model(input_ids=batch["input_ids"][:, :12], use_cache=True)
        found = model.generate(**batch, **ONE, **{CACHE: read[CACHE]})
        assert torch.equal(found, expected)
    prefill = steps_of(model).prompts
    assert prefill.num_compiled == 0
    assert not prefill.refused
