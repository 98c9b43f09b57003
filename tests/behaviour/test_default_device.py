"""Measurements, probes and uploads make their tensors on the CPU, whatever the default device is."""

import pytest
import torch
from drafters import use_drafter
from families import tiny_model
from on_steps import OPTIONS, attach_captured, new_tokens, prompts
from torch import nn

from tide_hf.base_model.unembed import unembed_hash
from tide_hf.kernels.cpu import attention
from tide_hf.kernels.cpu.cpp_kernels import load_op
from tide_hf.weights.layouts import PrepackedWeight, _measure

ELSEWHERE = torch.device("meta")  # stands in for a GPU: nothing can be read from it


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
def test_weight_layouts_are_measured_and_heads_hashed_on_the_cpu():
    head = nn.Linear(8, 300)
    expected = unembed_hash(head)
    with ELSEWHERE:
        assert unembed_hash(head) == expected
        assert min(_measure(PrepackedWeight, torch.float32, [1, 4], torch.float32)) > 0


@pytest.mark.usefixtures("fresh_kernels")
def test_attention_is_measured_on_the_cpu(monkeypatch):
    devices, prefill = [], attention._prefill
    assert load_op("prefill_attention", torch.float32) is not None
    monkeypatch.setattr(
        attention, "_prefill", lambda query, *rest: devices.append(query.device.type) or prefill(query, *rest)
    )
    with ELSEWHERE:
        attention._measure(torch.float32)
    assert set(devices) == {"cpu"}


def test_steps_upload_from_the_cpu_and_read_there():
    model, batch = tiny_model("llama"), prompts()
    expected = model.generate(**batch, **OPTIONS)
    attach_captured(model)
    use_drafter(model, "mixed", new_tokens(expected))
    with ELSEWHERE:
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert model.last_exit_stats.drafted > 0
