"""Captured steps: how many there are, when they are made anew and released, and what they read back.

A recorder stands in for CUDA graphs (`recorded.py`): it runs a step's operations again on the same tensors. That the
tokens are the base model's is in tests/behaviour/test_lossless.py.
"""

import copy
from functools import partial

import pytest
import torch
from drafters import use_drafter, use_heads
from families import ATTENTION, slow_but, tiny_model
from on_steps import (
    LAYERS,
    NEW,
    OPTIONS,
    UNTRACED,
    as_traced,
    check_drafts,
    linear_heads,
    prompts,
    steps_of,
    use_steps,
)
from on_steps import attach_captured as attach
from recorded import as_it_is

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.step_store import CapturedSteps
from tide_hf.speculation.policy import CostTable


def test_a_round_reads_once_and_a_draft_step_never(tiny_llama):
    model = tiny_llama()
    steps = attach(model, linear_heads(model))
    use_heads(model, 1, width=7)
    model.generate(**prompts(), **OPTIONS)
    stats = model.last_exit_stats
    assert steps.reads == stats.rounds
    assert steps.replays == stats.rounds + stats.drafted
    assert stats.layers_executed == LAYERS + LAYERS * stats.rounds + stats.drafted


def test_steps_serve_all_lengths_that_fit_into_the_buffers(tiny_llama):
    model = tiny_llama()
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * NEW], width=0)
    for length in (4, 90):
        model.generate(torch.arange(3, 3 + length)[None], **OPTIONS)
    assert steps.warm_up.num_made == 1
    model.generate(torch.arange(3, 253)[None], **OPTIONS)
    assert steps.warm_up.num_made == 2
    first, second = (recording.launches for recording in steps.make_replay.recordings)
    assert first == second  # larger buffers launch no more kernels


def test_calls_with_stop_strings_run_on_steps(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    options = {**OPTIONS, "stop_strings": ["r"], "tokenizer": tiny_tokenizer}
    expected = model.generate(**tiny_tokenizer("sea", return_tensors="pt"), **options)
    steps = attach(model)
    assert torch.equal(model.generate(**tiny_tokenizer("sea", return_tensors="pt"), **options), expected)
    assert expected[0, -1] == tiny_tokenizer.convert_tokens_to_ids("r")
    assert steps.replays > 0


@pytest.mark.parametrize("family", slow_but(("llama",), [family for family in ATTENTION if family not in UNTRACED]))
def test_the_compiled_step_is_captured(family):
    model = tiny_model(family)
    replays = []

    def watched(function, *args):
        replays.append(function)
        return as_it_is(function, *args)

    attach_to = partial(attach, make_replay=watched, compile_graph=as_traced)
    steps = check_drafts(model, prompts(pads=2), attach_to, ("right",))
    assert steps.refused is None
    assert len(replays) == steps.warm_up.num_made > 0
    assert steps.compiler.graphs.num_compiled > 0


def test_a_step_that_cannot_be_compiled_is_captured_uncompiled(tiny_llama, caplog):
    def no_compiler(_graph, _inputs):
        raise RuntimeError("no compiler")

    caplog.set_level("INFO", logger="tide_hf")
    attach_to = partial(attach, make_replay=as_it_is, compile_graph=no_compiler)
    steps = check_drafts(tiny_llama(num_hidden_layers=LAYERS), prompts(), attach_to, ("right",))
    assert steps.refused is None
    assert steps.replays > 0
    assert "a step is captured uncompiled: no compiler" in caplog.text


def test_costs_of_passes_leave_out_making_steps_ready(tiny_llama, monkeypatch):
    recorded, record = [], CostTable.record
    monkeypatch.setattr(CostTable, "record", lambda table, key, ms: (recorded.append(key), record(table, key, ms)))
    model = tiny_llama()
    steps = attach(model, linear_heads(model))
    use_heads(model, 1, width=7)
    model.generate(**prompts(), **OPTIONS)
    kinds = [kind for kind, _ in recorded]
    assert steps.warm_up.num_made >= 2
    assert 0 < kinds.count("draft") < model.last_exit_stats.rounds
    assert kinds.count("verify") < model.last_exit_stats.rounds


def test_steps_follow_a_changed_model_and_are_released(tiny_llama):
    model = tiny_llama()
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * NEW], width=0)
    model.generate(**prompts(), **OPTIONS)
    for layer in model.model.layers:
        layer.mlp.down_proj = torch.nn.Linear(layer.mlp.down_proj.in_features, layer.mlp.down_proj.out_features)
    changed = model.generate(**prompts(), **OPTIONS)
    other = copy.deepcopy(model)
    assert steps_of(other) is not steps
    assert torch.equal(TIDEModelForCausalLM.detach(other).generate(**prompts(), **OPTIONS), changed)
    with torch.no_grad():
        model.lm_head.weight.neg_()  # in place: graphs read the weights where they are
    before = steps.warm_up.num_made
    changed = model.generate(**prompts(), **OPTIONS)
    assert steps.warm_up.num_made == before
    model.tide_release()
    assert not steps._buffers
    assert torch.equal(model.generate(**prompts(), **OPTIONS), changed)
    assert torch.equal(TIDEModelForCausalLM.detach(model).generate(**prompts(), **OPTIONS), changed)


def test_steps_run_with_a_device_map_of_one_device(tiny_model_folder):
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, device_map={"": "cpu"}, engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    tokens = model.generate(**prompts(), **OPTIONS)
    assert steps.replays > 0
    assert torch.equal(tokens, model.generate(**prompts(), **OPTIONS, tide_engine="eager"))


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
