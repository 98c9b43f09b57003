"""The block head: what it drafts, that drafts never change the answer, and that it leaves nothing behind."""

import pytest
import torch
from block_heads import WITH_BLOCK, attach_drafting, block_layer_of, document_batches, routers_for
from families import tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.block_head import BlockTrainer
from tide_hf.calibration.documents import Document
from tide_hf.common.errors import UnsupportedModelError
from tide_hf.routers.block_head import block_config_of


@pytest.mark.parametrize("family", WITH_BLOCK)
def test_output_equals_the_base_model_s_in_every_family(family):
    model = tiny_model(family)
    torch.manual_seed(1)
    ids, mask = torch.randint(3, 90, (3, 7)), torch.ones(3, 7, dtype=torch.long)
    ids[0, :3], mask[0, :3] = 0, 0
    options = {"attention_mask": mask, "max_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **options)
    made = attach_drafting(model, routers_for(model, block_layer_of(family)), width=3)
    assert torch.equal(model.generate(ids, **options), expected)
    assert made[0].drafted


@pytest.mark.parametrize(
    ("family", "rows", "every"),
    [
        *(("llama", rows, every) for rows, every in [(1, 1), (1, 4)]),
        *((family, 2, 3) for family in ("llama", "gemma2", "gpt2", "bloom", "qwen2_5_vl")),
    ],
)
def test_drafts_start_with_the_top_token_of_a_pass_over_the_whole_text(family, rows, every, monkeypatch):
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
    trainer = BlockTrainer(model, unembed, routers.block, block_layer, torch.arange(structure.vocab_size))
    assert len(made[0].drafted) > 2
    for text, draft in made[0].drafted:
        if not draft:
            continue
        (batch,) = document_batches(model, block_layer, [Document(text, first=0)], 1)
        with torch.no_grad():
            top = unembed(trainer.states(batch))[0, -1].argmax()
        assert draft[0] == int(top)


def test_early_exit_and_the_returned_cache_have_no_layer_of_the_block(tiny_llama):
    model = tiny_llama()
    attach_drafting(model, routers_for(model, 1), width=2)
    ids = torch.arange(3, 12)[None]
    model.generate(ids, max_new_tokens=6, tide_mode="early_exit", exit_threshold=0.0)
    assert set(model.last_exit_stats.exits_per_layer) == {2}
    options = {"max_new_tokens": 9, "do_sample": False, "return_dict_in_generate": True}
    first = model.generate(ids, **options)
    assert len(first[CACHE].layers) == 4
    longer = torch.cat([first.sequences, ids], dim=1)
    model._tide.make_drafter = lambda *_: pytest.fail("no drafter")
    with pytest.raises(pytest.fail.Exception):
        model.generate(longer, **{CACHE: first[CACHE]}, **options)
    assert len(first[CACHE].layers) == 4


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


@pytest.mark.parametrize(
    ("family", "block_layer", "reason"),
    [
        ("mistral", 1, "sliding_attention"),
        ("gemma2", 1, "no layer of kind full_attention before layer 1"),
        ("deepseek_v3", 2, "cannot be built from the model's config"),
        ("mamba", 1, "a block head cannot be made"),
    ],
)
def test_block_layers_that_cannot_work_are_refused(family, block_layer, reason):
    model = tiny_model(family)
    with pytest.raises(UnsupportedModelError, match=reason):
        block_config_of(model, find_structure(model), block_layer)
