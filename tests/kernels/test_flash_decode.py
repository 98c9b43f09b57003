"""Attention with the number of filled slots on the device, over a stand-in for FlashAttention; see test_gpu.py."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from tide_hf.kernels import flash_decode as module
from tide_hf.kernels.flash_decode import MANY_SLOTS, can_split, flash_decode


class FlashAttention:
    """What FlashAttention 2 gives for sequences of any lengths, one after another; `most` are the queries of one."""

    def __init__(self, splits=True):
        self.most, self.splits = [], splits

    def __call__(self, query, key, value, query_ends, slot_ends, most, _slots, dropout, *_, scale, seqused_k):
        assert dropout == 0.0
        assert seqused_k.dtype == query_ends.dtype == slot_ends.dtype == torch.int32
        assert len(slot_ends) == len(query_ends) == len(seqused_k) + 1
        if most == 1 < len(query) and not self.splits:
            raise RuntimeError("this build has no such kernel")
        self.most.append(most)
        self.lengths = seqused_k
        found = torch.empty_like(query)
        for begin, end, first, length in zip(query_ends, query_ends[1:], slot_ends, seqused_k, strict=False):
            assert end - begin <= most
            queries = query[begin:end].transpose(0, 1)
            keys, values = (part[first : first + length].transpose(0, 1) for part in (key, value))
            mask = torch.ones(len(query[begin:end]), int(length), dtype=torch.bool).tril(int(length - (end - begin)))
            attended = scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
            found[begin:end] = attended.transpose(0, 1)
        return found, None


@pytest.fixture(autouse=True)
def _probes_anew():
    can_split.cache_clear()
    yield
    can_split.cache_clear()


@pytest.mark.parametrize("width", [1, 4, 16])
@pytest.mark.parametrize(
    ("kv_heads", "slots", "filled", "is_split"),
    [
        (2, 256, 100, False),
        (2, 2 * MANY_SLOTS, 3000, True),
        (2, 2 * MANY_SLOTS, 16, True),
        (4, 2 * MANY_SLOTS, 3000, False),  # query heads share no K/V
    ],
)
def test_beyond_many_slots_each_token_is_a_sequence_where_that_splits_keys(
    width, kv_heads, slots, filled, is_split, monkeypatch
):
    flash = FlashAttention()
    monkeypatch.setattr(module, "aten", SimpleNamespace(_flash_attention_forward=flash))
    assert can_split(torch.device("cpu"), torch.float32, 8)
    flash.most.clear()
    query, key, value = (torch.randn(1, *shape, 8) for shape in ((4, width), (kv_heads, slots), (kv_heads, slots)))
    ends = torch.arange(filled - width + 1, filled + 1, dtype=torch.int32)
    mask = torch.arange(slots) < ends[:, None]
    expected = scaled_dot_product_attention(query, key, value, mask, scale=0.3, enable_gqa=True)
    found = flash_decode(query, key, value, ends, 0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))
    assert flash.most == [1 if is_split else width]
    assert flash.lengths.untyped_storage().data_ptr() == ends.untyped_storage().data_ptr()  # nothing is made of them


def test_where_that_does_not_run_the_tokens_of_a_pass_are_one_sequence(monkeypatch):
    flash = FlashAttention(splits=False)
    monkeypatch.setattr(module, "aten", SimpleNamespace(_flash_attention_forward=flash))
    query, key = torch.randn(1, 4, 4, 8), torch.randn(1, 2, 2 * MANY_SLOTS, 8)
    flash_decode(query, key, key, torch.arange(97, 101, dtype=torch.int32), None)
    assert flash.most == [4]
