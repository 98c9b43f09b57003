"""Prompts of different lengths in one batch."""

from types import SimpleNamespace

import pytest
import torch

from tide_hf.padding import left_padded, pad_token


def test_all_prompts_end_in_the_last_column():
    inputs = left_padded([[5, 6, 7], [8]], pad=9, device="cpu")
    assert inputs["input_ids"].tolist() == [[5, 6, 7], [9, 9, 8]]
    assert inputs["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
    assert {tensor.dtype for tensor in inputs.values()} == {torch.int64}


@pytest.mark.parametrize(("pad", "eos", "found"), [(4, 5, 4), (0, 5, 0), (None, 5, 5), (None, None, 0)])
def test_any_tokenizer_can_pad(pad, eos, found):
    assert pad_token(SimpleNamespace(pad_token_id=pad, eos_token_id=eos)) == found
