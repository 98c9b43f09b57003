"""Which exit layers calibration keeps; no model needed."""

import pytest
import torch

from tide_hf.calibration.selection import (
    MIN_EXIT_RATE,
    Candidate,
    draft_cost,
    exit_rates_within,
    useful_exit_layers,
)
from tide_hf.calibration.threshold import Decisions


def candidates(**figures):
    """Keyword `l8=(0.4, 0.0)` is layer 8 of 32 with its agreement and exit rate."""
    return {
        int(name[1:]): Candidate(agreement, draft_cost(int(name[1:]), 32, 0.2, 0.2), exit_rate)
        for name, (agreement, exit_rate) in figures.items()
    }


def test_a_layer_that_is_dearer_and_no_better_is_dropped():
    assert useful_exit_layers(candidates(l4=(0.4, 0.0), l8=(0.4, 0.0), l12=(0.39, 0.0))) == [4]


def test_cheap_and_good_ones_may_both_be_best_somewhere():
    assert useful_exit_layers(candidates(l4=(0.62, 0.0), l8=(0.8, 0.0), l28=(0.81, 0.0))) == [4, 8]


def test_a_layer_where_tokens_leave_is_kept():
    assert useful_exit_layers(candidates(l4=(0.5, 0.0), l28=(0.5, MIN_EXIT_RATE))) == [4, 28]
    assert useful_exit_layers(candidates(l4=(0.5, 0.0), l28=(0.5, MIN_EXIT_RATE / 2))) == [4]


def test_a_dear_head_may_pay_by_a_single_token_and_a_cheap_one_by_many():
    assert useful_exit_layers(candidates(l4=(0.3, 0.0), l20=(0.9, 0.0))) == [4, 20]


def test_a_layer_that_pays_on_easier_text_is_kept():
    assert useful_exit_layers(candidates(l4=(0.03, 0.0), l28=(0.5, MIN_EXIT_RATE))) == [4, 28]
    assert useful_exit_layers(candidates(l4=(0.0001, 0.0), l28=(0.5, MIN_EXIT_RATE))) == [28]


def test_the_one_nearest_to_plain_decoding_is_kept_where_none_pays():
    assert useful_exit_layers(candidates(l20=(0.0, 0.0), l28=(0.01, 0.0))) == [28]
    assert useful_exit_layers(candidates(l8=(0.0, 0.0), l12=(0.001, 0.0), l28=(0.001, 0.0))) == [12]
    assert useful_exit_layers(candidates(l28=(0.0, 0.0))) == [28]


def test_costs_go_as_the_weights_that_are_read():
    assert draft_cost(8, 32, head_share=0.0, vocab_share=1.0) == 0.25
    assert draft_cost(32, 32, head_share=0.3, vocab_share=1.0) == pytest.approx(1.0)
    assert draft_cost(8, 32, head_share=0.5, vocab_share=0.1) == pytest.approx(0.125 + 0.05)


def test_tokens_leave_at_the_lowest_threshold_within_the_tolerance():
    scores = torch.tensor([[0.99, 0.2], [0.3, 0.8], [0.6, 0.9], [0.1, 0.2]])
    agrees = torch.tensor([[True, True], [True, True], [False, True], [False, False]])
    made = Decisions([1, 3], 4, scores, agrees, torch.tensor([0, 1, 2, 3]))
    assert exit_rates_within(made, 0.1) == {1: 0.25, 3: 0.5}  # at 0.61: one more would be wrong
    assert exit_rates_within(made, 0.9) == {1: 0.5, 3: 0.25}
    wrong = Decisions([1], 4, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool), torch.tensor([0, 1]))
    assert exit_rates_within(wrong, 0.1) == {1: 0.0}
