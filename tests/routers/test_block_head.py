"""The block head: what it drafts, that drafts never change the answer, and that it leaves nothing behind."""

import pytest
import torch
from block_heads import WITH_BLOCK, attach_drafting, block_layer_of, document_batches, routers_for
from families import LAYERS, tiny_model
from safetensors.torch import load_file

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.block_head import BlockTrainer
from tide_hf.calibration.documents import Document
from tide_hf.common.errors import ConfigurationError, UnsupportedModelError
from tide_hf.routers.block_head import block_config_of
from tide_hf.routers.config import TIDEConfig
from tide_hf.routers.routers import TIDERouters


@pytest.mark.parametrize("family", WITH_BLOCK)
@pytest.mark.parametrize("rows", [1, 3])
def test_answers_are_the_base_model_s_whatever_the_block_drafts(family, rows):
    model = tiny_model(family)
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 90, (rows, 7)), torch.ones(rows, 7, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 20, "do_sample": False}
    expected = model.generate(ids, **options)
    made = attach_drafting(model, routers_for(model, block_layer_of(family)), width=3)
    assert torch.equal(model.generate(ids, **options), expected)
    assert made[0].drafted


@pytest.mark.parametrize(("rows", "every"), [(1, 1), (1, 4), (2, 1), (2, 3)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "falcon", "bloom", "opt", "qwen2_5_vl"])
def test_the_first_token_of_a_draft_is_what_the_block_says_from_the_whole_text(family, rows, every, monkeypatch):
    monkeypatch.setattr("tide_hf.depth.block_drafting.MAX_PENDING_PASSES", 3)
    model = tiny_model(family)
    block_layer = block_layer_of(family)
    routers = routers_for(model, block_layer)
    structure = find_structure(model)
    unembed = Unembed(model, structure)
    made = attach_drafting(model, routers, width=2, every=every)
    ids = torch.randint(3, 90, (rows, 6), generator=torch.Generator().manual_seed(0))
    model.generate(ids, min_new_tokens=24, max_new_tokens=24, do_sample=False)
    TIDEModelForCausalLM.detach(model)
    trainer = BlockTrainer(model, structure, unembed, unembed, routers.block.head, block_layer)
    assert len(made[0].drafted) > 2
    for text, draft in made[0].drafted:
        if not draft:
            continue
        (batch,) = document_batches(model, block_layer, [Document(text, first=0)], 1)
        with torch.no_grad():
            top = unembed(trainer.states(batch))[0, -1].argmax()
        assert draft[0] == int(top)


def test_a_row_whose_block_never_drafts_pays_nothing_for_it(tiny_llama, monkeypatch):
    model = tiny_llama()
    made = attach_drafting(model, routers_for(model, 1), width=2, every=100)
    monkeypatch.setattr("tide_hf.depth.block_drafting.fill_skipped", lambda *_: pytest.fail("K/V that no one needs"))
    model.generate(torch.arange(3, 12)[None], max_new_tokens=20, do_sample=False)
    assert made[0].rounds > 10


def test_the_draft_vocabulary_s_rows_are_copied_when_the_head_has_changed(tiny_llama):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[2], draft_vocab_size=5)
    attachment = TIDEModelForCausalLM.attach(model, routers)._tide
    first = attachment.draft_unembed()
    assert attachment.draft_unembed() is first
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    second = attachment.draft_unembed()
    assert torch.equal(second.head.weight, model.lm_head.weight[:5])
    model.tide_release()
    assert attachment.draft_unembed() is not second


def test_the_cache_holds_no_trace_of_the_block(tiny_llama):
    model = tiny_llama()
    attach_drafting(model, routers_for(model, 1), width=2)
    ids = torch.arange(3, 12)[None]
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, **options)
    assert len(first[CACHE].layers) == 4
    longer = torch.cat([first.sequences, ids], dim=1)
    model._tide.make_drafter = lambda *_: pytest.fail("no drafter")
    with pytest.raises(pytest.fail.Exception):
        model.generate(longer, **{CACHE: first[CACHE]}, **options)
    assert len(first[CACHE].layers) == 4


