"""Inputs of randomly drawn calls."""

import torch
from families import VOCAB


def inputs_of(rows: int, length: int, padding: str, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    for row in range(rows):
        pads = int(torch.randint(0, length, (1,), generator=generator)) if padding != "none" else 0
        mask[row, slice(0, pads) if padding == "left" else slice(length - pads, length)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def sequences_of(result):
    return result if isinstance(result, torch.Tensor) else result.sequences
