"""Batches on steps: a call ends with its last row, and any number of rows may run on the steps of another number."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import tiny_model
from on_steps import (
    LAYERS,
    NEW,
    OPTIONS,
    attach_compiled,
    linear_heads,
    new_tokens,
    prompts,
)
from on_steps import attach_captured as attach_graphs
from transformers import MistralForCausalLM

from tide_hf.base_model.structure import CACHE

LONG = {**OPTIONS, "max_new_tokens": 40}


def ending_early(model, batch):
    """A token that ends the rows of a batch at different times, none with its first token and one not before the end.

    Returns:
        Options with that token, what plain decoding makes of them, and the length of each row's answer.
    """
    plain = new_tokens(model.generate(**batch, **LONG))
    for row in plain:
        for token in row[2:20]:
            ends = [other.index(token) if token in other else len(other) for other in plain]
            if len(set(ends)) > 2 and min(ends) > 0 and max(ends) == len(row):
                options = {**LONG, "eos_token_id": token}
                return options, model.generate(**batch, **options), [min(end + 1, len(row)) for end in ends]
    raise LookupError("no such token")


def test_a_call_ends_with_its_last_row_and_remaining_rows_run_on_smaller_steps_where_they_exist(tiny_llama):
    model, batch = tiny_llama(), prompts(4)
    options, expected, lengths = ending_early(model, batch)
    steps = attach_graphs(model)
    use_drafter(model, "wrong", [[0] * 40] * 4, width=0)
    counts = []
    for rows in (None, 2):
        if rows is not None:
            model.generate(**prompts(rows), **OPTIONS)
        assert torch.equal(model.generate(**batch, **options), expected)
        counts.append(model.last_exit_stats.layers_executed)
    passes = max(lengths) - 1
    with_three_rows_or_four = sorted(lengths)[-3] - 1  # then two are left
    assert counts[0] == LAYERS * 4 * (1 + passes)
    assert counts[1] == LAYERS * (4 + 4 * with_three_rows_or_four + 2 * (passes - with_three_rows_or_four))
    four, two = (next(found for key, found in steps._buffers.items() if key[0] == rows) for rows in (4, 2))
    assert two.cache.layers[0].keys.data_ptr() == four.cache.layers[0].keys.data_ptr()


@pytest.mark.parametrize(
    ("attach", "kind", "family"),
    [
        (attach_graphs, "draft head", "llama"),
        (attach_graphs, "draft head", "bloom"),
        (attach_graphs, "linear", "gpt2"),
        pytest.param(attach_graphs, "linear", "opt", marks=pytest.mark.slow),
        (attach_compiled, "linear", "llama"),
        pytest.param(attach_compiled, "draft head", "llama", marks=pytest.mark.slow),
    ],
)
def test_any_number_of_rows_runs_on_the_steps_of_others(family, attach, kind):
    """Padded rows, slots that are compacted, rows that end, heads that draft: on buffers of 8, 4, 2 and 1 rows."""
    model, batch = tiny_model(family), prompts(8, pads=3)
    options, expected, _ = ending_early(model, batch)
    has_draft_head = kind == "draft head"
    exit_layer, routers = (0, draft_head_for(model)) if has_draft_head else (1, linear_heads(model))
    routers.config.compaction_threshold = 0.1
    steps = attach(model, routers)
    for rows in (8, 4, 2, 1, 3, 7):
        some = {name: values[-rows:] for name, values in batch.items()}
        length = next((n for n in range(expected.shape[1], 0, -1) if (expected[-rows:, n - 1] != 0).any()), 0)
        width = rows % 3 + 1
        use_heads(model, exit_layer, width, continuations=new_tokens(expected[-rows:]), kind="mixed")
        assert torch.equal(model.generate(**some, **options), expected[-rows:, :length])
    assert sorted(key[0] for key in steps._buffers) == [1, 2, 4, 8]
    assert steps.refused is None


class MistralOfOtherCode(MistralForCausalLM):
    """A class from outside of transformers, whose masks might be its own."""


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("model_class", [MistralForCausalLM, MistralOfOtherCode])
def test_windows_skip_rejected_tokens_where_masks_are_known_and_else_they_leave_the_cache(model_class, attention):
    model, batch = tiny_model("mistral", attention=attention), prompts(4, pads=3)
    model.__class__ = model_class
    options, expected, _ = ending_early(model, batch)
    steps = attach_graphs(model)
    for _ in range(2):
        use_drafter(model, "mixed", new_tokens(expected))
        assert torch.equal(model.generate(**batch, **options), expected)
    rejected = [buffers.tensors.rejected for buffers in steps._buffers.values()]
    skip = attention == "sdpa" and model_class is MistralForCausalLM
    assert [found is not None for found in rejected] == [skip]
    assert not skip or (rejected[0].sum() > 0 and steps.replays > 0)


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_a_returned_cache_holds_the_rows_of_the_call(family):
    model, options = tiny_model(family), {**OPTIONS, "return_dict_in_generate": True}
    expected = model.generate(**prompts(3), **options)
    steps = attach_graphs(model)
    use_drafter(model, "mixed", new_tokens(expected.sequences) + [[0] * 40])
    model.generate(**prompts(4), **OPTIONS)
    found = model.generate(**prompts(3), **options)
    assert [key[0] for key in steps._buffers] == [4]
    assert torch.equal(found.sequences, expected.sequences)
    for layer, other in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        found_keys, keys = (one.keys[:, :, -NEW + 1 :] for one in (layer, other))  # after prefill
        torch.testing.assert_close(found_keys, keys, atol=1e-4, rtol=1e-4)
