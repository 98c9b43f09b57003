"""Random calls one after another, on any engine: plain decoding's own tokens, and nothing is left behind."""

import copy
import gc
import random
from functools import cache

import pytest
import torch
from drafters import KINDS, HeadDrafter, ScriptedDrafter
from families import VOCAB, tiny_model
from interruptions import Stops
from on_steps import attach_captured, attach_without_compiler, linear_heads, steps_of

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE

BY_SLOTS = ("bloom", "mistral", "gemma2", "gemma3_text", "llama4_text")  # whose prefill transformers cannot chunk
FAMILIES = ("llama", "gpt2", "falcon", "opt", "phi3", *BY_SLOTS)
FEWEST, MOST = 3, 20  # tokens of an answer

tiny = cache(tiny_model)


OPTIONAL = {
    "repetition_penalty": [1.2, 0.8],
    "encoder_repetition_penalty": [1.5, 0.7],
    "no_repeat_ngram_size": [1, 2, 3],
    "min_new_tokens": [FEWEST],
    "exponential_decay_length_penalty": [(2, 1.3)],
    "bad_words_ids": [[[7], [9, 10]]],
    "suppress_tokens": [[11, 12]],
    "forced_eos_token_id": [5],
    "sequence_bias": [[[[5, 6], 2.0], [[7], 1.5]]],
    "renormalize_logits": [True],
    "prefix_allowed_tokens_fn": [lambda row, ids: list(range(3 + row, VOCAB, 1 + ids.shape[0] % 3))],
    "prefill_chunk_size": [4],
    "stopping_criteria": [
        [Stops(lambda ids: ids[:, -1] % 13 == 0)],
        [Stops(lambda ids: bool((ids[:, -1] % 13 == 0).any()))],
    ],
    "output_scores": [True],
    "return_dict_in_generate": [True] * 4,
}


def random_options(chance, family, padding):
    options = {name: chance.choice(values) for name, values in OPTIONAL.items() if chance.random() < len(values) / 12}
    eos, new = chance.sample(range(3, VOCAB), chance.choice([0, 3, 8, 30])), chance.randint(1, MOST)
    if not eos:
        options.pop("exponential_decay_length_penalty", None)
    if not eos or new < FEWEST:
        options.pop("min_new_tokens", None)
    if padding == "right" or family in BY_SLOTS:
        options.pop("prefill_chunk_size", None)
    common = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos or None}
    return common | options


def random_prompts(chance, rows, length, padding):
    generator = torch.Generator().manual_seed(chance.randrange(10**6))
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows if padding != "none" else 0):
        pads = chance.randrange(length)
        mask[row, slice(0, pads) if padding == "left" else slice(length - pads, length)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def next_turn(result, mask, chance):
    """The text so far with a little more, and its mask."""
    more = [chance.randrange(3, VOCAB) for _ in range(chance.randint(0, 3))]
    ids = torch.cat([result.sequences, torch.tensor([more] * len(result.sequences)).long()], 1)
    return {"input_ids": ids, "attention_mask": torch.cat([mask, mask.new_ones(ids[:, mask.shape[1] :].shape)], 1)}


def sequences_of(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def drafter_maker(continuations, chance):
    kind, width = chance.choice([*KINDS, "mixed", "heads", "heads"]), chance.randint(0, 9)
    if kind == "heads":
        exit_layer = chance.choice([1, 3])
        return lambda _, call, engine: HeadDrafter(call.prompts, engine, exit_layer, max(1, width))
    return lambda *_: ScriptedDrafter(kind, continuations, VOCAB, width)


def attached(family, engine, chance):
    model = copy.deepcopy(tiny(family))
    routers = linear_heads(model)
    routers.config.compaction_threshold = chance.choice([0.1, routers.config.compaction_threshold])
    if engine == "captured":
        attach_captured(model, routers)
    else:
        attach_without_compiler(model, routers, engine=engine)
    return model


@pytest.mark.parametrize(("engine", "seeds"), [("eager", range(30)), ("captured", range(10)), ("compiled", [2])])
def test_calls_one_after_another_equal_plain_decoding(engine, seeds):
    replays = 0
    for seed in seeds:
        chance = random.Random(seed)
        family = chance.choice(FAMILIES)
        plain, model = tiny(family), attached(family, engine, chance)
        before = mask = None
        for _ in range(6):
            caches = ({}, {})
            if before is not None and chance.random() < 0.6:
                inputs, caches = next_turn(before[0], mask, chance), tuple({CACHE: one[CACHE]} for one in before)
            else:
                padding = chance.choice(["none", "left", "right"])
                inputs = random_prompts(chance, chance.choice([1, 1, 2, 5]), chance.randint(1, 14), padding)
            mask, options = inputs["attention_mask"], random_options(chance, family, padding)
            if caches[0]:
                options.pop("prefill_chunk_size", None)
            expected = plain.generate(**inputs, **options, **caches[0])
            new = sequences_of(expected)[:, mask.shape[1] :].tolist()
            model._tide.make_drafter = drafter_maker([row + [3] * MOST for row in new], chance)
            answer = model.generate(**inputs, **options, **caches[1])
            assert torch.equal(sequences_of(answer), sequences_of(expected)), (seed, family, options)
            can_go_on = options.get("return_dict_in_generate") and padding != "right"
            before = (expected, answer) if can_go_on else None
            if before is not None:
                assert answer[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        replays += steps_of(model).replays
    assert (replays > 0) == (engine != "eager")


def random_generation(model, seed):
    chance = random.Random(seed)
    model.generate(
        **random_prompts(chance, chance.choice([1, 1, 2]), chance.randint(2, 9), chance.choice(["none", "left"])),
        max_new_tokens=chance.randint(1, 8),
        do_sample=chance.random() < 0.5,
        tide_mode=chance.choice(["self_speculative", "early_exit", "post_hoc"]),
        exit_threshold=chance.choice([0.0, 0.5, 1.5]),
        return_dict_in_generate=chance.random() < 0.5,
    )


def test_many_calls_leave_nothing_behind():
    model = tiny_model("llama")
    before = sorted(model.__dict__)
    # Without copies of weights, which the first wide pass makes, whenever that comes.
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 3]), pack_weights=False)
    for seed in range(30):
        random_generation(model, seed)
    gc.collect()
    tensors = sum(type(item) is torch.Tensor for item in gc.get_objects())
    for seed in range(30, 120):
        random_generation(model, seed)
    gc.collect()
    assert sum(type(item) is torch.Tensor for item in gc.get_objects()) <= tensors
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    TIDEModelForCausalLM.detach(model)
    assert sorted(model.__dict__) == before
