"""What ends a call ends it where it ends plain decoding, whatever was drafted."""

import pytest
import torch
from drafters import use_drafter
from families import tiny_model
from stopping_calls import ATTACH, OPTIONS, PROMPT, prompts
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from tide_hf import TIDEModelForCausalLM


def both(make_options, rows=1, kind="right", family="llama", engine="eager", **settings):
    """Sequences of plain decoding, and of drafts of seven tokens."""
    model, ids = tiny_model(family, **settings), prompts(rows)
    expected = model.generate(ids, **{**OPTIONS, **make_options()})
    continuations = [row + [5] * 20 for row in expected[:, PROMPT:].tolist()]
    ATTACH[engine](model)
    use_drafter(model, kind, continuations, width=7)
    return expected, model.generate(ids, **{**OPTIONS, **make_options()})


class Callers(StoppingCriteria):
    """A criterion of the caller's own."""

    def __init__(self, stops):
        self.stops = stops

    def __call__(self, input_ids, scores, **kwargs):
        return self.stops(input_ids)


@pytest.mark.parametrize(("lengths", "length"), [([20], 20), ([16, 30], 16), ([5], PROMPT + 1)])
def test_a_max_length_of_the_callers_takes_the_place_of_the_configs(lengths, length):
    expected, found = both(
        lambda: {"max_new_tokens": 3, "stopping_criteria": [MaxLengthCriteria(one) for one in lengths]}
    )
    assert expected.shape[1] == length
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_criterion_may_answer_with_a_column(rows):
    """As transformers documents it."""
    expected, _ = both(lambda: {"max_new_tokens": 10}, rows)
    _, found = both(
        lambda: {
            "max_new_tokens": 10,
            "stopping_criteria": [Callers(lambda ids: torch.full((len(ids), 1), ids.shape[1] > 19))],
        },
        rows,
    )
    assert torch.equal(found, expected[:, :20])


def test_an_eos_criterion_of_one_token_without_a_dimension():
    eos = both(lambda: {"max_new_tokens": 10})[0][0, PROMPT + 4]
    expected, found = both(lambda: {"max_new_tokens": 10, "stopping_criteria": [EosTokenCriteria(eos)]})
    assert expected.shape[1] <= PROMPT + 5
    assert torch.equal(found, expected)


def test_a_streamer_hears_of_a_token_behind_the_criteria():
    """So that a criterion that looks at what was streamed ends both alike."""

    def options():
        heard = []

        class Streamer:
            def put(self, tokens):
                heard.append(tokens)

            def end(self):
                pass

        stops = Callers(lambda ids: torch.full((len(ids),), len(heard) >= 6))
        return {"max_new_tokens": 20, "streamer": Streamer(), "stopping_criteria": [stops]}

    expected, found = both(options)
    assert expected.shape[1] < PROMPT + 20
    assert torch.equal(found, expected)


def test_time_ends_all_rows_of_a_batch_with_the_same_token(monkeypatch):
    """A row whose drafts are right does not run ahead of one whose drafts are wrong, which had to catch up."""
    now = iter(range(1000))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(now))

    def options():
        return {"max_new_tokens": 40, "stopping_criteria": [MaxTimeCriteria(9.5, initial_timestamp=next(now))]}

    expected, found = both(options, rows=2, kind="mixed")
    assert expected.shape[1] < PROMPT + 20
    assert torch.equal(found, expected)


def test_token_ids_of_32_bits():
    model = tiny_model("llama")
    expected = model.generate(prompts(1).int(), max_new_tokens=4, **OPTIONS)
    found = TIDEModelForCausalLM.attach(model).generate(prompts(1).int(), max_new_tokens=4, **OPTIONS)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def test_rows_have_token_types_of_their_own():
    model, ids = tiny_model("gpt2"), prompts(2)
    types = torch.zeros_like(ids)
    types[1] = 7
    options = {**OPTIONS, "max_new_tokens": 12, "attention_mask": torch.ones_like(ids), "token_type_ids": types}
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_drafts_end_where_learnt_positions_do(family, engine):
    """Plain decoding may come as far as the last one; a wider pass has nowhere to stand."""
    last = 30
    name = "n_positions" if family == "gpt2" else "max_position_embeddings"
    expected, found = both(
        lambda: {"max_new_tokens": 100, "stopping_criteria": [Callers(lambda ids: ids.shape[1] >= last)]},
        family=family,
        engine=engine,
        **{name: last},
    )
    assert expected.shape[1] == last
    assert torch.equal(found, expected)
