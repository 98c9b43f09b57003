"""What a returned cache keeps for the block head: a call that goes on behind it drafts as if it had read all of it."""

import copy
import pickle

import pytest
import torch
from block_heads import block_layer_of, routers_for
from drafters import HeadDrafter, use_heads
from families import tiny_model
from on_steps import attach_captured as attach_graphs
from on_steps import attach_compiled, attach_eagerly, prompts

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.depth.block_drafting import block_state_of

OPTIONS = {"max_new_tokens": 18, "do_sample": False, "eos_token_id": None}
RETURNED = {**OPTIONS, "return_dict_in_generate": True}


@pytest.fixture
def talk(tiny_llama):
    """A model, what a first turn gave, and the tokens of a second."""
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    ids = prompts()["input_ids"]
    first = model.generate(ids, **RETURNED)
    return model, first[CACHE], torch.cat([first.sequences, ids], dim=1)


def drafts_behind(model, cache, ids):
    """Whether the block can draft in a call behind `cache`, and does; the tokens have to be the base model's."""
    made = []

    def make(_, texts, engine):
        made.append(HeadDrafter(texts, engine, engine.block_layer or 2, 2))
        return made[-1]

    before, model._tide.make_drafter = model._tide.make_drafter, make
    tokens = model.generate(ids, **{CACHE: cache}, **OPTIONS)
    model._tide.make_drafter = before
    plain = TIDEModelForCausalLM.detach(copy.deepcopy(model)).generate(ids, **OPTIONS)
    assert torch.equal(tokens, plain)
    assert made[0].drafted
    return made[0].exit_layer == 1


@pytest.mark.parametrize("attach", [attach_eagerly, attach_compiled, attach_graphs])
@pytest.mark.parametrize(
    ("family", "rows", "every"),
    [
        *(("llama", 1, 1), ("llama", 1, 4), ("llama", 3, 1)),
        *(("gpt2", 3, 1), ("bloom", 2, 1), ("gemma2", 1, 1), ("qwen2_5_vl", 1, 1)),
    ],
)
def test_a_second_turn_drafts_what_one_over_the_whole_text_would(family, rows, every, attach):
    model = tiny_model(family)
    block_layer = block_layer_of(family)
    attach(model, routers_for(model, block_layer))
    made = use_heads(model, block_layer, 2, every)
    ids = prompts(rows)["input_ids"]
    model.generation_config.pad_token_id = None  # or what looks like padding would be hidden
    first = model.generate(ids, **RETURNED)
    assert len(first[CACHE].layers) == len(model._tide.structure.layers)
    longer = torch.cat([first.sequences, ids], dim=1)
    second = model.generate(longer, **{CACHE: first[CACHE]}, **OPTIONS)
    assert torch.equal(second, model.generate(longer, **OPTIONS))
    assert len([draft for draft in made[1].drafted if draft]) > 3
    assert made[1].drafted == made[2].drafted


def test_a_third_turn_and_copies_of_the_cache(talk):
    model, cache, ids = talk
    for other in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), cache):
        assert drafts_behind(model, other, ids)
        plain = TIDEModelForCausalLM.detach(copy.deepcopy(model)).generate(ids, **OPTIONS)
        assert drafts_behind(model, other, torch.cat([plain, ids], dim=1))


def test_a_cache_that_was_cut_back(talk):
    model, cache, ids = talk
    cache.crop(12 - cache.get_seq_length())
    identity = model._tide.routers.block.identity
    memory = block_state_of(copy.deepcopy(cache), identity)
    assert memory.layer.get_seq_length() == 12
    assert memory.prev_hidden_state is None  # of the token that is the last now it is not known
    assert drafts_behind(model, cache, ids[:, :16])
    assert block_state_of(cache, identity).prev_hidden_state is not None


def test_an_emptied_cache(talk):
    model, cache, ids = talk
    cache.crop(-cache.get_seq_length())
    assert drafts_behind(model, cache, ids)


def test_a_cache_that_went_on_without_the_block(talk):
    model, cache, ids = talk
    longer = model.generate(ids, **{CACHE: cache}, **OPTIONS, tide_mode="early_exit", exit_threshold=2.0)
    assert not drafts_behind(model, cache, torch.cat([longer, ids], dim=1))


def test_other_rows_and_other_blocks(talk):
    model, cache, ids = talk
    other = copy.deepcopy(cache)
    other.batch_repeat_interleave(2)
    assert not drafts_behind(model, other, ids.repeat(2, 1))
    routers = routers_for(model, 1, seed=1)
    TIDEModelForCausalLM.attach(model, routers)
    assert not drafts_behind(model, cache, ids)


def test_a_call_that_fails_leaves_nothing_behind(talk):
    model, cache, ids = talk

    class Fails(HeadDrafter):
        def draft(self, rows, limits):
            if self.rounds == 2:
                raise KeyError
            return super().draft(rows, limits)

    before = model._tide.make_drafter
    model._tide.make_drafter = lambda _, texts, engine: Fails(texts, engine, 1, 2)
    with pytest.raises(KeyError):
        model.generate(ids, **{CACHE: cache}, **OPTIONS)
    model._tide.make_drafter = before
    assert len(cache.layers) == len(model._tide.structure.layers)
    assert not [name for name in vars(cache) if "tide" in name]
