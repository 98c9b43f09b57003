"""Tests of what shows only on accelerators: tensors on several devices, waits of the host, and offloaded weights.

`test_pretend_device.py` runs this module in a process of its own. tests/behaviour/test_lossless.py checks the tokens
of every family, drafter and way of decoding.
"""

import copy
from functools import partial

import pytest
import torch
from accelerate import disk_offload, dispatch_model
from calibrations import small, texts
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import LAYERS, tiny_model
from images import image_prompts, seeing_model
from on_steps import FEW, as_traced, linear_heads, new_tokens, prompts, use_steps
from pretend_device import NAME, Passes, answer, counts, there, two
from quantized_weights import quantize, quantized
from recorded import Recorder, as_it_is
from torch.nn.functional import linear, silu
from transformers import TextStreamer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.engines import gqa_attention
from tide_hf.engines.steps import step_store
from tide_hf.engines.steps.dequantised_products import reduce_products
from tide_hf.engines.steps.graphs import ONE_LAUNCH, lift_constants, traced
from tide_hf.engines.steps.step_store import CapturedSteps
from tide_hf.evaluation import QualityOptions, exit_logits, measure_quality
from tide_hf.evaluation.benchmark import compare, tide_methods
from tide_hf.evaluation.inspection import convergence_by_layer
from tide_hf.logits_process import TIDELogitsProcessor
from tide_hf.speculation.policy import CostTable

GREEDY = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20}


