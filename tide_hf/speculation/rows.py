"""The sequences of one self-speculative call, and what ends them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

# Other criteria that look at each row by itself. Time is not one of them: it ends all rows with the same token.
BY_ROW = (StopStringCriteria,)


@dataclass
class Row:
    """One sequence of the call. Scores and logits are stored where they are returned, (1, vocabulary) of each token."""

    index: int  # in the output
    prompt: Tensor  # (1, length), padding included
    last: int = 0  # the last token, which the next pass processes
    tokens: list[int] = field(default_factory=list)  # the new tokens
    stopped_at: int | None = None  # the number of new tokens with which a criterion stopped it
    depths: list[int] = field(default_factory=list)  # the layer that each new token was read from
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)

    @property
    def ids(self) -> Tensor:
        """(1, length) prompt and new tokens, as processors and criteria see them."""
        if not self.tokens:
            return self.prompt
        return torch.cat([self.prompt, torch.tensor([self.tokens], device=self.prompt.device)], dim=-1)


def by_step(by_row: Iterable[list[Tensor]]) -> tuple[Tensor, ...]:
    """(rows, vocabulary) of each step, from as many (1, vocabulary) of each row."""
    return tuple(torch.cat(step) for step in zip(*by_row, strict=True))


class RowCriterion(StoppingCriteria):
    """Receives every new token of every row as soon as it is final, and may end the row: for streaming and cancelling.

    Pass it in `generate(stopping_criteria=[...])`, with a `pad_token_id` in the generation config. In
    `self_speculative` a row that it ends costs nothing from then on, and it is not called for rows that have ended.
    In the other modes such rows stay in the batch, and it is called for their padding as well.
    """

    eos_token_id = None  # transformers pads the rows that end by a criterion with this attribute

    def stops_row(self, index: int, token: int) -> bool:
        """Whether the row of this index in the batch ends with this token, its last."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Call `stops_row` for every row of a batch, (rows, length); return (rows,) bool."""
        stops = [self.stops_row(index, token) for index, token in enumerate(input_ids[:, -1].tolist())]
        return torch.tensor(stops, device=input_ids.device)


def max_length_of(criteria: Iterable[Any]) -> int | None:
    """Most tokens of prompt and answer that criteria allow; `None` where none of them counts tokens."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min(lengths, default=None)


class Stopping:
    """The stopping criteria that `generate` prepared for a call; the common ones are checked without a tensor."""

    def __init__(self, criteria: Any, generation_config: Any) -> None:
        self.eos_tokens: set[int] = set()
        self.max_length = max_length_of(criteria)
        self.row_criteria: list[RowCriterion] = []
        self.others = []
        for criterion in criteria:
            if type(criterion) is EosTokenCriteria:
                self.eos_tokens |= set(criterion.eos_token_id.reshape(-1).tolist())
            elif isinstance(criterion, RowCriterion):
                self.row_criteria.append(criterion)
            elif type(criterion) is not MaxLengthCriteria:
                self.others.append(criterion)
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as plain decoding decides it
        pad = generation_config._pad_token_tensor
        self.pad_token_id = int(pad) if pad is not None else 0

    @property
    def by_row(self) -> bool:
        """Whether all criteria are known to look at each row by itself."""
        return all(type(criterion) in BY_ROW for criterion in self.others)

    def __call__(self, row: Row) -> bool:
        """Whether `row` ends with its last token."""
        return self.together([row])[0]

    def together(self, rows: list[Row]) -> list[bool]:
        """Whether each row ends with its last token; criteria on whole batches are called for all of them at once."""
        stops = [row.stopped_at is not None or self._ends(row) for row in rows]
        if not self.others:
            return stops
        ids = torch.cat([row.ids for row in rows])
        scores = by_step(row.scores for row in rows) or None
        found = torch.tensor(stops, device=ids.device)
        for criterion in self.others:  # all of them, whatever the first returns, as in plain decoding
            answer = criterion(ids, scores)
            if isinstance(answer, Tensor) and answer.shape == (len(rows), 1):  # as StoppingCriteria documents it
                answer = answer[:, 0]
            found = found | answer
        return found.tolist()

    def _ends(self, row: Row) -> bool:
        stops = row.tokens[-1] in self.eos_tokens
        stops |= self.max_length is not None and row.prompt.shape[1] + len(row.tokens) >= self.max_length
        for criterion in self.row_criteria:
            stops |= criterion.stops_row(row.index, row.tokens[-1])
        return stops
