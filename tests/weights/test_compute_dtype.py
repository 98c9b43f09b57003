"""Models in half precision that compute in float32: their answers are those of the same weights loaded in float32."""

import copy
import logging
import pickle
from functools import wraps

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter
from families import ATTENTION, FAMILIES, slow_but, tiny_model
from on_steps import FEW, OPTIONS, as_traced, linear_heads, new_tokens, prompts, use_steps
from quantized_weights import quantize, scaled
from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu import cpp_kernels
from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, build_kernels
from tide_hf.weights import compute_dtype
from tide_hf.weights.compute_dtype import ComputeDtype
from tide_hf.weights.fused_layers import FusedLayers
from tide_hf.weights.lossless import HalfWeight
from tide_hf.weights.upcast import UpcastGate, upcasts

TEXT = tuple(family for family in ATTENTION if "text_config" not in FAMILIES[family])

LOGITS = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
SMALL = {"num_hidden_layers": 2}


@pytest.fixture
def _built():
    for dtype in CPU_DTYPES:
        build_kernels(dtype)


def attach(model, engine="eager", routers=None, **settings):
    TIDEModelForCausalLM.attach(model, routers, engine=engine, **{"compute_dtype": torch.float32, **settings})
    use_steps(model, CompiledSteps(as_traced))
    return model


def in_float32(model):
    """What the same weights give if they are loaded in float32."""
    return copy.deepcopy(model).float().generate(**prompts(), **LOGITS)


def check(found, expected):
    assert torch.equal(found.sequences, expected.sequences)
    logits, others = torch.stack(found.logits), torch.stack(expected.logits)
    assert float((logits - others).abs().max()) <= 2e-5 * float(others.abs().max())  # bfloat16's are 1e-2 apart


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("family", slow_but(FEW, TEXT))
def test_answers_of_every_family_are_float32s(family, engine):
    model = tiny_model(family).to(torch.bfloat16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = in_float32(model)
    attach(model, engine, linear_heads(model))
    use_drafter(model, "wrong at the last position", new_tokens(expected.sequences))
    check(model.generate(**prompts(), **LOGITS), expected)
    assert model.last_exit_stats.compute_dtype == "float32"
    assert model.last_exit_stats.dtype == "bfloat16"
    assert "bfloat16 computed in float32" in model.last_exit_stats.summary()
    assert model.dtype is torch.bfloat16
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    TIDEModelForCausalLM.detach(model)
    assert not any("forward" in module.__dict__ for module in model.modules())


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize("kind", ["bfloat16", "float16", "rows", "zeros"])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_with_kernels_and_of_quantised_models(tiny_llama, kind, engine):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "attention_bias": True}
    model, plain = (tiny_llama(**sizes).to(torch.float16 if kind == "float16" else torch.bfloat16) for _ in range(2))
    if kind in ("rows", "zeros"):
        quantize(model, kind)
        take_values(plain.float(), model)
    expected = in_float32(plain)
    attach(model, engine, draft_head_for(model))
    model._tide.weights.copies_at_once = True
    for drafts in ("right", "trees"):
        use_drafter(model, drafts, new_tokens(expected.sequences), 6)
        check(model.generate(**prompts(), **LOGITS), expected)


def take_values(model, quantised):
    """Give a model in float32 what the integers of another one stand for."""
    for module, other in zip(model.modules(), quantised.modules(), strict=True):
        weight = other._parameters.get("weight")
        if hasattr(weight, "qdata"):
            scales, zeros = weight.scale.float(), getattr(weight, "zero_point", torch.zeros(()))
            module.weight = nn.Parameter(scaled(weight.qdata.float(), scales, -(zeros * scales)))


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_changed_parameters_are_followed(tiny_llama, engine):
    model = tiny_llama(**SMALL, attention_bias=True).to(torch.bfloat16)
    attach(model, engine).generate(**prompts(), **LOGITS)
    with torch.no_grad():
        model.model.norm.weight.mul_(-1.5)
        model.model.layers[0].input_layernorm.weight.fill_(0.3)
        model.model.layers[0].self_attn.q_proj.bias.fill_(0.7)
        model.model.embed_tokens.weight.mul_(-1)
    found = model.generate(**prompts(), **LOGITS)
    check(found, in_float32(TIDEModelForCausalLM.detach(model)))


def test_copies_are_few_and_released(tiny_llama):
    model = attach(tiny_llama(**SMALL, vocab_size=40_000).to(torch.bfloat16))
    model.generate(**prompts(), **OPTIONS)
    gates = [gate for module in model.modules() if isinstance(gate := module.__dict__.get("forward"), UpcastGate)]
    copies = [copy for gate in gates for _, copy in gate.copies.values()]
    assert sum(copy.numel() for copy in copies) == 5 * 32  # of the norms
    assert not any(gate.copies for gate in pickle.loads(pickle.dumps(model))._tide.weights._upcast)
    model.tide_release()
    assert not any(gate.copies for gate in gates)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_a_cache_that_is_returned_is_in_the_models_dtype(tiny_llama, engine):
    model = attach(tiny_llama(**SMALL).to(torch.bfloat16), engine)
    expected = in_float32(TIDEModelForCausalLM.detach(copy.deepcopy(model)))
    first = model.generate(**prompts(), **{**LOGITS, "max_new_tokens": 6})
    cache = first[CACHE]
    assert {layer.keys.dtype for layer in cache.layers} == {layer.dtype for layer in cache.layers} == {torch.bfloat16}
    rest = {**LOGITS, "max_new_tokens": OPTIONS["max_new_tokens"] - 6}
    found = model.generate(first.sequences, **{CACHE: cache}, **rest)
    assert model.last_exit_stats.compute_dtype == "float32"
    assert {layer.keys.dtype for layer in cache.layers} == {torch.bfloat16}
    assert found.sequences.shape == expected.sequences.shape

    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model.generate(found.sequences, **{CACHE: cache}, **rest, stopping_criteria=[stop])
    assert {layer.values.dtype for layer in cache.layers} == {torch.bfloat16}
    assert not upcasts()


