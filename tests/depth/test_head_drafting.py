"""The draft head drafts in calls of `generate` what it drafts after the whole text at once, and leaves the tokens."""

import copy
import pickle

import pytest
import torch
from draft_heads import draft_head_for, drafts_after
from drafters import HeadDrafter, ScriptedDrafter, use_heads
from families import ATTENTION, VOCAB, tiny_model
from on_steps import attach_captured, attach_compiled, attach_eagerly, new_tokens, prompts
from transformers.cache_utils import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.routers.draft_head import DraftHead

OPTIONS = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None}
WIDTH = 3


@pytest.mark.parametrize("kind", ["right", "trees"])
@pytest.mark.parametrize(
    ("family", "rows", "every", "changes"),
    [
        *((family, 1, 1, {"has_embedding": family == "opt"}) for family in ATTENTION),  # OPT's may be narrower
        *(("llama", rows, every, {}) for rows, every in ((1, 2), (3, 1), (3, 2))),
        ("llama", 2, 1, {"norm_output": True, "norm_before_residual": True}),
        ("llama", 2, 1, {"qk_norm": True, "norm_before_fc": True}),
        ("gemma2", 2, 1, {"fc_norm": True}),
        ("qwen3_moe", 3, 1, {"draft_vocab_size": 20}),
    ],
)
def test_drafts_are_those_after_the_whole_text(family, rows, every, changes, kind):
    check_drafts(TIDEModelForCausalLM.attach, family, rows, every, changes, kind)


@pytest.mark.parametrize("kind", ["right", "trees"])
@pytest.mark.parametrize("rows", [1, 3])
def test_drafts_on_steps_are_those_after_the_whole_text(rows, kind):
    check_drafts(attach_compiled, "llama", rows, 2, {}, kind)


def check_drafts(attach, family, rows, every, changes, kind):
    model, batch = tiny_model(family), prompts(rows, pads=2 if rows > 1 else 0)
    plain = model.generate(**batch, **OPTIONS)
    attach(model, draft_head_for(model, **changes))
    made = use_heads(model, 0, WIDTH, every, continuations=new_tokens(plain), kind=kind)
    assert torch.equal(model.generate(**batch, **OPTIONS), plain)
    drafted, pads = made[0].drafted, (batch["attention_mask"] == 0).sum(dim=1)
    assert drafted
    for text, tokens in drafted:
        row = [prompt.tolist() for prompt in batch["input_ids"]].index(text[: batch["input_ids"].shape[1]])
        assert drafts_after(model, text[int(pads[row]) :], len(tokens)) == tokens


@pytest.mark.parametrize("pads", [0, 2])
@pytest.mark.parametrize("attach", [attach_eagerly, attach_compiled])
def test_for_rounds_without_drafts_the_head_does_nothing_but_drafts_later_as_after_the_whole_text(
    attach, pads, tiny_llama, monkeypatch
):
    model, batch = tiny_llama(max_position_embeddings=256), prompts(pads=pads)
    options, read, fuse = OPTIONS | {"max_new_tokens": 170}, [], DraftHead.fuse
    plain = model.generate(**batch, **options)
    attach(model, draft_head_for(model))
    made = use_heads(model, 0, WIDTH, every=80)
    monkeypatch.setattr(DraftHead, "fuse", lambda head, tapped: read.append(tapped.shape[1]) or fuse(head, tapped))
    assert torch.equal(model.generate(**batch, **options), plain)
    assert read == [65, 22, 65, 15]  # for two drafts, and before each since much was pending
    for text, tokens in made[0].drafted:
        assert drafts_after(model, text[pads:], len(tokens)) == tokens


@pytest.mark.parametrize(
    ("attach", "family", "rows", "every"),
    [(attach_eagerly, "llama", 1, 3), (attach_eagerly, "llama", 3, 1), (attach_eagerly, "gemma2", 1, 1)]
    + [(attach_captured, "llama", 3, 1), (attach_compiled, "llama", 1, 1)],
)
def test_a_second_turn_drafts_as_one_over_the_whole_text(attach, family, rows, every):
    model, ids = tiny_model(family), prompts(rows)["input_ids"]
    attach(model, draft_head_for(model))
    made = use_heads(model, 0, 2, every)
    model.generation_config.pad_token_id = None  # or tokens that equal it would be masked
    first = model.generate(ids, **OPTIONS, return_dict_in_generate=True)
    assert len(first[CACHE].layers) == len(model._tide.structure.layers)
    longer = torch.cat([first.sequences, ids], dim=1)
    second = model.generate(longer, **{CACHE: pickle.loads(pickle.dumps(copy.deepcopy(first[CACHE])))}, **OPTIONS)
    assert torch.equal(second, model.generate(longer, **OPTIONS))
    assert made[1].drafted
    assert made[1].drafted == made[2].drafted


