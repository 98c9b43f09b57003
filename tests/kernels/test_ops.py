"""Which ops a model runs, and that it says so; what they compute is tested in hub_kernels/."""

import logging
import subprocess
import sys

import pytest
import torch
from families import ATTENTION, tiny_model
from repository import ROOT

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.common.errors import ConfigurationError, KernelError
from tide_hf.kernels import ops
from tide_hf.kernels import reference as reference_ops

pytest.importorskip("triton")
REPO = ops.KERNELS_REPO
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
on_cpu = pytest.mark.skipif(DEVICE == "cuda", reason="about machines without a GPU")


@on_cpu
def test_auto_on_a_cpu_says_once_that_it_is_plain_pytorch_and_why(caplog, monkeypatch, tiny_llama):
    monkeypatch.setattr(ops, "_logged", set())
    with caplog.at_level(logging.INFO, logger="tide_hf"):
        for _ in range(2):
            model = TIDEModelForCausalLM.attach(tiny_llama())
    (record,) = [record for record in caplog.records if record.name == "tide_hf.kernels.ops"]
    assert record.levelno == logging.INFO
    assert record.message == "plain PyTorch, no fused kernels: the model is on cpu, and they need an NVIDIA GPU"
    assert model._tide.unembed.ops.kernels is None
    assert set(model._tide.unembed.ops.implementations().values()) == {"torch"}


@on_cpu
def test_true_on_a_cpu_fails_with_the_reason(monkeypatch, tiny_model_folder):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(KernelError, match="the model is on cpu"):
        TIDEModelForCausalLM.from_pretrained(tiny_model_folder, use_kernels=True)


def test_false_asks_nobody(monkeypatch, tiny_model_folder):
    monkeypatch.setattr(ops, "obstacle", None)
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder, use_kernels=False)
    assert model._tide.unembed.ops is ops.PLAIN


def test_another_value_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigurationError, match="unknown use_kernels"):
        TIDEModelForCausalLM.from_pretrained("no/such/model", use_kernels="always")
    with pytest.raises(ConfigurationError, match="unknown use_kernels"):
        ops.load_kernels(use_kernels=None)


def test_importing_and_attaching_needs_no_network():
    code = "import socket; socket.socket.connect = None; import tide_hf.model; from tide_hf.kernels import ops; "
    code += "ops.load_kernels()"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


@on_cpu
def test_the_facts_for_people(local_kernels):
    cpu, fused = torch.device("cpu"), ops.load_kernels(use_kernels=True)
    facts = ops.kernel_facts(fused, cpu, torch.bfloat16)
    assert facts == {
        "gpu": None,
        "dtype": "bfloat16",
        "variant": "torch-cpu",
        "reason": f"{REPO}, build torch-cpu",
        "ops": dict.fromkeys(ops.OPS, "triton"),
    }
    facts = ops.kernel_facts(fused, cpu, torch.float64)
    assert (facts["variant"], facts["reason"]) == (None, "there are no kernels for torch.float64")
    assert set(facts["ops"].values()) == {"torch"}
    facts = ops.kernel_facts(ops.load_kernels(), cpu, torch.float32)
    assert (facts["variant"], facts["ops"]["norm_route"]) == (None, "torch")
    assert "need an NVIDIA GPU" in facts["reason"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ATTENTION)
def test_each_familys_norm_is_known(family, dtype):
    model = tiny_model(family).to(dtype)
    norm, states = find_structure(model).norm, torch.randn(2, 3, 32).to(dtype)
    torch.nn.init.normal_(norm.weight)
    found = reference_ops.which_norm(norm, states)
    assert found is not None
    name, eps = found
    ours = reference_ops.normalize(states, norm.weight, getattr(norm, "bias", None), eps=eps, norm=name)
    torch.testing.assert_close(ours, norm(states), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
