"""A draft head run by the kernels gives what its own modules give, and is taken only where it does."""

from copy import deepcopy

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_heads
from on_steps import OPTIONS, prompts
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.depth.kv_cache import GrowingLayer, crop
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights import reading
from tide_hf.weights.fused_head import MOST_TOKENS, FusedHead, fused_head
from tide_hf.weights.layouts import PlainWeight, QuantizedWeight
from tide_hf.weights.linear_gate import IntegerGate


@pytest.fixture(autouse=True)
def _kernels_are_ready(fresh_kernels):
    build_kernels(torch.float32)


def head_of(model, **changes):
    TIDEModelForCausalLM.attach(model, draft_head_for(model, **changes))
    return model._tide.routers.draft_head.requires_grad_(False)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"attention_bias": True}, {"head_dim": 12}])
@torch.no_grad()
def test_steps_give_what_the_heads_own_modules_give(tiny_llama, changes):
    head = head_of(tiny_llama(), **changes)
    quick, own, grown = fused_head(head), DynamicLayer(), GrowingLayer()
    for width in (2, 1, 1, MOST_TOKENS, MOST_TOKENS + 1, 3, 70, 1):
        embeddings, fused = torch.randn(2, 1, width, head.config.hidden_size)
        start = own.get_seq_length()
        positions, mask = torch.arange(start, start + width)[None], torch.arange(start + width)[None] > 0
        expected = head(embeddings, fused, positions, own, mask)
        found = quick(embeddings, fused, grown)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(grown.keys, own.keys, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(grown.values, own.values, atol=1e-5, rtol=1e-4)
        crop(own, 1)
        crop(grown, 1)
    torch.testing.assert_close(quick.logits(found), head.lm_head(found), atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_quantised_weights_draft_nearly_the_same(tiny_llama):
    head = head_of(tiny_llama())
    exact, quick = (fused_head(head, layout) for layout in (PlainWeight, QuantizedWeight))
    embeddings, fused = torch.randn(2, 1, 5, head.config.hidden_size)
    expected, found = (one(embeddings, fused, GrowingLayer()) for one in (exact, quick))
    assert 0 < float((found - expected).abs().max()) < 0.05 * float(expected.abs().max())


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"norm_before_residual": True}, {"mlp_bias": True}])
def test_other_heads_run_by_themselves(tiny_llama, changes):
    assert fused_head(head_of(tiny_llama(), **changes)) is None


@pytest.mark.parametrize("changes", [{}, {"attention_bias": True}, {"qk_norm": True}])
def test_a_head_in_half_precision_drafts_for_passes_in_float32(tiny_llama, changes, monkeypatch):
    build_kernels(torch.bfloat16)
    model, dtypes, run = tiny_llama().bfloat16(), [], FusedHead.__call__

    def counted(self, embeddings, *rest):
        dtypes.append(embeddings.dtype)
        return run(self, embeddings, *rest)

    monkeypatch.setattr(FusedHead, "__call__", counted)
    expected = deepcopy(model).float().generate(**prompts(), **OPTIONS)
    TIDEModelForCausalLM.attach(model, draft_head_for(model, **changes), compute_dtype=torch.float32)
    use_heads(model, 0)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert {*dtypes} == {model._tide.routers.draft_head.norm.weight.dtype}


@pytest.mark.parametrize("part", ["q_proj", "lm_head"])
@pytest.mark.parametrize("gate", [None, IntegerGate])
def test_heads_whose_weights_have_no_plain_gates_run_by_themselves(tiny_llama, part, gate):
    head = head_of(tiny_llama())
    linear = head.lm_head if part == "lm_head" else head.layers[0].self_attn.q_proj
    assert fused_head(head) is not None
    linear.forward.remove()
    if gate is not None:
        gate(linear).open()
    assert fused_head(head) is None


@pytest.mark.parametrize(("rows", "pads", "is_taken"), [(1, 0, True), (1, 2, False), (2, 0, False)])
def test_single_rows_without_padding_draft_by_the_kernels(tiny_llama, rows, pads, is_taken, monkeypatch):
    model, steps, run = tiny_llama(), [], FusedHead.__call__

    def counted(self, embeddings, *rest):
        steps.append(embeddings.shape[1])
        return run(self, embeddings, *rest)

    monkeypatch.setattr(FusedHead, "__call__", counted)
    batch = prompts(rows, pads=pads)
    expected = model.generate(**batch, **OPTIONS)
    TIDEModelForCausalLM.attach(model, draft_head_for(model), remembered_tokens=0)
    use_heads(model, 0)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert bool(steps) == is_taken
    model._tide.weights.use_kernels = False
    steps.clear()
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert not steps
    assert reading.WeightReading.fused_head(model._tide.weights, model._tide.routers.draft_head) is None
