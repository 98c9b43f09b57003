"""What routers are trained to predict: three rules, each against its definition."""

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
    cosine_similarity,
    decide,
    fit_router,
    kl_divergence,
    router_labels,
)
from tide_hf.calibration.states import StateBatch
from tide_hf.common.choices import LABELS

N = 40


@pytest.fixture(scope="module")
def setting():
    """A model's unembedding, and states of which some are near their final ones and some are not."""
    model = tiny_model("gemma2").requires_grad_(False)  # with softcapping behind the head
    unembed = Unembed(model, find_structure(model))
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(N, 32, generator=generator)
    noise = torch.linspace(0, 1, N)[:, None] * torch.randn(N, 32, generator=generator)
    return unembed, final + noise, final, unembed(final).argmax(dim=-1)


def test_agreement_asks_the_head(setting):
    unembed, early, final, top = setting
    shift = nn.Linear(32, 32)
    expected = unembed(shift(early)).argmax(dim=-1) == top
    assert torch.equal(router_labels("agreement", unembed, shift, early, final, top), expected)
    same = router_labels("agreement", unembed, nn.Identity(), early, final, top)
    assert 0 < int(same.sum()) < N


def test_cosine_is_of_the_states_before_norm_and_head(setting):
    unembed, early, final, top = setting
    cosine = (early * final).sum(-1) / early.norm(dim=-1) / final.norm(dim=-1)
    for head in (nn.Identity(), nn.Linear(32, 32)):
        found = router_labels("cosine", unembed, head, early, final, top)
        assert torch.equal(found, cosine > 0.98)
    assert 0 < int(found.sum()) < N


def test_kl_is_that_of_the_head_against_the_full_model(setting):
    unembed, early, final, top = setting
    for head in (nn.Identity(), nn.Linear(32, 32)):
        full = torch.distributions.Categorical(logits=unembed(final).double())
        exits = torch.distributions.Categorical(logits=unembed(head(early)).double())
        expected = torch.distributions.kl_divergence(full, exits)
        found = kl_divergence(unembed, head, early, final)
        torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-4)
        same = router_labels("kl", unembed, head, early, final, top)
        assert torch.equal(same, expected < 0.1)
    near = router_labels("kl", unembed, nn.Identity(), early, final, top)
    assert 0 < int(near.sum()) < N


def test_a_divergence_below_the_threshold_lets_most_drafts_pass(setting):
    """What the threshold is justified with: 1 - total variation, the share that rejection sampling keeps."""
    unembed, early, final, top = setting
    may_leave = router_labels("kl", unembed, nn.Identity(), early, final, top)
    kept = torch.minimum(unembed(early).softmax(-1), unembed(final).softmax(-1)).sum(-1)
    assert float(kept[may_leave].min()) >= 1 - (KL_THRESHOLD / 2) ** 0.5


@pytest.mark.parametrize("kind", ["cosine", "kl"])
def test_memory_is_bounded_by_slices(setting, monkeypatch, kind):
    unembed, early, final, top = setting
    whole = router_labels(kind, unembed, nn.Identity(), early, final, top)
    monkeypatch.setattr("tide_hf.calibration.routers.SLICE_ELEMENTS", 4 * 96 * 3)
    sizes = []

    class Counting(Unembed):
        def __call__(self, hidden_states):
            sizes.append(len(hidden_states))
            return super().__call__(hidden_states)

    counting = Counting(tiny_model("gemma2"), unembed.structure)
    assert torch.equal(router_labels(kind, counting, nn.Identity(), early, final, top), whole)
    assert max(sizes, default=0) <= 3
    assert bool(sizes) == (kind == "kl")


def test_half_precision_states_are_compared_in_float32(setting):
    early, final = (state.bfloat16() for state in setting[1:3])
    expected = torch.cosine_similarity(early.double(), final.double(), dim=-1)
    torch.testing.assert_close(cosine_similarity(early, final).double(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", LABELS)
def test_routers_learn_the_labels_they_are_given(monkeypatch, kind):
    """The labels reach the training; the certificate is on agreement whatever they are."""
    model = tiny_model("llama")
    unembed = Unembed(model, find_structure(model))
    generator = torch.Generator().manual_seed(0)
    final = torch.randn(60, 32, generator=generator)
    early = final + torch.linspace(0, 1, 60)[:, None] * torch.randn(60, 32, generator=generator)
    rest = {"tokens": torch.zeros(60).long(), "counted": torch.ones(60).bool(), "document_ids": torch.arange(60)}
    batch = StateBatch({2: early}, final, unembed(final).argmax(-1), **rest)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    given = []
    monkeypatch.setattr(
        "tide_hf.calibration.routers.train_router", lambda router, fit, tune, seed: given.append((fit[1], tune[1]))
    )
    fit_router(routers[2], 2, (batch, batch), unembed, kind, 0)
    expected = router_labels(kind, unembed, routers[2].head, early, final, batch.top_tokens)
    assert torch.equal(given[0][0], expected)
    assert torch.equal(given[0][1], expected)
    agrees = agreement_labels(unembed, routers[2].head, early, batch.top_tokens)
    assert torch.equal(decide(batch, routers, unembed)["agrees"][:, 0], agrees)
    assert (kind == "agreement") == torch.equal(agrees, expected)
