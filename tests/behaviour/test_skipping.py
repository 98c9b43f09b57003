"""Layers that a token skips do not run, and the K/V in the cache is right."""

from collections import Counter
from contextlib import contextmanager

import pytest
import torch
from draft_heads import draft_head_for
from families import ATTENTION, LAYERS, RECURRENT, prompt, tiny_model
from on_steps import FEW, attach_captured
from skipping_calls import OPTIONS, attached_early

from tide_hf import TIDEModelForCausalLM, TIDERouters, UnsupportedModelError
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.cli.model_arguments import ALL, modes_to_run
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError


@contextmanager
def layer_calls(model):
    """Count how often the decoder layers' own forward runs, by position."""
    layers = find_structure(model).layers
    counts = Counter()
    position = {layer: index for index, layer in enumerate(layers)}

    def counting(native):
        def forward(self, *args, **kwargs):
            counts[position[self]] += 1
            return native(self, *args, **kwargs)

        return forward

    with pytest.MonkeyPatch.context() as patch:
        for layer_class in {type(layer) for layer in layers}:
            patch.setattr(layer_class, "forward", counting(layer_class.forward))
        yield counts


@pytest.mark.parametrize(("exit_layer", "family"), [(3, "llama"), *((1, family) for family in ATTENTION)])
def test_a_decode_step_executes_exactly_the_exit_layers(family, exit_layer):
    model = attached_early(family, [exit_layer], exit_threshold=0.0)
    with layer_calls(model) as counts:
        model.generate(prompt(), **OPTIONS)
    steps = OPTIONS["max_new_tokens"] - 1
    for layer_idx in range(LAYERS):
        assert counts[layer_idx] == 1 + (steps if layer_idx < exit_layer else 0)
    assert model.last_exit_stats.layers_executed == LAYERS + steps * exit_layer
    assert model.last_exit_stats.exits_per_layer == {exit_layer: steps}


@pytest.mark.parametrize(("rows", "family"), [*((1, family) for family in ATTENTION), *((3, family) for family in FEW)])
def test_early_exit_gives_what_post_hoc_gives_and_skips(family, rows):
    """Both read exits from the same states and keep exact K/V; one leaves out what it does not need."""
    model = attached_early(family, [1, 2, 3], exit_threshold=0.5)
    options = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
    expected = model.generate(prompt(rows), tide_mode="post_hoc", **options)
    post_hoc = model.last_exit_stats
    result = model.generate(prompt(rows), **options)
    stats = model.last_exit_stats
    assert torch.equal(result.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(expected.logits), atol=1e-4, rtol=1e-4)
    assert stats.per_token == post_hoc.per_token
    for layer, other in zip(result[CACHE].layers, expected[CACHE].layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        kept = other.keys.shape[-2]
        torch.testing.assert_close(layer.keys[:, :, -kept:], other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values[:, :, -kept:], other.values, atol=1e-4, rtol=1e-4)
    if rows == 1:
        assert stats.exit_rate > 0
        assert stats.layers_executed < post_hoc.layers_executed


def test_min_layers_and_the_fixed_criterion_choose_the_exit_layer_at_run_time():
    model = attached_early("llama", [1, 3], exit_threshold=0.0)
    model.generate(prompt(), min_layers=2, **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {3: 9}
    model.generate(prompt(), min_layers=4, **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {}
    model.generate(prompt(), exit_criterion="fixed", exit_threshold=1.0, **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {1: 9}


@pytest.mark.parametrize(
    ("option", "message"),
    [
        *(({"min_layers": value}, r"invalid min_layers: got .*Expected a whole number") for value in (0, 1.5, "two")),
        ({"exit_criterion": "mood"}, r"unknown exit_criterion: got 'mood'\. Expected one of 'router'"),
    ],
)
def test_invalid_options_are_refused(option, message):
    with pytest.raises(ConfigurationError, match=message):
        attached_early("llama", [2]).generate(prompt(), **option, **OPTIONS)


def test_the_confidence_criterion_is_the_heads_largest_probability():
    model = attached_early("llama", [2])
    result = model.generate(prompt(), exit_criterion="confidence", exit_threshold=0.0,
        return_dict_in_generate=True, output_logits=True, **OPTIONS)  # fmt: skip
    largest = [float(logits.softmax(-1).max()) for logits in result.logits[1:]]
    threshold = sorted(largest)[4]
    first = next(position for position, value in enumerate(largest) if value < threshold)
    model.generate(prompt(), exit_criterion="confidence", exit_threshold=threshold, **OPTIONS)
    per_token = model.last_exit_stats.per_token[0]
    assert per_token[1 : first + 2] == [2] * first + [LAYERS]


@pytest.mark.parametrize("attach", [TIDEModelForCausalLM.attach, attach_captured])
def test_tokens_exit_as_without_a_draft_head(attach):
    found = []
    for has_head in (True, False):
        model = tiny_model("llama")
        routers = draft_head_for(model)
        if not has_head:
            routers.draft_head = routers.config.draft_head = None
        attach(model, routers, mode="early_exit", exit_threshold=0.5)
        answer = model.generate(prompt(), **OPTIONS).tolist()
        found.append((answer, model.last_exit_stats.per_token))
    assert found[0] == found[1]
    assert found[0][1] == [[LAYERS, *[2] * 9]]


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_a_draft_head_alone_has_no_layer_to_exit_at(mode):
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, draft_head_for(model))
    model._tide.config.exit_layers = []
    message = "has no layer at which tokens could exit: got routers without exit layers.*a draft head alone only drafts"
    with pytest.raises(UnsupportedOptionError, match=message):
        model.generate(prompt(), **OPTIONS, tide_mode=mode)
    assert modes_to_run(ALL, model._tide.routers) == ["self_speculative"]


@pytest.mark.parametrize("family", RECURRENT)
def test_recurrent_models_are_refused_with_the_reason(family):
    model = tiny_model(family)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    for mode in ("early_exit", "self_speculative"):
        with pytest.raises(UnsupportedModelError, match=r"recurrent state.*Expected tide_mode='post_hoc'"):
            TIDEModelForCausalLM.attach(model, routers, mode=mode, strict=True)
    assert not isinstance(model, TIDEModelForCausalLM)
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc")
    with pytest.raises(UnsupportedModelError, match="recurrent state"):
        model.generate(prompt(), tide_mode="early_exit", **OPTIONS)


@pytest.mark.parametrize("family", [*FEW, *RECURRENT])
def test_post_hoc_runs_all_layers_and_selects_early_states(family):
    model = tiny_model(family)
    expected = model.generate(prompt(), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[2], exit_strategy="linear")
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc")
    assert torch.equal(model.generate(prompt(), exit_threshold=1.5, **OPTIONS), expected)
    with layer_calls(model) as counts:
        model.generate(prompt(), exit_threshold=0.0, **OPTIONS)
    assert counts == dict.fromkeys(range(LAYERS), 10)
    assert model.last_exit_stats.exits_per_layer == {2: 9}


def test_passes_with_another_cache_stay_at_full_depth():
    """Classifier-free guidance calls the model from a logits processor, with a cache of its own."""
    model = attached_early("llama", [1], exit_threshold=0.0)
    options = {**OPTIONS, "guidance_scale": 1.5, "negative_prompt_ids": prompt()[:, :5]}
    with layer_calls(model) as counts:
        model.generate(prompt(), **options)
    # Ten guiding passes at full depth, prefill, and nine steps of one layer.
    assert counts == {0: 20, 1: 11, 2: 11, 3: 11}
    assert model.last_exit_stats.exits_per_layer == {1: 9}
