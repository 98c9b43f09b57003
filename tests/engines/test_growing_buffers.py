"""The buffers of steps: their sizes; on a CPU they grow with an answer, and empty slots are not read."""

import weakref

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import SDPA, slow_but, tiny_model
from on_steps import LAYERS, OPTIONS, attach_captured, check_drafts, new_tokens, prompts
from on_steps import attach_compiled as attach

from tide_hf.engines.steps import step_buffers
from tide_hf.engines.steps.static_cache import StaticKVLayer
from tide_hf.engines.steps.step_buffers import StepBuffers

SLOT = 2 * LAYERS * 2 * 8 * 4  # bytes of a tiny model's K/V


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


def test_on_a_gpu_buffers_are_as_large_as_memory_holds_and_grow_if_an_answer_needs_more(monkeypatch, caplog):
    for name, slots in {"BUCKET": 8, "FIRST_SLOTS": 32}.items():
        monkeypatch.setattr(step_buffers, name, slots)
    monkeypatch.setattr("tide_hf.engines.steps.step_store.FIRST_SLOTS", 32)
    monkeypatch.setattr("tide_hf.engines.steps.step_store.free_memory", lambda _: 2 * 64 * SLOT)
    sizes, load, take_over = [], StepBuffers.load, StepBuffers.take_over
    for name, method in {"load": load, "take_over": take_over}.items():
        monkeypatch.setattr(
            StepBuffers, name, lambda self, *args, method=method: sizes.append(self.capacity) or method(self, *args)
        )
    model, batch = tiny_model("llama"), prompts()
    options = {**OPTIONS, "max_new_tokens": 90}
    expected = model.generate(**batch, **options)
    steps = attach_captured(model)
    use_drafter(model, "mixed", new_tokens(expected))
    for tokens, grows_to in ((40, [64]), (90, [64, 104, 120])):
        sizes.clear()
        assert torch.equal(model.generate(**batch, **{**options, "max_new_tokens": tokens}), expected[:, : 8 + tokens])
        assert sizes == grows_to
        assert [buffers.capacity for buffers in steps._buffers.values()] == grows_to[
            -1:
        ]  # the others' memory is given back
        assert {buffers for buffers, *_ in steps._steps} == set(steps._buffers.values())
    assert "eagerly" not in caplog.text


@pytest.mark.parametrize(("is_returned", "held"), [(False, [4, 3, 2, 1, 0]), (True, [4, 4, 4, 4, 4])])
def test_the_cache_of_prefill_gives_up_its_memory_layer_by_layer_unless_it_is_returned(
    tiny_llama, monkeypatch, is_returned, held
):
    found, kept, static_cache, init = [], [], step_buffers.static_cache, StaticKVLayer.__init__

    def note():
        found.append(sum(tensor() is not None for tensor in kept))

    def watched(like, *args):
        kept.extend(weakref.ref(layer.keys) for layer in like.cache.layers)
        made = static_cache(like, *args)
        note()
        return made

    monkeypatch.setattr(step_buffers, "static_cache", watched)
    monkeypatch.setattr(StaticKVLayer, "__init__", lambda self, *args: (note(), init(self, *args))[1])
    model = tiny_llama(num_hidden_layers=LAYERS)
    expected = model.generate(**prompts(), **OPTIONS)
    attach_captured(model)
    answer = model.generate(**prompts(), **OPTIONS, return_dict_in_generate=is_returned)
    assert torch.equal(answer.sequences if is_returned else answer, expected)
    assert found == held
    kept.clear()
    found.clear()
    monkeypatch.setattr(
        StepBuffers,
        "load",
        lambda self, source, *args, load=StepBuffers.load: (
            kept.extend(weakref.ref(layer.keys) for layer in source.cache.layers),
            load(self, source, *args),
            note(),
        )[1],
    )
    model.generate(**prompts(), **OPTIONS, return_dict_in_generate=is_returned)  # into buffers that exist
    assert found == held[-1:]


@pytest.mark.parametrize(
    "family",
    slow_but(("llama",), [family for family in SDPA if family not in ("falcon", "deepseek_v3")]),
)
def test_empty_slots_are_not_read(family, monkeypatch):
    model = tiny_model(family, attention="sdpa")
    load = StepBuffers.load

    def spoil(self, source, mask, deep):
        load(self, source, mask, deep)
        for layer in self.cache.layers:
            layer.keys[:, :, source.length :] = layer.values[:, :, source.length :] = float("nan")

    monkeypatch.setattr(StepBuffers, "load", spoil)
    steps = check_drafts(model, prompts(pads=2), attach, ("wrong at the last position",))
    assert steps.replays > 0
