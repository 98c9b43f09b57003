"""Routers: the labels that they predict, how they are trained, and the figures that judge them."""

import pytest
import torch
from families import tiny_model
from torch import nn

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.routers import (
    KL_THRESHOLD,
    agreement_labels,
    area_under_curve,
    cosine_similarity,
    decide,
    expected_calibration_error,
    fit_router,
    kl_divergence,
    platt_scaling,
    router_labels,
    train_router,
)
from tide_hf.calibration.states import StateBatch
from tide_hf.common.choices import LABELS

N = 40


@pytest.fixture(scope="module")
def setting():
    """A model's unembedding, and states of which some are near their final ones and some are not."""
    model = tiny_model("gemma2").requires_grad_(False)  # with softcapping after the head
    unembed = Unembed(model, find_structure(model))
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(N, 32, generator=generator)
    noise = torch.linspace(0, 1, N)[:, None] * torch.randn(N, 32, generator=generator)
    return unembed, final + noise, final, unembed(final).argmax(dim=-1)


@pytest.mark.parametrize("head", [nn.Identity(), nn.Linear(32, 32)])
def test_labels_against_their_definitions(setting, head):
    unembed, states, final, top = setting
    cosine = (states * final).sum(-1) / states.norm(dim=-1) / final.norm(dim=-1)
    full_model, exits = (torch.distributions.Categorical(logits=unembed(x).double()) for x in (final, head(states)))
    divergence = torch.distributions.kl_divergence(full_model, exits)
    expected = {
        "agreement": unembed(head(states)).argmax(dim=-1) == top,
        "cosine": cosine > 0.98,  # whatever the head
        "kl": divergence < 0.1,
    }
    torch.testing.assert_close(kl_divergence(unembed, head, states, final).double(), divergence, atol=1e-5, rtol=1e-4)
    for kind in LABELS:
        found = router_labels(kind, unembed, head, states, final, top)
        assert torch.equal(found, expected[kind])
        assert isinstance(head, nn.Linear) or 0 < int(found.sum()) < N


def test_rejection_sampling_accepts_most_drafts_below_the_kl_threshold(setting):
    """What the threshold is justified with: it accepts 1 - total variation."""
    unembed, states, final, top = setting
    may_exit = router_labels("kl", unembed, nn.Identity(), states, final, top)
    accepted = torch.minimum(unembed(states).softmax(-1), unembed(final).softmax(-1)).sum(-1)
    assert float(accepted[may_exit].min()) >= 1 - (KL_THRESHOLD / 2) ** 0.5


@pytest.mark.parametrize("kind", ["cosine", "kl"])
def test_memory_is_bounded_by_slices(setting, monkeypatch, kind):
    unembed, states, final, top = setting
    whole = router_labels(kind, unembed, nn.Identity(), states, final, top)
    monkeypatch.setattr("tide_hf.calibration.routers.SLICE_ELEMENTS", 4 * 96 * 3)
    sizes = []

    class Counting(Unembed):
        def __call__(self, hidden_states):
            sizes.append(len(hidden_states))
            return super().__call__(hidden_states)

    counting = Counting(tiny_model("gemma2"), unembed.structure)
    assert torch.equal(router_labels(kind, counting, nn.Identity(), states, final, top), whole)
    assert max(sizes, default=0) <= 3
    assert bool(sizes) == (kind == "kl")


def test_half_precision_states_are_compared_in_float32(setting):
    states, final = (part.bfloat16() for part in setting[1:3])
    expected = torch.cosine_similarity(states.double(), final.double(), dim=-1)
    torch.testing.assert_close(cosine_similarity(states, final).double(), expected, atol=1e-6, rtol=0)


def test_routers_learn_the_labels_they_are_given_and_are_judged_by_agreement(monkeypatch):
    model = tiny_model("llama")
    unembed = Unembed(model, find_structure(model))
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(60, 32, generator=generator)
    states = final + torch.linspace(0, 1, 60)[:, None] * torch.randn(60, 32, generator=generator)
    rest = {"tokens": torch.zeros(60).long(), "counted": torch.ones(60).bool(), "document_ids": torch.arange(60)}
    batch = StateBatch({2: states}, final, unembed(final).argmax(-1), **rest)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    given = []
    monkeypatch.setattr("tide_hf.calibration.routers.train_router", lambda _, fit, tune, __: given.append((fit, tune)))
    fit_router(routers[2], 2, (batch, batch), unembed, "cosine", 0)
    ((fit, tune),) = given
    expected = router_labels("cosine", unembed, routers[2].head, states, final, batch.top_tokens)
    assert torch.equal(fit[1], expected)
    assert torch.equal(tune[1], expected)
    agrees = agreement_labels(unembed, routers[2].head, states, batch.top_tokens)
    assert torch.equal(decide(batch, routers, unembed)["agrees"][:, 0], agrees)
    assert not torch.equal(agrees, expected)


def test_a_router_keeps_the_epoch_with_the_best_probabilities():
    """With a huge step its logits become overconfident; after Platt scaling a later epoch is better than the first."""
    generator = torch.Generator().manual_seed(0)
    states = torch.randn(1500, 16, generator=generator)
    labels = torch.rand(1500, generator=generator) < torch.sigmoid(3 * states[:, 0] - 1)
    router = TIDERouters.for_model(tiny_model("llama", hidden_size=16, head_dim=4), exit_layers=[1])[1].router
    tune = states[1000:], labels[1000:]
    figures = train_router(router, (states[:1000], labels[:1000]), tune, seed=0)
    with torch.no_grad():
        scores, logits = router(tune[0]), router.logits(tune[0])
    loss = float(nn.functional.binary_cross_entropy(scores, tune[1].float()))
    assert loss == pytest.approx(figures["log_loss"], abs=1e-4)
    assert expected_calibration_error(scores, tune[1]) == pytest.approx(figures["expected_calibration_error"], abs=1e-3)
    assert figures["expected_calibration_error"] < 0.06
    assert platt_scaling(logits, tune[1]) == pytest.approx((1.0, 0.0), abs=0.05)


def test_platt_scaling_makes_probabilities_of_scores():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator)
    labels = torch.rand(20_000, generator=generator) < torch.sigmoid(0.5 * logits - 1.0)
    assert platt_scaling(logits, labels) == pytest.approx((0.5, -1.0), abs=0.05)


def test_router_figures():
    labels = torch.tensor([True, True, False, False])
    assert area_under_curve(torch.tensor([0.9, 0.8, 0.2, 0.1]), labels) == 1.0
    assert area_under_curve(torch.tensor([0.1, 0.2, 0.8, 0.9]), labels) == 0.0
    assert area_under_curve(torch.tensor([0.5] * 4), labels) == 0.5
    assert expected_calibration_error(torch.tensor([0.5] * 4), labels) == pytest.approx(0.0)
    assert expected_calibration_error(torch.tensor([0.99] * 4), labels) == pytest.approx(0.49)
