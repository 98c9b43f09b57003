"""Weights that accelerate offloads to the CPU or the disk: those of skipped layers are not loaded."""

from collections import Counter

import pytest
import torch
from accelerate import cpu_offload, disk_offload, dispatch_model
from accelerate.hooks import AlignDevicesHook
from calibrations import small, texts
from drafters import drafting_routers, use_heads
from families import LAYERS, tiny_model
from families import repeating_prompt as prompt
from transformers import AutoModelForCausalLM

from tide_hf import TIDELogitsProcessor, TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.evaluation.inspection import structure_facts

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
CPU = torch.device("cpu")
DEEP = {f"model.layers.{layer}": "disk" for layer in range(1, LAYERS)} | {"lm_head": "disk"}
SPLIT = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.norm": "cpu"} | DEEP


def to_cpu(model, folder):
    return cpu_offload(model, execution_device=CPU)


def to_disk(model, folder):
    return disk_offload(model, folder / "weights", execution_device=CPU)


def dispatched(model, folder):
    return dispatch_model(model, SPLIT, main_device="cpu", offload_dir=folder / "weights")


def loaded_to_disk(model, folder):
    model.save_pretrained(folder / "base")
    device_map = {"": "disk"}
    return AutoModelForCausalLM.from_pretrained(folder / "base", device_map=device_map, offload_folder=folder / "off")


OFFLOADS = (to_cpu, to_disk, dispatched, loaded_to_disk)


@pytest.fixture
def loads(monkeypatch):
    """How often accelerate brings each module's weights."""
    counts, pre_forward = Counter(), AlignDevicesHook.pre_forward

    def counted(hook, module, *args, **kwargs):
        if hook.offload:
            counts[module.tide_name] += 1
        return pre_forward(hook, module, *args, **kwargs)

    monkeypatch.setattr(AlignDevicesHook, "pre_forward", counted)
    return counts


def named(model):
    for name, module in model.named_modules():
        object.__setattr__(module, "tide_name", name)
    return model


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("offload", OFFLOADS[:2])
def test_drafts_load_only_shallow_layers(family, offload, tmp_path, loads):
    expected = tiny_model(family).generate(prompt(), **OPTIONS)
    model = named(offload(tiny_model(family), tmp_path))
    TIDEModelForCausalLM.attach(model, drafting_routers(model))
    use_heads(model, 1)
    loads.clear()
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    structure, stats = find_structure(model), model.last_exit_stats
    passes = stats.rounds + 1
    assert stats.drafted > stats.rounds
    for layer_idx, layer in enumerate(structure.layers):
        names = {
            module.tide_name for module in layer.modules() if next(module.parameters(recurse=False), None) is not None
        }
        assert {loads[name] for name in names} == {passes + (stats.drafted if layer_idx == 0 else 0)}
    assert loads[structure.head.tide_name] == passes + stats.drafted


@pytest.mark.parametrize("offload", OFFLOADS)
def test_early_exit_does_not_load_skipped_layers(offload, tmp_path, loads):
    plain = tiny_model("llama")
    TIDEModelForCausalLM.attach(plain, drafting_routers(plain), mode="early_exit", exit_threshold=0.0)
    expected = plain.generate(prompt(), **OPTIONS)
    model = named(offload(tiny_model("llama"), tmp_path))
    TIDEModelForCausalLM.attach(model, drafting_routers(model), mode="early_exit", exit_threshold=0.0)
    loads.clear()
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    shallow = 0 if offload is dispatched else OPTIONS["max_new_tokens"]  # which stays where it is
    assert loads["model.layers.0.mlp.up_proj"] == shallow
    for layer in range(1, LAYERS):
        counts = [count for name, count in loads.items() if name.startswith(f"model.layers.{layer}.")]
        assert counts == [1] * 9  # each part for the prompt


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("offload", OFFLOADS)
def test_tokens_are_the_base_models(offload, rows, tmp_path):
    expected = tiny_model("llama").generate(prompt(rows), **OPTIONS)
    model = offload(tiny_model("llama"), tmp_path)
    hooked = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    TIDEModelForCausalLM.attach(model, drafting_routers(model))
    assert torch.equal(model.generate(prompt(rows), **OPTIONS), expected)
    assert model.last_exit_stats.drafted > 0
    TIDEModelForCausalLM.detach(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == hooked
    assert torch.equal(model.generate(prompt(rows), **OPTIONS), expected)


def test_a_head_that_is_tied_to_offloaded_embeddings(tiny_llama, tmp_path):
    expected = tiny_llama(tie_word_embeddings=True).generate(prompt(), **OPTIONS)
    model = TIDEModelForCausalLM.attach(to_disk(tiny_llama(tie_word_embeddings=True), tmp_path))
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)


@pytest.mark.parametrize("max_memory", [None, {"cpu": 30_000}])
def test_device_map_auto_without_a_gpu(max_memory, tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    drafting_routers(base).save_pretrained(tmp_path / "routers")
    options = {"device_map": "auto", "max_memory": max_memory, "offload_folder": tmp_path / "off"}
    model = TIDEModelForCausalLM.from_pretrained(tmp_path / "base", routers=tmp_path / "routers", **options)
    on_disk = "disk" in getattr(model, "hf_device_map", {}).values()
    assert on_disk == (max_memory is not None)
    expected = base.generate(prompt(3), **OPTIONS)
    assert torch.equal(model.generate(prompt(3), **OPTIONS), expected)
    assert model.generate(prompt(), tide_mode="early_exit", exit_threshold=0.0, **OPTIONS).shape == (1, 38)
    assert model.last_exit_stats.depth_fraction < 0.5


@pytest.mark.parametrize("offload", OFFLOADS[2:])  # transformers saves no others
def test_saving_an_attached_model_writes_its_weights(offload, tmp_path):
    expected = tiny_model("llama").generate(prompt(), **OPTIONS)
    model = offload(tiny_model("llama"), tmp_path)
    TIDEModelForCausalLM.attach(model, drafting_routers(model))
    model.save_pretrained(tmp_path / "saved")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert sorted(loaded.state_dict()) == sorted(tiny_model("llama").state_dict())
    assert torch.equal(loaded.generate(prompt(), **OPTIONS), expected)
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)


def test_an_offloaded_model_can_be_calibrated_and_inspected(tiny_llama, tiny_tokenizer, tmp_path):
    model = to_disk(tiny_llama(), tmp_path)
    expected, routers = (small(one, tiny_tokenizer, texts(20), exit_layers=[1]) for one in (tiny_llama(), model))
    assert routers.device == CPU
    torch.testing.assert_close(routers[1].router.down.weight, expected[1].router.down.weight)
    assert structure_facts(model, find_structure(model))["device"] == "cpu"
    with TIDELogitsProcessor(model, routers, exit_threshold=0.0) as processor:
        assert model.generate(prompt(), logits_processor=[processor], **OPTIONS).shape == (1, 38)
