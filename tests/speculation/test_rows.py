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


@pytest.mark.parametrize(("family", "kind"), [("llama", "wrong"), ("gemma3_text", "mixed"), ("gpt2", "mixed")])
def test_rows_that_ended_cost_nothing_more(family, kind, prompts):
    model = tiny_model(family)
    plain = model.generate(prompts, **OPTIONS)[:, PROMPT:].tolist()
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, plain)
    limits = Limits()
    result = model.generate(prompts, stopping_criteria=[limits], **OPTIONS)[:, PROMPT:].tolist()
    for row, limit in enumerate(LIMITS):
        assert limits.seen[row] == plain[row][:limit]
        assert result[row] == plain[row][:limit] + [0] * (NEW - limit)
    assert [len(row) for row in model.last_exit_stats.per_token] == list(LIMITS)
    if kind == "wrong":  # one pass over the rows that still decode for each token
        assert model.last_exit_stats.layers_executed == 4 * sum(LIMITS)


def test_it_is_not_called_for_ended_rows_where_all_rows_advance_together(prompts):
    model = tiny_model("llama")
    plain = model.generate(prompts, **OPTIONS)[:, PROMPT:].tolist()
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", plain)
    limits = Limits()
    model.generate(prompts, stopping_criteria=[limits, MaxTimeCriteria(10**6)], **OPTIONS)
    assert limits.seen == [row[:limit] for row, limit in zip(plain, LIMITS, strict=True)]


@pytest.mark.parametrize("mode", ["plain", "early_exit", "post_hoc"])
def test_it_ends_rows_in_other_modes(mode, prompts):
    model = tiny_model("llama")
    if mode != "plain":
        TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), mode=mode)
    whole = model.generate(prompts, **OPTIONS)[:, PROMPT:].tolist()
    limits = Limits()
    result = model.generate(prompts, stopping_criteria=[limits], **OPTIONS)[:, PROMPT:].tolist()
    for row, limit in enumerate(LIMITS):
        assert limits.seen[row][:limit] == whole[row][:limit]
        assert result[row] == whole[row][:limit] + [0] * (NEW - limit)
