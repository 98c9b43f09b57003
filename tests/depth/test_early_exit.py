"""Prompt tokens that exit early: frozen hidden states, K/V of these, and no MLP for them."""

import pytest
import torch
from families import ATTENTION, LAYERS, VOCAB, tiny_model
from skipping_calls import attached_early, frozen_after_exits
from transformers import DynamicCache

from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.common.errors import UnsupportedOptionError

EXIT_LAYERS = [1, 3]
LENGTH = 12
OPTIONS = {
    "max_new_tokens": 1,
    "do_sample": False,
    "eos_token_id": None,
    "return_dict_in_generate": True,
    "output_logits": True,
}


def prompt(rows: int) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(5))


def median_score(model, tokens):
    """A threshold that about half of the tokens reach at the first exit layer."""
    with torch.no_grad():
        state = model(input_ids=tokens, output_hidden_states=True).hidden_states[EXIT_LAYERS[0]]
        normalized = Unembed(model, find_structure(model)).normalize(state)
        scores = model._tide.routers[EXIT_LAYERS[0]].router(normalized)
    return float(scores.flatten().sort().values[tokens.numel() // 2 - 1 :][:2].mean())


@pytest.mark.parametrize(("family", "rows"), [*((family, 3) for family in ATTENTION), ("llama", 1)])
def test_logits_and_cache_equal_the_reference(family, rows):
    tokens, model, plain = prompt(rows), attached_early(family, EXIT_LAYERS), tiny_model(family)
    threshold = median_score(model, tokens)
    output = model.generate(tokens, **OPTIONS, exits_in_prompt=True, exit_threshold=threshold)
    cache = DynamicCache(config=plain.config)
    with frozen_after_exits(plain, model._tide.routers, threshold=threshold) as exits:
        expected = plain(input_ids=tokens, **{CACHE: cache}).logits[:, -1]
    assert len(exits[0].unique()) > 1  # some exit, and some do not or later
    torch.testing.assert_close(output.logits[0], expected.float(), rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(output[CACHE].layers, cache.layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)
    assert model.last_exit_stats.per_token == exits[0][:, -1:].tolist()
    remaining = [int((exits[0] > layer_idx).sum()) for layer_idx in range(LAYERS)]
    if find_structure(model).mlps:
        skipped = sum(tokens.numel() - count for count in remaining if count)
        assert model.last_exit_stats.mlp_tokens_skipped == skipped


def test_no_more_runs_than_tokens_that_have_not_exited_need():
    model, sizes = attached_early("llama", EXIT_LAYERS, exit_threshold=0.55), []
    for layer in find_structure(model).layers:
        layer.mlp.down_proj.register_forward_pre_hook(lambda _m, args: sizes.append(args[0].shape[:2].numel()))
    model.generate(prompt(2), **OPTIONS, exits_in_prompt=True)
    assert sizes[0] == 2 * LENGTH > sizes[-1]
    assert model.last_exit_stats.mlp_tokens_skipped == sum(2 * LENGTH - size for size in sizes)
    model.generate(prompt(1), **OPTIONS, exits_in_prompt=True, exit_criterion="fixed")
    assert model.last_exit_stats.layers_executed == EXIT_LAYERS[0]
    model.generate(prompt(1), **OPTIONS)  # by default no token of a prompt exits
    assert (model.last_exit_stats.layers_executed, model.last_exit_stats.mlp_tokens_skipped) == (LAYERS, 0)


@pytest.mark.parametrize(("mode", "strategy"), [("post_hoc", "propagate"), ("early_exit", "recompute")])
def test_prompt_exits_are_refused_with_exact_kv(mode, strategy):
    model = attached_early("llama", EXIT_LAYERS, strategy)
    with pytest.raises(UnsupportedOptionError, match=r"got exits_in_prompt=True with.*Expected .*propagate"):
        model.generate(prompt(1), **OPTIONS, tide_mode=mode, exits_in_prompt=True)