def spread(model, *, cut=2, head=1):
    """Spread a model: embeddings and the first `cut` layers on device 0, the LM head on `head`, the rest on 1."""
    devices = {f"model.layers.{layer}": int(layer >= cut) for layer in range(LAYERS)}
    devices |= {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.norm": 1, "lm_head": head}
    devices = {name: f"{NAME}:{device}" for name, device in devices.items()}
    return dispatch_model(model, devices, main_device=f"{NAME}:0", force_hooks=True)


def test_the_pretend_device_behaves_like_an_accelerator():
    tensor = torch.ones(3, device=NAME)
    with pytest.raises(RuntimeError, match="same device"):
        torch.where(torch.ones(3, dtype=torch.bool), tensor, tensor)
    with pytest.raises(TypeError, match="no float64"):
        tensor.double()
    before = counts()
    assert (tensor + 1).sum().item() == 6
    assert torch.equal(copy.deepcopy(tensor).cpu(), torch.ones(3))
    there({"tensor": torch.ones(3)})
    asked = counts() - before
    assert (asked.waits, asked.uploads, asked.uploaded_bytes) == (2, 1, 12)
    assert asked.launches == 3  # the addition, the sum, and the copy


@pytest.mark.parametrize(
    ("family", "rows", "options"),
    [*((family, 3, GREEDY) for family in FEW), ("llama", 1, GREEDY), ("llama", 1, SAMPLED)],
)
def test_tokens_are_the_base_models(family, rows, options):
    plain, model = two(family)
    batch = prompts(rows, pads=2 if rows > 1 else 0)
    expected = answer(plain, batch, **options)
    TIDEModelForCausalLM.attach(model, linear_heads(plain))
    use_heads(model, 3, continuations=new_tokens(expected), kind="mixed")
    assert torch.equal(answer(model, there(batch), **options), expected)
    assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize(("family", "head"), [("llama", 0), ("gemma2", 1)])
def test_a_model_on_two_devices_generates_the_base_models_tokens(family, head):
    """Heads draft on either side of the cut; the LM head is with the embeddings or with the last layer."""
    plain = tiny_model(family)
    expected = answer(plain, prompts(3, pads=2), **GREEDY)
    linear, draft_head = linear_heads(plain), draft_head_for(plain)
    for cut, routers, exit_layer in [(2, linear, 1), (2, linear, 3), (1, draft_head, 0), (3, draft_head, 0)]:
        model = spread(tiny_model(family), cut=cut, head=head)
        TIDEModelForCausalLM.attach(model, copy.deepcopy(routers))
        use_heads(model, exit_layer)
        assert torch.equal(answer(model, there(prompts(3, pads=2)), **GREEDY), expected)
        assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize(("mode", "rows"), [("post_hoc", 1), ("early_exit", 1), ("early_exit", 3)])
def test_tokens_exit_as_on_a_cpu(mode, rows):
    found = []
    for model in (*two("llama"), spread(tiny_model("llama"))):
        routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear", exit_threshold=0.5)
        TIDEModelForCausalLM.attach(model, routers, mode=mode, pack_weights=False)
        batch = there(prompts(rows, pads=3), model.device)
        tokens = answer(model, batch, **(SAMPLED if rows == 1 else GREEDY))
        found.append((tokens, model.last_exit_stats))
    assert all(torch.equal(tokens, found[0][0]) and stats == found[0][1] for tokens, stats in found)
    assert found[0][1].layers_executed < LAYERS * rows * GREEDY["max_new_tokens"] or mode == "post_hoc"


@pytest.mark.parametrize(("family", "rows"), [("gemma3", 1), ("qwen2_5_vl", 3)])
def test_prompts_with_images(family, rows):
    batch = image_prompts(family, rows)
    expected = answer(seeing_model(family), batch, **GREEDY)
    model = TIDEModelForCausalLM.attach(seeing_model(family).to(NAME))
    use_drafter(model, "wrong at the last position", expected[:, batch["input_ids"].shape[1] :].tolist())
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_a_prompt_may_be_on_the_cpu(mode, tiny_tokenizer, capsys):
    """As in transformers, `generate` moves inputs to the model's device, and the answer to the prompt's device."""
    plain, model = two("llama")
    routers = TIDERouters.for_model(plain, exit_layers=[2], exit_threshold=0.9)
    expected = answer(plain, prompts(), **GREEDY)
    TIDEModelForCausalLM.attach(model, routers, mode=mode)
    found = answer(model, prompts(), streamer=TextStreamer(tiny_tokenizer), **GREEDY)
    assert mode != "self_speculative" or torch.equal(found, expected)
    assert capsys.readouterr().out


@pytest.mark.parametrize(
    ("family", "rows", "kind"),
    [("gemma2", 1, "draft"), ("gpt2", 1, "linear"), ("qwen3_moe", 3, "linear"), ("bloom", 3, "draft")],
)
def test_captured_steps_never_wait_for_the_device(family, rows, kind):
    plain, model = two(family)
    batch = prompts(rows)
    expected = answer(plain, batch, **GREEDY)
    routers = draft_head_for(plain) if kind == "draft" else linear_heads(plain)
    TIDEModelForCausalLM.attach(model, routers, engine="compiled")
    passes = Passes()
    steps = use_steps(model, CapturedSteps(passes.replay_of, compile_graph=None))
    use_heads(model, 0 if kind == "draft" else (1, 3))
    assert torch.equal(answer(model, there(batch), **GREEDY), expected)
    assert steps.refused is None
    assert steps.replays > 0
    assert passes.asked.waits == 0


def test_offloaded_weights(tiny_llama, tiny_tokenizer, tmp_path):
    model = disk_offload(tiny_llama(), tmp_path, execution_device=torch.device(f"{NAME}:0"))
    expected = answer(tiny_llama(), prompts(3), **GREEDY)
    TIDEModelForCausalLM.attach(model, small(model, tiny_tokenizer, texts(60)))
    use_heads(model, 1)
    assert torch.equal(answer(model, there(prompts(3)), **GREEDY), expected)


@pytest.mark.parametrize(
    ("exit_strategy", "labels"), [("identity", "agreement"), ("linear", "cosine"), ("linear", "kl")]
)
def test_calibration_on_two_devices_makes_the_routers_of_a_cpu(tiny_llama, tiny_tokenizer, exit_strategy, labels):
    options = {"exit_strategy": exit_strategy, "labels": labels, "samples": 24, "max_length": 12}
    models = (tiny_llama(), spread(tiny_llama()))
    expected, found = (small(model, tiny_tokenizer, texts(60), **options) for model in models)
    states = found.state_dict()
    assert {value.device.type for value in states.values()} == {"cpu"}
    for name, value in expected.state_dict().items():
        error = states[name].float() - value.float()  # from rounding, which training amplifies
        assert float(error.norm()) <= 0.01 + 0.2 * float(value.float().norm()), name
    assert found.config.calibration["exit_layers"].keys() == expected.config.calibration["exit_layers"].keys()


def test_calibration_on_text_of_the_models_own_and_from_routers(tiny_llama, tiny_tokenizer):
    model = tiny_llama().to(NAME)
    own = small(model, tiny_tokenizer, exit_strategy="eagle3")
    assert own.config.calibration["num_documents"] > 0
    again = small(model.bfloat16(), tiny_tokenizer, texts(60), exit_strategy="eagle3", start_from=own)
    assert again.config.calibration["draft_head"]["agreement"] >= 0.0


def test_quality_on_two_devices_is_measured_as_on_a_cpu(tiny_llama, tiny_tokenizer):
    plain, model = tiny_llama(), spread(tiny_llama())
    options = QualityOptions(text=texts(12), samples=6, max_length=16)
    routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_threshold=0.5)
    records = [measure_quality(one, tiny_tokenizer, routers, options) for one in (plain, model)]
    for one, other in zip(*(record["perplexity"]["rows"] for record in records), strict=True):
        assert one["perplexity"]["value"] == pytest.approx(other["perplexity"]["value"], rel=1e-4)
    assert exit_logits(model, routers, there(prompts())["input_ids"], exit_threshold=0.5).logits.device.type == NAME
    found = [convergence_by_layer(one, tiny_tokenizer, texts(4)) for one in (plain, model)]
    for one, other in zip(*found, strict=True):
        assert one.mean_cosine == pytest.approx(other.mean_cosine, rel=1e-5)
    methods = tide_methods(model, routers, ["self_speculative"])
    assert compare(methods, [there(prompts())], max_new_tokens=8, repeats=1)[1].num_equal == 1


