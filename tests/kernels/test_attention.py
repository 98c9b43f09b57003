"""Attention kernels in C++: what PyTorch computes, whatever the shapes, strides and masks are."""

from itertools import product

import pytest
import torch
from on_steps import OPTIONS, attach_compiled, prompts
from torch.nn.functional import scaled_dot_product_attention

from tide_hf.engines.gqa_attention import gqa_attention
from tide_hf.kernels.cpu import attention, cpp_kernels
from tide_hf.kernels.cpu.attention import MIN_QUERIES, decode_sdpa, is_faster, prefill_sdpa
from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, build_kernels

measure = attention._measure
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 2e-2}
# Rows, heads, queries, size, all slots and filled ones.
DECODE_SHAPES = [(1, 3, 12, 64, 96, 50), (2, 3, 5, 8, 64, 33), (3, 2, 7, 83, 64, 64), (1, 1, 1, 5, 40, 1)]
# Rows, heads, KV heads, queries, slots, size.
PREFILL_SHAPES = [(1, 9, 3, 48, 48, 64), (2, 4, 4, 130, 130, 5), (2, 2, 1, 32, 32, 80), (2, 2, 1, 33, 200, 33)]


@pytest.fixture(autouse=True)
def _prefill_kernel_is_faster(monkeypatch, fresh_kernels):
    """Whatever this machine is, the prefill kernel is compiled and the faster one."""
    build_kernels(torch.float32)
    monkeypatch.setattr(attention, "_measure", lambda _dtype: [1.0, 2.0])
    monkeypatch.setattr(attention, "_is_faster", {})


@pytest.fixture
def calls(monkeypatch):
    """The arguments of each call of the prefill kernel."""
    made, prefill = [], attention._prefill
    monkeypatch.setattr(attention, "_prefill", lambda *given: made.append(given) or prefill(*given))
    return made


