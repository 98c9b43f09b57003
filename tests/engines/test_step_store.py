"""The store of steps: memory, changed models, and steps that cannot be captured."""

import logging

import pytest
import torch
from on_steps import use_steps
from recorded import as_it_is
from torch import nn

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.capture import Replay
from tide_hf.engines.steps.step_store import CapturedSteps, _facts_of, free_memory

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
IDS = torch.arange(3, 11)[None]


def test_cached_memory_is_free_memory(monkeypatch):
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda _: 50)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda _: 20)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda _: (10, 80))
    assert free_memory(torch.device("cuda:0")) == 40


def test_buffers_that_do_not_fit_into_memory_are_not_allocated(tiny_llama, monkeypatch, caplog):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled", remembered_tokens=0)
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    model.generate(IDS, **OPTIONS)
    replays = steps.replays
    monkeypatch.setattr("tide_hf.engines.steps.step_store.MEMORY_SHARE", 0.0)
    model.generate(IDS, **OPTIONS)  # on those that exist
    assert steps.replays == 2 * replays
    model.generate(IDS, **{**OPTIONS, "max_new_tokens": 600})  # for which they are too small
    assert steps.replays == 2 * replays
    assert "the call runs eagerly: K/V buffers of 607 slots would take" in caplog.text


@pytest.mark.parametrize(("free_slots", "capacity"), [(4000, 1024), (1000, 256)])
def test_slots_that_take_no_time_are_a_power_of_two_if_memory_holds_it(tiny_llama, monkeypatch, free_slots, capacity):
    monkeypatch.setattr("tide_hf.engines.steps.step_store.can_flash_decode", lambda *_: True)
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    config = model.config
    slot = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    monkeypatch.setattr("tide_hf.engines.steps.step_store.free_memory", lambda _: free_slots * slot)
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    model.generate(IDS, **OPTIONS)
    assert [buffers.capacity for buffers in steps._buffers.values()] == [capacity]


class Refusing:
    """Refuses to capture the first steps, which run without a graph."""

    def __init__(self, times, **refused):
        self.times, self.refused = times, refused

    def __call__(self, function, *_):
        self.times -= 1
        return Replay(function, **self.refused) if self.times >= 0 else as_it_is(function, *_)


def test_steps_without_memory_are_captured_in_the_next_call(tiny_llama, caplog):
    model = tiny_llama()
    expected = model.generate(IDS, **OPTIONS)
    TIDEModelForCausalLM.attach(model, engine="compiled", remembered_tokens=0)
    refusing = Refusing(1, refused="CUDA out of memory", may_do_later=True)
    steps = use_steps(model, CapturedSteps(refusing, None))
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for made in (1, 2, 2):
            before = steps.replays
            assert torch.equal(model.generate(IDS, **OPTIONS), expected)
            assert steps.replays > before
            assert refusing.times == 1 - made
    assert steps.refused is None
    assert [record.message for record in caplog.records if record.name.startswith("tide_hf")] == [
        "LlamaForCausalLM runs some steps without CUDA graphs: CUDA out of memory"
    ]


def test_released_steps_may_be_captured_again(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    steps = use_steps(model, CapturedSteps(Refusing(1, refused="operation not permitted"), None))
    replays = []
    for _ in range(2):
        model.generate(IDS, **OPTIONS)
        replays.append(steps.replays)
    assert steps.refused == "operation not permitted"
    assert replays[0] == replays[1]  # the second call ran eagerly
    model.tide_release()
    assert steps.refused is None
    model.generate(IDS, **OPTIONS)
    assert steps.replays > replays[1]


class Stream:
    """A stand-in for a stream of CUDA, whose event is the stream itself."""

    def __init__(self):
        self.waited_for = []

    def record_event(self):
        return self

    def wait_event(self, event):
        self.waited_for.append(event)


def test_a_call_on_another_stream_waits_for_what_the_last_one_left_running(monkeypatch):
    first, second = Stream(), Stream()
    steps, device = CapturedSteps(as_it_is, None), torch.device("cuda", 0)
    for stream in (first, second):
        monkeypatch.setattr("torch.cuda.current_stream", lambda _, stream=stream: stream)
        assert steps.hold()
        assert not steps.hold()
        steps.let_go(device)
    assert (first.waited_for, second.waited_for) == ([], [first])


@pytest.mark.parametrize("max_new_tokens", [1, 6])  # without and with passes after prefill
def test_steps_are_told_the_device_of_each_call(tiny_llama, monkeypatch, max_new_tokens):
    devices, let_go = [], CapturedSteps.let_go
    monkeypatch.setattr(CapturedSteps, "let_go", lambda steps, device: (devices.append(device), let_go(steps, device)))
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    use_steps(model, CapturedSteps(as_it_is, None))
    model.generate(IDS, **{**OPTIONS, "max_new_tokens": max_new_tokens})
    assert devices == [model.device]


class LateCopies:
    """Inputs on a device that is busy: what is copied to them is read once the host has gone on."""

    def __init__(self):
        self.sources = []

    def copy_(self, source, non_blocking):
        assert non_blocking
        self.sources.append(source)


def test_an_upload_leaves_alone_what_an_earlier_one_has_yet_to_copy(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    model.generate(IDS, **OPTIONS)
    [buffers] = steps._buffers.values()
    tensors = buffers.tensors
    tensors.device_inputs = LateCopies()
    for token in (5, 7):
        tensors.write(3, [[3]], 99, [[token]], None)
    for token, source in zip((5, 7), tensors.device_inputs.sources, strict=True):
        assert token in source.tolist()


@pytest.mark.parametrize(
    ("before", "after", "is_setting"),
    [
        (1.0, 2.0, True),
        (False, True, True),
        ("a", "b", True),
        (["a"], ["a", "b"], True),
        (1, 2, False),  # may count calls
        (None, torch.ones(1), False),  # may be set by calls
        ([torch.ones(2)], [torch.zeros(2)], False),
        (["a", 1], ["a", 2], False),
    ],
)
def test_changed_settings_of_a_module_are_noticed(before, after, is_setting):
    module = nn.Linear(2, 2)
    module.setting = before
    first = _facts_of(module)
    module.setting = after
    assert (_facts_of(module) != first) == is_setting


def test_added_and_removed_hooks_are_noticed():
    module = nn.Linear(2, 2)
    first = _facts_of(module)
    handle = module.register_forward_pre_hook(lambda *_: None)
    assert _facts_of(module) != first
    handle.remove()
    assert _facts_of(module) == first