def test_the_published_selection_runs_as_a_logits_processor():
    found = []
    for model in (tiny_model("llama"), spread(tiny_model("llama"))):
        routers = TIDERouters.for_model(model, exit_layers=[3], exit_strategy="linear", exit_threshold=0.5)
        batch = there(prompts(), model.device)
        with TIDELogitsProcessor(model, routers) as processor:
            found.append(answer(model, batch, logits_processor=[processor], **GREEDY))
    assert torch.equal(*found)


def compiler_for_h100():
    reason = "no Triton, or another version of PyTorch"
    return pytest.importorskip("h100_code", exc_type=ImportError, reason=reason).CodeForH100()


def code_for_h100(graph, inputs):
    """What is generated for a graph."""
    compile_graph = compiler_for_h100()
    compile_graph(graph, inputs)
    (found,) = compile_graph.found
    return found


def on_steps_for_an_h100(family, dtype=torch.float32, quantize=lambda model: model, **sizes):
    """A model whose steps are compiled as for an H100 and run as traced, after a check of its tokens; and its steps."""
    plain, model = (quantize(one.to(dtype)) for one in two(family, attention="sdpa", **sizes))
    expected = answer(plain, prompts(), **GREEDY)
    TIDEModelForCausalLM.attach(model, linear_heads(plain), engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, compiler_for_h100()))
    use_drafter(model, "mixed", new_tokens(expected), width=3)
    assert torch.equal(answer(model, there(prompts()), **GREEDY), expected)
    assert steps.refused is None
    return model, steps


def layers_of(steps):
    """The code of decoder layers, of which there is some."""
    layers = [code for code in steps.compiler.graphs._compile.found if code.is_layer]
    assert layers
    return layers


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.bfloat16), ("llama", torch.float32), ("qwen2", torch.float32), ("gpt2", torch.float32)],
)
def test_a_layer_on_an_h100_launches_few_kernels(family, dtype):
    _, steps = on_steps_for_an_h100(family, dtype)
    for code in layers_of(steps):
        # This device has no fused attention, which takes two products and at most three kernels.
        assert code.products - 2 <= 4
        assert code.kernels - 3 <= 9


