"""``RowCriterion`` receives every row of a batch token by token, and can end each by itself."""

import pytest
import torch
from drafters import use_drafter
from families import VOCAB, tiny_model
from transformers.generation.stopping_criteria import MaxTimeCriteria

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.speculation.rows import RowCriterion

ROWS, PROMPT, NEW = 4, 10, 16
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LIMITS = (1, 16, 5, 9)


class Limits(RowCriterion):
    """Ends each row after so many tokens, and records the tokens."""

    def __init__(self):
        self.seen = [[] for _ in range(ROWS)]

    def stops_row(self, index, token):
        self.seen[index].append(token)
        return len(self.seen[index]) >= LIMITS[index]


@pytest.fixture
def prompts():
    return torch.randint(3, VOCAB, (ROWS, PROMPT), generator=torch.Generator().manual_seed(0))


def tokens_of(model, ids, **options):
    return model.generate(ids, **OPTIONS, **options)[:, PROMPT:].tolist()


@pytest.mark.parametrize(
    ("family", "kind", "others"),
    [
        ("llama", "wrong", []),
        ("gemma3_text", "mixed", []),
        ("llama", "mixed", [MaxTimeCriteria(10**6)]),  # because of which all rows advance together
    ],
)
def test_it_gets_each_rows_tokens_and_rows_that_ended_cost_nothing_more(family, kind, others, prompts):
    model, limits = tiny_model(family), Limits()
    plain = tokens_of(model, prompts)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, plain)
    result = tokens_of(model, prompts, stopping_criteria=[limits, *others])
    assert limits.seen == [row[:limit] for row, limit in zip(plain, LIMITS, strict=True)]
    assert result == [row[:limit] + [0] * (NEW - limit) for row, limit in zip(plain, LIMITS, strict=True)]
    assert [len(row) for row in model.last_exit_stats.per_token] == list(LIMITS)
    if kind == "wrong":  # one pass over the rows that still decode for each token
        assert model.last_exit_stats.layers_executed == 4 * sum(LIMITS)


@pytest.mark.parametrize("mode", ["plain", "early_exit", "post_hoc"])
def test_it_ends_rows_in_other_modes(mode, prompts):
    model, limits = tiny_model("llama"), Limits()
    if mode != "plain":
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), mode=mode)
    whole = tokens_of(model, prompts)
    result = tokens_of(model, prompts, stopping_criteria=[limits])
    assert result == [row[:limit] + [0] * (NEW - limit) for row, limit in zip(whole, LIMITS, strict=True)]
    for seen, row, limit in zip(limits.seen, whole, LIMITS, strict=True):
        assert seen[:limit] == row[:limit]
