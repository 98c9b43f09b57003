"""Attention over grouped query heads: the same numbers, without repeated K/V."""

import threading

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_heads
from families import SDPA, VOCAB, tiny_model
from on_steps import OPTIONS, attach_compiled, new_tokens, prompts
from recorded import KeyHeads

from tide_hf.base_model.structure import CACHE
from tide_hf.engines import gqa_attention as attention
from tide_hf.engines.gqa_attention import NAME, attend, attend_static, filled_up_to, gqa_attention, reading_lengths


@torch.no_grad()
def last_logits(model, width=1):
    """The logits of a pass over `width` tokens after six in two rows, one of them padded; and K/V heads read."""
    torch.manual_seed(1)
    ids, mask = torch.randint(3, VOCAB, (2, 6 + width)), torch.ones(2, 6 + width, dtype=torch.long)
    mask[0, :2] = 0
    read = model(input_ids=ids[:, :6], attention_mask=mask[:, :6], use_cache=True)
    with KeyHeads() as heads:
        logits = model(input_ids=ids[:, 6:], attention_mask=mask, **{CACHE: read[CACHE]}).logits
    return logits, heads.found


@pytest.mark.parametrize("family", SDPA)
def test_the_logits_of_every_family_are_those_of_sdpa(family):
    model = tiny_model(family, attention="sdpa")
    expected, _ = last_logits(model, width=3)
    with gqa_attention(model):
        found, _ = last_logits(model, width=3)
    torch.testing.assert_close(found, expected)
    assert model.config._attn_implementation == "sdpa"


def test_kv_heads_are_not_repeated_unless_a_repeated_mask_would_be_larger(tiny_llama):
    model = tiny_llama()
    config = model.config
    shared, heads = config.num_key_value_heads, config.num_attention_heads
    widest = 2 * config.head_dim * shared
    assert last_logits(model, 3)[1] == {heads}
    with gqa_attention(model):
        found = [last_logits(model, width)[1] for width in (1, 3, widest, widest + 1)]
    assert found == [{shared}, {shared}, {shared}, {heads}]


@pytest.mark.parametrize(("attention", "during"), [("sdpa", NAME), ("eager", "eager")])
def test_only_sdpa_is_replaced_and_restored_after_an_error(tiny_llama, attention, during):
    model, used = tiny_llama(), []
    model.set_attn_implementation(attention)

    def fail():
        used.append(model.config._attn_implementation)
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"), gqa_attention(model):
        fail()
    assert used == [during]
    assert model.config._attn_implementation == attention


def test_it_stays_until_the_last_thread_is_done(tiny_llama):
    model, inside, other_is_done = tiny_llama(), threading.Event(), threading.Event()
    found = []

    def generate_slowly():
        with gqa_attention(model):
            inside.set()
            other_is_done.wait(30)
            found.append(model.config._attn_implementation)

    thread = threading.Thread(target=generate_slowly)
    thread.start()
    inside.wait(30)
    with gqa_attention(model):
        pass
    other_is_done.set()
    thread.join()
    assert found == [NAME]
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("may_read", "change", "reads"),
    [
        (True, {}, True),
        (False, {}, False),
        (True, {"mask": torch.zeros(1, 1, 2, 8)}, False),  # may hold biases
        (True, {"sliding_window": 4}, False),
        (True, {"value": torch.randn(1, 2, 8, 6)}, False),
    ],
)
def test_lengths_on_a_device_replace_only_masks_that_hide_no_more(may_read, change, reads, monkeypatch):
    calls = []
    monkeypatch.setattr(attention, "flash_decode", lambda query, *_: calls.append(0) or query.transpose(1, 2))
    values = {"mask": torch.ones(1, 1, 2, 8, dtype=torch.bool), "value": torch.randn(1, 2, 8, 4)} | change
    query, key = torch.randn(1, 4, 2, 4), torch.randn(1, 2, 8, 4)
    module = torch.nn.Module()
    module.num_key_value_groups = 2
    with reading_lengths(may_read), filled_up_to(torch.tensor(8, device="meta")):  # as on a device
        attend(module, query, key, values.pop("value"), values.pop("mask"), **values)
    assert bool(calls) == reads


@pytest.mark.parametrize("kv_heads", [1, 3])
def test_draft_heads_read_only_filled_slots(kv_heads):
    query, (key, value) = torch.randn(2, 3, 1, 8), torch.randn(2, 2, kv_heads, 9, 8)
    mask = (torch.arange(9) > 0) & (torch.arange(9) < 5)
    mask = mask.expand(2, 1, 1, 9).contiguous()
    expected = attention.draft_head.attend(query, key, value, mask)
    key[:, :, 5:] = value[:, :, 5:] = torch.nan
    with filled_up_to(torch.tensor(5)):
        assert torch.allclose(attend_static(query, key, value, mask), expected, atol=1e-5)


def test_drafts_on_compiled_steps_are_of_filled_slots(tiny_llama, monkeypatch):
    model = tiny_llama()
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach_compiled(model, draft_head_for(model))
    use_heads(model, 0, continuations=new_tokens(expected), kind="mixed")
    monkeypatch.setattr(attention.draft_head, "attend", lambda *_: pytest.fail("all slots were read"))
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert model.last_exit_stats.drafted > 0
    assert steps.refused is None
