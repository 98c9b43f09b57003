"""`ExitStats`: figures derived from its counts."""

import json

from tide_hf import ExitStats


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
    empty = ExitStats("early_exit", 10)
    assert empty.exit_rate == empty.depth_fraction == empty.acceptance_rate == empty.mean_acceptance_length == 0.0
    assert "0 tokens" in empty.summary()