def decode_tensors(shape, dtype=torch.float32, mask_rows=None):
    rows, heads, queries, size, slots, filled = shape
    torch.manual_seed(0)
    query, key, value = (torch.randn(rows, heads, length, size).to(dtype) for length in (queries, slots, slots))
    attends = torch.rand(mask_rows or rows, 1, queries, slots) < 0.8
    attends[..., 0] = True
    mask = torch.zeros(attends.shape).masked_fill(~attends, -torch.inf).to(dtype)
    return query, key, value, mask, torch.tensor(filled)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_decode_attention_is_that_of_pytorch_and_rounds_alike_for_any_number_of_queries(on_some_cpu, dtype):
    for shape, mask_rows, scale in product(DECODE_SHAPES, (None, 1), (None, 0.3)):
        query, key, value, mask, filled = decode_tensors(shape, dtype, mask_rows)
        mask[..., filled - 1 :] = -torch.inf
        mask[..., 0] = 0.0
        found = decode_sdpa(query, key, value, mask, filled, scale)
        read = (tensor.double() for tensor in (query, key[:, :, :filled], value[:, :, :filled]))
        exact = scaled_dot_product_attention(*read, attn_mask=mask[..., :filled].double(), scale=scale)
        torch.testing.assert_close(found.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
        for i in range(query.shape[2]):
            one = query[:, :, i : i + 1].contiguous(), key, value, mask[:, :, i : i + 1].contiguous()
            alone = decode_sdpa(*one, (filled - 1).clamp(min=1), scale)  # without the last slot, which the mask hides
            assert torch.equal(alone, found[:, :, i : i + 1])


def prefill_tensors(shape, dtype=torch.float32):
    rows, heads, kv_heads, queries, slots, size = shape
    torch.manual_seed(0)
    sizes = ((queries, heads), (slots, kv_heads), (slots, kv_heads))
    return [torch.randn(rows, length, count, size).to(dtype).transpose(1, 2) for length, count in sizes]


def prefill_masks(shape):
    """`None` where it can be left out; causal, random, with a hidden block, and with other strides."""
    rows, _, _, queries, slots, _ = shape
    causal = torch.ones(queries, slots, dtype=torch.bool).tril(slots - queries)
    random = causal & (torch.rand(rows, 1, queries, slots) < 0.7)
    random[..., 0] = True
    padded = causal.expand(rows, 1, queries, slots).clone()
    padded[0, :, :, 1:70] = False
    transposed = padded.transpose(2, 3).contiguous().transpose(2, 3)
    return [*([None] if queries == slots else []), causal[None, None], random, padded, transposed]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_prefill_attention_is_that_of_pytorch(on_some_cpu, dtype):
    build_kernels(dtype)
    for shape, scale in product(PREFILL_SHAPES, (None, 0.3)):
        tensors = prefill_tensors(shape, dtype)
        wide = [tensor.double() for tensor in tensors]
        for mask in prefill_masks(shape):
            found = prefill_sdpa(*tensors, mask, scale)
            options = {"attn_mask": mask, "is_causal": mask is None, "scale": scale, "enable_gqa": True}
            exact = scaled_dot_product_attention(*wide, **options).transpose(1, 2)
            assert found.is_contiguous()
            torch.testing.assert_close(found.double(), exact, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_a_query_that_attends_to_nothing_gives_zeros():
    query, key, value, mask, filled = decode_tensors(DECODE_SHAPES[0])
    mask[:, :, 2] = -torch.inf
    decoded = decode_sdpa(query, key, value, mask, filled, None)[:, :, 2]
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    mask[:, :, 3], mask[:, :, :, 5] = False, False
    prefilled = prefill_sdpa(*prefill_tensors((1, 2, 1, 70, 70, 16)), mask, None)
    assert bool(prefilled.isfinite().all())
    for found in (decoded, prefilled[:, 3]):
        assert torch.equal(found, torch.zeros_like(found))


def test_large_scores_give_finite_weights():
    query, key, value = prefill_tensors((1, 2, 1, 130, 130, 16))
    found = prefill_sdpa(query * 1e4, key * 1e4, value, None, None)
    exact = scaled_dot_product_attention(query * 1e4, key * 1e4, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), exact)


def transposed(tensor):
    return tensor.transpose(2, 3).contiguous().transpose(2, 3)


def test_other_decode_tensors_are_left_to_pytorch():
    q, k, v, mask, filled = decode_tensors(DECODE_SHAPES[0])
    assert decode_sdpa(q, k, v, mask, filled, None) is not None
    for others in (
        (q.double(), k.double(), v.double(), mask.double()),
        (q, k, v, mask.bfloat16()),
        (q, k[:, :1], v, mask),
        (q, k, transposed(v), mask),
        (q, k, v, mask[:, :, :1]),
    ):
        assert decode_sdpa(*others, filled, None) is None


def test_other_prefill_tensors_are_left_to_pytorch(monkeypatch):
    (q, k, v), mask = prefill_tensors((1, 4, 2, 40, 40, 16)), torch.ones(1, 1, 40, 40, dtype=torch.bool)
    assert prefill_sdpa(q, k, v, mask, None) is not None
    few = slice(1 - MIN_QUERIES, None)
    for others in (
        (q.double(), k.double(), v.double(), mask),
        (q, k, v.bfloat16(), mask),
        (q[:, :, few], k, v, mask[:, :, few]),
        (q[:, :3], k, v, mask),
        (q, k, v[..., :8], mask),
        (q, transposed(k), v, mask),
        (q[:, :, 1:], k, v, None),
        (q, k, v, mask.float()),
        (q, k, v, mask.expand(1, 4, 40, 40)),
        (q.to("meta"), k.to("meta"), v.to("meta"), None),
    ):
        assert prefill_sdpa(*others, None) is None
    monkeypatch.setattr(attention, "_is_faster", {(torch.float32, torch.get_num_threads()): False})
    assert prefill_sdpa(q, k, v, mask, None) is None


@pytest.mark.parametrize(("by_pytorch", "by_kernel"), [(2.0, 1.0), (1.0, 2.0)])
def test_the_faster_attention_is_measured_once(monkeypatch, by_pytorch, by_kernel):
    seconds = iter((by_kernel, by_pytorch))
    monkeypatch.setattr(attention, "_measure", measure)
    monkeypatch.setattr(attention, "least_seconds", lambda *_: next(seconds))
    assert [is_faster(torch.float32), is_faster(torch.float32)] == [by_kernel < by_pytorch] * 2
    assert not is_faster(torch.float64)  # there is no kernel


def test_a_call_under_autocast_or_with_gradients_uses_pytorchs_attention(tiny_llama, calls):
    model, batch = tiny_llama(), prompts(length=MIN_QUERIES)
    with gqa_attention(model):
        model(**batch).logits.sum().backward()
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            model(**batch)
        assert not calls
        with torch.no_grad():
            model(**batch)
    assert len(calls) == model.config.num_hidden_layers


def test_compiled_prefill_of_long_prompts_calls_the_kernel(tiny_llama, calls):
    model = tiny_llama(num_hidden_layers=2)
    inputs = {**prompts(length=MIN_QUERIES), **OPTIONS, "max_new_tokens": 3}
    expected = model.generate(**inputs)
    steps = attach_compiled(model)
    assert torch.equal(model.generate(**inputs), expected)
    assert len(calls) == model.config.num_hidden_layers + 1  # each layer once, which tells those alike; one in a trace
    assert model.config._attn_implementation == "sdpa"
    calls.clear()
    with steps.lock:  # as in another thread's call: the model's attention is not to be changed
        assert torch.equal(model.generate(**inputs), expected)
    assert not calls
    model.generate(**inputs)
    assert model.last_exit_stats.warm_up_s == 0.0
    cpp_kernels._loaded.clear()  # building kernels is part of the warm-up
    attention._is_faster.clear()
    model.generate(**inputs)
    assert model.last_exit_stats.warm_up_s > 0.0