def test_the_head_does_not_draft_where_its_state_does_not_fit(tiny_llama):
    model, ids = tiny_llama(), prompts()["input_ids"]
    TIDEModelForCausalLM.attach(model, draft_head_for(model))
    layers = []

    def make_drafter(_attachment, call, engine):
        layers.append(engine.head_layer)
        return HeadDrafter(call.prompts, engine, 2, 1)

    model._tide.make_drafter = make_drafter
    cache = model.generate(ids, **OPTIONS, return_dict_in_generate=True)[CACHE]
    cropped, repeated, others = copy.deepcopy(cache), copy.deepcopy(cache), copy.deepcopy(cache)
    cropped.crop(4 - cropped.get_seq_length())
    repeated.batch_repeat_interleave(2)
    text = ids.repeat(1, 4)
    model.generate(text, **{CACHE: cropped}, **OPTIONS)
    model.generate(text.repeat(2, 1), **{CACHE: repeated}, **OPTIONS)
    TIDEModelForCausalLM.attach(model, draft_head_for(model, seed=1))
    model._tide.make_drafter = make_drafter
    model.generate(text, **{CACHE: others}, **OPTIONS)
    assert layers == [0, 0, None, None]


@pytest.mark.parametrize("attach", [attach_eagerly, attach_compiled])
@pytest.mark.parametrize("rows", [1, 2])
def test_it_drafts_with_a_cache_that_was_made_without_a_config(rows, attach, tiny_llama):
    model, ids, cache = tiny_llama(), prompts(rows)["input_ids"], DynamicCache()
    attach(model, draft_head_for(model))
    made = use_heads(model, 0, WIDTH)
    found = [model.generate(ids, **{CACHE: one}, **OPTIONS) for one in (cache, None)]
    assert torch.equal(*found)
    assert made[0].drafted == made[1].drafted
    assert len(cache.layers) == model.config.num_hidden_layers


@pytest.mark.parametrize("attach", [attach_eagerly, attach_compiled])
def test_models_of_several_dtypes_may_share_a_head(attach, tiny_llama):
    model, other, ids = tiny_llama(), tiny_llama().to(torch.bfloat16), prompts()["input_ids"]
    routers = draft_head_for(model)
    attach(model, routers)
    made = use_heads(model, 0, WIDTH)
    first = model.generate(ids, **OPTIONS, return_dict_in_generate=True)
    TIDEModelForCausalLM.attach(other, routers, ignore_base_mismatch=True)
    assert torch.equal(model.generate(ids, **OPTIONS), first.sequences)
    longer = torch.cat([first.sequences, ids], dim=1)
    second = model.generate(longer, **OPTIONS)
    model._tide.make_drafter = lambda *_: ScriptedDrafter("right", [new_tokens(second)[0]], VOCAB)
    assert torch.equal(model.generate(longer, **{CACHE: first[CACHE]}, **OPTIONS), second)
    assert made[1].drafted


@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_outside_its_own_embeddings_are_read_all_the_same(rows):
    """A vocabulary may grow after TIDE was attached."""
    model, ids = tiny_model("llama"), prompts(rows)["input_ids"]
    TIDEModelForCausalLM.attach(model, draft_head_for(model, has_embedding=True))
    model.resize_token_embeddings(VOCAB + 8)
    ids[0, 3] = VOCAB + 3
    expected = TIDEModelForCausalLM.detach(copy.deepcopy(model)).generate(ids, **OPTIONS)
    made = use_heads(model, 0, WIDTH)
    assert torch.equal(model.generate(ids, **OPTIONS), expected)
    assert made[0].drafted


def test_a_call_that_fails_leaves_no_state(tiny_llama):
    class Fails(HeadDrafter):
        def draft(self, rows, limits):
            if self.rounds == 2:
                raise KeyError
            return super().draft(rows, limits)

    model, batch = tiny_llama(), prompts(2)
    TIDEModelForCausalLM.attach(model, draft_head_for(model))
    model._tide.make_drafter = lambda _, call, engine: Fails(call.prompts, engine, 0, 2)
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyError):
        model.generate(**batch, **{CACHE: cache}, **OPTIONS)
    assert len(cache.layers) == len(model._tide.structure.layers)
    assert not [name for name in vars(cache) if "tide" in name]
