"""The choice of the threshold and of exit layers, the guarantee that it keeps, and bootstrap intervals."""

import math

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from tide_hf.calibration.threshold import (
    MIN_EXIT_RATE,
    Bootstrap,
    Candidate,
    Decisions,
    choose_threshold,
    clopper_pearson,
    exit_rates_within,
    hoeffding_bentkus_p_value,
    mean_interval,
    useful_exit_layers,
)
from tide_hf.routers.config import NEVER_EXIT
from tide_hf.speculation.policy import draft_cost

pytestmark = pytest.mark.usefixtures("one_thread")


def decisions(scores, agrees, documents):
    return Decisions([1, 3], 4, torch.tensor(scores), torch.tensor(agrees), torch.tensor(documents))


def test_a_token_exits_at_the_first_layer_whose_score_reaches_the_threshold():
    made = decisions([[0.9, 0.2], [0.1, 0.95], [0.1, 0.2]], [[False, True], [True, True], [False, False]], [0, 0, 1])
    assert made.disagreement_per_document(0.5).tolist() == [0.5, 0.0]
    assert made.depth_fraction(0.5) == pytest.approx((1 + 3 + 4) / 3 / 4)
    assert made.exit_rates(0.5) == {1: pytest.approx(1 / 3), 3: pytest.approx(1 / 3)}
    assert made.disagreement_per_document(0.99).tolist() == [0.0, 0.0]


# The guarantee


def test_p_values_of_known_cases():
    assert hoeffding_bentkus_p_value(0.0, 300, 0.1) < 1e-6
    assert hoeffding_bentkus_p_value(0.5, 300, 0.1) == 1.0
    assert hoeffding_bentkus_p_value(0.0, 372, 0.02) == pytest.approx(0.98**372, rel=0.01)
    coins = (Bernoulli(torch.tensor(share, dtype=torch.float64)) for share in (0.05, 0.1))
    hoeffding = math.exp(-20 * float(kl_divergence(*coins)))  # the smaller bound for few documents
    assert hoeffding_bentkus_p_value(0.05, 20, 0.1) == pytest.approx(hoeffding)


def chosen(losses, grid, offset=0):
    """The threshold that the real procedure chooses for given losses, or one `offset` places further down the grid."""

    class Fixed(Decisions):
        def disagreement_per_document(self, t):
            return losses[t]

        def depth_fraction(self, t):
            return 1.0

    made = Fixed([1], 2, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))
    choice = choose_threshold(made, tolerance=0.1, confidence=0.9, grid=grid).chosen
    return grid[min(grid.index(choice) + offset, len(grid) - 1)] if choice in grid else choice


@pytest.mark.parametrize("offset", [0, 1])
def test_the_promised_risk_is_kept_and_an_off_by_one_would_break_it(offset):
    """How often the true disagreement at the chosen threshold exceeds the tolerance.

    Every document is one token; it disagrees with a probability that grows as the threshold falls.
    """
    generator = torch.Generator().manual_seed(1)
    grid = (0.9, 0.8, 0.7, 0.6, 0.5)
    true_risk = dict(zip(grid, (0.02, 0.05, 0.101, 0.2, 0.3), strict=True))
    exceeded = 0
    for _ in range(1500):
        draws = torch.rand(150, generator=generator)
        losses = {t: (draws < risk).double() for t, risk in true_risk.items()}
        exceeded += true_risk.get(chosen(losses, grid, offset), 0.0) > 0.1
    assert (exceeded / 1500 <= 0.1) == (offset == 0)


def test_nothing_after_the_first_failure_is_certified():
    losses = {0.9: torch.zeros(150).double(), 0.8: torch.ones(150).double(), 0.7: torch.zeros(150).double()}
    assert chosen(losses, (0.9, 0.8, 0.7)) == 0.9
    assert chosen(losses, (0.8, 0.7)) == NEVER_EXIT


# Intervals


