"""Intervals by bootstrap, against the binomial and where nothing varies."""

import math

import pytest
import torch

from tide_hf.evaluation.intervals import Bootstrap


def test_the_bootstrap_knows_the_binomial_and_pairs_items():
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(400, generator=generator) < 0.3
    other = right.clone()
    other[:8] = ~other[:8]
    bootstrap = Bootstrap({"items": torch.ones(400), "right": right, "other": other}, confidence=0.95)
    share = bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=(0.0, 1.0))
    deviation = math.sqrt(share["value"] * (1 - share["value"]) / 400)
    for end, sign in zip(share["interval"], (-1, 1), strict=True):
        assert end == pytest.approx(share["value"] + sign * 1.96 * deviation, abs=0.35 * deviation)
    low, high = bootstrap.figure(lambda sums: (sums["other"] - sums["right"]) / sums["items"])["interval"]
    assert high - low < 0.5 * (share["interval"][1] - share["interval"][0])


def test_where_nothing_varies_the_interval_is_still_not_empty():
    bootstrap = Bootstrap({"items": torch.ones(20), "right": torch.zeros(20)}, confidence=0.95)
    exact = 1 - 0.025 ** (1 / 20)
    share = bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=(0.0, 1.0))
    assert share == {"value": 0.0, "interval": [0.0, pytest.approx(exact)]}
    share = bootstrap.figure(lambda sums: 1 - sums["right"] / sums["items"], limits=(0.0, 1.0))
    assert share["interval"] == [pytest.approx(1 - exact), 1.0]
    share = bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=(-1.0, 1.0))
    assert share["interval"] == [pytest.approx(-exact), pytest.approx(exact)]
    assert bootstrap.figure(lambda sums: sums["right"] / sums["items"])["interval"] is None
