"""Files of `torch.save`: tensors are read as torch reads them, or the file is refused."""

import pytest
import torch
from torch import nn

from tide_hf.routers.pickled import read_pickled

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
WIDE = torch.randn(4, 6)
NORMS = nn.Sequential(nn.LayerNorm(3), nn.LayerNorm(3))


@pytest.mark.parametrize(
    "content",
    [
        {str(dtype): torch.ones(2, 3).to(dtype) for dtype in DTYPES},
        {"transposed": WIDE.T, "row": WIDE[2], "column": WIDE[:, 2], "again": WIDE[2]},
        {"empty": torch.empty(0, 3), "scalar": torch.tensor(3)},
        dict(NORMS.named_parameters()),
        NORMS.state_dict(),
    ],
    ids=["dtypes", "views", "empty and scalar", "parameters", "state dict"],
)
def test_tensors_are_read_as_torch_reads_them(content, tmp_path):
    torch.save(content, tmp_path / "a.bin")
    found = read_pickled(tmp_path / "a.bin")
    assert found.keys() == content.keys()
    for name, tensor in content.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def test_numbers_and_dictionaries_are_read(tmp_path):
    content = {"a": 1, 2: {"b": 10**12, "c": -0.5, "d": None, "e": "text"}}
    torch.save(content, tmp_path / "a.bin")
    assert read_pickled(tmp_path / "a.bin") == content


def test_a_file_with_a_flipped_bit_is_refused_or_loads_as_it_was(tmp_path):
    """Padding, dates and records that are not read may change."""
    torch.save({"a": WIDE, "b": torch.arange(9)}, tmp_path / "a.bin")
    content, refused = (tmp_path / "a.bin").read_bytes(), 0
    for position in range(0, len(content), 3):
        (tmp_path / "a.bin").write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        try:
            found = read_pickled(tmp_path / "a.bin")
        except ValueError:
            refused += 1
            continue
        assert torch.equal(found["a"], WIDE)
        assert torch.equal(found["b"], torch.arange(9))
    assert refused > (9 * 8 + 24 * 4) // 3
