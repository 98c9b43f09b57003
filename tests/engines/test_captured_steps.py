"""Captured steps: the base model's tokens in every family, from operations that run again without their Python.

A recorder stands in for CUDA graphs (`recorded.py`): what a step did is done again, on the same tensors.
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
from tide_hf.engines.steps.captured_steps import CapturedSteps
from tide_hf.engines.steps.compiled_steps import StepCompiler
from tide_hf.engines.steps.replay import HostReads
from tide_hf.engines.steps.step_buffers import WIDTHS, capacity_for
from tide_hf.speculation.policy import CostTable, step_width


def test_one_read_a_round_and_none_a_draft(tiny_llama):
    model = tiny_llama()
    steps = attach(model, linear_heads(model))
    use_heads(model, 1, width=7)
    model.generate(**prompts(), **OPTIONS)
    stats = model.last_exit_stats
    assert steps.reads == stats.rounds
    assert steps.replays == stats.rounds + stats.drafted
    assert stats.layers_executed == LAYERS + LAYERS * stats.rounds + stats.drafted


def test_a_step_costs_the_same_however_long_the_text_is(tiny_llama):
    model = tiny_llama()
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * NEW], width=0)
    for length in (4, 90):
        model.generate(torch.arange(3, 3 + length)[None], **OPTIONS)
    assert steps.warm_up.num_made == 1  # graphs serve all calls that fit into the buffers
    model.generate(torch.arange(3, 253)[None], **OPTIONS)
    assert steps.warm_up.num_made == 2
    first, second = (recording.launches for recording in steps.make_replay.recordings)
    assert first == second


def test_strings_that_end_an_answer_leave_it_on_steps(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    options = {**OPTIONS, "stop_strings": ["r"], "tokenizer": tiny_tokenizer}
    expected = model.generate(**tiny_tokenizer("sea", return_tensors="pt"), **options)
    steps = attach(model)
    assert torch.equal(model.generate(**tiny_tokenizer("sea", return_tensors="pt"), **options), expected)
    assert expected[0, -1] == tiny_tokenizer.convert_tokens_to_ids("r")
    assert steps.replays > 0


@pytest.mark.parametrize(
    "family", slow_but(("llama", "gpt2"), [family for family in ATTENTION if family not in UNTRACED])
)
def test_what_is_captured_is_the_compiled_step(family):
    model = tiny_model(family)
    replays = []

    def watched(function, *args):
        replays.append(function)
        return as_it_is(function, *args)

    kinds = ("right", "wrong at the last position")
    attach_to = partial(attach, make_replay=watched, layers=partial(StepCompiler, as_traced))
    steps = check_drafts(model, prompts(pads=2), attach_to, kinds, width=4)
    assert steps.refused is None
    assert len(replays) == steps.warm_up.num_made > 0
    assert steps.layers.graphs.num_compiled > 0


def test_a_step_that_cannot_be_compiled_is_captured_as_it_is(tiny_llama, caplog):
    def no_compiler(_graph, _inputs):
        raise RuntimeError("no compiler")

    caplog.set_level("INFO", logger="tide_hf")
    attach_to = partial(attach, make_replay=as_it_is, layers=partial(StepCompiler, no_compiler))
    steps = check_drafts(tiny_llama(num_hidden_layers=LAYERS), prompts(), attach_to, ("right",))
    assert steps.refused is None
    assert steps.replays > 0
    assert "a step is captured uncompiled: no compiler" in caplog.text


def test_making_steps_ready_is_no_part_of_what_passes_cost(tiny_llama, monkeypatch):
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


def test_changed_models_are_noticed_and_memory_is_given_back(tiny_llama):
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


def test_a_device_map_of_one_device(tiny_model_folder):
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, device_map={"": "cpu"}, engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    tokens = model.generate(**prompts(), **OPTIONS)
    assert steps.replays > 0
    assert torch.equal(tokens, model.generate(**prompts(), **OPTIONS, tide_engine="eager"))


def test_masks_ask_for_no_value_while_a_graph_is_captured(tiny_llama):
    model = tiny_llama()
    steps = attach(model, make_replay=as_it_is)
    model.generate(**prompts(), **OPTIONS)
    (buffers,) = steps._buffers.values()
    with torch.no_grad(), HostReads(model.device) as reads:
        buffers.verify(4)
    assert reads.found is None


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


def test_sizes():
    assert [step_width(tokens, WIDTHS) for tokens in (1, 2, 3, 5, 8, 9, 16)] == [1, 2, 4, 8, 8, 16, 16]
    assert [capacity_for(1, slots) for slots in (1, 240, 241)] == [256, 256, 512]
    assert capacity_for(2, 240) == 512
