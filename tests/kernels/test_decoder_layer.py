"""The kernels of a decoder layer: what PyTorch computes, in every dtype, whatever the sizes, biases and masks are."""

from itertools import product

import pytest
import torch
from quantized_weights import packed_int4, scaled
from torch.nn.functional import linear, rms_norm, scaled_dot_product_attention, silu

from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, load_op

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Rows, width, D, heads, KV heads, head size, slots, inner size of the MLP.
SHAPES = [
    (1, 1, 96, 6, 2, 16, 9, 70),
    (1, 5, 37, 4, 4, 6, 40, 33),
    (2, 3, 64, 3, 1, 32, 3, 128),
    (3, 16, 8, 2, 1, 4, 50, 9),
]
GROUPED = (1, 3, 64, 4, 2, 32, 20, 128)  # of sizes that weights in int4, and groups with a scale each, can have
KINDS = [(shape, kind) for shape in SHAPES for kind in ("plain", "rows")] + [
    (GROUPED, "groups"),
    (GROUPED, "all kinds"),
]
EPS = 1e-5


def random(*sizes, dtype, scale=1.0):
    return (scale * torch.randn(sizes)).to(dtype)


def product_of(kind, size_out, size, dtype):
    """A weight as a kernel takes it, its scales, and as floats."""
    if kind == "plain":
        weight = random(size_out, size, dtype=dtype, scale=size**-0.5)
        return weight, torch.empty(0), weight.double()
    groups, largest = 1 if kind == "rows" else size // 32, 7 if kind == "int4" else 127
    integers = torch.randint(-largest, largest + 1, (size_out, size))
    scales, zeros = torch.rand(2, size_out, groups) * size**-0.5 / largest
    if kind in ("rows", "groups"):
        exact = scaled(integers.double(), scales.double(), torch.zeros(()))
        return integers.to(torch.int8), scales[:, 0].contiguous() if kind == "rows" else scales, exact
    both, exact = torch.stack([scales, zeros], dim=-1), scaled(integers.double(), scales.double(), zeros.double())
    if kind == "zeros":
        return integers.to(torch.int8), both, exact
    return packed_int4(integers), both.transpose(0, 1).contiguous(), exact


def products(sizes, dtype, kind):
    """Weights as a kernel takes them, their scales, and as floats."""
    kinds = ("int4", "plain", "zeros", "int4") if kind == "all kinds" else (kind,) * 4  # of three or four products
    found = [product_of(kind, *size, dtype) for kind, size in zip(kinds, sizes, strict=False)]
    weights, scales, floats = ([one[i] for one in found] for i in range(3))
    return weights, [] if kind == "plain" else scales, floats


def rotated(heads, cos, sin):
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def assert_near(found, exact, dtype):
    assert found.dtype is dtype
    assert found.is_contiguous()
    error = (found.double() - exact).abs().max()
    assert float(error) <= TOLERANCE[dtype] * float(exact.abs().max())


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_queries_keys_and_values(on_some_cpu, dtype):
    torch.manual_seed(0)
    for (shape, kind), has_more in product(KINDS, (False, True)):
        rows, width, size, heads, kv_heads, head_size, *_ = shape
        counts = (heads, kv_heads, kv_heads)
        states, norm = random(rows, width, size, dtype=dtype), random(size, dtype=dtype)
        weights, scales, floats = products([(count * head_size, size) for count in counts], dtype, kind)
        biases = [random(count * head_size, dtype=dtype) for count in counts] if has_more else []
        norms = [random(head_size, dtype=dtype) for _ in range(2)] if has_more else []
        cos, sin = (random(rows if has_more else 1, width, head_size, dtype=dtype) for _ in range(2))
        found = load_op("qkv_rope", dtype)(states, norm, EPS, weights, biases, scales, norms, 1e-3, cos, sin)
        normalised = rms_norm(states.double(), (size,), norm.double(), EPS)
        given = [bias.double() for bias in biases] or [None] * 3
        exact = [
            linear(normalised, weight, bias).unflatten(-1, (count, head_size)).transpose(1, 2)
            for weight, bias, count in zip(floats, given, counts, strict=True)
        ]
        for i, weight in enumerate(norms):
            exact[i] = rms_norm(exact[i], (head_size,), weight.double(), 1e-3)
        exact[:2] = (rotated(one, cos.double(), sin.double()) for one in exact[:2])
        assert_near(found, torch.cat(exact, dim=1), dtype)


