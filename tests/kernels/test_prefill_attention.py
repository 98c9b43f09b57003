"""Attention of many queries in C++: what PyTorch's gives, whatever the shapes, strides and masks are."""

import pytest
import torch
from families import SDPA, VOCAB, tiny_model
from on_steps import OPTIONS
from on_steps import attach_compiled as attach
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

from tide_hf.engines.gqa_attention import gqa_attention
from tide_hf.kernels.cpu import prefill_attention
from tide_hf.kernels.cpu.cpp_kernels import VALUES, compile_kernel, load_op
from tide_hf.kernels.cpu.prefill_attention import MIN_QUERIES, is_faster, prefill_sdpa

measure = prefill_attention._measure
# Rows, heads, shared heads, queries, slots, size.
SHAPES = [
    (1, 9, 3, 48, 48, 64),
    (2, 4, 4, 130, 130, 8),
    (2, 2, 1, 32, 32, 80),
    (1, 2, 2, 65, 65, 5),
    (1, 2, 1, 33, 200, 33),
    (3, 4, 2, 64, 90, 16),
]


@pytest.fixture(autouse=True)
def _it_is_faster(monkeypatch, fresh_kernels):
    """Whatever this machine is, the kernel is the faster one, and it is there."""
    compile_kernel("prefill_attention", torch.float32)
    monkeypatch.setattr(prefill_attention, "_measure", lambda _dtype: True)
    monkeypatch.setattr(prefill_attention, "_is_faster", {})


@pytest.fixture
def calls(monkeypatch):
    """What was given to the kernel."""
    made = []
    attended = prefill_attention._attended
    monkeypatch.setattr(prefill_attention, "_attended", lambda *given: made.append(given) or attended(*given))
    return made


def tensors(shape, dtype=torch.float32):
    rows, heads, shared, queries, slots, size = shape
    torch.manual_seed(0)
    sizes = ((queries, heads), (slots, shared), (slots, shared))
    return [torch.randn(rows, length, of, size).to(dtype).transpose(1, 2) for length, of in sizes]


def masks(shape):
    """`None` where it can be left out, what is before, some of that, all but blocks of it, and one of other strides."""
    rows, _, _, queries, slots, _ = shape
    back = torch.ones(queries, slots, dtype=torch.bool).tril(slots - queries)
    random = back & (torch.rand(rows, 1, queries, slots) < 0.7)
    random[..., 0] = True
    padded = back.expand(rows, 1, queries, slots).clone()
    padded[0, :, :, 1:70] = False
    turned = padded.transpose(2, 3).contiguous().transpose(2, 3)
    return [*([None] if queries == slots else []), back[None, None], random, padded, turned]


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("dtype", VALUES)
def test_it_is_that_of_pytorch(on_some_cpu, dtype, scale):
    compile_kernel("prefill_attention", dtype)
    for shape in SHAPES:
        query, key, value = tensors(shape, dtype)
        for mask in masks(shape):
            found = prefill_sdpa(query, key, value, mask, scale)
            exact = scaled_dot_product_attention(
                *(tensor.double() for tensor in (query, key, value)),
                attn_mask=mask,
                is_causal=mask is None,
                scale=scale,
                enable_gqa=True,
            )
            tolerance = 5e-6 if dtype is torch.float32 else 2e-2
            assert found.is_contiguous()
            torch.testing.assert_close(found.transpose(1, 2).double(), exact, atol=tolerance, rtol=tolerance)


def test_a_query_that_sees_nothing_gives_zeros():
    shape = (1, 2, 1, 70, 70, 16)
    mask = torch.ones(1, 1, 70, 70, dtype=torch.bool).tril()
    mask[:, :, 3], mask[:, :, :, 5] = False, False
    found = prefill_sdpa(*tensors(shape), mask, None)
    assert torch.equal(found[:, 3], torch.zeros_like(found[:, 3]))
    assert bool(found.isfinite().all())


