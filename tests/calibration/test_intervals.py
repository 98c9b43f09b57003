"""Intervals by bootstrap, against the binomial and where nothing varies."""

import math

import pytest
import torch

from tide_hf.calibration.threshold import RESAMPLES, Bootstrap, mean_interval, resampled_sums


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


@pytest.mark.parametrize("at_once", [21, 20, 1])
def test_many_items_are_resampled_in_parts(monkeypatch, at_once):
    values = torch.rand(7, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole, sizes, randint = resampled_sums(values), [], torch.randint

    def drawn(high, size, **options):
        sizes.append(math.prod(size))
        return randint(high, size, **options)

    monkeypatch.setattr("tide_hf.calibration.threshold.RESAMPLED_AT_ONCE", at_once)
    monkeypatch.setattr(torch, "randint", drawn)
    assert torch.equal(resampled_sums(values), whole)
    assert sum(sizes) == 7 * RESAMPLES
    assert max(sizes) <= max(7, at_once)


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


@pytest.mark.parametrize(("layer", "num_layers"), [(4, 30), (16, 30), (12, 28)])
def test_rounding_is_no_variation(layer, num_layers):
    tokens = torch.randint(5, 60, (40,), generator=torch.Generator().manual_seed(0))
    depth = torch.stack([torch.full((int(count),), layer).double().div(num_layers).sum() for count in tokens])
    bootstrap = Bootstrap({"tokens": tokens, "depth": depth}, confidence=0.95)
    low, high = bootstrap.figure(lambda sums: sums["depth"] / sums["tokens"], limits=(0.0, 1.0))["interval"]
    assert high - low > 0.1
    assert bootstrap.figure(lambda sums: (sums["depth"] / sums["tokens"]).exp())["interval"] is None


@pytest.mark.parametrize(("loss", "count"), [(0.0, 20), (0.25, 3), (0.25, 1), (1.0, 3)])
def test_a_mean_that_does_not_vary_is_uncertain_by_what_one_item_in_n_moves(loss, count):
    slack = 1 - 0.025 ** (1 / count)
    expected = (max(0.0, loss - slack), min(1.0, loss + slack))
    assert mean_interval(torch.full((count,), loss).double(), 0.95) == pytest.approx(expected)
