"""Adapters of PEFT: TIDE goes to the base model inside, and the user goes on with the adapter's own object."""

import copy

import peft
import pytest
import torch
from families import repeating_prompt as prompt
from families import tiny_model
from packaging import version
from packed_weights import let_pay
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.integrations.peft import MIN_PEFT_VERSION

from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM, TIDERouters, calibrate
from tide_hf.calibration import work_folder
from tide_hf.common.errors import CalibrationError, UnsupportedModelError, UnsupportedOptionError
from tide_hf.depth.linear_gate import linear_gates
from tide_hf.kernels.cpu.weight_layouts import PrepackedWeight, can_pack

OPTIONS = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None}
LORA = {"task_type": "CAUSAL_LM", "r": 4, "target_modules": "all-linear"}


def disturb(model, name="default", seed=1):
    """Give an adapter weights that change what the model says; fresh ones change nothing."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if f".{name}" in key:
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return model.eval()


def adapted(family="llama", config=None, **options):
    return disturb(get_peft_model(tiny_model(family), config or LoraConfig(**LORA | options)))


def attached(peft_model, **options):
    routers = TIDERouters.for_model(peft_model, exit_layers=[1, 3])
    routers.config.calibration = {"exit_layers": {"1": {"agreement": 0.9}, "3": {"agreement": 0.9}}}  # heads draft
    return TIDEModelForCausalLM.attach(peft_model, routers, **options)


def insert_eos(model, ids):
    """An end token that the answers reach at different lengths."""
    answers = model.generate(ids, **OPTIONS)[:, ids.shape[1] :].tolist()
    return next(token for token in answers[0][2:] if token not in answers[-1][:8])


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text"])
def test_the_tokens_are_the_adapted_model_s_own(family, rows):
    model = adapted(family)
    expected = model.generate(prompt(rows), **OPTIONS)
    assert not torch.equal(expected, tiny_model(family).generate(prompt(rows), **OPTIONS))
    assert attached(model) is model
    assert isinstance(model, TIDEModelForCausalLM)
    assert isinstance(model, PeftModel)
    assert torch.equal(model.generate(prompt(rows), **OPTIONS), expected)
    assert model.last_exit_stats.drafted > 0
    model.generate(prompt(rows), tide_mode="early_exit", exit_threshold=0.0, **OPTIONS)
    assert model.last_exit_stats.depth_fraction < 0.5
    assert TIDEModelForCausalLM.detach(model) is model
    assert not isinstance(model, TIDEModelForCausalLM)
    assert not any("forward" in module.__dict__ for module in model.modules())
    assert torch.equal(model.generate(prompt(rows), **OPTIONS), expected)


def test_other_kinds_of_adapters_inside_the_layers():
    targets = {"target_modules": ["k_proj", "v_proj", "down_proj"], "feedforward_modules": ["down_proj"]}
    model = adapted(config=IA3Config(task_type="CAUSAL_LM", **targets))
    expected = model.generate(prompt(), **OPTIONS)
    assert torch.equal(attached(model).generate(prompt(), **OPTIONS), expected)


@pytest.mark.skipif(not can_pack(torch.float32), reason="this PyTorch has no oneDNN")
def test_merged_it_stays_attached_and_says_the_same(tmp_path, monkeypatch):
    let_pay(monkeypatch, order=(PrepackedWeight, None))  # and merging changes the weights
    model = adapted()
    short = prompt(repeats=1)
    expected = model.generate(short, **OPTIONS)
    attached(model).generate(short, **OPTIONS)
    assert any(PrepackedWeight in gate.converted for gate in linear_gates(model._tide.structure))
    merged = model.merge_and_unload()
    assert isinstance(merged, TIDEModelForCausalLM)
    assert not isinstance(merged, PeftModel)
    assert torch.equal(merged.generate(short, **OPTIONS), expected)
    merged.save_pretrained(tmp_path)
    assert "tide" not in (tmp_path / "config.json").read_text().lower()
    saved = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert saved.config.architectures == ["LlamaForCausalLM"]
    assert torch.equal(saved.generate(short, **OPTIONS), expected)
    TIDEModelForCausalLM.detach(merged)
    assert type(merged) is type(tiny_model("llama"))
    assert not any("forward" in module.__dict__ for module in merged.modules())
    assert torch.equal(merged.generate(short, **OPTIONS), expected)


def test_adapters_come_go_and_change_while_attached():
    model = attached(adapted())
    model.add_adapter("second", LoraConfig(**LORA))
    disturb(model, "second", seed=2)
    plain = adapted()
    plain.add_adapter("second", LoraConfig(**LORA))
    disturb(plain, "second", seed=2)
    answers = []
    for name in ("default", "second", "default"):
        model.set_adapter(name)
        plain.set_adapter(name)
        answers.append(model.generate(prompt(), **OPTIONS))
        assert torch.equal(answers[-1], plain.generate(prompt(), **OPTIONS))
    assert not torch.equal(answers[0], answers[1])
    with model.disable_adapter():
        assert torch.equal(model.generate(prompt(), **OPTIONS), tiny_model("llama").generate(prompt(), **OPTIONS))
    assert torch.equal(model.unload().generate(prompt(), **OPTIONS), tiny_model("llama").generate(prompt(), **OPTIONS))


def test_an_adapter_put_on_an_attached_model():
    expected = adapted().generate(prompt(), **OPTIONS)
    model = disturb(get_peft_model(attached(tiny_model("llama")), LoraConfig(**LORA)))
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    assert model.last_exit_stats.drafted > 0


def test_a_batch_with_an_adapter_for_each_row():
    """Its rows keep their places when some have ended."""
    model = adapted()
    model.add_adapter("second", LoraConfig(**LORA))
    disturb(model, "second", seed=2)
    ids, names = prompt(3), ["default", "second", "__base__"]
    options = {**OPTIONS, "pad_token_id": 0, "eos_token_id": insert_eos(model, ids)}
    expected = model.generate(input_ids=ids, adapter_names=names, **options)
    assert torch.equal(attached(model).generate(input_ids=ids, adapter_names=names, **options), expected)
    assert len({len(layers) for layers in model.last_exit_stats.per_token}) > 1


def test_a_folder_with_an_adapter_loads_as_any_other(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = disturb(get_peft_model(loaded, LoraConfig(**LORA)))
    expected = model.generate(prompt(), **OPTIONS)
    attached(model).save_pretrained(tmp_path / "adapter")
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    assert "TIDE" not in (tmp_path / "adapter" / "adapter_config.json").read_text()
    model._tide.routers.save_pretrained(tmp_path / "routers")
    again = TIDEModelForCausalLM.from_pretrained(tmp_path / "adapter", routers=tmp_path / "routers")
    assert torch.equal(again.generate(prompt(), **OPTIONS), expected)
    by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    TIDEModelForCausalLM.attach(by_peft.eval(), tmp_path / "routers")
    assert torch.equal(by_peft.generate(prompt(), **OPTIONS), expected)


@pytest.mark.skipif(
    version.parse(peft.__version__) < version.parse(MIN_PEFT_VERSION), reason=f"it takes PEFT {MIN_PEFT_VERSION}"
)
def test_saving_what_was_loaded_with_an_adapter_writes_the_adapter(tmp_path):
    tiny_model("llama").save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    get_peft_model(base, LoraConfig(**LORA)).save_pretrained(tmp_path / "adapter")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")
    attached(loaded).save_pretrained(tmp_path / "again")
    files = {path.name for path in (tmp_path / "again").iterdir()}
    assert "adapter_model.safetensors" in files
    assert "model.safetensors" not in files


def test_copies_are_independent():
    model = attached(adapted())
    twin = copy.deepcopy(model)
    disturb(model, seed=7)
    assert torch.equal(twin.generate(prompt(), **OPTIONS), adapted().generate(prompt(), **OPTIONS))
    assert isinstance(twin, TIDEModelForCausalLM)


def test_the_logits_processor_reads_the_base_inside():
    model = adapted()
    routers = TIDERouters.for_model(model, exit_layers=[1])
    with TIDELogitsProcessor(model, routers, exit_threshold=0.0) as processor:
        processed = model.generate(prompt(), logits_processor=[processor], **OPTIONS)
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc", exit_threshold=0.0)
    assert torch.equal(model.generate(prompt(), **OPTIONS), processed)


def test_calibration_sees_the_adapter(tiny_llama, tiny_tokenizer, tmp_path, monkeypatch):
    dataset = [f"{word} {count} {word}" for word in ("tide", "depth", "layer", "token") for count in range(5)]
    options = {"dataset": dataset, "max_length": 8, "exit_layers": [1], "progress": False}
    plain = calibrate(tiny_llama(), tiny_tokenizer, **options)
    model = disturb(get_peft_model(tiny_llama(), LoraConfig(**LORA)))
    routers = calibrate(model, tiny_tokenizer, **options)
    assert not torch.equal(routers[1].head.translator.weight, plain[1].head.translator.weight)
    TIDEModelForCausalLM.attach(model, routers)
    with monkeypatch.context() as patch:
        patch.setattr(work_folder.WorkFolder, "remove", lambda _: None)
        calibrate(tiny_llama(), tiny_tokenizer, output_dir=tmp_path, **options)
    with pytest.raises(
        CalibrationError, match="the work of another calibration, or one by other settings: got weights_hash="
    ):
        calibrate(model, tiny_tokenizer, output_dir=tmp_path, **options)


@pytest.mark.parametrize("config", [PromptTuningConfig, PrefixTuningConfig])
def test_virtual_tokens_are_refused(config, tiny_tokenizer):
    model = get_peft_model(tiny_model("llama"), config(task_type="CAUSAL_LM", num_virtual_tokens=4)).eval()
    message = rf"this kind of adapter cannot be attached to: got {config.__name__}.*Expected an adapter inside the lay"
    for use in (TIDEModelForCausalLM.attach, lambda refused: calibrate(refused, tiny_tokenizer, progress=False)):
        with pytest.raises(UnsupportedModelError, match=message):
            use(model)
    TIDEModelForCausalLM.attach(model.base_model)
    with pytest.raises(UnsupportedOptionError, match=r"cannot decode with this adapter: got virtual tokens of Peft"):
        model.generate(input_ids=prompt(), tide_strict=True, **OPTIONS)
    assert model.generate(input_ids=prompt(), **OPTIONS).shape == (1, 42)
    TIDEModelForCausalLM.detach(model)
    assert model.generate(input_ids=prompt(), **OPTIONS).shape == (1, 42)


def test_an_adapter_that_works_on_some_positions_is_refused():
    """Activated LoRA counts its tokens from the end of a pass, so a wide one would be adapted only in part."""
    ids = prompt()
    model = adapted(alora_invocation_tokens=ids[0, -2:].tolist())
    expected = model.generate(input_ids=ids, **OPTIONS)
    attached(model)
    with pytest.raises(UnsupportedOptionError, match=r"got an activated LoRA.*Expected an adapter that treats every"):
        model.generate(input_ids=ids, tide_strict=True, **OPTIONS)
    assert torch.equal(model.generate(input_ids=ids, **OPTIONS), expected)
    assert torch.equal(TIDEModelForCausalLM.detach(model).generate(input_ids=ids, **OPTIONS), expected)
