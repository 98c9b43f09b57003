"""The sequences of one self-speculative call, and what ends them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria, StopStringCriteria

# Criteria, besides EOS and length, that judge each row by itself; MaxTimeCriteria ends all rows at the same step.
CRITERIA_BY_ROW = (StopStringCriteria,)


@dataclass
class Row:
    """One sequence of a call; `scores` and `logits`, (1, vocabulary) per token, are filled only if returned."""

    index: int  # in the output
    prompt: Tensor  # (1, length), padding included
    last: int = 0  # the last token, which the next pass processes
    tokens: list[int] = field(default_factory=list)  # the new tokens
    stopped_at: int | None = None  # the number of new tokens when a criterion stopped the row
    depths: list[int] = field(default_factory=list)  # the layer that each new token was read from; 0 for an n-gram
    sources: list[str] = field(default_factory=list)  # what wrote each new token; see `common.token_sources`
    scores: list[Tensor] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)
    # (1, slots) on the prompt's device: the prompt, the first `_num_stored` new tokens, and drafts that were accepted.
    _buffer: Tensor | None = None
    _num_stored: int = 0
    _host_prompt: Tensor | None = None

    @property
    def ids(self) -> Tensor:
        """(1, length) prompt and new tokens, as processors and criteria see them; a token is uploaded once."""
        missing = self.tokens[self._num_stored :]
        if missing:
            tokens = torch.tensor([missing], device="cpu").to(self.prompt.device, non_blocking=True)
            self._store(self._num_stored, tokens)
            self._num_stored = len(self.tokens)
        return self._filled(len(self.tokens))

    @property
    def host_ids(self) -> Tensor:
        """`ids` on the CPU; only the first call waits for a device."""
        if self._host_prompt is None:
            self._host_prompt = self.prompt.cpu()
        tokens = torch.tensor([self.tokens], dtype=self.prompt.dtype, device="cpu")
        return torch.cat([self._host_prompt, tokens], dim=-1)

    def ids_before(self, inputs: Tensor) -> Tensor:
        """`ids` and the row's draft, without an upload: `inputs`, (1, width), are the last token and the draft.

        It has to be called in each round, since the tokens that the last round accepted are not stored again.
        """
        self._store(len(self.tokens) - 1, inputs)
        self._num_stored = len(self.tokens)
        return self._filled(len(self.tokens) + inputs.shape[1] - 1)

    def _filled(self, num_tokens: int) -> Tensor:
        """(1, length) prompt and `num_tokens` tokens after it."""
        return self.prompt if self._buffer is None else self._buffer[:, : self.prompt.shape[1] + num_tokens]

    def _store(self, start: int, tokens: Tensor) -> None:
        """Store tokens, (1, width), from the `start`-th new token on."""
        begin = self.prompt.shape[1] + start
        end = begin + tokens.shape[1]
        if self._buffer is None or self._buffer.shape[1] < end:
            filled = self._filled(start)
            self._buffer = torch.cat([filled, filled.new_zeros((1, end))], dim=-1)
        self._buffer[:, begin:end] = tokens


def by_step(by_row: Iterable[list[Tensor]]) -> tuple[Tensor, ...]:
    """Concatenate each step's tensors of all rows, (1, vocabulary) each, to (rows, vocabulary)."""
    return tuple(torch.cat(step) for step in zip(*by_row, strict=True))


class RowCriterion(StoppingCriteria):
    """Receives every new token of every row as soon as it is final, and may end the row: for streaming and cancelling.

    Pass it in `generate(stopping_criteria=[...])`, with a `pad_token_id` in the generation config. In
    mode `self_speculative`, ended rows leave the batch where possible, and the criterion is not called for them again.
    In the other modes, ended rows stay in the batch, and the criterion is called for their padding as well.
    """

    eos_token_id = None  # transformers pads ended rows only if a criterion has this attribute

    def stops_row(self, index: int, token: int) -> bool:
        """Whether the row at `index` in the batch ends with `token`, the row's last token."""
        raise NotImplementedError

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        """Call `stops_row` for every row of a batch, (rows, length); return (rows,) bool."""
        stops = [self.stops_row(index, token) for index, token in enumerate(input_ids[:, -1].tolist())]
        return torch.tensor(stops, device=input_ids.device)


def max_length_of(criteria: Iterable[Any]) -> int | None:
    """Maximum number of tokens of prompt and answer that the criteria allow; `None` without a MaxLengthCriteria."""
    lengths = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    return min(lengths, default=None)


class Stopping:
    """The stopping criteria that `generate` prepared for a call; common criteria are checked without tensors."""

    def __init__(self, criteria: Any, pad_token_id: int) -> None:
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
        self._scores: list[Tensor] = []  # of each step so far, (rows, vocabulary), of several rows
        self.pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)  # as in plain decoding
        self.pad_token_id = pad_token_id

    @property
    def by_row(self) -> bool:
        """Whether all criteria are known to look at each row by itself."""
        return all(type(criterion) in CRITERIA_BY_ROW for criterion in self.others)

    def __call__(self, row: Row) -> bool:
        """Whether `row` stops after its latest token."""
        return self.of_rows([row])[0]

    def of_rows(self, rows: list[Row]) -> list[bool]:
        """Whether each row stops after its latest token; criteria on whole batches are called once for all rows."""
        stops = [row.stopped_at is not None or self._ends(row) for row in rows]
        if not self.others:
            return stops
        # Stop strings are compared on the CPU: on a device, they would have the host wait for each token.
        ids = torch.cat([row.host_ids if self.by_row else row.ids for row in rows])
        scores = self._scores_of(rows) or None
        found = torch.tensor(stops, device=ids.device)
        for criterion in self.others:  # every criterion is called, even if all rows have stopped, as in plain decoding
            answer = criterion(ids, scores)
            if isinstance(answer, Tensor) and answer.shape == (len(rows), 1):  # the documented shape
                answer = answer[:, 0]
            found = found | answer
        return found.tolist()

    def _scores_of(self, rows: list[Row]) -> tuple[Tensor, ...]:
        """The returned scores of all steps so far; those of earlier steps are not concatenated anew for each token."""
        if len(rows) == 1:
            return tuple(rows[0].scores)
        self._scores.extend(by_step(row.scores[len(self._scores) :] for row in rows))
        return tuple(self._scores)

    def _ends(self, row: Row) -> bool:
        stops = row.tokens[-1] in self.eos_tokens
        stops |= self.max_length is not None and row.prompt.shape[1] + len(row.tokens) >= self.max_length
        for criterion in self.row_criteria:
            stops |= criterion.stops_row(row.index, row.tokens[-1])
        return stops
