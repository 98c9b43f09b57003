"""The kernel of decoder layers: what PyTorch computes, in every dtype, whatever the sizes, weights and masks are."""

from itertools import product

import pytest
import torch
from quantized_weights import packed_int4, scaled
from torch.nn.functional import linear, pad, rms_norm, scaled_dot_product_attention, silu

from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, load_op
from tide_hf.weights.panels import in_panels, int4_in_panels, scales_in_panels

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 6e-2, torch.float16: 1e-2}
# Rows, width, D, heads, KV heads, head size, slots before the pass, inner size of the MLP.
SHAPES = [
    (1, 1, 96, 6, 2, 16, 9, 70),
    (1, 5, 37, 4, 4, 6, 40, 33),
    (2, 3, 64, 3, 1, 32, 0, 128),
    (3, 16, 8, 2, 1, 4, 34, 9),
]
GROUPED = (1, 3, 64, 4, 2, 32, 17, 128)  # of sizes that all kinds of weights can have
WIDE = (1, 9, 128, 4, 2, 64, 130, 192)
KINDS = [(shape, kind) for shape in SHAPES for kind in ("plain", "rows")]
KINDS += [(shape, kind) for shape in (GROUPED, WIDE) for kind in ("groups", "all kinds", "panels", "all panels")]
OF_LAYER = {
    "all kinds": ("int4", "plain", "zeros"),
    "all panels": ("int8 panels", "int4 panels", "zeros panels", "panels"),
}
EPS, HEAD_EPS, SCALE = 1e-5, 1e-3, 0.3


def random(*sizes, dtype, scale=1.0):
    return (scale * torch.randn(sizes)).to(dtype)


def product_of(kind, size_out, size, dtype):
    """A weight as a kernel takes it, its scales, and as floats."""
    kind, _, of_panels = kind.partition(" ") if kind != "panels" else ("plain", "", "panels")
    if kind == "plain":
        stored = torch.bfloat16 if of_panels and dtype is torch.float32 else dtype
        weight = random(size_out, size, dtype=stored, scale=size**-0.5)
        return in_panels(weight) if of_panels else weight, torch.empty(0), weight.double()
    groups, largest = 1 if kind in ("rows", "int8") else size // 32, 7 if kind == "int4" else 127
    integers = torch.randint(-largest, largest + 1, (size_out, size))
    scales, zeros = torch.rand(2, size_out, groups) * size**-0.5 / largest
    if kind in ("rows", "int8", "groups"):
        exact = scaled(integers.double(), scales.double(), torch.zeros(()))
        stored = in_panels(integers.to(torch.int8)) if of_panels else integers.to(torch.int8)
        return stored, scales if kind == "groups" else scales[:, 0].contiguous(), exact
    both, exact = torch.stack([scales, zeros], dim=-1), scaled(integers.double(), scales.double(), zeros.double())
    if of_panels and kind == "int4":
        return int4_in_panels(integers + 7), scales_in_panels(scales, zeros - 7 * scales), exact
    if of_panels:
        return in_panels(integers.to(torch.int8)), scales_in_panels(scales, zeros), exact
    if kind == "zeros":
        return integers.to(torch.int8), both, exact
    return packed_int4(integers).contiguous(), both.transpose(0, 1).contiguous(), exact


def rotated(heads, cos, sin):
    first, second = heads.chunk(2, dim=-1)
    return heads * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def assert_near(found, exact, dtype):
    assert found.dtype is dtype
    assert found.is_contiguous()
    error = (found.double() - exact).abs().max()
    assert float(error) <= TOLERANCE[dtype] * float(exact.abs().max())