def test_a_call_may_name_another_dtype_and_calls_that_decode_plainly_compute_in_it(tiny_llama):
    model = tiny_llama(**SMALL).to(torch.bfloat16)
    exact = in_float32(model)
    attach(model, compute_dtype="bfloat16").generate(**prompts(), **LOGITS)
    assert model.last_exit_stats.compute_dtype == "bfloat16"
    check(model.generate(**prompts(), **LOGITS, compute_dtype=torch.float32), exact)
    model.generation_config.compute_dtype = "float32"
    found = model.generate(**prompts(), **LOGITS, output_attentions=True)
    assert model.last_exit_stats.fallback_reason is not None
    check(found, exact)


def as_fast(monkeypatch, ratio):
    """Let passes in float32 be so many times as fast as in the model's dtype."""
    monkeypatch.setattr(compute_dtype, "MEASURED_BYTES", 1)
    monkeypatch.setattr(ComputeDtype, "_measure", lambda *_: [ratio, 1.0])


@pytest.mark.usefixtures("_built")
@pytest.mark.parametrize(("ratio", "chosen"), [(0.96, "float32"), (0.94, "bfloat16")])
def test_auto_takes_float32_where_it_is_as_fast(tiny_llama, monkeypatch, caplog, ratio, chosen):
    as_fast(monkeypatch, ratio)
    caplog.set_level(logging.INFO, "tide_hf")
    model = TIDEModelForCausalLM.attach(tiny_llama(**SMALL).to(torch.bfloat16))
    model.generate(**prompts(), **OPTIONS)
    assert model.last_exit_stats.compute_dtype == chosen
    assert f"LlamaForCausalLM computes in {chosen}" in caplog.text
    assert "times as long as in bfloat16" in caplog.text


@pytest.mark.usefixtures("_built")
def test_what_is_measured_are_passes_of_both_kinds_through_the_same_layers(tiny_llama, monkeypatch):
    monkeypatch.setattr(compute_dtype, "MEASURED_BYTES", 1)
    seen, forward = [], LlamaDecoderLayer.forward

    @wraps(forward)
    def noted(self, state, *args, **kwargs):
        seen.append((self.self_attn.layer_idx, state.dtype, state.shape[1]))
        return forward(self, state, *args, **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", noted)
    monkeypatch.setattr(FusedLayers, "with_limits", lambda *_: {})
    model = TIDEModelForCausalLM.attach(tiny_llama(**SMALL).to(torch.bfloat16), compute_dtype="bfloat16")
    seen.clear()
    own, upcast = model._tide.compute._measure(model, 1)
    assert own > 0
    assert upcast > 0
    kinds = [(dtype, width) for index, dtype, width in seen if index == 0]
    assert kinds.count((torch.bfloat16, 1)) == kinds.count((torch.float32, 1)) == kinds.count((torch.float32, 4))
    assert all(index == 0 for index, *_ in seen)
    assert not any(
        gate.converted for gate in model._tide.weights.gates() if gate.may_copy and HalfWeight in gate.converted
    )


def test_auto_waits_for_no_kernels(tiny_llama, fresh_kernels, monkeypatch):
    monkeypatch.setattr(cpp_kernels, "_built", lambda _: pytest.fail("a build"))
    model = TIDEModelForCausalLM.attach(tiny_llama(**SMALL).to(torch.bfloat16))
    model.generate(**prompts(), **OPTIONS)
    assert model.last_exit_stats.compute_dtype == "bfloat16"


class Rounding(nn.Module):
    """A norm whose code rounds."""

    def __init__(self, size):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, state):
        return (state.bfloat16() * self.weight).to(state.dtype)


@pytest.mark.parametrize(
    ("family", "settings", "reason"),
    [
        ("llama", {"pack_weights": False}, "pack_weights=False"),
        ("gemma3", {}, "reads images"),
        ("qwen3_next", {}, "a recurrent model"),
        ("adapters", {}, "adapters, which compute in their own dtype"),
        ("shared", {}, "a model that processes share"),
        ("rounding", {}, r"LlamaForCausalLM, which rounds in aten\._to_copy"),
        ("float64", {}, r"a model in torch\.float64"),
        ("llama", {"compute_dtype": "float16"}, "compute_dtype='float16'"),
    ],
)
def test_what_cannot_compute_in_float32_says_so(family, settings, reason):
    is_llama = family in ("adapters", "shared", "rounding", "float64")
    model = tiny_model("llama" if is_llama else family).to(torch.float64 if family == "float64" else torch.bfloat16)
    if family == "rounding":
        model.model.norm = Rounding(32).to(torch.bfloat16)
    if family == "adapters":
        model.peft_config = {}
    if family == "shared":
        model._tp_size = 2
    with pytest.raises(UnsupportedOptionError, match=f"cannot compute in float.* here: got .*{reason}"):
        attach(model, **settings)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert TIDEModelForCausalLM.attach(model)._tide.compute.default == "auto"


def test_an_unknown_dtype_is_refused(tiny_llama):
    with pytest.raises(ConfigurationError, match="unknown compute_dtype"):
        TIDEModelForCausalLM.from_pretrained("nowhere", compute_dtype=torch.int8)
    model = TIDEModelForCausalLM.attach(tiny_llama(**SMALL), compute_dtype="float32")  # which it is in
    with pytest.raises(ConfigurationError, match="unknown compute_dtype"):
        model.generate(**prompts(), compute_dtype="half")
