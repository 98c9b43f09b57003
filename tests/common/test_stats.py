"""`ExitStats`: figures derived from its counts."""

import json

import torch
from families import VOCAB, tiny_model

from tide_hf import ExitStats, TIDEModelForCausalLM, TIDERouters


def test_figures_are_derived_from_the_counts():
    stats = ExitStats("self_speculative", 10, layers_executed=45, per_token=[[10, 4, 0, 10, 10]])
    stats.rounds, stats.drafted, stats.accepted = 3, 4, 2
    assert stats.total_tokens == 5
    assert stats.exits_per_layer == {0: 1, 4: 1}
    assert stats.exit_rate == 0.4
    assert stats.depth_fraction == 0.9
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 5 / 3
    derived = {"total_tokens", "exits_per_layer", "exit_rate", "depth_fraction", "acceptance_rate"}
    found = json.loads(json.dumps(stats.to_dict()))
    assert found.keys() == vars(stats).keys() | derived | {"mean_acceptance_length"}
    assert found["acceptance_rate"] == 0.5
    assert stats.summary().splitlines() == [
        "self_speculative: 5 tokens, 9.0 of 10 layers per token (90%)",
        "2 of 4 draft tokens accepted (50%), 1.67 tokens per round",
        "n-grams: 1 tokens (20%)",
        "exit layer 4: 1 tokens (20%)",
    ]


def test_an_empty_call_divides_by_zero_nowhere():
    stats = ExitStats("early_exit", 10)
    assert stats.exit_rate == stats.depth_fraction == stats.acceptance_rate == stats.mean_acceptance_length == 0.0
    assert "0 tokens" in stats.summary()


def test_rows_that_end_early_count_their_own_tokens():
    model = tiny_model("llama")
    prompt = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(3))
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[:, 9:].tolist()
    eos = next(token for token in tokens[0] if token not in tokens[1])
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), mode="early_exit")
    model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=eos)
    lengths = [len(row) for row in model.last_exit_stats.per_token]
    assert lengths == [tokens[0].index(eos) + 1, 12]
