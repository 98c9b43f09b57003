"""Models whose linear layers read packed or plain weights, on any machine."""

from itertools import product

import torch
from on_steps import as_traced
from on_steps import attach_compiled as attach
from torch.nn import functional

from tide_hf.engines.steps.fused_linears import LINEAR
from tide_hf.kernels.cpu.cpp_kernels import load_op
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights.layouts import (
    PROBED_ROWS,
    WEIGHT_LAYOUTS,
    PlainWeight,
    PrepackedWeight,
    QuantizedWeight,
)
from tide_hf.weights.linear_gate import LOSSLESS_LAYOUTS

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 6e-3, torch.float16: 1e-3}  # of the largest product
DRAFT_ORDER = (QuantizedWeight, PrepackedWeight, None, PlainWeight)


def set_fastest_layouts(monkeypatch, dtypes=(torch.float32,), order=DRAFT_ORDER, except_rows=None):
    """Replace the measured times of layouts, so that tests do not depend on this machine.

    Args:
        monkeypatch: pytest's fixture.
        dtypes: Dtypes of the weights.
        order: Layouts, the fastest first; `None` is PyTorch's linear.
        except_rows: A number of rows for which PyTorch's linear is the fastest.
    """
    threads = torch.get_num_threads()
    order = (
        *order,
        *(layout for layout in (*WEIGHT_LAYOUTS, QuantizedWeight, *LOSSLESS_LAYOUTS) if layout not in order),
    )
    seconds = {
        (layout, dtype, threads, rows): 0.0 if layout is None and rows == except_rows else 1.0 + rank
        for (rank, layout), dtype, rows in product(enumerate(order), dtypes, PROBED_ROWS)
    }
    monkeypatch.setattr(weight_layouts, "_measured", seconds)
    weight_layouts._fastest_layout.cache_clear()


def converted(model):
    """The layouts that any weight of an attached model has been converted to."""
    return {layout for gate in model._tide.weights.gates() for layout in gate.converted}


def check_products(layout, exact_weight, dtype, rounding=ROUNDING):
    """Compare products with those in float64, and of each row with the same row's alone, bit for bit."""
    size_out, size = exact_weight.shape
    for rows in (*range(1, 10), 16, 21):
        state = torch.randn(rows, size).to(dtype)
        for bias in (None, torch.randn(size_out).to(dtype)):
            exact = functional.linear(state.double(), exact_weight, None if bias is None else bias.double())
            found = layout.apply(state, bias)
            assert float((found.double() - exact).abs().max()) <= rounding[dtype] * float(exact.abs().max())
            assert torch.equal(found, torch.cat([layout.apply(row, bias) for row in state.split(1)]))


def narrow(model, kind):
    """Give a model's weights values that need fewer bits."""
    with torch.no_grad():
        for weight in model.parameters():
            if kind != "integers":
                weight.copy_(weight.to(getattr(torch, kind)))
            elif weight.dim() == 2:
                groups = weight.reshape(-1, 32)
                scales = (groups.abs().amax(dim=1, keepdim=True) / 127).half().float()
                weight.copy_(((groups / scales).round().clamp(-127, 127) * scales).reshape(weight.shape))
    return model


class Graphs:
    """Stands in for Inductor; records how many layers each fused product has."""

    def __init__(self):
        self.products = []

    def __call__(self, graph, _inputs):
        gemm = load_op("skinny_gemm", torch.float32)
        sizes = [len(node.args[1]) for node in graph.graph.nodes if node.target in (LINEAR, gemm)]
        self.products += [size for size in sizes if size > 1]
        return as_traced(graph, _inputs)


def attach_packed(model, routers=None, compile_graph=as_traced):
    return attach(model, routers, compile_graph, pack_weights=True)
