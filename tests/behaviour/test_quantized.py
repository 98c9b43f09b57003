"""Base models with 8- and 4-bit weights, quantised by the packages that users quantise with."""

import pytest
import torch
from calibrations import small, texts
from drafters import drafting_routers, use_drafter
from families import VOCAB, tiny_model
from families import repeating_prompt as prompt
from on_steps import as_traced, attach_captured
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, QuantoConfig, TorchAoConfig

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import hash_distance, unembed_hash, weights_hash
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights.linear_gate import IntegerGate

OPTIONS = {"max_new_tokens": 32, "do_sample": False, "eos_token_id": None}
SIZES = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # some kinds want multiples of 32 or 64
NONE = ["no_such_module"]
PROTOTYPE = "torchao.prototype.quantization.int4"


def torchao(name, with_head, group=None, package="torchao.quantization", **options):
    quantization = pytest.importorskip(package)
    if group is not None:
        options["granularity"] = quantization.PerGroup(group)
    return TorchAoConfig(getattr(quantization, name)(**options), include_input_output_embeddings=with_head)


def packed_int4(with_head):
    return torchao("PrototypeInt4WeightOnlyConfig", with_head, package=PROTOTYPE, group_size=32)


def quanto(bits, with_head):
    pytest.importorskip("optimum.quanto")
    return QuantoConfig(weights=bits, modules_to_not_convert=NONE if with_head else None)


def bitsandbytes(with_head, **options):
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**options, llm_int8_skip_modules=NONE if with_head else None)


# Only weights are quantised: a pass over several tokens differs from passes over one by float32 rounding.
WEIGHT_ONLY = {
    "torchao int8": lambda with_head: torchao("Int8WeightOnlyConfig", with_head),
    "torchao int4": lambda with_head: torchao("IntxWeightOnlyConfig", with_head, weight_dtype=torch.int4),
    "torchao int8 groups": lambda with_head: torchao("Int8WeightOnlyConfig", with_head, group=32),
    "torchao int4 groups": lambda with_head: torchao("IntxWeightOnlyConfig", with_head, 32, weight_dtype=torch.int4),
    "torchao packed int4": packed_int4,
    "torchao float8": lambda with_head: torchao("Float8WeightOnlyConfig", with_head),
    "quanto int8": lambda with_head: quanto("int8", with_head),
    "quanto int4": lambda with_head: quanto("int4", with_head),
    "bitsandbytes nf4": lambda with_head: bitsandbytes(with_head, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
}
# The states are quantised as well, so that rounding can move one by a whole step.
WITH_STATES = {
    "torchao int8": lambda with_head: torchao("Int8DynamicActivationInt8WeightConfig", with_head),
    "bitsandbytes int8": lambda with_head: bitsandbytes(with_head, load_in_8bit=True),
}
NOT_INTEGERS = ("torchao float8", "quanto int4", "bitsandbytes nf4")
# What the kernel reads, and the number of rows that it needs a weight's to be a multiple of.
INTEGERS = dict.fromkeys(WEIGHT_ONLY, 1) | {"torchao packed int4": 64} | dict.fromkeys(NOT_INTEGERS, 0)
UNREADABLE_HEAD = ("torchao packed int4", "bitsandbytes nf4")
# Which transformers cannot save.
SAVED = [name for name in WEIGHT_ONLY if not name.startswith("quanto") and name != "torchao packed int4"]


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny_model("llama", **SIZES).save_pretrained(folder)
    return folder


def load(folder, config):
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype="float32", device_map="cpu")


def attach(model, **config):
    return TIDEModelForCausalLM.attach(model, drafting_routers(model, **config), exit_threshold=0.0)


@pytest.mark.parametrize("with_head", [False, True])
@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_tokens_with_quantised_weights_are_the_base_models(kind, with_head, base_folder):
    model = load(base_folder, WEIGHT_ONLY[kind](with_head))
    expected = [model.generate(prompt(rows), **OPTIONS) for rows in (1, 3)]
    build_kernels(torch.float32)
    attach(model, draft_vocab_size=64)
    drafted = 0  # in both calls: where drafts turn out to be dear in the one, the other may have none
    for tokens in expected:
        assert torch.equal(model.generate(prompt(len(tokens)), **OPTIONS), tokens)
        drafted += model.last_exit_stats.drafted
    assert drafted > 0
    check_gates(model, with_head, INTEGERS.get(kind, 0))
    model.generate(prompt(), tide_mode="early_exit", **OPTIONS)
    assert model.last_exit_stats.depth_fraction < 0.5
    TIDEModelForCausalLM.detach(model)
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected[0])


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_on_steps_as_on_a_gpu_the_tokens_are_the_quantised_models(kind, base_folder):
    model = load(base_folder, WEIGHT_ONLY[kind](with_head=True))
    for rows in (1, 3):
        expected = model.generate(prompt(rows), **OPTIONS)
        steps = attach_captured(model, compile_graph=as_traced)
        use_drafter(model, "mixed", expected[:, prompt().shape[1] :].tolist(), width=3)
        assert torch.equal(model.generate(prompt(rows), **OPTIONS), expected)
        assert steps.refused is None
        assert steps.replays > 0
        assert (steps.compiler.graphs.num_compiled > 0) == (kind != "bitsandbytes nf4")  # which cannot be traced
        TIDEModelForCausalLM.detach(model)


