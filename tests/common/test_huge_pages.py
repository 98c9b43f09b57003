"""Tensors in huge pages are tensors like others, and take no memory once nobody has them."""

import gc
import mmap

import pytest
import torch

from tide_hf.common import huge_pages
from tide_hf.common.huge_pages import AT_ONCE, CACHE_LINE, empty_in_huge_pages

has_huge_pages = pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="needs Linux")


def test_tensors_share_memory_but_no_bytes():
    sizes = [
        ((3, 5), torch.int8),
        ((4, 16, 2), torch.bfloat16),
        ((AT_ONCE // 4 + 7,), torch.float32),
        ((2,), torch.half),
    ]
    tensors = [empty_in_huge_pages(size, dtype).fill_(index) for index, (size, dtype) in enumerate(sizes)]
    for index, (tensor, (size, dtype)) in enumerate(zip(tensors, sizes, strict=True)):
        assert (tuple(tensor.shape), tensor.dtype) == (size, dtype)
        assert tensor.eq(index).all()
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % CACHE_LINE == 0
    assert torch.equal(tensors[1].clone(), tensors[1])


@has_huge_pages
def test_memory_lives_as_long_as_its_tensors(monkeypatch):
    monkeypatch.setattr(huge_pages, "_latest", huge_pages._Latest())
    one, other = (empty_in_huge_pages((8,), torch.float32) for _ in range(2))
    memory = huge_pages._latest.memory
    del one
    gc.collect()
    assert memory() is not None
    assert other.fill_(1.0).sum() == 8
    del other
    gc.collect()
    assert memory() is None
    assert empty_in_huge_pages((8,), torch.float32).fill_(2.0).sum() == 16  # elsewhere


@has_huge_pages
def test_systems_without_huge_pages_or_memory_for_them(monkeypatch):
    def refuse(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(huge_pages, "_latest", huge_pages._Latest())
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", refuse)
        assert empty_in_huge_pages((8,), torch.float32).shape == (8,)
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    assert empty_in_huge_pages((8,), torch.float32).shape == (8,)
    assert huge_pages._latest.memory is None
    assert empty_in_huge_pages((0, 4), torch.int8).shape == (0, 4)
