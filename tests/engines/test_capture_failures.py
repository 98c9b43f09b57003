"""Captures of graphs, with a stand-in for CUDA: on which stream they run, and what one that fails leaves behind."""

import logging

import pytest
import torch
from on_steps import use_steps
from recorded import as_it_is
from replays import Cuda

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps import replay
from tide_hf.engines.steps.captured_steps import CapturedSteps

DEVICE = torch.device("cuda:0")


@pytest.fixture
def counter():
    return torch.zeros((), dtype=torch.int64)


@pytest.fixture(autouse=True)
def _no_streams_are_kept():
    replay._stream_of.cache_clear()
    yield
    replay._stream_of.cache_clear()


def test_a_device_has_one_stream_for_all_that_surrounds_captures(monkeypatch, counter):
    cuda, streams = Cuda(), []
    cuda.play(monkeypatch)

    def function():
        streams.append(cuda.current_stream())
        counter.add_(1)

    for _ in range(2):
        assert replay.replay_of(function, [counter], DEVICE).refused is None
    assert len(streams) == 2 * (replay.WARM_UPS + 2)
    assert set(streams) == {replay._stream_of(DEVICE)}
    assert cuda.cleared == [0, 1, 1, 2]  # before each capture and behind it: a graph has working memory of its own


@pytest.fixture
def allocator(monkeypatch):
    """What the allocator is told, as PyTorch with CUDA tells it."""
    told = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: told.append((name, *args)), raising=False)
    return told


@pytest.mark.parametrize("earlier", [None, (0, 99)])
def test_an_end_that_fails_is_cleared_up(monkeypatch, counter, allocator, earlier):
    cuda = Cuda("operation failed due to a previous error during capture")
    cuda.play(monkeypatch)

    def function():
        counter.add_(1)
        if cuda.captured_on:
            raise RuntimeError("operation not permitted\nwhile capturing")

    found = replay.replay_of(function, [counter], DEVICE, earlier)
    assert found.refused == "operation not permitted"
    pool = earlier or (0, 1)
    assert allocator == [("_cuda_endAllocateToPool", 0, pool), ("_cuda_releasePool", 0, pool)]
    assert len(cuda.captured_on) == 2  # the second makes random numbers possible again
    assert pool not in cuda.pools[-1:]
    assert found.pool is None
    assert cuda.current is cuda.outer
    assert counter == 0


@pytest.mark.parametrize("earlier", [None, (0, 99)])
def test_a_failure_behind_which_the_capture_ends_leaves_the_pool_to_others(monkeypatch, counter, allocator, earlier):
    cuda = Cuda()
    cuda.play(monkeypatch)

    def function():
        if cuda.captured_on:
            raise RuntimeError("Cannot copy between CPU and CUDA tensors")

    found = replay.replay_of(function, [counter], DEVICE, earlier)
    assert found.refused == "Cannot copy between CPU and CUDA tensors"
    assert found.pool == earlier
    assert allocator == []
    assert len(cuda.captured_on) == 1


def test_a_pool_that_was_not_recorded_to_is_not_released(monkeypatch, counter, allocator):
    def refuse(*_):
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    Cuda("invalid", times=2).play(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    assert replay.replay_of(lambda: counter.add_(1), [counter], DEVICE, (0, 99)).pool is None
    assert allocator == []


def test_memory_that_ran_out_says_nothing_of_the_function(monkeypatch, counter):
    cuda = Cuda()
    cuda.play(monkeypatch)
    errors = [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("operation not permitted")]

    def function():
        if len(cuda.captured_on) > captured:
            raise errors[captured]

    for captured, may_do_later in enumerate((True, False)):
        found = replay.replay_of(function, [counter], DEVICE)
        assert found.refused == str(errors[captured])
        assert found.may_do_later == may_do_later


class Refusing:
    """Makes steps that run as they are: first so many of which it says `refused`."""

    def __init__(self, times, **refused):
        self.times, self.refused = times, refused

    def __call__(self, function, *_):
        self.times -= 1
        return replay.Replay(function, **self.refused) if self.times >= 0 else as_it_is(function, *_)


def test_steps_without_memory_are_captured_in_the_next_call(tiny_llama, caplog):
    model = tiny_llama()
    ids, options = torch.arange(3, 11)[None], {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model, engine="compiled")
    refusing = Refusing(1, refused="CUDA out of memory", may_do_later=True)
    steps = use_steps(model, CapturedSteps(refusing, None))
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for made in (1, 2, 2):
            before = steps.replays
            assert torch.equal(model.generate(ids, **options), expected)
            assert steps.replays > before
            assert sum(key[1:] == ("verify", 1) for key in steps._steps) == 1
            assert refusing.times == 1 - made
    assert steps.refused is None
    assert [record.message for record in caplog.records if record.name.startswith("tide_hf")] == [
        "LlamaForCausalLM runs some steps without CUDA graphs: CUDA out of memory"
    ]


def test_a_model_that_is_released_may_be_captured_again(tiny_llama):
    model = tiny_llama()
    ids, options = torch.arange(3, 11)[None], {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    TIDEModelForCausalLM.attach(model, engine="compiled")
    steps = use_steps(model, CapturedSteps(Refusing(1, refused="operation not permitted"), None))
    replays = []
    for _ in range(2):
        model.generate(ids, **options)
        replays.append(steps.replays)
    assert steps.refused == "operation not permitted"
    assert replays[0] == replays[1]  # the second call ran eagerly
    model.tide_release()
    assert steps.refused is None
    model.generate(ids, **options)
    assert steps.replays > replays[1]