def check_gates(model, with_head, multiple):
    structure = find_structure(model)
    assert structure.vocab_size == VOCAB
    gates = model._tide.weights.gates()
    packed = [gate.module for gate in gates if not isinstance(gate, IntegerGate)]
    assert packed == ([] if with_head or not torch.backends.mkldnn.is_available() else [structure.head])
    read = [gate for gate in gates if isinstance(gate, IntegerGate)]
    modules = [module for layer in structure.layers for module in layer.modules()]
    linears = [module for module in modules if isinstance(module, nn.Linear)]
    quantized = [*linears, structure.head] if with_head else linears
    assert len(read) == sum(multiple > 0 and linear.out_features % multiple == 0 for linear in quantized)
    assert all(gate.converted for gate in read)  # by passes over few tokens


@pytest.mark.parametrize("kind", WITH_STATES)
def test_with_quantised_states_every_mode_runs(kind, base_folder):
    model = attach(load(base_folder, WITH_STATES[kind](with_head=False)))
    check_gates(model, with_head=False, multiple=0)
    for mode in ("self_speculative", "early_exit", "post_hoc"):
        assert model.generate(prompt(3), tide_mode=mode, **OPTIONS).shape == (3, 50)


@pytest.mark.parametrize("kind", SAVED)
def test_what_is_saved_is_the_base_and_can_be_loaded(kind, base_folder, tmp_path):
    plain = load(base_folder, WEIGHT_ONLY[kind](with_head=False))
    plain.generate(prompt(), **OPTIONS)  # bitsandbytes moves weights about when they are first used
    plain.save_pretrained(tmp_path / "plain")
    model = attach(load(base_folder, WEIGHT_ONLY[kind](with_head=False)))
    model.generate(prompt(), **OPTIONS)
    model.save_pretrained(tmp_path / "base")
    model._tide.routers.save_pretrained(tmp_path / "routers")
    assert "tide" not in (tmp_path / "base" / "config.json").read_text().lower()
    expected, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "base"))
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], tensor) for name, tensor in expected.items())
    routers = TIDERouters.from_pretrained(tmp_path / "routers")
    again = TIDEModelForCausalLM.from_pretrained(tmp_path / "base", routers=routers, device_map="cpu")
    assert again.config.architectures == ["LlamaForCausalLM"]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", device_map="cpu")
    assert torch.equal(again.generate(prompt(), **OPTIONS), loaded.generate(prompt(), **OPTIONS))


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_routers_of_the_unquantised_model_fit(kind, base_folder):
    base = AutoModelForCausalLM.from_pretrained(base_folder)
    routers = TIDERouters.for_model(base, exit_layers=[1, 3])
    model = load(base_folder, WEIGHT_ONLY[kind](with_head=True))
    fingerprint = unembed_hash(model.lm_head)
    assert (fingerprint is None) == (kind in UNREADABLE_HEAD)
    if fingerprint is not None:
        assert hash_distance(fingerprint, routers.config.unembed_hash) < 0.15
    assert isinstance(TIDEModelForCausalLM.attach(model, routers), TIDEModelForCausalLM)


@pytest.mark.parametrize("kind", ["torchao int8", "torchao int4", "quanto int8", "quanto int4"])
def test_hashes_differ_where_one_packed_weight_differs(kind, base_folder, tmp_path):
    other = tiny_model("llama", **SIZES)
    with torch.no_grad():
        other.model.layers[1].mlp.up_proj.weight.neg_()
    other.save_pretrained(tmp_path)
    model, again, other = (load(folder, WEIGHT_ONLY[kind](False)) for folder in (base_folder, base_folder, tmp_path))
    again.generate(prompt(), **OPTIONS)
    assert weights_hash(model) == weights_hash(again) != weights_hash(other)


@pytest.mark.parametrize("kind", WEIGHT_ONLY)
def test_a_quantised_model_can_be_calibrated(kind, tiny_llama, tiny_tokenizer, tmp_path):
    # 9 times 32 tokens, a kind's block on CPUs that multiply in bfloat16.
    tiny_llama(hidden_size=64, intermediate_size=128, vocab_size=288).save_pretrained(tmp_path)
    model = load(tmp_path, WEIGHT_ONLY[kind](with_head=True))
    routers = small(model, tiny_tokenizer, texts(20))
    assert set(routers.config.calibration["heads"]) == {"1", "2"}
    TIDEModelForCausalLM.attach(model, routers)
