"""The published system's `router.pt`: what it becomes here, and which files are refused."""

import os
import pickle

import pytest
import torch
from families import tiny_model
from torch.nn.functional import silu

from tide_hf import TIDERouters
from tide_hf.common.errors import ConfigurationError, RoutersFileError, RoutersNotFoundError


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


class Code:
    def __reduce__(self):
        return os.mkdir, ("code-ran",)


def published(hidden_size=32, bottleneck=16, positions=(1, 2)):
    """What `RouterCheckpoint.save` of tide-inference 0.2.1 writes."""
    layers = {
        position: {"down.weight": torch.randn(bottleneck, hidden_size), "up.weight": torch.randn(1, bottleneck)}
        for position in positions
    }
    return {"hidden_dim": hidden_size, "bottleneck_dim": bottleneck, "router_layers": layers}


def test_published_positions_become_exit_layers_with_the_published_scores(model, tmp_path):
    state = published(positions=(1, 2, 3))  # one behind the last layer, which is left out
    torch.save(state, tmp_path / "router.pt")
    routers = TIDERouters.from_router_pt(tmp_path / "router.pt", base_model=model)
    assert routers.exit_layers == [2, 3]
    states = torch.randn(5, 32)
    for position in (1, 2):
        down, up = state["router_layers"][position].values()
        expected = torch.sigmoid(silu(states @ down.T) @ up.T).squeeze(-1)  # `TokenRouter` of tide-inference 0.2.1
        torch.testing.assert_close(routers[position + 1].router(states), expected)
    assert routers.config.exit_strategy == "identity"
    assert routers.config.exit_threshold == 0.85


def test_code_in_a_router_pt_does_not_run(model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({**published(), "extra": Code()}, tmp_path / "router.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(Code()))
    for name in ("router.pt", "plain.pt"):
        with pytest.raises(RoutersFileError, match=r"as a published router\.pt: got .*Expected hidden_dim"):
            TIDERouters.from_router_pt(tmp_path / name, model)
    assert not (tmp_path / "code-ran").exists()


@pytest.mark.parametrize(
    "make",
    [
        lambda: published(hidden_size=31),
        lambda: {**published(), "bottleneck_dim": 8},
        lambda: {**published(), "bottleneck_dim": float("inf")},
        lambda: {**published(), "router_layers": {"a": {}}},
        lambda: {"hidden_dim": 32},
        lambda: [1, 2],
    ],
)
def test_other_content_than_weights_that_fit_is_refused(model, tmp_path, make):
    torch.save(make(), tmp_path / "router.pt")
    with pytest.raises(RoutersFileError, match=r"got .*Expected hidden_dim, bottleneck_dim and router_layers"):
        TIDERouters.from_router_pt(tmp_path / "router.pt", model)


def test_layers_out_of_range_and_missing_files_are_refused(model, tmp_path):
    torch.save(published(positions=(1, 7)), tmp_path / "router.pt")
    with pytest.raises(ConfigurationError, match="exit layer out of range"):
        TIDERouters.from_router_pt(tmp_path / "router.pt", model)
    with pytest.raises(RoutersNotFoundError, match="no such file"):
        TIDERouters.from_router_pt(tmp_path / "other.pt", model)
