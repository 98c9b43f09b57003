"""Tests of what a round asks of an accelerator, and of the tokens that are chosen there.

`test_pretend_device.py` runs this module in a process of its own.
"""

from functools import partial
from statistics import median

import pytest
import torch
from distribution import check_distribution, model_for_sampling
from draft_heads import draft_head_for
from drafters import HeadDrafter, ScriptedDrafter
from families import VOCAB
from on_steps import linear_heads, new_tokens, prompts, use_steps
from pretend_device import NAME, Passes, answer, counts, there, two
from transformers import LogitsProcessor

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.step_store import CapturedSteps
from tide_hf.speculation import device_choice
from tide_hf.speculation.drafters import NoDrafter

NEW, WIDTH = 40, 4  # new tokens; tokens of a pass
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9}
PENALISED = {"repetition_penalty": 1.2}
WAYS = {"greedy": GREEDY, "sampled": SAMPLED, "penalised": GREEDY | PENALISED, "both": SAMPLED | PENALISED}


class Watched:
    """A drafter that notes, at the begin of each round, the rows in the batch and what the host has asked so far.

    What passes launch and upload, as their own function or as a graph, is not counted; their waits are.
    """

    def __init__(self, drafter, passes):
        self.drafter, self.passes, self.begins = drafter, passes, []

    def draft(self, rows, limits):
        self.begins.append((len(rows), counts() - self.passes.asked._replace(waits=0)))
        return self.drafter.draft(rows, limits)

    def observe(self, *args):
        self.drafter.observe(*args)

    @property
    def rounds(self):
        """What the host asked in each round after which all rows were still in the batch."""
        pairs = zip(self.begins, self.begins[1:], strict=False)
        return [after - before for (rows, before), (remaining, after) in pairs if rows == remaining]


def watched_rounds(engine, make_drafter, rows, options, make_routers=linear_heads):
    """What the host asks in each round of a second call; the first one prepares steps. The tokens are checked."""
    plain, model = two("llama")
    expected = answer(plain, prompts(rows), **options)
    passes, made = Passes(), []
    passes.watch(model)
    TIDEModelForCausalLM.attach(model, make_routers(plain), engine=engine)
    if engine == "compiled":
        use_steps(model, CapturedSteps(passes.replay_of, compile_graph=None))
    for _ in range(2):
        model._tide.make_drafter = lambda _tide, call, own: (
            made.append(Watched(make_drafter(expected, call.prompts, own), passes)) or made[-1]
        )
        found = answer(model, there(prompts(rows)), **options)
    if rows == 1 or not options["do_sample"]:
        assert torch.equal(found, expected)
    rounds = made[-1].rounds
    assert len(rounds) >= NEW // WIDTH - 2
    return rounds


def by_script(kind, expected, _prompts, _engine):
    return ScriptedDrafter(kind, new_tokens(expected), VOCAB)


def by_head(_expected, prompts, engine):
    return HeadDrafter(prompts, engine, 0, WIDTH - 1)


# Most launches of a round outside of its pass, with one row: choosing tokens, and calling a processor at each position.
LAUNCHES = {"greedy": 0, "sampled": 30, "penalised": 12 * WIDTH, "both": 30 + 12 * WIDTH}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("engine", "rows"), [("eager", 1), ("eager", 3), ("compiled", 1), ("compiled", 3)])
def test_a_round_waits_once_and_uploads_its_tokens_alone(engine, rows, way):
    ids_and_positions, own_launches = (2, 12) if engine == "eager" else (1, 0)
    launches = own_launches + LAUNCHES[way] * (rows if way in ("penalised", "both") else 1)
    for asked in (level := watched_rounds(engine, partial(by_script, "right"), rows, WAYS[way])):
        assert asked.waits == 1
        assert asked.uploads == ids_and_positions
        assert asked.uploaded_bytes == level[0].uploaded_bytes  # whatever the length of the answer
        assert asked.launches <= launches
    mixed = watched_rounds(engine, partial(by_script, "mixed"), rows, WAYS[way])
    for asked in mixed:
        assert asked.waits == 1
        assert asked.uploads <= ids_and_positions + (
            2 if rows > 1 else 0
        )  # of new rejected slots, and of what a compaction keeps
        assert asked.launches <= launches + (30 if rows > 1 else 0)
    # No whole mask, but in the few rounds that compact the cache.
    assert median(asked.uploaded_bytes for asked in mixed) <= level[0].uploaded_bytes + 8 * rows * WIDTH


@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_round_waits_for_no_head_in_steps_and_once_for_each_token_that_a_head_drafts_eagerly(way):
    rounds = watched_rounds("compiled", by_head, 1, WAYS[way], draft_head_for)
    assert all(asked.waits == 1 for asked in rounds)
    own, ahead = (rounds[:2], rounds[2 : -2 * WIDTH]) if way == "greedy" else (rounds, [])
    assert all(asked.uploads == 1 for asked in own)
    for asked in ahead:  # draft steps that the last round has started, after tokens that it has accepted on the device
        assert asked.uploads == 0
        assert asked.launches <= 1  # beside the graphs
    for asked in watched_rounds("eager", by_head, 1, WAYS[way], draft_head_for)[:-2]:  # the last drafts are shorter
        assert asked.waits == WIDTH


