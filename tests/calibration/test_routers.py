"""Routers: the labels that they predict, how they are trained, and the figures that judge them."""

import pytest
import torch
from families import tiny_model
from torch import nn

from tide_hf import TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.router_training import (
    area_under_curve,
    expected_calibration_error,
    platt_scaling,
    router_labels,
    train_router,
)
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
    for kind in LABELS:
        found = router_labels(kind, unembed, head, states, final, top)
        assert torch.equal(found, expected[kind])
        assert isinstance(head, nn.Linear) or 0 < int(found.sum()) < N


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


def test_router_figures():
    labels = torch.tensor([True, True, False, False])
    assert area_under_curve(torch.tensor([0.9, 0.8, 0.2, 0.1]), labels) == 1.0
    assert area_under_curve(torch.tensor([0.1, 0.2, 0.8, 0.9]), labels) == 0.0
    assert area_under_curve(torch.tensor([0.5] * 4), labels) == 0.5
    assert expected_calibration_error(torch.tensor([0.5] * 4), labels) == pytest.approx(0.0)
    assert expected_calibration_error(torch.tensor([0.99] * 4), labels) == pytest.approx(0.49)