class Layers:
    """Random layers, and what they compute in float64."""

    def __init__(self, shape, kind, dtype, has_more, count=2):
        self.rows, self.width, self.size, self.heads, self.kv_heads, self.head_size, self.before, inner = shape
        self.dtype, self.count = dtype, count
        projected, kv = self.heads * self.head_size, self.kv_heads * self.head_size
        ins = [self.size] * 3 + [projected, self.size, self.size, inner]
        outs = [projected, kv, kv, self.size, inner, inner, self.size]
        kinds = OF_LAYER.get(kind, (kind,))
        made = [
            product_of(kinds[i % len(kinds)], out, size, dtype)
            for i, (out, size) in enumerate([*zip(outs, ins, strict=True)] * count)
        ]
        self.weights, self.scales, self.floats = ([one[i] for one in made] for i in range(3))
        self.norms = [random(self.size, dtype=dtype) for _ in range(2 * count)]
        self.biases = [random(out, dtype=dtype) for out in outs[:4] * count] if has_more else []
        self.head_norms = [random(self.head_size, dtype=dtype) for _ in range(2 * count)] if has_more else []
        slots = self.before + self.width + 7  # those behind the filled ones hold anything
        self.kv = [
            [random(self.rows, self.kv_heads, slots, self.head_size, dtype=dtype) for _ in range(count)] for _ in "kv"
        ]
        for cache in self.kv[0] + self.kv[1]:
            cache[:, :, self.before + self.width :] = torch.nan

    def run(self, states, cos, sin, mask, end=None, count=None, tapped=None, taps=()):
        """The states after all layers, or the first `count`; those after `taps` layers go to `tapped`."""
        end = torch.tensor(self.before + self.width if end is None else end)
        lists = *self.kv, self.weights, self.scales, self.norms, self.biases, self.head_norms
        lists = [one[: len(one) if count is None else len(one) // self.count * count] for one in lists]
        rest = EPS, EPS, HEAD_EPS, SCALE, [], tapped, list(taps)
        return load_op("decoder_layers", self.dtype)(states, cos, sin, mask, end, *lists, *rest)

    def exact(self, states, cos, sin, mask):
        """The states after all layers, and the K/V that each stores."""
        states, stored = states.double(), []
        for i in range(self.count):
            weights, norms = self.floats[7 * i : 7 * i + 7], [norm.double() for norm in self.norms[2 * i : 2 * i + 2]]
            biases = [bias.double() for bias in self.biases[4 * i : 4 * i + 4]] or [None] * 4
            normalised = rms_norm(states, (self.size,), norms[0], EPS)
            heads = [
                linear(normalised, weight, bias).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
                for weight, bias in zip(weights[:3], biases[:3], strict=True)
            ]
            for j, weight in enumerate(self.head_norms[2 * i : 2 * i + 2]):
                heads[j] = rms_norm(heads[j], (self.head_size,), weight.double(), HEAD_EPS)
            query, key = (rotated(one, cos.double(), sin.double()) for one in heads[:2])
            stored.append((key, heads[2]))
            read = [
                torch.cat([kv[i][:, :, : self.before].double(), new], dim=2)
                for kv, new in zip(self.kv, stored[-1], strict=True)
            ]
            attended = scaled_dot_product_attention(query, *read, attn_mask=mask, scale=SCALE, enable_gqa=True)
            states = states + linear(attended.transpose(1, 2).flatten(2), weights[3], biases[3])
            normalised = rms_norm(states, (self.size,), norms[1], EPS)
            states = states + linear(silu(linear(normalised, weights[4])) * linear(normalised, weights[5]), weights[6])
        return states, stored


def masks(rows, width, slots, dtype):
    causal = torch.ones(width, slots, dtype=torch.bool).tril(slots - width)
    padded = causal.expand(rows, 1, width, slots).clone()
    padded[0, :, :, : (slots - width) // 2] = False
    added = torch.zeros(padded.shape).masked_fill(~padded, -torch.inf).to(dtype)
    return [None, causal[None, None], padded, added]


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_states_keys_and_values(on_some_cpu, dtype):
    torch.manual_seed(0)
    for (shape, kind), has_more in product(KINDS, (False, True)):
        layers = Layers(shape, kind, dtype, has_more)
        rows, width, slots = layers.rows, layers.width, layers.before + layers.width
        states = random(rows, width, layers.size, dtype=dtype)
        cos, sin = (random(rows if has_more else 1, width, layers.head_size, dtype=dtype) for _ in range(2))
        for mask in masks(rows, width, slots, dtype):
            seen = masks(rows, width, slots, dtype)[1] if mask is None else mask
            exact, stored = layers.exact(states, cos, sin, seen if seen.dtype is torch.bool else seen.double())
            given = None if mask is None else pad(mask, (0, 7), value=1)
            assert_near(layers.run(states, cos, sin, given), exact, dtype)
            for caches, new in zip(layers.kv, zip(*stored, strict=True), strict=True):
                for cache, part in zip(caches, new, strict=True):
                    assert_near(cache[:, :, layers.before : slots].contiguous(), part, dtype)
                    assert cache[:, :, slots:].isnan().all()


@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("width", [1, 5, 300])
def test_states_between_layers_are_given(fresh_kernels, dtype, width):
    torch.manual_seed(0)
    layers = Layers((2, width, *WIDE[2:]), "panels", dtype, has_more=False, count=4)
    states = random(2, width, layers.size, dtype=dtype)
    cos, sin = (random(1, width, layers.head_size, dtype=dtype) for _ in range(2))
    for taps in ((4,), (1, 3, 4), (3, 2)):
        tapped = torch.full((2, width, len(taps), layers.size), torch.nan).to(dtype)
        found = layers.run(states, cos, sin, None, tapped=tapped, taps=taps)
        assert torch.equal(found, layers.run(states, cos, sin, None))
        for place, count in enumerate(taps):
            assert torch.equal(tapped[:, :, place], layers.run(states, cos, sin, None, count=count))


@pytest.mark.parametrize("dtype", CPU_DTYPES)
def test_a_token_gets_the_same_bits_in_passes_of_any_width_and_on_any_number_of_threads(
    on_some_cpu, dtype, monkeypatch
):
    torch.manual_seed(0)
    for kind, width in product(("plain", "panels", "all panels", "all kinds"), (2, 3, 4, 5, 7, 8, 16)):
        layers = Layers((1, width, *WIDE[2:]), kind, dtype, has_more=False)
        states = random(1, width, layers.size, dtype=dtype)
        cos, sin = (random(1, width, layers.head_size, dtype=dtype) for _ in range(2))
        together = layers.run(states, cos, sin, None)
        stored = [cache.clone() for cache in layers.kv[0] + layers.kv[1]]
        one_by_one = [
            layers.run(*(part[:, i : i + 1] for part in (states, cos, sin)), None, end=layers.before + i + 1)
            for i in range(width)
        ]
        assert torch.equal(torch.cat(one_by_one, dim=1), together)
        assert all(
            torch.equal(a, b)
            for a, b in zip(
                (c.nan_to_num() for c in layers.kv[0] + layers.kv[1]), (c.nan_to_num() for c in stored), strict=True
            )
        )
        threads = torch.get_num_threads()
        try:
            torch.set_num_threads(3 if threads == 1 else 1)
            assert torch.equal(layers.run(states, cos, sin, None), together)
        finally:
            torch.set_num_threads(threads)
