"""CUDA graph capture with a stand-in for CUDA, and the forward that can be captured; on a GPU see test_gpu.py."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from on_steps import OPTIONS, attach_captured, prompts
from recorded import Recording
from replays import Cuda
from transformers import masking_utils

from tide_hf.engines.steps import capture
from tide_hf.engines.steps.capture import HostReads, capturable_forward, eager_mask

DEVICE, EARLIER_POOL = torch.device("cuda:0"), (0, 99)


@pytest.fixture
def counter():
    return torch.zeros((), dtype=torch.int64)


@pytest.fixture(autouse=True)
def _streams_of_its_own():
    capture._stream_of.cache_clear()
    yield
    capture._stream_of.cache_clear()


@pytest.fixture
def allocator_calls(monkeypatch):
    """Calls of PyTorch's private functions that free the memory pool of a failed capture."""
    calls = []
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: calls.append((name, *args)), raising=False)
    return calls


def test_warm_up_and_capture_run_on_one_stream_per_device(monkeypatch, counter):
    cuda, streams = Cuda().play(monkeypatch), []
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        found = capture.capture(lambda: streams.append(cuda.current_stream()), [counter], torch.device(device))
        assert found.refused is None
    assert len(streams) == 3 * (capture.WARM_UPS + 2)
    assert [str(stream.device) for stream in cuda.captured_on] == ["cuda:0", "cuda:1", "cuda:0"]
    assert set(streams) == set(cuda.captured_on)
    assert cuda.captured_on[0] is cuda.captured_on[2]
    assert cuda.current is cuda.outer
    assert cuda.cleared == [0, 1, 1, 2, 2, 3]  # before and after each capture: a graph has its own cuBLAS workspace


@pytest.mark.parametrize("pool", [None, EARLIER_POOL])
def test_a_capture_that_cannot_end_is_cleared_up(monkeypatch, counter, allocator_calls, pool):
    cuda = Cuda("operation failed due to a previous error during capture").play(monkeypatch)

    def function():
        counter.add_(1)
        if cuda.captured_on:
            raise RuntimeError("operation not permitted\nwhile capturing")

    found = capture.capture(function, [counter], DEVICE, pool)
    assert found.refused == "operation not permitted"
    used = pool or (0, 1)
    assert allocator_calls == [("_cuda_endAllocateToPool", 0, used), ("_cuda_releasePool", 0, used)]
    assert len(cuda.captured_on) == 2  # the second makes random numbers possible again
    assert used not in cuda.pools[-1:]
    assert found.pool is None
    assert cuda.current is cuda.outer
    assert counter == 0
    cuda.captured_on.clear()
    found.run()
    assert counter == 1


@pytest.mark.parametrize(
    ("error", "may_do_later"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("Cannot copy between CPU and CUDA tensors"), False),
    ],
)
def test_after_a_failure_whose_capture_ends_the_pool_stays(monkeypatch, counter, allocator_calls, error, may_do_later):
    cuda = Cuda().play(monkeypatch)

    def function():
        if cuda.captured_on:
            raise error

    found = capture.capture(function, [counter], DEVICE, EARLIER_POOL)
    assert (found.refused, found.may_do_later, found.pool) == (str(error), may_do_later, EARLIER_POOL)
    assert allocator_calls == []
    assert len(cuda.captured_on) == 1


def test_a_pool_that_was_not_recorded_to_is_not_released(monkeypatch, counter, allocator_calls):
    def refuse(*_):
        raise RuntimeError("endAllocatePool: not currently recording to mempool_id")

    Cuda("invalid", times=2).play(monkeypatch)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    assert capture.capture(lambda: counter.add_(1), [counter], DEVICE, EARLIER_POOL).pool is None
    assert allocator_calls == []


@pytest.mark.parametrize(
    ("function", "synchronises"),
    [
        (lambda x: x.sum().item(), True),
        (lambda x: x.nonzero(), True),
        (lambda x: x.repeat_interleave(torch.tensor([1, 2])), True),
        (lambda x: x.repeat_interleave(2), False),
        (lambda x: torch.where(x > 0, x, 0).index_copy_(0, torch.tensor([1]), x[:1]), False),
        (lambda x: x.to("meta"), True),
    ],
)
def test_operations_that_synchronise_the_host_are_found(function, synchronises):
    with HostReads(torch.device("cpu")) as reads:
        function(torch.tensor([1.0, -1.0]))
    assert (reads.found is not None) == synchronises


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    "function", [masking_utils.causal_mask_function, masking_utils.sliding_window_causal_mask_function(3)]
)
def test_masks_are_transformers_own_and_made_on_the_device(dtype, function):
    mask = torch.ones((2, 9), dtype=torch.bool)
    mask[0, :2] = False
    options = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": torch.tensor(3), "mask_function": function}
    options |= {"attention_mask": mask, "dtype": dtype, "device": mask.device}
    expected = masking_utils.eager_mask(**options)
    with Recording() as recording:
        found = eager_mask(**options)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert not recording.copies_from_host


@pytest.mark.parametrize("is_old", [False, True])
def test_masks_are_replaced_while_an_old_transformers_is_captured(monkeypatch, is_old):
    monkeypatch.setattr(capture, "HAS_CAPTURABLE_MASKS", not is_old)
    used, functions = [], masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    before = functions["eager"]
    model = tiny_model("llama")
    model.model.register_forward_pre_hook(lambda *_: used.append(functions["eager"] is eager_mask))
    expected = model.generate(**prompts(), **OPTIONS)
    attach_captured(model)
    used.clear()
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert used[0] is False  # prefill is not captured
    assert set(used[1:]) == {is_old}
    assert functions["eager"] is before


@pytest.mark.parametrize(
    ("tokens", "dtype", "is_copied"),
    [(16, torch.bfloat16, True), (17, torch.bfloat16, False), (64, torch.float16, True)],
)
def test_expert_weights_are_copied_for_few_tokens_or_outside_bfloat16(tokens, dtype, is_copied):
    entered = []

    @contextmanager
    def decoding():
        entered.append(True)
        yield

    config = SimpleNamespace(_attn_implementation="eager")
    with capturable_forward(SimpleNamespace(dtype=dtype, config=config, _optimize_model_for_decode=decoding), tokens):
        assert entered == [True] * is_copied


@pytest.mark.parametrize(("rows", "engine"), [(1, "eager"), (3, "eager"), (3, "compiled")])
def test_experts_run_as_in_generate(monkeypatch, rows, engine):
    """`generate` changes their implementation after prefill on GPUs; a stand-in does so here."""
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")

    @contextmanager
    def decoding():
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(model, "_optimize_model_for_decode", decoding)
    used = []
    model.model.register_forward_pre_hook(lambda *_: used.append(model.config._experts_implementation))
    expected = model.generate(**prompts(rows), **OPTIONS)
    assert used == ["grouped_mm"] + (OPTIONS["max_new_tokens"] - 1) * ["batched_mm"]
    steps = attach_captured(model)
    used.clear()
    assert torch.equal(model.generate(**prompts(rows), **OPTIONS, tide_engine=engine), expected)
    assert used[0] == "grouped_mm"
    assert set(used[1:]) == {"grouped_mm" if (rows, engine) == (3, "eager") else "batched_mm"}
    assert steps.refused is None
    assert model.config._experts_implementation == "grouped_mm"


def test_attention_in_a_capture_is_not_cudnns(tiny_llama):
    before = torch.backends.cuda.cudnn_sdp_enabled()
    with capturable_forward(tiny_llama(), 1):
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert torch.backends.cuda.mem_efficient_sdp_enabled()
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