def masks(rows, width, slots, dtype):
    causal = torch.ones(width, slots, dtype=torch.bool).tril(slots - width)
    padded = causal.expand(rows, 1, width, slots).clone()
    padded[0, :, :, : (slots - width) // 2] = False
    added = torch.zeros(padded.shape).masked_fill(~padded, -torch.inf).to(dtype)
    return [None, causal[None, None], padded, added]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_attention_and_mlp(on_some_cpu, dtype):
    torch.manual_seed(0)
    for (shape, kind), has_bias in product(KINDS, (False, True)):
        rows, width, size, heads, kv_heads, head_size, slots, inner = shape
        slots = max(slots, width)
        states, norm = random(rows, width, size, dtype=dtype), random(size, dtype=dtype)
        query = random(rows, heads, width, head_size, dtype=dtype)
        key, value = (random(rows, kv_heads, slots, head_size, dtype=dtype) for _ in range(2))
        sizes = [(size, heads * head_size), (inner, size), (inner, size), (size, inner)]
        weights, scales, floats = products(sizes, dtype, kind)
        bias = random(size, dtype=dtype) if has_bias else None
        for mask in masks(rows, width, slots, dtype):
            rest = 0.3, norm, EPS, weights, bias, scales
            found = load_op("attention_mlp", dtype)(states, query, key, value, mask, None, *rest)
            if mask is not None:  # slots behind the filled ones hold anything
                wide = [torch.nn.functional.pad(one, (0, 0, 0, 7), value=torch.nan) for one in (key, value)]
                padded = torch.nn.functional.pad(mask, (0, 7), value=1)
                again = load_op("attention_mlp", dtype)(states, query, *wide, padded, torch.tensor(slots), *rest)
                assert torch.equal(again, found)
            seen = masks(rows, width, slots, dtype)[1] if mask is None else mask
            seen = seen if seen.dtype is torch.bool else seen.double()
            read = (one.double() for one in (query, key, value))
            attended = scaled_dot_product_attention(*read, attn_mask=seen, scale=0.3, enable_gqa=True)
            output, gate, up, down = floats
            exact = linear(attended.transpose(1, 2).flatten(2), output, None if bias is None else bias.double())
            exact = states.double() + exact
            normalised = rms_norm(exact, (size,), norm.double(), EPS)
            exact = exact + linear(silu(linear(normalised, gate)) * linear(normalised, up), down)
            assert_near(found, exact, dtype)


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_a_layer_on_a_static_cache_is_both_with_keys_and_values_stored_between(on_some_cpu, dtype):
    torch.manual_seed(0)
    for (shape, kind), before in product(KINDS, (0, 4)):
        rows, width, size, heads, kv_heads, head_size, slots, inner = shape
        end, slots = before + width, slots + 2 * width
        states, norms = random(rows, width, size, dtype=dtype), [random(size, dtype=dtype) for _ in range(2)]
        counts = (heads, kv_heads, kv_heads)
        qkv, qkv_scales, _ = products([(count * head_size, size) for count in counts], dtype, kind)
        sizes = [(size, heads * head_size), (inner, size), (inner, size), (size, inner)]
        rest, rest_scales, _ = products(sizes, dtype, kind)
        cos, sin = (random(1, width, head_size, dtype=dtype) for _ in range(2))
        mask = torch.nn.functional.pad(masks(rows, width, end, dtype)[1], (0, slots - end))
        first = norms[0], EPS, qkv, [], qkv_scales, [], 0.0
        last = 0.3, norms[1], EPS, rest, None, rest_scales
        caches = [random(rows, kv_heads, slots, head_size, dtype=dtype) for _ in range(2)]
        expected = [cache.clone() for cache in caches]
        query, *stored = load_op("qkv_rope", dtype)(states, *first, cos, sin).split(counts, dim=1)
        for cache, part in zip(expected, stored, strict=True):
            cache[:, :, end - width : end] = part
        output = load_op("attention_mlp", dtype)(states, query, *expected, mask, torch.tensor(end), *last)
        found = load_op("decoder_layer", dtype)(states, cos, sin, mask, torch.tensor(end), *caches, *first, *last)
        assert torch.equal(found, output)
        assert all(map(torch.equal, caches, expected))
