"""Prefill by compiled layers: the base model's logits in every family, and one graph for many lengths.

Most tests run what was traced as it is, which takes no compiler.
"""

import logging

import pytest
import torch
from families import SDPA, tiny_model
from on_steps import LAYERS, OPTIONS, steps_of
from on_steps import attach_compiled as attach
from on_steps import prompts as short_prompts
from packed_weights import narrow, set_fastest_layouts
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tide_hf.base_model.structure import CACHE
from tide_hf.engines.steps import graphs, step_compiler
from tide_hf.kernels.cpu.attention import MIN_QUERIES
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights.layouts import PrepackedWeight
from tide_hf.weights.lossless import HalfWeight

pytestmark = pytest.mark.usefixtures("no_fused_layers")

FAMILIES = ("llama", "gpt2", "falcon", "gemma2")
LENGTHS = (MIN_QUERIES - 1, MIN_QUERIES, MIN_QUERIES + 20, MIN_QUERIES - 2, 5)  # which attention tells apart
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


def check(model, batches, **settings):
    """Generate a token for each of the prompts; return the compiled prefill, and how many graphs each compiled."""
    expected = [model.generate(**batch, **SCORED) for batch in batches]
    counted, counts = Graphs(), []
    steps = attach(model, compile_graph=counted, **settings)
    for batch, plain in zip(batches, expected, strict=True):
        before = counted.num_sized
        found = model.generate(**batch, **SCORED)
        assert torch.equal(found.sequences, plain.sequences)
        torch.testing.assert_close(found.logits[0], plain.logits[0], atol=1e-3, rtol=1e-4)
        counts.append(counted.num_sized - before)
        assert steps.prompts.refused or (model.last_exit_stats.warm_up_s > 0) == (counts[-1] > 0)
    return steps.prompts, counts


@pytest.mark.parametrize(
    ("family", "shapes"),
    [*((family, [(9,), (14,)]) for family in FAMILIES), ("bloom", [(9, 3, 3), (12, 4, 3)])],
)
def test_the_graphs_of_one_length_serve_others(family, shapes):
    """Of prompts, and of batches; test_lossless.py compiles the prefill of every family."""
    attention = "sdpa" if family in SDPA else "eager"
    prefill, counts = check(tiny_model(family, attention=attention), [prompts(*shape) for shape in shapes])
    assert not prefill.refused
    assert counts[0] > 0
    assert counts[1] == 0
    assert prefill.num_compiled == 2 * LAYERS


@pytest.mark.parametrize(
    ("shapes", "counts", "most"),
    [
        # One row and several have graphs of their own; so have lengths that layers compare with others.
        ([(9, 1), (9, 1), (9, 2), (9, 3), (40, 3), (70, 2)], [1, 0, 1, 0, 1, 0], None),
        ([(length, 1) for length in LENGTHS], [1, 1, 0, 0, 0], None),
        ([(length, 1) for length in LENGTHS], [1, 0, 0, 0, 0], 1),  # the number of graphs is bounded
    ],
)
def test_graphs_for_rows_and_lengths(tiny_llama, monkeypatch, shapes, counts, most):
    if most is not None:
        monkeypatch.setattr(step_compiler, "MAX_PREFILL_GRAPHS", most)
    assert check(tiny_llama(), [prompts(*shape) for shape in shapes])[1] == counts


def test_lengths_whose_products_read_one_layout_share_a_graph(tiny_llama, monkeypatch):
    set_fastest_layouts(monkeypatch, order=(PrepackedWeight, None), except_rows=128)  # that is, below 256
    measured, in_traces = weight_layouts._seconds_of, []

    def seconds_of(*args):
        in_traces.append(bool(_get_current_dispatch_mode_stack()))
        return measured(*args)

    monkeypatch.setattr(weight_layouts, "_seconds_of", seconds_of)
    model = tiny_llama(max_position_embeddings=2048)
    lengths = (40, 70, 127, 140, 255, 300, 1100)
    assert check(model, [prompts(length) for length in lengths], pack_weights=True)[1] == [1, 0, 0, 1, 0, 1, 0]
    assert not any(in_traces)  # where nothing could be measured


@pytest.mark.parametrize("length", [5, 40])
def test_weights_in_fewer_bits_are_traced_once_for_all_layers(tiny_llama, monkeypatch, length):
    build_kernels(torch.float32)
    set_fastest_layouts(monkeypatch, order=(HalfWeight, PrepackedWeight, None))
    sizes, trace = [], graphs.traced
    monkeypatch.setattr(graphs, "traced", lambda *args, **kwargs: sizes.append(kwargs) or trace(*args, **kwargs))
    check(narrow(tiny_llama(), "bfloat16"), [prompts(length)], pack_weights=True)
    assert sum(kwargs.get("dynamic", False) for kwargs in sizes) == 1


def test_weights_may_change_between_calls(tiny_llama):
    model, other = tiny_llama(), tiny_llama(seed=7)
    check(model, [prompts(40)] * 2)
    for parameter, new in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data = new.data
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
