"""Passes by the parts of a model: the tokens stay the base model's; models that do more run by their own forward."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import tiny_model
from on_steps import OPTIONS, linear_heads, new_tokens, prompts

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import UnsupportedModelError
from tide_hf.engines.direct_passes import DirectPasses
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights.fused_layers import MEASURED_WIDTHS, FusedStack, Probe


@pytest.fixture(autouse=True)
def _kernels_are_ready_and_faster(monkeypatch, fresh_kernels):
    """Whatever this machine is."""
    build_kernels(torch.float32)
    monkeypatch.setattr(Probe, "_measure", lambda _: [2.0, 1.0] * len(MEASURED_WIDTHS))


@pytest.fixture
def direct_widths(monkeypatch):
    """The widths of the passes by the parts of a model."""
    found, run = [], DirectPasses.__call__

    def counted(self, ids, positions):
        found.append(ids.shape[1])
        return run(self, ids, positions)

    monkeypatch.setattr(DirectPasses, "__call__", counted)
    return found


@pytest.mark.parametrize("kind", ["mixed", "trees"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_are_the_base_models(family, kind, direct_widths):
    model, batch = tiny_model(family), prompts()
    expected = model.generate(**batch, **OPTIONS)
    for routers in (draft_head_for(model), linear_heads(model)):  # whose taps, or exit layers, split the layers
        TIDEModelForCausalLM.attach(model, routers, remembered_tokens=0)
        use_drafter(model, kind, new_tokens(expected), width=6)
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
        stats = model.last_exit_stats
        assert stats.layers_executed == (1 + stats.rounds) * model.config.num_hidden_layers
        assert len(direct_widths) == stats.rounds - 1  # the first pass shows that the others may
        use_heads(model, 0 if routers.draft_head else 3, continuations=new_tokens(expected), kind=kind)
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
        assert max(direct_widths) > 1
        direct_widths.clear()
        model = TIDEModelForCausalLM.detach(model)


def test_the_pass_that_shows_it_compares_all_parts(tiny_llama, direct_widths, monkeypatch):
    """A model that scales what it embeds, or its logits, in its own forward."""
    for part in ("embed", "logits"):
        model = tiny_llama()
        kind = type(model.model) if part == "embed" else type(model)
        native = kind.forward

        def scaled(self, *args, native=native, part=part, **kwargs):
            if part == "embed":
                kwargs["inputs_embeds"] = 2 * self.embed_tokens(kwargs.pop("input_ids"))
                return native(self, *args, **kwargs)
            found = native(self, *args, **kwargs)
            found.logits = found.logits * -1
            return found

        with monkeypatch.context() as patch:
            patch.setattr(kind, "forward", scaled)
            expected = model.generate(**prompts(), **OPTIONS)
            TIDEModelForCausalLM.attach(model, remembered_tokens=0)
            use_drafter(model, "mixed", new_tokens(expected))
            assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
        assert not direct_widths


@pytest.mark.parametrize("place", ["model", "decoder"])
def test_hooks_see_all_passes(tiny_llama, place, direct_widths):
    model, calls = TIDEModelForCausalLM.attach(tiny_llama(), remembered_tokens=0), []
    module = model if place == "model" else model.model
    handle = module.register_forward_hook(lambda *_: calls.append(1))
    model.generate(**prompts(), **OPTIONS)
    assert len(calls) == 1 + model.last_exit_stats.rounds
    assert not direct_widths
    handle.remove()
    model.generate(**prompts(), **OPTIONS)
    assert direct_widths


def test_padded_rows_and_batches_run_by_the_models_own_forward(tiny_llama, direct_widths):
    model = TIDEModelForCausalLM.attach(tiny_llama(), remembered_tokens=0)
    padded = prompts(2, pads=2)
    for batch in (prompts(2), {name: tensor[-1:] for name, tensor in padded.items()}):
        model.generate(**batch, **OPTIONS)
        assert not direct_widths


def test_a_model_that_calls_its_layers_otherwise_than_in_earlier_calls_is_refused(tiny_llama, monkeypatch):
    model = TIDEModelForCausalLM.attach(tiny_llama(), remembered_tokens=0)
    model.generate(**prompts(), **OPTIONS)
    second = model.model.layers[1]
    call = type(second).__call__

    def with_a_copy(self, state, *args, **kwargs):
        return call(self, state.clone() if self is second else state, *args, **kwargs)

    monkeypatch.setattr(type(second), "__call__", with_a_copy)
    with pytest.raises(UnsupportedModelError, match="layer 1 with other arguments than the output, angles and mask"):
        model.generate(**prompts(), **OPTIONS)
    model = TIDEModelForCausalLM.detach(model)
    expected = model.generate(**prompts(), **OPTIONS)
    TIDEModelForCausalLM.attach(model, remembered_tokens=0)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_a_prompts_layers_run_in_one_call_once_a_pass_has_shown_that_they_may(tiny_llama, rows, monkeypatch):
    model, stacks, run = TIDEModelForCausalLM.attach(tiny_llama(), remembered_tokens=0), [], FusedStack.__call__

    def counted(self, *args, **options):
        stacks.append(len(self.layers))
        return run(self, *args, **options)

    monkeypatch.setattr(FusedStack, "__call__", counted)
    expected = model.generate(**prompts(rows), **OPTIONS)
    layers = model.config.num_hidden_layers
    assert stacks[: layers + 1] == [1] * layers + [layers]
    stacks.clear()
    assert torch.equal(model.generate(**prompts(rows), **OPTIONS), expected)
    assert set(stacks) == {layers}
