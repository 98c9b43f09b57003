"""Products by plain weights in C++: what PyTorch's linear gives, the same for a row whatever stands beside it."""

import logging
import platform

import pytest
import torch
from drafters import use_drafter
from families import ATTENTION, slow_but, tiny_model
from on_steps import FEW, LAYERS, NEW, OPTIONS, UNTRACED, check_drafts, draft_with_heads, new_tokens, prompts
from on_steps import attach_compiled as attach
from packed_weights import Graphs, let_pay
from torch._inductor.codecache import CppCodeCache

from tide_hf.depth import linear_gate
from tide_hf.depth.linear_gate import linear_gates
from tide_hf.kernels.cpu import weight_layouts
from tide_hf.kernels.cpu.cpp_kernels import VALUES
from tide_hf.kernels.cpu.gemm import skinny_gemm_for
from tide_hf.kernels.cpu.weight_layouts import PlainWeight

ROWS = (*range(1, 10), 16, 21)
ROUNDING = 1e-6 if platform.machine() not in ("aarch64", "arm64") else 2e-6  # whose vectors take longer sums
SIZES = [(576, (576, 192, 192)), (40, (7,)), (5000, (33, 5)), (3, (2, 1))]  # of input, and of weights
pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.mark.parametrize("dtype", VALUES)
def test_the_product_is_that_of_linear(on_some_cpu, dtype):
    torch.manual_seed(0)
    for size, sizes in SIZES:
        weights = [torch.randn(size_out, size).to(dtype) for size_out in sizes]
        layout = PlainWeight(*weights)
        for rows in ROWS:
            state = torch.randn(rows, size).to(dtype)
            for bias in (None, torch.randn(sum(sizes)).to(dtype)):
                exact = torch.nn.functional.linear(
                    state.double(), torch.cat(weights).double(), None if bias is None else bias.double()
                )
                found = layout.apply(state, bias)
                tolerance = (ROUNDING if dtype is torch.float32 else 6e-3) * float(exact.abs().max())
                assert float((found.double() - exact).abs().max()) <= tolerance
                alone = torch.cat([layout.apply(row, bias) for row in state.split(1)])
                assert torch.equal(found, alone)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_share_the_rows_of_all_weights(threads):
    before = torch.get_num_threads()
    weights = [torch.randn(size_out, 512) for size_out in (301, 1, 77)]
    layout, state = PlainWeight(*weights), torch.randn(5, 512)
    expected = layout.apply(state, None)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layout.apply(state, None), expected)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(expected, torch.nn.functional.linear(state, torch.cat(weights)), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("rows", [3, 150])
def test_weights_need_not_stand_at_round_addresses(rows):
    stored = torch.randn(64 * 33 + 3)
    weight = stored[3:].view(64, 33)
    layout, state = PlainWeight(weight), torch.randn(rows, 2, 33)
    torch.testing.assert_close(
        layout.apply(state, None), torch.nn.functional.linear(state, weight), atol=1e-4, rtol=1e-5
    )
    assert layout._plain[0].data_ptr() == weight.data_ptr()
    turned = torch.randn(33, 64).t()
    torch.testing.assert_close(
        PlainWeight(turned).apply(state, None), torch.nn.functional.linear(state, turned), atol=1e-4, rtol=1e-5
    )


def test_without_a_compiler_there_is_none_and_it_is_said_once(monkeypatch, caplog):
    def failing(*_args, **_kwargs):
        raise RuntimeError("C++ compile error\nand much more")

    monkeypatch.setattr(CppCodeCache, "load", failing)
    with caplog.at_level(logging.WARNING, logger="tide_hf.kernels.cpu.cpp_kernels"):
        assert not PlainWeight.serves(torch.float32, 1)
        assert skinny_gemm_for(torch.float32) is None
    assert [record.getMessage() for record in caplog.records] == [
        "skinny_gemm.cpp cannot be compiled, so PyTorch's own operations are used: C++ compile error"
    ]
    assert skinny_gemm_for(torch.float64) is None


class TestInSteps:
    """Steps that read weights as the model stores them."""

    @pytest.fixture(autouse=True)
    def _it_pays(self, monkeypatch):
        """Whatever this machine is, it is the fastest; and there is no memory for copies."""
        let_pay(monkeypatch, order=(PlainWeight, None, *weight_layouts.WEIGHT_LAYOUTS[:2]))
        monkeypatch.setattr(linear_gate, "MEMORY_SHARE", 0.0)

    @pytest.mark.parametrize("family", slow_but(FEW, [family for family in ATTENTION if family not in UNTRACED]))
    def test_every_familys_tokens_are_the_base_models(self, family):
        model, graphs = tiny_model(family), Graphs()
        steps = check_drafts(
            model,
            prompts(pads=2),
            lambda model, routers: attach(model, routers, graphs, pack_weights="auto"),
            draft_with_heads,
            ("right", "wrong at the last position"),
            width=4,
        )
        assert steps.refused is None
        gates = list(linear_gates(model._tide.structure))
        assert all(set(gate.kept) <= {PlainWeight} for gate in gates)
        assert any(gate.kept for gate in gates) == any(type(gate.module) is torch.nn.Linear for gate in gates)

    def test_a_pass_over_several_tokens_rounds_as_passes_over_one_do(self, tiny_llama):
        model = tiny_llama(num_hidden_layers=LAYERS)
        steps = attach(model, pack_weights="auto")
        asked = {**prompts(), **OPTIONS, "output_logits": True, "return_dict_in_generate": True}
        use_drafter(model, "right", [[]])  # nothing
        expected = model.generate(**asked)
        assert {size for _, _, size in steps._steps} == {1}
        use_drafter(model, "wrong at the last position", new_tokens(expected.sequences), width=4)
        found = model.generate(**asked)
        assert {size for _, _, size in steps._steps} > {1}
        assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))

    def test_layers_of_one_input_are_one_product_without_a_copy(self, tiny_llama):
        model, graphs = tiny_llama(num_hidden_layers=LAYERS), Graphs()
        model.set_attn_implementation("sdpa")
        expected = model.generate(**prompts(), **OPTIONS)
        attach(model, None, graphs, pack_weights="auto")
        use_drafter(model, "random", [[5] * NEW], width=4)
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
        assert set(graphs.products) == {3, 2}
        names = {op.name() for op in graphs.ops}  # no Python between kernels
        assert names == {f"tide_hf::{name}" for name in ("layer", "skinny_gemm", "decode_attention")}
        attention = model.model.layers[0].self_attn
        weights = [getattr(attention, f"{name}_proj").weight for name in "qkv"]
        joined = weight_layouts._known[weight_layouts._key_of(weights, PlainWeight)]
        assert [stored.data_ptr() for stored in joined._plain] == [weight.data_ptr() for weight in weights]
