"""Exit heads: the closed form against least squares, and distillation."""

import copy
import time

import pytest
import torch
from families import tiny_model

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import DraftUnembed, Unembed
from tide_hf.calibration.heads import PATIENCE, Moments, collect_moments, distil_head, draft_agreement, fit_head
from tide_hf.calibration.states import StateBatch, top_tokens

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = 2


@pytest.fixture(scope="module")
def problem():
    """States whose final ones are a fixed rotation of theirs, with noise, and an unembedding to read them."""
    model = tiny_model("llama")
    unembed = Unembed(model, find_structure(model))
    generator = torch.Generator().manual_seed(0)
    rotation = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q

    def batch(count):
        states = torch.randn(count, 32, generator=generator) * torch.linspace(0.2, 3, 32)
        states[:, 0] = states[:, 0] * 50 + 200  # like the few huge entries of real models
        noise = torch.randn(count, 32, generator=generator)
        final = (states * torch.tensor([0.02, *[1.0] * 31])) @ rotation + 0.5 * noise
        ids = torch.zeros(count, dtype=torch.long)
        tokens = top_tokens(unembed, final)
        return StateBatch({LAYER: states}, final, tokens, ids, torch.ones(count, dtype=torch.bool), ids)

    return model, unembed, batch(3000), batch(600)


def fitted(problem, rank=None, positions=3000):
    model, unembed, fit, tune = problem
    routers = TIDERouters.for_model(model, exit_layers=[LAYER], exit_strategy="linear", translator_rank=rank)
    head = routers[LAYER].head
    moments = collect_moments([fit.select(torch.arange(positions))], LAYER, torch.device("cpu"))
    fit_head(head, moments, tune.hidden_states[LAYER], tune.top_tokens, DraftUnembed(unembed))
    return head


def distil(problem, head, **options):
    _, unembed, fit, tune = problem
    return distil_head(head, LAYER, fit, tune, unembed, torch.arange(96), seed=0, **options)


def test_ridge_from_moments_is_the_weighted_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * 3 + 5
    translation = torch.randn(6, 6, generator=generator)
    y = x + x @ translation.T + torch.arange(6.0) + 0.1 * torch.randn(400, 6, generator=generator)
    weights = torch.rand(400, generator=generator) + 0.1
    moments = Moments(6)
    for part in torch.arange(400).split(150):
        moments.add(x[part], y[part], weights[part])
    solved, bias = moments.solve(penalty=0.0)
    ones = torch.cat([x, torch.ones(400, 1)], dim=1).double()
    root = weights.double().sqrt()[:, None]
    expected = torch.linalg.lstsq(ones * root, (y - x).double() * root).solution
    torch.testing.assert_close(solved, expected[:6].T.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bias, expected[6].float(), atol=1e-3, rtol=1e-3)
    shrunk, _ = moments.solve(penalty=100.0)
    assert shrunk.norm() < 0.1 * solved.norm()


def test_a_translator_of_low_rank_is_the_best_of_its_rank():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator) * torch.tensor([1.0, 2, 3, 1, 1, 1]) + 2
    strong = torch.randn(6, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    y = x + x @ strong.T + 1.5
    moments = Moments(6)
    moments.add(x, y, torch.ones(500))
    down, up, bias = moments.solve(0.0, rank=1)
    ours = (x + x @ (up @ down).T + bias - y).square().mean()
    singular = torch.linalg.svdvals((x - x.mean(0)) @ strong.T)
    torch.testing.assert_close(ours, singular[1:].square().sum() / y.numel(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("rank", "positions"), [(None, 40), (8, 3000)])
def test_distillation_raises_agreement(problem, monkeypatch, rank, positions):
    """A closed form of full rank has seen fewer positions: on as many, least squares is best for such states."""
    monkeypatch.setattr("tide_hf.calibration.heads.LEARNING_RATE", 1e-2)  # sixty steps are few
    head = fitted(problem, rank, positions)
    _, unembed, _, tune = problem
    judged = tune.hidden_states[LAYER], tune.top_tokens, DraftUnembed(unembed)
    before = draft_agreement(head, *judged)
    outcome = distil(problem, head)
    assert draft_agreement(head, *judged) > before + 0.05
    assert outcome["best_epoch"] > 0
    assert not outcome["stopped"]
    assert all(torch.equal(value, value.bfloat16().float()) for value in head.state_dict().values())  # as in the file


def test_distillation_that_makes_a_head_worse_or_has_no_time_leaves_it_as_it_was(problem, monkeypatch):
    head = fitted(problem)
    before = copy.deepcopy(head.state_dict())
    outcome = distil(problem, head, deadline=time.perf_counter())
    assert outcome == {"epochs": 0, "best_epoch": 0, "stopped": True}
    monkeypatch.setattr("tide_hf.calibration.heads.LEARNING_RATE", 10.0)
    assert distil(problem, head) == {"epochs": PATIENCE, "best_epoch": 0, "stopped": False}
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())
