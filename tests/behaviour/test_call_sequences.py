"""Calls of all kinds one after another: what is kept between them changes no token, on any engine."""

import copy
import random

import pytest
import torch
from drafters import KINDS, AheadDrafter, HeadDrafter, ScriptedDrafter
from families import VOCAB, tiny_model
from on_steps import attach_captured, attach_without_compiler, linear_heads, steps_of
from random_calls import inputs_of, sequences_of
from transformers import StoppingCriteria

from tide_hf.base_model.structure import CACHE

FAMILIES = ("llama", "gpt2", "falcon", "bloom", "gemma2", "opt")
LEAST, LONGEST = 3, 20  # tokens of an answer


class EachRow(StoppingCriteria):
    """Answers for each row by itself."""

    def __call__(self, input_ids, scores, **kwargs):
        return input_ids[:, -1] % 13 == 0


OPTIONAL = {
    "repetition_penalty": [1.2, 0.8],
    "no_repeat_ngram_size": [1, 2, 3],
    "min_new_tokens": [LEAST],
    "bad_words_ids": [[[7], [9, 10]]],
    "sequence_bias": [[[[5, 6], 2.0], [[7], 1.5]]],
    "stopping_criteria": [[EachRow()]],
    "output_scores": [True],
    "return_dict_in_generate": [True] * 4,
}


def random_options(chance):
    options = {name: chance.choice(values) for name, values in OPTIONAL.items() if chance.random() < len(values) / 12}
    eos, new = chance.sample(range(3, VOCAB), chance.choice([0, 3, 8])), chance.randint(1, LONGEST)
    if not eos or new < LEAST:
        options.pop("min_new_tokens", None)
    common = {"max_new_tokens": new, "do_sample": False, "pad_token_id": 0, "eos_token_id": eos or None}
    return common | options


def random_prompts(chance):
    rows, length, padding = chance.choice([1, 1, 2, 5]), chance.randint(1, 14), chance.choice(["none", "left"])
    return inputs_of(rows, length, padding, chance.randrange(10**6))


def more_of(result, mask, chance):
    """The text so far with a little more, and its mask."""
    ids, extra = result.sequences, chance.randint(0, 3)
    ids = torch.cat([ids, torch.tensor([[chance.randrange(3, VOCAB) for _ in range(extra)] for _ in ids]).long()], 1)
    ones = mask.new_ones((len(ids), ids.shape[1] - mask.shape[1]))
    return {"input_ids": ids, "attention_mask": torch.cat([mask, ones], 1)}


class Heads:
    """Drafts by heads, in whichever way the call can at the moment."""

    def __init__(self, texts, shallow, exit_layer, width):
        self.shallow = shallow
        self.texts, self.exit_layer, self.width = [list(text) for text in texts], exit_layer, width

    def draft(self, rows, limits):
        if not self.shallow.reads_drafts:
            return AheadDrafter(self.texts, self.shallow, [self.exit_layer], self.width).draft(rows, limits)
        return HeadDrafter(self.texts, self.shallow, self.exit_layer, self.width).draft(rows, limits)

    def observe(self, row, draft, new_tokens, n_matches):
        self.texts[row] += new_tokens


def drafter_maker(continuations, chance):
    kind, width, exit_layer = (
        chance.choice([*KINDS, "mixed", "heads", "heads"]),
        chance.randint(0, 9),
        chance.choice([1, 3]),
    )
    if kind == "heads":
        return lambda _, texts, shallow: Heads(texts, shallow, exit_layer, max(1, width))
    return lambda *_: ScriptedDrafter(kind, continuations, VOCAB, width)


def attached(model, engine):
    own = copy.deepcopy(model)
    if engine == "captured":
        attach_captured(own, linear_heads(own))
    else:
        attach_without_compiler(own, linear_heads(own), engine=engine)
    return own


@pytest.mark.parametrize(("engine", "times"), [("eager", 30), ("captured", 30), ("compiled", 6)])  # which traces
def test_calls_one_after_another_equal_plain_decoding(engine, times):
    replays = 0
    for seed in range(times):
        chance = random.Random(seed)
        plain = tiny_model(chance.choice(FAMILIES))
        own, before, mask = attached(plain, engine), None, None
        for _ in range(6):
            options, caches = random_options(chance), ({}, {})
            if before is not None and chance.random() < 0.6:
                inputs = more_of(before[0], mask, chance)
                caches = tuple({CACHE: result[CACHE]} for result in before)
            else:
                inputs = random_prompts(chance)
            mask = inputs["attention_mask"]
            expected = plain.generate(**inputs, **options, **caches[0])
            continuations = [row + [3] * LONGEST for row in sequences_of(expected)[:, mask.shape[1] :].tolist()]
            own._tide.make_drafter = drafter_maker(continuations, chance)
            answer = own.generate(**inputs, **options, **caches[1])
            assert torch.equal(sequences_of(answer), sequences_of(expected)), (seed, options)
            before = (expected, answer) if options.get("return_dict_in_generate") else None
            if before is not None:
                assert answer[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        replays += steps_of(own).replays
    assert (replays > 0) == (engine != "eager")
