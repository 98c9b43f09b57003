"""Kernels change no decision: where a token exits, what is drafted and what is generated.

Without a GPU they run under Triton's interpreter. What each of them computes is tested in hub_kernels/.
"""

import pytest
import torch

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.kernels import ops

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6], [9, 8, 7, 6, 5, 4, 3, 9]], device=DEVICE)


def attached(model, mode, use_kernels, **config):
    settings = {"exit_layers": [1, 2], "exit_strategy": "linear"}
    record = {"exit_layers": {"1": {"agreement": 0.5}, "2": {"agreement": 0.6}}}
    routers = TIDERouters.for_model(model, router_bottleneck_dim=8, calibration=record, **settings, **config)
    torch.manual_seed(1)
    for exit_layer in routers.exit_layers:
        torch.nn.init.normal_(routers[exit_layer].router.up.weight)
        torch.nn.init.normal_(routers[exit_layer].router.down.weight)
    return TIDEModelForCausalLM.attach(model, routers, mode=mode, use_kernels=use_kernels, exit_threshold=0.5)


@pytest.fixture
def calls(monkeypatch, local_kernels):
    """How often each kernel ran."""
    counted = {}
    original = ops.Ops.__getattr__

    def count(self, name):
        counted[name] = counted.get(name, 0) + 1
        return original(self, name)

    monkeypatch.setattr(ops.Ops, "__getattr__", count)
    return counted


@pytest.mark.parametrize(
    ("mode", "config", "options", "called"),
    [
        ("early_exit", {}, {"max_new_tokens": 8}, {"norm_route"}),
        ("self_speculative", {"compaction_threshold": 0.0}, {"max_new_tokens": 16}, {"draft_top1", "kv_compact"}),
    ],
    ids=["exits", "drafts"],
)
def test_tokens_and_statistics_stay(tiny_llama, calls, monkeypatch, mode, config, options, called):
    monkeypatch.setattr("tide_hf.engines.round_clock.perf_counter", iter(range(10**6)).__next__)
    results = []
    for use_kernels in (False, True):
        model = attached(tiny_llama().to(DEVICE), mode, use_kernels, **config)
        tokens = model.generate(IDS, do_sample=False, **options)
        stats = model.last_exit_stats
        results.append([tokens.tolist(), stats.per_token, stats.drafted, stats.accepted])
    assert results[0] == results[1]
    assert stats.depth_fraction < 1.0 or stats.drafted
    assert called <= calls.keys()


def test_an_unknown_norm_runs_in_pytorch(local_kernels, calls, tiny_llama):
    model = tiny_llama()
    model.model.norm.forward = lambda states: states**3
    model.to(DEVICE)
    unembed = Unembed(model, find_structure(model), ops.load_kernels(use_kernels=True))
    router = TIDERouters.for_model(model, exit_layers=[1])[1].router.to(DEVICE)
    states = torch.randn(2, 32, device=DEVICE)
    assert torch.equal(unembed.route(router, states), router(states**3))
    assert calls == {}