def test_products_with_one_input_are_joined_and_their_weights_are_not_copied():
    model, steps = on_steps_for_an_h100("llama")
    attention, mlp = model.model.layers[0].self_attn, model.model.layers[0].mlp
    for linears in ((attention.q_proj, attention.k_proj, attention.v_proj), (mlp.gate_proj, mlp.up_proj)):
        (storage,) = {linear.weight.untyped_storage().data_ptr() for linear in linears}
        assert linears[0].weight.data_ptr() == storage
        assert linears[0].weight.untyped_storage().nbytes() == sum(linear.weight.nbytes for linear in linears)
    before = steps.warm_up.num_prepared
    tokens = answer(model, there(prompts()), **GREEDY)
    assert steps.warm_up.num_prepared == before  # moved weights are no change
    with torch.no_grad():
        mlp.up_proj.weight.neg_()
    changed = answer(model, there(prompts()), **GREEDY)
    assert not torch.equal(changed, tokens)
    assert torch.equal(answer(TIDEModelForCausalLM.detach(model), there(prompts()), **GREEDY), changed)


def test_a_model_with_joined_weights_is_saved_like_any_other(tmp_path):
    model, _ = on_steps_for_an_h100("llama")
    expected = answer(model, there(prompts()), **GREEDY)
    model.save_pretrained(tmp_path)
    again = TIDEModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(answer(again, prompts(), **GREEDY), expected)
    assert torch.equal(answer(copy.deepcopy(model), there(prompts()), **GREEDY), expected)


def by_torchao(name, **options):
    """A function that quantises the linear layers of a model."""
    quantization = pytest.importorskip("torchao.quantization")
    if (group := options.pop("group", None)) is not None:
        options["granularity"] = quantization.PerGroup(group)
    if name != "IntxWeightOnlyConfig":
        options["set_inductor_config"] = False  # for the whole process
    config = getattr(quantization, name)(**options)
    return lambda model: (quantization.quantize_(model, config), model)[1]


