"""Choose tokens from the base model's own full-depth logits as plain decoding does, whatever was drafted."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process
from transformers.generation.logits_process import LogitsProcessorList

from .call import Call
from .device_choice import BY_POSITION, SCORES_ONLY, DeviceChoice, can_choose_on
from .engine import Draft
from .ranks import Ranks
from .rows import Row, Stopping

# Stateless processors that treat each row by itself. With any other, all processors get whole batches.
BY_ROW = (*SCORES_ONLY, *BY_POSITION, logits_process.NoRepeatNGramLogitsProcessor)


class AcceptanceRule:
    """Chooses the tokens of one call, and ends its rows.

    The rows of a batch accept drafts independently if all processors and criteria are known to treat each row by
    itself. If not, or with `stay_level`, the rows advance `together`: processors and criteria are called once for each
    position, in order, with all rows, as in plain decoding, and a rejected draft of one row ends the round for all.

    Args:
        call: The call.
        ranks: Processes that have to draw the same tokens.
        padding_is_returned: Whether the caller gets scores or K/V of the padding that follows ended rows.
        stay_level: Whether all rows must have the same length, since the model's attention counts cache slots.
    """

    def __init__(self, call: Call, ranks: Ranks, padding_is_returned: bool, stay_level: bool = False) -> None:
        self.config, self.streamer, self.ranks = call.generation_config, call.streamer, ranks
        self.padding_is_returned = padding_is_returned
        self.stopping = Stopping(call.stopping_criteria, self.config)
        self.rows = [Row(index, prompt[None]) for index, prompt in enumerate(call.input_ids)]
        is_returned = self.config.return_dict_in_generate
        self.returns_scores = bool(is_returned and self.config.output_scores)
        self.returns_logits = bool(is_returned and self.config.output_logits)
        processors = call.logits_processor
        by_row = not stay_level and self.stopping.by_row and all(type(one) in BY_ROW for one in processors)
        self.together = len(self.rows) > 1 and not by_row
        self.processors_of = [_of_row(processors, row.index) if by_row else processors for row in self.rows]
        self.on_device: DeviceChoice | None = None  # chooses the tokens of whole passes, where it can
        may_choose = self.needs_logits and not self.together and not ranks.many
        if may_choose and can_choose_on(call.input_ids.device, processors, self.config.do_sample):
            self.on_device = DeviceChoice(self.processors_of, self.config.do_sample)

    @property
    def needs_logits(self) -> bool:
        """Whether choosing tokens needs logits, and not only the top-1 token at each position."""
        return bool(
            self.config.do_sample
            or len(self.processors_of[0])
            or self.returns_scores
            or self.returns_logits
            or self.together  # criteria on whole batches may read scores
        )

    @property
    def length(self) -> int:
        """Number of new tokens of the longest row that has stopped."""
        return max(row.stopped_at or 0 for row in self.rows)

    def room(self, row: Row) -> int:
        """How many tokens `row` may still add; a stopped row in the batch only grows to the longest row's length."""
        if row.stopped_at is not None and not self.together:
            return max(len(other.tokens) for other in self.rows) - len(row.tokens)
        # At least one, as in plain decoding, which checks no criterion before the first token.
        return max(1, self.config.max_length - row.prompt.shape[1] - len(row.tokens))

    def accept(
        self,
        batch: list[Row],
        logits: Tensor | None,
        drafts: list[Draft],
        top_tokens: list[list[int]] | None,
        depths: list[int],
    ) -> list[list[int]]:
        """Choose tokens for each row of `batch`, position by position, until a token differs from the row's draft.

        A pass, of `depths[i]` layers for `batch[i]`, gave `logits` (rows, width, vocabulary) if `needs_logits`, else
        the `top_tokens` at each position of each row; so did `on_device`, if there is one. Returns each row's new
        tokens: accepted draft tokens and one more.
        """
        before = [len(row.tokens) for row in batch]
        if self.together:
            self._accept_together(logits, drafts, depths)
        else:
            for position, (row, draft) in enumerate(zip(batch, drafts, strict=True)):
                chosen = top_tokens[position] if top_tokens is not None else None
                own = logits[position] if logits is not None else None
                self._accept_row(position, row, own, chosen, draft, depths[position])
        for row in batch:
            row.last = row.tokens[-1] if row.tokens else row.last
        new_tokens = [row.tokens[start:] for row, start in zip(batch, before, strict=True)]
        if self.on_device is not None:
            self.on_device.end(max(map(len, new_tokens)))
        return new_tokens

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        """Choose the next token of each of these rows from its logits, (rows, vocabulary)."""
        ids = torch.cat([row.ids for row in rows])
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self.processors_of[rows[0].index](ids, logits)
        for position, row in enumerate(rows):
            self._keep(row, scores[position : position + 1], logits[position : position + 1])
        if self.config.do_sample:
            drawn = torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1)
            return [int(self.ranks.agree(token)) for token in drawn.flatten().tolist()]
        return scores.argmax(dim=-1).tolist()

    def _keep(self, row: Row, scores: Tensor, logits: Tensor) -> None:
        """Keep the scores and logits of a row's next token, (1, vocabulary), if the caller gets them."""
        if self.returns_scores:
            row.scores.append(scores)
        if self.returns_logits:
            row.logits.append(logits)

    def _accept_row(
        self, number: int, row: Row, logits: Any, chosen: list[int] | None, draft: Draft, depth: int
    ) -> None:
        for position in range(min(len(draft.tokens) + 1, self.room(row))):
            token = chosen[position] if chosen is not None else self.choose([row], logits[position : position + 1])[0]
            if self.on_device is not None:
                self.on_device.check(token, number, position)
                if self.returns_scores or self.returns_logits:
                    self._keep(row, *self.on_device.at(number, position))
            matched = self._add(row, token, draft, position, depth)
            stops = row.stopped_at is None and self.stopping(row)
            if stops:
                row.stopped_at = len(row.tokens)
            if self.streamer is not None:  # after the criteria, as in plain decoding
                self.streamer.put(torch.tensor([token]))
            if stops or not matched:
                break

    def _accept_together(self, logits: Any, drafts: list[Draft], depths: list[int]) -> None:
        for position in range(min(logits.shape[1], self.room(self.rows[0]))):
            chosen = self.choose(self.rows, logits[:, position])
            matched = [
                self._add(row, token, draft, position, depth) or self._may_differ(row)
                for row, token, draft, depth in zip(self.rows, chosen, drafts, depths, strict=True)
            ]
            for row, stops in zip(self.rows, self.stopping.together(self.rows), strict=True):
                if row.stopped_at is None and stops:
                    row.stopped_at = len(row.tokens)
            if not all(matched) or all(row.stopped_at is not None for row in self.rows):
                break

    def _add(self, row: Row, token: int, draft: Draft, position: int, depth: int) -> bool:
        """Add a token, or padding if the row has ended; return whether it equals the draft token."""
        if row.stopped_at is not None and self.stopping.pads:
            token = self.stopping.pad_token_id
        matched = position < len(draft.tokens) and token == draft.tokens[position]
        row.tokens.append(token)
        row.depths.append(draft.exit_layer_of(position) if matched else depth)
        return matched

    def _may_differ(self, row: Row) -> bool:
        """Whether `row` may differ from its draft: it has ended, and the model's output for its padding is not used."""
        return row.stopped_at is not None and self.stopping.pads and not self.padding_is_returned


def _of_row(processors: Any, index: int) -> LogitsProcessorList:
    """The processors of one row; since transformers 5.23, one of them stores the prompt length of every row."""
    found = LogitsProcessorList()
    for processor in processors:
        lengths = getattr(processor, "prompt_ignore_length", None)
        of_row = processor
        if isinstance(lengths, Tensor):
            of_row = copy(processor)
            of_row.prompt_ignore_length = lengths[index : index + 1]
        found.append(of_row)
    return found
