"""The buffers of steps: their sizes; on a CPU they grow with an answer, and empty slots are not read."""

import pytest
import torch
from block_heads import routers_for
from drafters import use_heads
from families import SDPA, slow_but, tiny_model
from on_steps import LAYERS, OPTIONS, UNTRACED, check_drafts, new_tokens, prompts
from on_steps import attach_compiled as attach

from tide_hf.engines.steps.step_buffers import WIDTHS, StepBuffers, capacity_for, slots_for_now
from tide_hf.speculation.policy import step_width


@pytest.mark.parametrize(("rows", "grows_to"), [(1, [64, 128]), (3, [72, 136])])
def test_buffers_grow_with_the_answer_and_its_holes(tiny_llama, monkeypatch, rows, grows_to):
    grown = small_buffers(monkeypatch)
    model, batch = tiny_llama(num_hidden_layers=LAYERS), prompts(rows, pads=rows - 1)
    options = {**OPTIONS, "max_new_tokens": 90}
    expected = model.generate(**batch, **options)
    attach(model, routers_for(model, 1))
    made = use_heads(model, 1, continuations=new_tokens(expected), kind="right" if rows == 1 else "mixed")
    for engine in ("eager", "compiled"):
        assert torch.equal(model.generate(**batch, **options, tide_engine=engine), expected)
    eager, compiled = made
    assert compiled.drafted == eager.drafted
    assert grown == grows_to


def small_buffers(monkeypatch):
    """Few slots; return the numbers to which buffers grow."""
    monkeypatch.setattr("tide_hf.engines.steps.step_buffers.BUCKET", 8)
    monkeypatch.setattr("tide_hf.engines.steps.step_buffers.FIRST_SLOTS", 32)
    monkeypatch.setattr("tide_hf.engines.steps.step_buffers.SPARE_SLOTS", 8)
    grown = []
    take_over = StepBuffers.take_over

    def note(self, *args):
        grown.append(self.capacity)
        take_over(self, *args)

    monkeypatch.setattr(StepBuffers, "take_over", note)
    return grown


@pytest.mark.parametrize(
    "family",
    slow_but(("llama",), [family for family in SDPA if family not in (*UNTRACED, "falcon", "deepseek_v3")]),
)
def test_empty_slots_are_not_read(family, monkeypatch):
    model = tiny_model(family, attention="sdpa")
    load = StepBuffers.load

    def spoil(self, source, length, mask, deep):
        load(self, source, length, mask, deep)
        for layer in self.cache.layers:
            layer.keys[:, :, length:] = layer.values[:, :, length:] = float("nan")

    monkeypatch.setattr(StepBuffers, "load", spoil)
    steps = check_drafts(model, prompts(pads=2), attach, ("wrong at the last position",))
    assert steps.replays > 0


def test_widths_and_capacities_are_powers_of_two_and_few():
    assert [step_width(tokens, WIDTHS) for tokens in (1, 2, 3, 5, 8, 9, 16)] == [1, 2, 4, 8, 8, 16, 16]
    assert [capacity_for(1, slots) for slots in (1, 240, 241)] == [256, 256, 512]
    assert capacity_for(2, 240) == 512
    assert {slots_for_now(30, most) for most in (20, 512)} == {slots_for_now(0, 1)}
    assert capacity_for(1, slots_for_now(30, 512)) == 512
    assert capacity_for(1, slots_for_now(30, 8192)) == 1024
    assert capacity_for(1, slots_for_now(1100, 8192)) == 2048
    assert capacity_for(1, slots_for_now(8000, 8192)) == 8192