def test_a_continued_cache_gives_the_base_models_tokens(tiny_llama):
    model = tiny_llama()
    routers = routers_for(model, 1)
    routers.config.calibration = {"exit_layers": {}, "block": {"agreement": 0.99}}
    ids = torch.arange(3, 12)[None]
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, **options)
    longer = torch.cat([first.sequences, ids], dim=1)
    expected = model.generate(longer, **{CACHE: first[CACHE]}, **options).sequences
    TIDEModelForCausalLM.attach(model, routers)
    first = model.generate(ids, **options)
    assert torch.equal(model.generate(longer, **{CACHE: first[CACHE]}, **options).sequences, expected)


def test_the_hybrid_drafter_uses_the_block_if_it_pays(tiny_llama):
    model = tiny_llama()
    routers = routers_for(model, 1)
    routers.config.calibration = {"exit_layers": {"2": {"agreement": 0.01}}, "block": {"agreement": 0.99}}
    TIDEModelForCausalLM.attach(model, routers)
    costs = model._tide.costs_of(1, "eager")
    for key, milliseconds in {("verify", 1): 10.0, ("verify", 16): 10.0, ("draft", 1): 0.01}.items():
        for _ in range(20):
            costs.record(key, milliseconds)
    expected = TIDEModelForCausalLM.detach(tiny_llama()).generate(torch.arange(3, 12)[None], max_new_tokens=12)
    assert torch.equal(model.generate(torch.arange(3, 12)[None], max_new_tokens=12), expected)
    assert model.last_exit_stats.drafted > 0


def test_early_exit_knows_nothing_of_the_block(tiny_llama):
    model = tiny_llama()
    attach_drafting(model, routers_for(model, 1), width=2)
    model.generate(torch.arange(3, 12)[None], max_new_tokens=6, tide_mode="early_exit", exit_threshold=0.0)
    assert set(model.last_exit_stats.exits_per_layer) == {2}


def test_routers_with_a_block_are_saved_and_loaded(tiny_llama, tmp_path):
    routers = routers_for(tiny_llama(), 1)
    routers.save_pretrained(tmp_path)
    loaded = TIDERouters.from_pretrained(tmp_path)
    assert loaded.config.block_layer == 1
    for name, parameter in routers.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], parameter), name
    assert {m.layer_idx for m in loaded.block.head.layer.modules() if hasattr(m, "layer_idx")} == {4}


def test_saving_what_was_loaded_takes_no_more_space(tiny_llama, tmp_path):
    routers_for(tiny_llama(), 1).to(torch.bfloat16).save_pretrained(tmp_path / "first")
    TIDERouters.from_pretrained(tmp_path / "first").save_pretrained(tmp_path / "second")
    first, second = (load_file(tmp_path / name / "model.safetensors") for name in ("first", "second"))
    assert {name: tensor.dtype for name, tensor in first.items()} == {name: t.dtype for name, t in second.items()}


@pytest.mark.parametrize(
    ("family", "block_layer", "reason"),
    [
        ("mistral", 1, "sliding_attention"),
        ("gemma2", 2, "sliding_attention"),
        ("gemma2", 1, "no layer of kind full_attention before layer 1"),
        ("deepseek_v3", 2, "cannot be built from the model's config"),
        ("mamba", 1, "a block head cannot be made"),
    ],
)
def test_layers_that_no_block_can_follow_are_refused(family, block_layer, reason):
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=reason):
        block_config_of(model, find_structure(model), block_layer)


@pytest.mark.parametrize("block_config", [None, {}, {"hidden_size": 32}])
def test_a_block_without_its_config_is_refused(block_config):
    sizes = {"hidden_size": 32, "num_hidden_layers": LAYERS, "vocab_size": 96}
    with pytest.raises(ConfigurationError, match="needs the base model's config"):
        TIDEConfig(**sizes, exit_layers=[2], block_layer=1, block_config=block_config)
    with pytest.raises(ConfigurationError, match="exit layer out of range"):
        TIDEConfig(**sizes, exit_layers=[2], block_layer=LAYERS, block_config={"model_type": "llama"})
