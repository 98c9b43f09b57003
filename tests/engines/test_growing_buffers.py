"""The buffers of steps: their sizes; on a CPU they grow with an answer, and empty slots are not read."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_heads
from families import SDPA, slow_but, tiny_model
from on_steps import LAYERS, OPTIONS, check_drafts, new_tokens, prompts
from on_steps import attach_compiled as attach

from tide_hf.engines.steps.step_buffers import StepBuffers


@pytest.mark.parametrize(("rows", "grows_to"), [(1, [64, 128]), (3, [72, 136])])
def test_buffers_grow_with_the_answer_and_its_holes(tiny_llama, monkeypatch, rows, grows_to):
    for name, slots in {"BUCKET": 8, "FIRST_SLOTS": 32, "SPARE_SLOTS": 8}.items():
        monkeypatch.setattr(f"tide_hf.engines.steps.step_buffers.{name}", slots)
    grown, take_over = [], StepBuffers.take_over
    monkeypatch.setattr(
        StepBuffers, "take_over", lambda self, *args: grown.append(self.capacity) or take_over(self, *args)
    )
    model, batch = tiny_llama(num_hidden_layers=LAYERS), prompts(rows, pads=rows - 1)
    options = {**OPTIONS, "max_new_tokens": 90}
    expected = model.generate(**batch, **options)
    attach(model, draft_head_for(model))
    made = use_heads(model, 0, continuations=new_tokens(expected), kind="right" if rows == 1 else "mixed")
    for engine in ("eager", "compiled"):
        assert torch.equal(model.generate(**batch, **options, tide_engine=engine), expected)
    eager, compiled = made
    assert compiled.drafted == eager.drafted
    assert grown == grows_to


@pytest.mark.parametrize(
    "family",
    slow_but(("llama",), [family for family in SDPA if family not in ("falcon", "deepseek_v3")]),
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
