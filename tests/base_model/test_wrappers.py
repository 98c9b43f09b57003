"""PEFT adapters and `torch.compile`: TIDE attaches to the base model inside, and refuses what it cannot decode with."""

import pytest
import torch
from calibrations import small, texts
from drafters import drafting_routers
from families import repeating_prompt as prompt
from families import tiny_model
from packed_weights import set_fastest_layouts
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, CompileConfig

from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM, TIDERouters, calibrate
from tide_hf.base_model.wrappers import _warn_unused_compile_config
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError
from tide_hf.weights.layouts import PrepackedWeight, can_pack

OPTIONS = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}
IA3 = IA3Config(
    task_type="CAUSAL_LM", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]
)


def disturb(model, name="default", seed=1):
    """Give an adapter random weights; freshly made ones change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def adapted(family="llama", config=None, **options):
    return disturb(get_peft_model(tiny_model(family), config or LoraConfig(**LORA | options)))


def add_second(model):
    model.add_adapter("second", LoraConfig(**LORA))
    return disturb(model, "second", seed=2)


def attached(peft_model, **options):
    return TIDEModelForCausalLM.attach(peft_model, drafting_routers(peft_model), **options)


def generated(model, ids=None, **options):
    return model.generate(input_ids=prompt() if ids is None else ids, **{**OPTIONS, **options})


@pytest.mark.parametrize(("family", "rows", "config"), [("llama", 3, None), ("gpt2", 1, None), ("llama", 1, IA3)])
def test_tokens_are_the_adapted_models(family, rows, config):
    model, ids = adapted(family, config), prompt(rows)
    expected = generated(model, ids)
    assert not torch.equal(expected, generated(tiny_model(family), ids))
    assert attached(model) is model
    assert isinstance(model, TIDEModelForCausalLM)
    assert isinstance(model, PeftModel)
    assert torch.equal(generated(model, ids), expected)
    assert model.last_exit_stats.drafted > 0
    generated(model, ids, tide_mode="early_exit", exit_threshold=0.0)
    assert model.last_exit_stats.depth_fraction < 0.5
    assert TIDEModelForCausalLM.detach(model) is model
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(generated(model, ids), expected)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")
def test_a_merged_model_stays_attached(monkeypatch):
    set_fastest_layouts(monkeypatch, order=(PrepackedWeight, None))  # and merging changes the weights
    model, short = adapted(), prompt(repeats=1)
    expected = generated(model, short)
    generated(attached(model, pack_weights=True, use_kernels=False), short)
    assert any(PrepackedWeight in gate.converted for gate in model._tide.weights.gates())
    merged = model.merge_and_unload()
    assert isinstance(merged, TIDEModelForCausalLM)
    assert not isinstance(merged, PeftModel)
    assert torch.equal(generated(merged, short), expected)
    TIDEModelForCausalLM.detach(merged)
    assert type(merged) is type(tiny_model("llama"))
    assert not any("forward" in module.__dict__ for module in merged.modules())


def test_adapters_can_be_added_switched_disabled_and_unloaded_while_attached():
    on_attached = disturb(get_peft_model(attached(tiny_model("llama")), LoraConfig(**LORA)))
    model, plain = add_second(on_attached), add_second(adapted())
    answers = []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        plain.set_adapter(name)
        answers.append(generated(model))
        assert torch.equal(answers[-1], generated(plain))
    assert not torch.equal(answers[0], answers[1])
    base = generated(tiny_model("llama"))
    with model.disable_adapter():
        assert torch.equal(generated(model), base)
    assert torch.equal(generated(model.unload()), base)


def test_rows_with_adapters_of_their_own_keep_their_order():
    model, ids = add_second(adapted()), prompt(3)
    answers = generated(model, ids)[:, ids.shape[1] :].tolist()
    eos = next(token for token in answers[0][2:] if token not in answers[-1][:8])  # rows end at different lengths
    options = {"adapter_names": ["default", "second", "__base__"], "eos_token_id": eos}
    expected = generated(model, ids, **options)
    assert torch.equal(generated(attached(model), ids, **options), expected)
    assert len({len(layers) for layers in model.last_exit_stats.per_token}) > 1


def test_a_folder_with_an_adapter_loads_as_any_other(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    model = disturb(get_peft_model(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), LoraConfig(**LORA)))
    expected = generated(model)
    attached(model).save_pretrained(tmp_path / "adapter")
    files = {path.name for path in (tmp_path / "adapter").iterdir()}
    assert files == {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert "TIDE" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    model._tide.routers.save_pretrained(tmp_path / "routers")
    again = TIDEModelForCausalLM.from_pretrained(tmp_path / "adapter", routers=tmp_path / "routers")
    assert torch.equal(generated(again), expected)


def test_the_logits_processor_reads_the_base_model_inside():
    model = adapted()
    routers = TIDERouters.for_model(model, exit_layers=[1])
    with TIDELogitsProcessor(model, routers, exit_threshold=0.0) as processor:
        processed = generated(model, logits_processor=[processor])
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc", exit_threshold=0.0)
    assert torch.equal(generated(model), processed)


def test_calibration_sees_the_adapter(tiny_llama, tiny_tokenizer):
    model = disturb(get_peft_model(tiny_llama(), LoraConfig(**LORA)))
    plain, routers = (small(one, tiny_tokenizer, texts(20), exit_layers=[1]) for one in (tiny_llama(), model))
    assert not torch.equal(routers[1].head.translator.weight, plain[1].head.translator.weight)
    TIDEModelForCausalLM.attach(model, routers)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config, tiny_tokenizer):
    model = get_peft_model(tiny_model("llama"), config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    message = rf"this kind of adapter cannot be attached to: got {config.__name__}.*Expected an adapter inside the lay"
    for use in (TIDEModelForCausalLM.attach, lambda refused: calibrate(refused, tiny_tokenizer, progress=False)):
        with pytest.raises(UnsupportedModelError, match=message):
            use(model)
    TIDEModelForCausalLM.attach(model.base_model)
    with pytest.raises(UnsupportedOptionError, match=r"cannot decode with this adapter: got virtual tokens of Peft"):
        generated(model, tide_strict=True)
    assert generated(model).shape == (1, 34)
    TIDEModelForCausalLM.detach(model)
    assert generated(model).shape == (1, 34)


def test_an_activated_lora_is_refused():
    """It counts the tokens that it applies to from the end of a pass, so it would adapt a wider pass only in part."""
    model = adapted(alora_invocation_tokens=prompt()[0, -2:].tolist())
    expected = generated(model)
    attached(model)
    with pytest.raises(UnsupportedOptionError, match=r"got an activated LoRA.*Expected an adapter that treats every"):
        generated(model, tide_strict=True)
    assert torch.equal(generated(model), expected)
    assert torch.equal(generated(TIDEModelForCausalLM.detach(model)), expected)


def compile_forward(module):
    module.forward = torch.compile(module.forward, backend="eager")


def compile_in_place(module):
    module.compile(backend="eager")


class TestCompile:
    """Models that a user compiles: refused where TIDE has to decide which layers run, whole graphs elsewhere."""

    @pytest.fixture(autouse=True)
    def _forget_graphs(self):
        """Dynamo counts the graphs of a function, whichever model they were for, and gives up."""
        torch.compiler.reset()

    @pytest.mark.parametrize("compile_module", [compile_forward, compile_in_place])
    @pytest.mark.parametrize("part", ["the model", "model.model", "model.model.layers.1"])
    def test_a_compiled_part_that_tide_decides_about_is_refused(self, tiny_llama, part, compile_module):
        message = f"so TIDE cannot decode with it: got {part}, a .*, compiled"
        name = part.removeprefix("the model").removeprefix("model.")
        model, other = TIDEModelForCausalLM.attach(tiny_llama()), tiny_llama()
        for one in (model, other):
            compile_module(one.get_submodule(name))
        with pytest.raises(UnsupportedModelError, match=message):
            generated(model, tide_strict=True)
        with pytest.raises(UnsupportedModelError, match=message):
            TIDEModelForCausalLM.attach(other)

    def test_parts_of_a_layer_may_be_compiled(self, tiny_llama):
        model = tiny_llama(num_hidden_layers=2)
        expected = generated(model, max_new_tokens=2)
        compile_forward(model.model.layers[0].self_attn)
        compile_in_place(model.model.layers[1].self_attn)
        compile_forward(model.model.layers[0].mlp)
        compile_in_place(model.model.layers[1].mlp)
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]))
        assert torch.equal(generated(model, max_new_tokens=2), expected)
        assert model.last_exit_stats is not None

    def test_an_attached_model_is_one_graph_where_tide_does_not_decide(self, tiny_llama):
        model = tiny_llama(num_hidden_layers=2)
        logits = model(prompt(), use_cache=False).logits
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]))
        counter = CompileCounter()
        whole = torch.compile(model, fullgraph=True, backend=counter)
        torch.testing.assert_close(whole(prompt(), use_cache=False).logits, logits)
        assert counter.frame_count == 1

    def test_the_wrapper_of_torch_compile_can_be_attached_to(self, tiny_llama):
        model = tiny_llama()
        expected = generated(model)
        wrapper = torch.compile(model, backend="eager")
        assert TIDEModelForCausalLM.attach(wrapper) is wrapper
        assert torch.equal(generated(wrapper), expected)
        assert model.last_exit_stats.mode == "self_speculative"
        TIDEModelForCausalLM.detach(wrapper)
        assert not hasattr(model, "_tide")

    def test_compile_config_is_ignored_with_a_warning(self, tiny_llama, caplog):
        """`generate` would compile prefill in chunks, in which layers could be neither skipped nor counted."""
        model, counter = tiny_llama(), CompileCounter()
        options = {"cache_implementation": "static", "prefill_chunk_size": 4, "max_new_tokens": 4}
        expected = generated(model, **options)
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), exit_threshold=2.0)
        settings = CompileConfig(backend=counter, fullgraph=False, mode=None)
        settings._compile_all_devices = True  # as on a GPU
        _warn_unused_compile_config.cache_clear()
        for mode in ("self_speculative", "post_hoc"):
            assert torch.equal(generated(model, compile_config=settings, tide_mode=mode, **options), expected)
        assert counter.frame_count == 0
        assert caplog.text.count("TIDE ignores compile_config") == 1
