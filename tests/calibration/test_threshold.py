"""The rule that chooses a threshold: what leaves, p-values and intervals, and the promise that it keeps."""

import math

import pytest
import torch
from torch.distributions import Bernoulli, kl_divergence

from tide_hf.calibration.threshold import Decisions, choose_threshold, clopper_pearson, hoeffding_bentkus_p_value
from tide_hf.routers.config import NEVER_EXIT

pytestmark = pytest.mark.usefixtures("one_thread")


def decisions(scores, agrees, documents):
    return Decisions([1, 3], 4, torch.tensor(scores), torch.tensor(agrees), torch.tensor(documents))


def test_a_token_leaves_at_the_earliest_layer_that_is_sure():
    made = decisions([[0.9, 0.2], [0.1, 0.95], [0.1, 0.2]], [[False, True], [True, True], [False, False]], [0, 0, 1])
    assert made.disagreement_per_document(0.5).tolist() == [0.5, 0.0]
    assert made.depth_fraction(0.5) == pytest.approx((1 + 3 + 4) / 3 / 4)
    assert made.exit_rates(0.5) == {1: pytest.approx(1 / 3), 3: pytest.approx(1 / 3)}
    assert made.disagreement_per_document(0.99).tolist() == [0.0, 0.0]


def test_p_values_against_a_simulation():
    """At the edge of the hypothesis a p-value below 5% turns up at most 5% of the time, and sometimes."""
    generator = torch.Generator().manual_seed(0)
    means = (torch.rand(4000, 300, generator=generator) < 0.1).double().mean(dim=1)
    rejected = sum(hoeffding_bentkus_p_value(float(mean), 300, 0.1) <= 0.05 for mean in means) / 4000
    assert 0.001 < rejected <= 0.05
    assert hoeffding_bentkus_p_value(0.0, 300, 0.1) < 1e-6
    assert hoeffding_bentkus_p_value(0.5, 300, 0.1) == 1.0
    assert hoeffding_bentkus_p_value(0.0, 372, 0.02) == pytest.approx(0.98**372, rel=0.01)


@pytest.mark.parametrize(("mean", "count"), [(0.05, 20), (0.02, 50), (0.0, 20), (0.09, 300)])
def test_p_values_where_hoeffding_s_bound_is_the_smaller(mean, count):
    coins = (Bernoulli(torch.tensor(share, dtype=torch.float64)) for share in (mean, 0.1))
    expected = math.exp(-count * float(kl_divergence(*coins)))
    assert hoeffding_bentkus_p_value(mean, count, 0.1) == pytest.approx(expected)


def test_exact_interval_of_a_probability():
    # 5 of 100 at 95%: 1.64% to 11.28%, as tables of Clopper and Pearson's interval have it
    assert clopper_pearson(5, 100, 0.95) == pytest.approx((0.016432, 0.112835), abs=1e-6)
    assert clopper_pearson(0, 100, 0.95) == (0.0, pytest.approx(1 - 0.025**0.01))
    assert clopper_pearson(100, 100, 0.95) == (pytest.approx(0.025**0.01), 1.0)


def simulated_risk(rule, trials=1500) -> float:
    """How often a rule chooses a threshold whose true disagreement exceeds the tolerance.

    Every document is one token; it disagrees with a probability that grows as the threshold falls.
    """
    generator = torch.Generator().manual_seed(1)
    grid = (0.9, 0.8, 0.7, 0.6, 0.5)
    true_risk = dict(zip(grid, (0.02, 0.05, 0.101, 0.2, 0.3), strict=True))
    exceeded = 0
    for _ in range(trials):
        draws = torch.rand(150, generator=generator)
        losses = {t: (draws < risk).double() for t, risk in true_risk.items()}
        exceeded += true_risk.get(rule(losses, grid), 0.0) > 0.1
    return exceeded / trials


def chosen(losses, grid, behind=0):
    """Run the real procedure on given losses, `behind` places past what it says."""

    class Fixed(Decisions):
        def disagreement_per_document(self, t):
            return losses[t]

        def depth_fraction(self, t):
            return 1.0

    made = Fixed([1], 2, torch.zeros(1, 1), torch.zeros(1, 1), torch.zeros(1))
    choice = choose_threshold(made, tolerance=0.1, confidence=0.9, grid=grid).chosen
    return grid[min(grid.index(choice) + behind, len(grid) - 1)] if choice in grid else choice


def test_the_promised_risk_is_kept():
    assert simulated_risk(chosen) <= 0.1


def test_an_off_by_one_in_the_rule_breaks_the_promise():
    assert simulated_risk(lambda losses, grid: chosen(losses, grid, behind=1)) > 0.1


def test_nothing_behind_the_first_failure_is_certified():
    losses = {0.9: torch.zeros(150).double(), 0.8: torch.ones(150).double(), 0.7: torch.zeros(150).double()}
    assert chosen(losses, (0.9, 0.8, 0.7)) == 0.9
    assert chosen(losses, (0.8, 0.7)) == NEVER_EXIT
