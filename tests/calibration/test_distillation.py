"""Distillation of exit heads, and the choice of exit layers."""

import copy
import time

import pytest
import torch
from families import tiny_model

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import DraftUnembed, Unembed
from tide_hf.calibration.heads import (
    IGNORED,
    PATIENCE,
    FrequentUnembed,
    Moments,
    _Student,
    collect_moments,
    distil_head,
    draft_agreement,
    fit_head,
    frequent_tokens,
)
from tide_hf.calibration.routers import expected_calibration_error, platt_scaling, train_router
from tide_hf.calibration.states import StateBatch, top_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

LAYER = 2


@pytest.fixture(scope="module")
def problem():
    """States whose final ones are a fixed turn of the early ones, with noise, and an unembedding to read them."""
    model = tiny_model("llama")
    structure = find_structure(model)
    unembed = Unembed(model, structure)
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(32, 32, generator=generator)).Q

    def batch(count):
        states = torch.randn(count, 32, generator=generator) * torch.linspace(0.2, 3, 32)
        states[:, 0] = states[:, 0] * 50 + 200  # like the few huge entries of real models
        noise = torch.randn(count, 32, generator=generator)
        final = (states * torch.tensor([0.02, *[1.0] * 31])) @ turn + 0.5 * noise
        ids = torch.zeros(count, dtype=torch.long)
        tokens = top_tokens(unembed, final)
        return StateBatch({LAYER: states}, final, tokens, ids, torch.ones(count, dtype=torch.bool), ids)

    return model, unembed, batch(3000), batch(600)


def fitted(problem, rank=None, positions=3000):
    model, unembed, fit, tune = problem
    few = fit.select(torch.arange(positions))
    routers = TIDERouters.for_model(model, exit_layers=[LAYER], exit_strategy="linear", translator_rank=rank)
    head = routers[LAYER].head
    moments = collect_moments([few], LAYER, torch.device("cpu"))
    fit_head(head, moments, tune.hidden_states[LAYER], tune.top_tokens, DraftUnembed(unembed))
    return head


def agreement(problem, head):
    _, unembed, _, tune = problem
    return draft_agreement(head, tune.hidden_states[LAYER], tune.top_tokens, DraftUnembed(unembed))


@pytest.mark.parametrize(("rank", "positions"), [(None, 40), (8, 3000)])
def test_a_distilled_head_agrees_more_often(problem, monkeypatch, rank, positions):
    """A closed form of full rank has seen fewer positions: on as many, least squares is best for such states."""
    monkeypatch.setattr("tide_hf.calibration.heads.LEARNING_RATE", 1e-2)  # sixty steps are few
    _, unembed, fit, tune = problem
    head = fitted(problem, rank, positions)
    before = agreement(problem, head)
    outcome = distil_head(head, LAYER, fit, tune, unembed, torch.arange(96), seed=0)
    assert agreement(problem, head) > before + 0.05
    assert outcome["best_epoch"] > 0
    assert not outcome["stopped"]
    assert all(torch.equal(value, value.bfloat16().float()) for value in head.state_dict().values())


def test_it_never_leaves_a_head_worse_than_it_was(problem, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.heads.LEARNING_RATE", 10.0)
    _, unembed, fit, tune = problem
    head = fitted(problem)
    before = {name: value.clone() for name, value in head.state_dict().items()}
    outcome = distil_head(head, LAYER, fit, tune, unembed, torch.arange(96), seed=0)
    assert outcome == {"epochs": PATIENCE, "best_epoch": 0, "stopped": False}
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


def test_it_stops_in_time(problem):
    _, unembed, fit, tune = problem
    head = fitted(problem)
    before = copy.deepcopy(head.state_dict())
    outcome = distil_head(head, LAYER, fit, tune, unembed, torch.arange(96), 0, deadline=time.perf_counter())
    assert outcome == {"epochs": 0, "best_epoch": 0, "stopped": True}
    assert all(torch.equal(value, before[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize("rank", [None, 8])
def test_standardisation_changes_nothing_by_itself(problem, rank, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.heads.round_weights", lambda head: None)
    states = problem[2].hidden_states[LAYER]
    head = fitted(problem, rank)
    expected = head(states)
    student = _Student(head, states, torch.device("cpu"))
    torch.testing.assert_close(student(states), expected, atol=2e-3, rtol=1e-3)
    torch.nn.init.zeros_(next(head.parameters()))
    student.copy_to(head)
    torch.testing.assert_close(head(states), expected, atol=2e-3, rtol=1e-3)


def test_logits_of_frequent_tokens_are_the_models_own(problem):
    _, unembed, fit, _ = problem
    tokens = torch.tensor([3, 10, 50])
    frequent = FrequentUnembed(unembed, tokens)
    expected = unembed(fit.final_states[:5])[:, tokens].log_softmax(-1)
    torch.testing.assert_close(frequent(fit.final_states[:5]), expected)
    assert frequent.positions[[3, 10, 50, 4]].tolist() == [0, 1, 2, IGNORED]


def test_frequent_tokens_fill_up_by_id():
    counts = torch.tensor([0, 5, 0, 7, 0, 1])
    assert frequent_tokens(counts, 2).tolist() == [1, 3]
    assert frequent_tokens(counts, 4).tolist() == [0, 1, 3, 5]
    assert frequent_tokens(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_a_translator_of_low_rank_is_the_best_of_its_rank():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 6, generator=generator) * torch.tensor([1.0, 2, 3, 1, 1, 1]) + 2
    strong = torch.randn(6, 2, generator=generator) @ torch.randn(2, 6, generator=generator)
    y = x + x @ strong.T + 1.5
    moments = Moments(6)
    moments.add(x, y, torch.ones(500))
    down, up, bias = moments.solve(0.0, rank=2)
    assert (down.shape, up.shape) == ((2, 6), (6, 2))
    torch.testing.assert_close(x + x @ (up @ down).T + bias, y, atol=1e-3, rtol=1e-3)
    down, up, bias = moments.solve(0.0, rank=1)
    ours = (x + x @ (up @ down).T + bias - y).square().mean()
    centred = (x - x.mean(0)) @ strong.T
    singular = torch.linalg.svdvals(centred)
    torch.testing.assert_close(ours, singular[1:].square().sum() / y.numel(), rtol=1e-3, atol=1e-5)


def test_a_router_keeps_the_epoch_whose_probabilities_are_best(monkeypatch):
    """With a huge step its logits grow too sure; scaled, a later epoch is better than the first."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1500, 16, generator=generator)
    labels = torch.rand(1500, generator=generator) < torch.sigmoid(3 * states[:, 0] - 1)
    router = TIDERouters.for_model(tiny_model("llama", hidden_size=16, head_dim=4), exit_layers=[1])[1].router
    tune = states[1000:], labels[1000:]
    figures = train_router(router, (states[:1000], labels[:1000]), tune, seed=0)
    with torch.no_grad():
        scores = router(tune[0])
    loss = float(torch.nn.functional.binary_cross_entropy(scores, tune[1].float()))
    assert loss == pytest.approx(figures["log_loss"], abs=1e-4)
    assert expected_calibration_error(scores, tune[1]) == pytest.approx(figures["expected_calibration_error"], abs=1e-3)
    assert figures["expected_calibration_error"] < 0.06
    with torch.no_grad():
        logits = router.logits(tune[0])
    scale, shift = platt_scaling(logits, tune[1])
    assert (scale, shift) == (pytest.approx(1.0, abs=0.05), pytest.approx(0.0, abs=0.05))
