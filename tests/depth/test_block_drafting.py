"""The block head's state on a returned cache: a call that continues from it drafts as after the whole text."""

import copy
import pickle

import pytest
import torch
from block_heads import block_layer_of, routers_for
from drafters import HeadDrafter, use_heads
from families import tiny_model
from on_steps import attach_captured, attach_compiled, attach_eagerly, prompts

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.depth.head_drafting import head_state_of

OPTIONS = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None}
RETURNED = {**OPTIONS, "return_dict_in_generate": True}


@pytest.fixture
def talk(tiny_llama):
    """A model, the cache of a first turn, and the tokens of a second."""
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    ids = prompts()["input_ids"]
    first = model.generate(ids, **RETURNED)
    return model, first[CACHE], torch.cat([first.sequences, ids], dim=1)


def block_drafts(model, cache, ids):
    """Whether the block can draft in a call that continues from `cache`; the tokens have to be the base model's."""
    made = []

    def make(_, prompts, engine):
        made.append(HeadDrafter(prompts, engine, engine.head_layer or 2, 2))
        return made[-1]

    model._tide.make_drafter = make
    tokens = model.generate(ids, **{CACHE: cache}, **OPTIONS)
    plain = TIDEModelForCausalLM.detach(copy.deepcopy(model)).generate(ids, **OPTIONS)
    assert torch.equal(tokens, plain)
    assert made[0].drafted
    return made[0].exit_layers == [1]


@pytest.mark.parametrize(
    ("attach", "family", "rows", "every"),
    [
        *((attach_eagerly, "llama", rows, every) for rows, every in ((1, 4), (3, 1))),
        *((attach_eagerly, family, rows, 1) for family, rows in (("bloom", 2), ("gemma2", 1), ("qwen2_5_vl", 1))),
        *((attach_captured, family, rows, 1) for family, rows in (("llama", 3), ("gemma2", 1), ("qwen2_5_vl", 1))),
        (attach_compiled, "llama", 1, 1),
    ],
)
def test_a_second_turn_drafts_as_one_over_the_whole_text(attach, family, rows, every):
    model, block_layer = tiny_model(family), block_layer_of(family)
    attach(model, routers_for(model, block_layer))
    made = use_heads(model, block_layer, 2, every)
    ids = prompts(rows)["input_ids"]
    model.generation_config.pad_token_id = None  # or tokens that equal it would be masked
    first = model.generate(ids, **RETURNED)
    assert len(first[CACHE].layers) == len(model._tide.structure.layers)
    longer = torch.cat([first.sequences, ids], dim=1)
    second = model.generate(longer, **{CACHE: first[CACHE]}, **OPTIONS)
    assert torch.equal(second, model.generate(longer, **OPTIONS))
    assert len([draft for draft in made[1].drafted if draft]) > 3
    assert made[1].drafted == made[2].drafted


def test_copies_of_a_cache_carry_the_state(talk):
    model, cache, ids = talk
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert block_drafts(model, other, ids)


def test_a_cropped_cache_carries_the_state_of_its_tokens(talk):
    model, cache, ids = talk
    cache.crop(12 - cache.get_seq_length())
    identity = model._tide.routers.block.identity
    state = head_state_of(copy.deepcopy(cache), identity)
    assert state.kv.get_seq_length() == 12
    assert state.prev_hidden_state is None  # of the new last token it is not known
    assert block_drafts(model, cache, ids[:, :16])
    assert head_state_of(copy.deepcopy(cache), identity).prev_hidden_state is not None
    cache.crop(-cache.get_seq_length())
    assert block_drafts(model, cache, ids)


def test_the_block_does_not_draft_where_its_state_does_not_fit(talk):
    model, cache, ids = talk
    without_block, repeated = copy.deepcopy(cache), copy.deepcopy(cache)
    longer = model.generate(ids, **{CACHE: without_block}, **OPTIONS, tide_mode="early_exit", exit_threshold=2.0)
    assert not block_drafts(model, without_block, torch.cat([longer, ids], dim=1))
    repeated.batch_repeat_interleave(2)
    assert not block_drafts(model, repeated, ids.repeat(2, 1))
    TIDEModelForCausalLM.attach(model, routers_for(model, 1, seed=1))
    assert not block_drafts(model, cache, ids)


@pytest.mark.parametrize("failing_round", [0, 2])
def test_a_call_that_fails_leaves_no_state(talk, failing_round):
    model, cache, ids = talk

    class Fails(HeadDrafter):
        def draft(self, rows, limits):
            if self.rounds == failing_round:
                raise KeyError
            return super().draft(rows, limits)

    model._tide.make_drafter = lambda _, prompts, engine: Fails(prompts, engine, 1, 2)
    with pytest.raises(KeyError):
        model.generate(ids, **{CACHE: cache}, **OPTIONS)
    assert len(cache.layers) == len(model._tide.structure.layers)
    assert not [name for name in vars(cache) if "tide" in name]
