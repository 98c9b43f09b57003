"""Reading a text by a model as it is: the loss of every token, and the top token before it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tide_hf.calibration.documents import Document, plan_batches, token_batch

Reading = Callable[..., Tensor]  # (input_ids, attention_mask=) -> logits


def reading_of(model: Any) -> Reading:
    """A model's logits, no cache kept."""
    return lambda input_ids, attention_mask: model(input_ids, attention_mask=attention_mask, use_cache=False).logits


@torch.no_grad()
def plain_scores(
    read: Reading, documents: Sequence[Document], batch_size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Read documents in the order of `score_texts`.

    Args:
        read: Gives (rows, length, vocab_size) logits.
        documents: What to read.
        batch_size: Most documents a pass.
        device: Where the model is.

    Returns:
        (N,) negative log-likelihood of each token that counts, in nats, and (N,) the top token in its place.
    """
    losses, tops = [], []
    for rows in plan_batches(documents, batch_size):
        batch = token_batch(documents, rows)
        logits = read(batch.input_ids.to(device), attention_mask=batch.attention_mask.to(device)).cpu()
        wanted = batch.counted[:, :-1] & batch.attention_mask[:, 1:].bool()
        found, targets = logits[:, :-1][wanted].float(), batch.input_ids[:, 1:][wanted]
        losses.append(torch.nn.functional.cross_entropy(found, targets, reduction="none"))
        tops.append(found.argmax(dim=-1))
    return torch.cat(losses), torch.cat(tops)