def test_exact_interval_of_a_probability():
    # 5 of 100 at 95%: 1.64% to 11.28%, as tables of Clopper and Pearson's interval have it
    assert clopper_pearson(5, 100, 0.95) == pytest.approx((0.016432, 0.112835), abs=1e-6)
    assert clopper_pearson(0, 100, 0.95) == (0.0, pytest.approx(1 - 0.025**0.01))
    assert clopper_pearson(100, 100, 0.95) == (pytest.approx(0.025**0.01), 1.0)


def test_the_bootstrap_gives_binomial_intervals_and_pairs_items():
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


@pytest.mark.parametrize(("share", "limits"), [(0.0, (0.0, 1.0)), (1.0, (0.0, 1.0)), (0.0, (-1.0, 1.0))])
def test_items_that_do_not_vary_have_the_interval_of_zero_successes(share, limits):
    bootstrap = Bootstrap({"items": torch.ones(20), "right": torch.full((20,), share)}, confidence=0.95)
    slack = 1 - 0.025 ** (1 / 20)
    found = bootstrap.figure(lambda sums: sums["right"] / sums["items"], limits=limits)
    expected = [max(limits[0], share - slack), min(limits[1], share + slack)]
    assert found == {"value": share, "interval": pytest.approx(expected)}
    assert bootstrap.figure(lambda sums: sums["right"] / sums["items"])["interval"] is None
    bounds = max(0.0, share - slack), min(1.0, share + slack)
    assert mean_interval(torch.full((20,), share).double(), 0.95) == pytest.approx(bounds)


# Exit layers


@pytest.mark.parametrize(
    ("candidates", "kept"),
    [
        # layer of 32: (agreement, exit rate)
        ({4: (0.4, 0.0), 8: (0.4, 0.0), 12: (0.39, 0.0)}, [4]),  # the others cost more and are no better
        ({4: (0.62, 0.0), 8: (0.8, 0.0), 28: (0.81, 0.0)}, [4, 8]),  # each is the fastest on some machine
        ({4: (0.3, 0.0), 20: (0.9, 0.0)}, [4, 20]),  # one for short drafts, one for long ones
        ({4: (0.5, 0.0), 28: (0.5, MIN_EXIT_RATE)}, [4, 28]),  # tokens exit there
        ({4: (0.5, 0.0), 28: (0.5, MIN_EXIT_RATE / 2)}, [4]),
        ({4: (0.03, 0.0), 28: (0.5, MIN_EXIT_RATE)}, [4, 28]),  # it pays on easier text
        ({4: (0.0001, 0.0), 28: (0.5, MIN_EXIT_RATE)}, [28]),
        ({20: (0.0, 0.0), 28: (0.01, 0.0)}, [28]),  # none pays: the nearest to plain decoding
        ({28: (0.0, 0.0)}, [28]),
    ],
)
def test_layers_that_are_useful_on_some_machine_and_text_are_kept(candidates, kept):
    figures = {
        layer: Candidate(agreement, draft_cost(layer, 32, 0.2, 0.2), exit_rate)
        for layer, (agreement, exit_rate) in candidates.items()
    }
    assert useful_exit_layers(figures) == kept


def test_exit_rates_are_those_of_the_lowest_threshold_within_the_tolerance():
    scores = [[0.99, 0.2], [0.3, 0.8], [0.6, 0.9], [0.1, 0.2]]
    made = decisions(scores, [[True, True], [True, True], [False, True], [False, False]], [0, 1, 2, 3])
    assert exit_rates_within(made, 0.1) == {1: 0.25, 3: 0.5}  # at 0.61: one more would be wrong
    assert exit_rates_within(made, 0.9) == {1: 0.5, 3: 0.25}
    wrong = Decisions([1], 4, torch.ones(2, 1), torch.zeros(2, 1, dtype=torch.bool), torch.tensor([0, 1]))
    assert exit_rates_within(wrong, 0.1) == {1: 0.0}