@pytest.mark.parametrize("rows", [1, 3])
def test_a_pass_without_drafts_starts_before_the_host_has_read_the_one_before_and_needs_no_upload(rows):
    first, *others = watched_rounds("compiled", NoDrafter, rows, GREEDY)
    assert (first.waits, first.uploads) == (1, 1)
    for asked in others:
        assert (asked.waits, asked.uploads) == (1, 0)
        assert asked.launches <= 1  # beside the graphs


class Own(LogitsProcessor):
    """Of an unknown kind, so it is called token by token, as in plain decoding."""

    def __call__(self, input_ids, scores):
        return scores - (input_ids[:, -1:] == 7).float()


def test_a_processor_of_an_unknown_kind_has_each_token_uploaded_once():
    options = GREEDY | {"logits_processor": [Own()]}
    for asked in watched_rounds("eager", partial(by_script, "right"), 1, options):
        assert asked.waits == WIDTH
        assert asked.uploaded_bytes <= 8 * (2 * WIDTH + 1)  # each token for the pass and the processor; the position


CHOICES = {
    "temperature": {"temperature": 0.7},
    "top-k": {"top_k": 7},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "typical": {"typical_p": 0.8},
    "epsilon": {"epsilon_cutoff": 1e-3},
    "eta": {"eta_cutoff": 1e-3},
    "top-h": {"top_h": 0.5},
    "normalised": {"renormalize_logits": True},
    "finite": {"remove_invalid_values": True},
    "repetition": {"repetition_penalty": 1.5},
    "n-grams": {"no_repeat_ngram_size": 2},
    "bad words": {"bad_words_ids": [[5], [6, 7]]},
    "bias": {"sequence_bias": [[[5], 3.0], [[9, 11], 5.0]]},
    "suppressed": {"suppress_tokens": [5, 6, 7], "begin_suppress_tokens": [8, 9]},
    "first and last": {"forced_bos_token_id": 3, "forced_eos_token_id": 4},
    "at least": {"min_new_tokens": 9, "eos_token_id": list(range(3, 40))},
    "ends": {"eos_token_id": list(range(3, 9))},
    "decay": {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7},
    "all in turn": {**PENALISED, "top_k": 30, "min_new_tokens": 5, "eos_token_id": [5, 9], "suppress_tokens": [11]},
}
RETURNED = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}


@pytest.mark.parametrize("do_sample", [True, False])
@pytest.mark.parametrize("name", CHOICES)
def test_tokens_that_are_chosen_on_the_device_are_plain_decodings(name, do_sample):
    """So are scores, logits, and the random numbers that the next call draws."""
    plain, model = two("llama")
    options = GREEDY | CHOICES[name] | RETURNED | {"do_sample": do_sample}
    torch.manual_seed(0)
    expected = plain.generate(**prompts(), **options)
    next_draw = torch.rand(())
    TIDEModelForCausalLM.attach(model)
    script = [tokens + [5] * NEW for tokens in new_tokens(expected.sequences)]
    for kind in ("right", "mixed"):
        model._tide.make_drafter = lambda *_, kind=kind: ScriptedDrafter(kind, script, VOCAB)
        torch.manual_seed(0)
        found = model.generate(**there(prompts()), **options)
        assert torch.equal(torch.rand(()), next_draw)
        assert torch.equal(found.sequences.cpu(), expected.sequences)
        for one, other in (
            pair for part in ("scores", "logits") for pair in zip(found[part], expected[part], strict=True)
        ):
            torch.testing.assert_close(one.cpu(), other, atol=1e-4, rtol=1e-4)


def test_a_device_that_draws_otherwise_has_its_tokens_read_one_by_one(monkeypatch):
    device, draw, before = torch.device(NAME, 0), device_choice._draw, torch.get_rng_state()
    probe = device_choice._draws_as_plain_decoding
    probe.cache_clear()
    assert device_choice.can_choose_on(device, [], do_sample=True)
    assert torch.equal(torch.get_rng_state(), before)
    probe.cache_clear()
    monkeypatch.setattr(device_choice, "_draw", lambda probabilities: (draw(probabilities)[0] + 1, []))
    try:
        for asked in watched_rounds("eager", partial(by_script, "right"), 1, SAMPLED):
            assert asked.waits == 3 * WIDTH  # `torch.multinomial` waits twice itself
    finally:
        probe.cache_clear()


def test_stop_strings_are_found_without_a_wait(tiny_tokenizer):
    options = GREEDY | {"stop_strings": ["Q"], "tokenizer": tiny_tokenizer}
    for asked in watched_rounds("eager", partial(by_script, "right"), 1, options):
        assert (asked.waits, asked.uploads) == (1, 2)


def test_invalid_probabilities_are_refused_as_in_plain_decoding():
    plain, model = two("llama")
    TIDEModelForCausalLM.attach(model)
    for one, batch in ((plain, prompts()), (model, there(prompts()))):
        with pytest.raises(RuntimeError, match="probability tensor contains"):
            answer(one, batch, **SAMPLED, suppress_tokens=list(range(VOCAB)))


def test_rows_that_accept_apart_have_the_base_models_distribution():
    model = model_for_sampling().to(NAME)
    check_distribution(model)
