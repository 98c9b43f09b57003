"""Sampling in `self_speculative` has the base model's distribution, whatever is drafted."""

from distribution import check_distribution, model_for_sampling


def test_tokens_and_sequences_have_the_base_models_distribution():
    check_distribution(model_for_sampling())
