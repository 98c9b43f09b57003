"""What ends a call ends it where plain decoding ends, whatever is drafted."""

import pytest
import torch
from drafters import use_drafter
from families import tiny_model
from interruptions import Stops
from on_steps import ATTACH, prompts
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria

from tide_hf.common.errors import UnsupportedOptionError

PROMPT = 12
LEARNED = dict.fromkeys(("n_positions", "max_position_embeddings"), 30)  # positions, as gpt2 and opt call them
OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def both(make_options, rows=1, kind="right", family="llama", engine="eager", **config):
    """Sequences of plain decoding, and those of drafts of seven tokens; options with state are made for each."""
    model, ids = tiny_model(family, **config), prompts(rows, length=PROMPT)["input_ids"]
    expected = model.generate(ids, **{**OPTIONS, **make_options()})
    ATTACH[engine](model)
    use_drafter(model, kind, [row + [5] * 20 for row in expected[:, PROMPT:].tolist()], width=7)
    return expected, model.generate(ids, **{**OPTIONS, **make_options()})


@pytest.mark.parametrize(
    ("criteria", "rows", "length"),
    [
        ([MaxLengthCriteria(20)], 1, 20),  # takes the place of the config's maximum, which is lower
        ([MaxLengthCriteria(16), MaxLengthCriteria(30)], 1, 16),
        ([MaxLengthCriteria(5)], 1, PROMPT + 1),
        ([Stops(lambda ids: torch.full((len(ids),), ids.shape[1] > 13))], 2, 14),
    ],
)
def test_criteria_end_a_call_where_plain_decoding_ends(criteria, rows, length):
    expected, found = both(lambda: {"max_new_tokens": 3, "stopping_criteria": criteria}, rows)
    assert expected.shape[1] == length
    assert torch.equal(found, expected)


def test_an_eos_criterion_may_hold_one_token_without_a_dimension():
    eos = both(dict)[0][0, PROMPT + 4]
    expected, found = both(lambda: {"stopping_criteria": [EosTokenCriteria(eos)]})
    assert expected.shape[1] <= PROMPT + 5
    assert torch.equal(found, expected)


def test_a_streamer_gets_a_token_after_the_criteria():
    """So that a criterion that looks at what was streamed ends both alike."""

    class Streamer(list):
        put = list.append

        def end(self):
            pass

    def options():
        streamer = Streamer()
        stops = Stops(lambda ids: torch.full((len(ids),), len(streamer) >= 6))
        return {"streamer": streamer, "stopping_criteria": [stops]}

    expected, found = both(options)
    assert expected.shape[1] < PROMPT + 20
    assert torch.equal(found, expected)


def test_time_ends_all_rows_of_a_batch_with_the_same_token(monkeypatch):
    """A row whose drafts are right does not run ahead of one whose drafts are wrong, which had to catch up."""
    now = iter(range(1000))
    monkeypatch.setattr("transformers.generation.stopping_criteria.time.time", lambda: next(now))

    def options():
        return {"stopping_criteria": [MaxTimeCriteria(9.5, initial_timestamp=next(now))]}

    expected, found = both(options, rows=2, kind="mixed")
    assert expected.shape[1] < PROMPT + 20
    assert torch.equal(found, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_criterion_may_return_a_column(rows):
    """As transformers documents it."""
    expected, _ = both(lambda: {"max_new_tokens": 8}, rows)
    column = Stops(lambda ids: torch.full((len(ids), 1), ids.shape[1] > 19))
    assert torch.equal(both(lambda: {"stopping_criteria": [column]}, rows)[1], expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_criteria_get_the_scores_of_earlier_steps_without_new_copies(rows):
    """Copies at each token would take time and memory that grow with the square of the answer."""

    class Keeps(list, StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            self.append(scores)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    kept = []

    def options():
        kept.append(Keeps())
        return {"stopping_criteria": [kept[-1]], "return_dict_in_generate": True, "output_scores": True}

    model, ids = tiny_model("llama"), prompts(rows, length=PROMPT)["input_ids"]
    model.generate(ids, **{**OPTIONS, **options()})
    ATTACH["eager"](model)
    model.generate(ids, **{**OPTIONS, **options()})
    expected, found = kept
    assert len(expected) == len(found) == 40
    for position, scores in enumerate(found):
        assert all(one is last for one, last in zip(scores, found[-1], strict=False))
        torch.testing.assert_close(scores, expected[position], atol=1e-3, rtol=1e-3)


AT_THE_LAST = {"max_new_tokens": 100, "stopping_criteria": [Stops(lambda ids: ids.shape[1] >= 30)]}


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
@pytest.mark.parametrize(
    ("options", "rows", "kind", "length"),
    [(AT_THE_LAST, 1, "right", 30), ({"max_new_tokens": 30 - PROMPT + 1}, 3, "mixed", 31)],
)
def test_drafts_end_where_learned_positions_do(options, rows, kind, length, family, engine):
    """A wider pass has no position for what is beyond; a row that is there waits for the others."""
    expected, found = both(lambda: options, rows, kind, family, engine, **LEARNED)
    assert expected.shape[1] == length
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("engine", "error"), [("eager", IndexError), ("compiled", UnsupportedOptionError)])
@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_an_answer_beyond_the_learned_positions_fails_on_any_engine(family, engine, error):
    model, batch = tiny_model(family, **LEARNED), prompts(1, length=PROMPT)
    ATTACH[engine](model)
    with pytest.raises(error, match=r"index out of range|at position 30\. Expected positions below 30\."):
        model.generate(**batch, **{**OPTIONS, "max_new_tokens": 30})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_rows_have_token_types_of_their_own_and_ids_may_have_32_bits(dtype):
    model, batch = tiny_model("gpt2"), prompts(2, length=PROMPT)
    batch["token_type_ids"] = torch.tensor([[0], [7]]).expand(-1, PROMPT)
    batch["input_ids"] = batch["input_ids"].to(dtype)
    expected = model.generate(**batch, **OPTIONS)
    ATTACH["eager"](model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    found = model.generate(**batch, **OPTIONS)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