QUANTIZED = {
    "rows": lambda: partial(quantize, kind="rows"),
    "zeros": lambda: partial(quantize, kind="zeros"),
    "torchao int8": lambda: by_torchao("Int8WeightOnlyConfig"),
    "torchao int8 groups": lambda: by_torchao("Int8WeightOnlyConfig", group=32),
    "torchao int4 groups": lambda: by_torchao("IntxWeightOnlyConfig", group=32, weight_dtype=torch.int4),
    "torchao float8": lambda: by_torchao("Float8WeightOnlyConfig"),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_layer_with_quantised_weights_reads_them_as_they_are_stored(kind):
    sizes = {"hidden_size": 96, "intermediate_size": 160, "head_dim": 24}  # no buffer of another use is a weight's size
    model, steps = on_steps_for_an_h100("llama", quantize=QUANTIZED[kind](), **sizes)
    layers = layers_of(steps)
    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    for code in steps.compiler.graphs._compile.found:
        assert not {linear.weight.numel() for linear in linears} & set(code.buffers)
    for code in layers:
        assert code.products == 2  # of attention, which is not fused on this device
        assert code.kernels - 3 <= 11  # with five products
    assert not any(one.joined for one in steps.compiler.graphs._compiled.values())


def test_a_kernel_of_the_packages_own_stays():
    """`Int4WeightOnlyConfig` packs weights for an op of PyTorch that GPUs alone have."""
    packed = pytest.importorskip("torchao.quantization").Int4TilePackedTo4dTensor
    group, size, out = 128, 1024, 64
    tensors = (
        torch.zeros(out // 8, size // 128, 32, 4, dtype=torch.int32),
        torch.zeros(size // group, out, 2).bfloat16(),
    )
    weight = packed(*(tensor.to(NAME) for tensor in tensors), [1, group], torch.Size((out, size)))
    state = torch.randn(1, 4, size, dtype=torch.bfloat16, device=NAME)
    graph, constants = lift_constants(traced(lambda state: linear(state, weight), state))
    assert [id(constant) for constant in constants] == [id(weight.qdata), id(weight.scale_and_zero)]
    assert reduce_products(graph, constants) == 0
    found = code_for_h100(graph, [state, *constants])
    assert found.text.count("torch.ops.aten._weight_int4pack_mm.default(") == 1
    assert found.kernels == 0


def test_plain_weights_beside_quantised_ones_are_joined():
    def quantize_some(model):
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight = quantized(layer.self_attn.q_proj.weight, kind="groups")
        return model

    model, steps = on_steps_for_an_h100("llama", quantize=quantize_some)
    attention = model.model.layers[0].self_attn
    assert {len(joined) for one in steps.compiler.graphs._compiled.values() for joined in one.joined} == {2}
    both = [linear.weight.untyped_storage().data_ptr() for linear in (attention.k_proj, attention.v_proj)]
    assert len(set(both)) == 1


@pytest.mark.parametrize(("rows", "kernels"), [(1, 2), (16, 4)])
def test_an_mlp_with_quantised_weights_has_as_many_kernels_at_any_width(rows, kernels):
    shapes = (2048, 1024), (2048, 1024), (1024, 2048)
    gate, up, down = (quantized(torch.randn(shape, device=NAME), kind="groups") for shape in shapes)

    def mlp(state):
        return linear(silu(linear(state, gate)) * linear(state, up), down) + state

    state = torch.randn(1, rows, 1024, device=NAME)
    graph, constants = lift_constants(traced(mlp, state))
    assert reduce_products(graph, constants) == 3
    found = code_for_h100(graph, [state, *constants])
    assert found.products == 0
    # Gate and up, the activation, down, the sum; with one row, the products' own kernels end with the other two.
    assert found.kernels == kernels


def attend_up_to(query, key, value, ends, scale):
    """What FlashAttention gives that reads the number of filled slots on the device."""
    slots = torch.arange(key.shape[2], device=key.device)
    found = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=slots < ends[:, None], scale=scale, enable_gqa=True
    )
    return found.transpose(1, 2).contiguous()


def replace_flash_decode(monkeypatch):
    """Let this device have attention that reads the number of filled slots; return its calls."""
    calls = []
    monkeypatch.setattr(step_store, "can_flash_decode", lambda *_: True)
    monkeypatch.setattr(gqa_attention, "flash_decode", lambda *args: calls.append(0) or attend_up_to(*args))
    return calls


def attend_to_lengths(query, key, value, lengths, _query_ends, _slot_ends, scale):
    """The op of that attention, for one sequence of several tokens."""
    return attend_up_to(query, key, value, lengths - torch.arange(query.shape[2]).to(lengths).flip(0), scale)


def test_a_layer_that_reads_lengths_launches_few_kernels(monkeypatch):
    monkeypatch.setattr(step_store, "can_flash_decode", lambda *_: True)
    with torch.library._scoped_library("tide_hf", "FRAGMENT") as ops:
        ops.impl("flash_decode", attend_to_lengths, "PrivateUse1")
        _, steps = on_steps_for_an_h100("llama")
    layers = layers_of(steps)
    assert len(layers) > 1  # of several widths
    for code in layers:
        assert code.text.count("= torch.ops.tide_hf.flash_decode.default(") == 1
        assert code.products == 4
        # The norms, RoPE with both K/V writes, the activation, the last sum.
        assert code.kernels <= (5 if ONE_LAUNCH else 7)


@pytest.mark.parametrize("compile_graph", [as_traced, None])
@pytest.mark.parametrize(
    ("family", "attention", "pads", "reads"),
    [
        ("llama", "sdpa", 0, True),
        ("llama", "eager", 0, False),
        ("llama", "sdpa", 2, False),
        ("mistral", "sdpa", 0, False),
    ],
)
def test_steps_read_the_number_of_filled_slots_where_masks_hide_nothing_else(
    family, attention, pads, reads, compile_graph, monkeypatch
):
    """Compiled or not; and buffers have many slots where that is so."""
    calls = replace_flash_decode(monkeypatch)
    plain, model = two(family, attention=attention)
    for batch in (prompts(pads=pads), prompts(3, pads=2)):
        expected = answer(plain, batch, **GREEDY)
        calls.clear()
        TIDEModelForCausalLM.attach(model, linear_heads(plain), engine="compiled")
        steps = use_steps(model, CapturedSteps(Recorder(), compile_graph))
        use_heads(model, 3, continuations=new_tokens(expected), kind="mixed")
        assert torch.equal(answer(model, there(batch), **GREEDY), expected)
        assert bool(calls) == (reads and len(expected) == 1)
        [buffers] = steps._buffers.values()
        assert step_store.can_read_length(buffers.kind, buffers.cache) == bool(calls)
        TIDEModelForCausalLM.detach(model)


def test_draft_steps_read_the_number_of_filled_slots_and_draft_the_same(monkeypatch):
    plain, found, read = two("llama", attention="sdpa")[0], [], []
    expected = answer(plain, prompts(), **GREEDY)
    for reads in (False, True):
        if reads:
            monkeypatch.setattr(step_store, "can_flash_decode", lambda *_: True)
            monkeypatch.setattr(
                gqa_attention, "flash_decode", lambda *args: read.append(args[1].shape[2]) or attend_up_to(*args)
            )
        model = TIDEModelForCausalLM.attach(two("llama", attention="sdpa")[1], draft_head_for(plain), engine="compiled")
        steps = use_steps(model, CapturedSteps(as_it_is, compile_graph=as_traced))
        made = use_heads(model, 0)
        assert torch.equal(answer(model, there(prompts()), **GREEDY), expected)
        found.append(made[0].drafted)
        [buffers] = steps._buffers.values()
    assert found[0]
    assert found[1] == found[0]
    assert buffers.capacity - 1 in read  # draft steps leave the first token out


@pytest.mark.parametrize(("before", "captures"), [([], True), ([2100], False)])
def test_a_chat_captures_nothing_once_its_buffers_are_large_enough(before, captures, monkeypatch):
    """Each turn needs more slots than the one before; a call `before` may have needed many more."""
    replace_flash_decode(monkeypatch)
    plain, model = two("llama", attention="sdpa", max_position_embeddings=4096)
    TIDEModelForCausalLM.attach(model, engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, compile_graph=None))
    found, options = [], {**GREEDY, "max_new_tokens": 8}
    for length in [*before, 100, 500, 900]:
        batch = prompts(length=length)
        expected, prepared = answer(plain, batch, **options), steps.warm_up.num_prepared
        use_drafter(model, "right", expected[:, length:].tolist(), width=3)
        assert torch.equal(answer(model, there(batch), **options), expected)
        found.append(steps.warm_up.num_prepared - prepared)
    first, *others = found[len(before) :]
    assert bool(first) == captures
    assert not any(others)


@pytest.mark.parametrize(
    ("family", "length", "widths"),
    [("llama", 8, {1, 16}), ("qwen3_moe", 8, {1, 2, 4, 8}), ("llama", 2100, {1, 2, 4, 8})],
)
def test_an_answer_that_was_not_warmed_up_captures_few_widths(family, length, widths, monkeypatch):
    """A wider pass costs next to nothing, but experts' weights are copied, and many K/V are read, for each token."""
    replace_flash_decode(monkeypatch)
    record = CostTable.record
    monkeypatch.setattr(CostTable, "record", lambda table, key, *_, **__: record(table, key, 6.5 + 0.007 * key[1]))
    plain, model = two(family, attention="sdpa", max_position_embeddings=4096)
    batch, options = prompts(length=length), {**GREEDY, "max_new_tokens": 100}
    expected = answer(plain, batch, **options)
    TIDEModelForCausalLM.attach(model, engine="compiled")
    steps = use_steps(model, CapturedSteps(as_it_is, compile_graph=None))
    assert torch.equal(answer(model, there(batch), **options), expected)
    assert model.last_exit_stats.drafted > 0
    assert {size for _, _, size in steps._steps} == widths