def test_scores_of_any_size_give_finite_weights():
    query, key, value = tensors((1, 2, 1, 130, 130, 16))
    found = prefill_sdpa(query * 1e4, key * 1e4, value, None, None)
    exact = scaled_dot_product_attention(query * 1e4, key * 1e4, value, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(found.transpose(1, 2), exact)


@pytest.mark.parametrize(
    "what", ["dtype", "other dtypes", "few", "heads", "values", "turned", "slots", "numbers", "mask of heads", "slower"]
)
def test_what_it_is_not_for_is_left_to_pytorch(what, monkeypatch):
    shape = (1, 4, 2, 40, 40, 16)
    query, key, value = tensors(shape, torch.float64 if what == "dtype" else torch.float32)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    if what == "other dtypes":
        value = value.bfloat16()
    elif what == "few":
        query, mask = query[:, :, 1 - MIN_QUERIES :], mask[:, :, 1 - MIN_QUERIES :]
    elif what == "heads":
        query = query[:, :3]
    elif what == "values":
        value = value[..., :8]
    elif what == "turned":
        key = key.transpose(2, 3).contiguous().transpose(2, 3)
    elif what == "slots":
        query, mask = query[:, :, 1:], None
    elif what == "numbers":
        mask = mask.float()
    elif what == "mask of heads":
        mask = mask.expand(1, 4, 40, 40)
    elif what == "slower":
        monkeypatch.setattr(prefill_attention, "_measure", lambda _dtype: False)
    assert prefill_sdpa(query, key, value, mask, None) is None


def test_what_is_not_on_the_cpu_is_left_to_pytorch():
    shape = (1, 4, 2, 40, 40, 16)
    assert prefill_sdpa(*tensors(shape), None, None) is not None
    assert prefill_sdpa(*(tensor.to("meta") for tensor in tensors(shape)), None, None) is None


def test_which_one_is_faster_is_measured_once(monkeypatch):
    asked = []
    monkeypatch.setattr(prefill_attention, "_measure", lambda dtype: asked.append(dtype) or True)
    assert [is_faster(torch.float32), is_faster(torch.float32)] == [True, True]
    assert asked == [torch.float32]
    assert not is_faster(torch.float64)  # there is no kernel
    assert asked == [torch.float32]


@pytest.mark.parametrize(("by_pytorch", "by_kernel"), [(2.0, 1.0), (1.0, 2.0)])
def test_measuring_runs_both_and_compares(monkeypatch, calls, by_pytorch, by_kernel):
    monkeypatch.setattr(prefill_attention, "PROBED_SHAPE", (1, 2, 64, 16))

    def seconds(function, _repeats):
        before = len(calls)
        function()
        return by_kernel if len(calls) > before else by_pytorch

    monkeypatch.setattr(prefill_attention, "least_seconds", seconds)
    assert measure(torch.float32) == (by_kernel < by_pytorch)
    assert len(calls) == 1


def read_prompt(model, mask):
    ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids, attention_mask=mask).logits


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("family", SDPA)
@torch.no_grad()
def test_every_family_reads_a_prompt_as_it_did(family, is_padded, calls):
    model = tiny_model(family, attention="sdpa")
    mask = torch.ones(2, 40, dtype=torch.long)
    if is_padded:
        mask[0, :7] = 0
    expected = read_prompt(model, mask)
    assert not calls
    with gqa_attention(model):
        found = read_prompt(model, mask)
    torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=1e-4, rtol=1e-4)
    assert bool(calls) == (family not in ("deepseek_v3", "falcon"))  # values of another size; attention of its own


@torch.no_grad()
def test_who_looks_at_operations_sees_attention(tiny_llama, calls):
    model, mask = tiny_llama(), torch.ones(1, 40, dtype=torch.long)
    with gqa_attention(model):
        with FlopCounterMode(display=False):
            read_prompt(model, mask)
        assert not calls
        read_prompt(model, mask)
    assert len(calls) == model.config.num_hidden_layers


def test_gradients_come_from_pytorch(tiny_llama, calls):
    model = tiny_llama()
    with gqa_attention(model):
        read_prompt(model, torch.ones(1, 40, dtype=torch.long)).sum().backward()
        assert not calls
        with torch.no_grad():
            read_prompt(model, torch.ones(1, 40, dtype=torch.long))
    assert len(calls) == model.config.num_hidden_layers


@torch.no_grad()
def test_under_autocast_it_is_pytorchs(tiny_llama, calls):
    model = tiny_llama()
    with gqa_attention(model), torch.autocast("cpu", dtype=torch.bfloat16):
        read_prompt(model, torch.ones(1, 40, dtype=torch.long))
    assert not calls


def prompt(length):
    return {"input_ids": torch.arange(3, 3 + length)[None], "attention_mask": torch.ones(1, length, dtype=torch.long)}


@pytest.mark.parametrize("length", [MIN_QUERIES - 1, MIN_QUERIES])
def test_compiled_steps_read_long_prompts_by_it(tiny_llama, calls, length):
    model = tiny_llama()
    inputs = prompt(length)
    expected = model.generate(**inputs, **OPTIONS)
    steps = attach(model)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    # Each layer as it is, and to see which are alike, and one in a trace.
    assert len(calls) == (2 * model.config.num_hidden_layers + 1 if length == MIN_QUERIES else 0)
    assert model.config._attn_implementation == "sdpa"
    calls.clear()
    with steps.lock:  # as another thread's call would hold it: the model's attention is not ours to change
        assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert not calls


@pytest.mark.parametrize("length", [4, MIN_QUERIES])
def test_compiling_kernels_is_part_of_the_warm_up(tiny_llama, length):
    model = tiny_llama()
    attach(model)
    model.generate(**prompt(length), **OPTIONS)
    model.generate(**prompt(length), **OPTIONS)
    assert model.last_exit_stats.warm_up_s == 0.0
    load_op.cache_clear()
    prefill_attention._is_faster.clear()
    model.generate(**prompt(length), **OPTIONS)
    assert model.last_exit_stats.warm_up_s > 0.0
