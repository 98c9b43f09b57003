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
from .drafts import ROOT, Accepted, Draft
from .protocols import Pass
from .ranks import Ranks
from .rows import Row, Stopping

# Stateless processors that treat each row by itself. With any other, all processors get whole batches.
PROCESSORS_BY_ROW = (*SCORES_ONLY, *BY_POSITION, logits_process.NoRepeatNGramLogitsProcessor)


class ExactAcceptance:
    """The [`AcceptanceRule`] of `self_speculative`: accepts a draft token where plain decoding would have chosen it.

    The rows of a batch accept drafts independently if all processors and criteria are known to treat each row by
    itself. If not, or with `same_length`, the rows advance in `lockstep`: processors and criteria are called once for
    each position, in order, with all rows, as in plain decoding, and one row's rejected draft ends the round for all.

    Args:
        call: The call.
        ranks: Processes that have to draw the same tokens.
        same_length: Whether all rows must have the same length, since the model's attention counts cache slots.
    """

    is_exact = (
        True  # whether tokens are those of plain decoding; such a rule need not see logits where it can do without
    )

    def __init__(self, call: Call, ranks: Ranks, same_length: bool = False) -> None:
        self.config, self.streamer, self.ranks = call.generation_config, call.streamer, ranks
        self.padding_is_returned = call.cache_is_returned  # with the scores or K/V that follow ended rows
        self.stopping = Stopping(call.stopping_criteria, call.pad_token_id)
        self.rows = [Row(index, prompt[None]) for index, prompt in enumerate(call.input_ids)]
        is_returned = self.config.return_dict_in_generate
        self.returns_scores = bool(is_returned and self.config.output_scores)
        self.returns_logits = bool(is_returned and self.config.output_logits)
        processors = call.logits_processor
        by_row = not same_length and self.stopping.by_row and all(type(one) in PROCESSORS_BY_ROW for one in processors)
        self.lockstep = len(self.rows) > 1 and not by_row
        self.processors_of = [_of_row(processors, row.index) if by_row else processors for row in self.rows]
        self.device_choice: DeviceChoice | None = None  # chooses the tokens of whole passes, where it can
        may_choose = self.is_exact and self.needs_logits and not self.lockstep and not ranks.many
        if may_choose and can_choose_on(call.input_ids.device, processors, self.config.do_sample):
            self.device_choice = DeviceChoice(self.processors_of, self.config.do_sample)

    @property
    def needs_logits(self) -> bool:
        """Whether choosing tokens needs logits, and not only the top-1 token at each position."""
        return bool(
            not self.is_exact
            or self.config.do_sample
            or len(self.processors_of[0])
            or self.returns_scores
            or self.returns_logits
            or self.lockstep  # criteria on whole batches may read scores
        )

    @property
    def keeps_ended_rows(self) -> bool:
        """Whether rows that have ended stay in the batch, since they are not padded, or their padding has effects."""
        return not self.stopping.pads or self.padding_is_returned or self.lockstep

    def limit(self, row: Row) -> int:
        """How many tokens `row` may still add; a stopped row in the batch only grows to the longest row's length."""
        if row.stopped_at is not None and not self.lockstep:
            return max(len(other.tokens) for other in self.rows) - len(row.tokens)
        # At least one, as in plain decoding, which checks no criterion before the first token.
        return max(1, self.config.max_length - row.prompt.shape[1] - len(row.tokens))

    def accept(self, batch: list[Row], verified: Pass) -> list[Accepted]:
        """Choose tokens for each row of `batch`, position by position, until one is not among its draft's tokens."""
        logits, chosen, on_device = None, None, self.device_choice
        if verified.has_trees:
            on_device = None  # the tokens before a node are not those before its position
        if on_device is not None:
            chosen = verified.tokens(on_device.choose(batch, verified.logits, verified.inputs))
        elif not self.needs_logits:
            chosen = verified.tokens()
        else:
            logits = verified.logits
        drafts, depths = verified.drafts, verified.depths
        if self.lockstep:
            found = self._accept_in_lockstep(logits, drafts, depths)
        else:
            found = [
                self._accept_row(index, row, logits, chosen, drafts[index], depths[index])
                for index, row in enumerate(batch)
            ]
        for row in batch:
            row.last = row.tokens[-1] if row.tokens else row.last
        if on_device is not None:
            on_device.end(max(len(accepted.tokens) for accepted in found))
        return found

    def _choose(self, rows: Sequence[Row], logits: Tensor, drafted: Sequence[Sequence[int]]) -> list[int]:
        """Choose the next token of each of these rows from its logits, (rows, vocabulary)."""
        ids = torch.cat([row.ids for row in rows])
        logits = logits.to(copy=True, dtype=torch.float32, device=ids.device)
        scores = self.processors_of[rows[0].index](ids, logits)
        for position, row in enumerate(rows):
            self._keep(row, scores[position : position + 1], logits[position : position + 1])
        tokens = self.pick(scores, drafted)
        return [int(self.ranks.agree(token)) for token in tokens] if self.config.do_sample else tokens

    def pick(self, scores: Tensor, drafted: Sequence[Sequence[int]]) -> list[int]:
        """Pick each row's token from its scores, (rows, vocabulary), logits after the processors.

        `drafted` are the tokens that a row's draft proposes at this position; the exact rule does not look at them.
        """
        if self.config.do_sample:
            return torch.multinomial(torch.softmax(scores, dim=-1), num_samples=1).flatten().tolist()
        return scores.argmax(dim=-1).tolist()

    def _keep(self, row: Row, scores: Tensor, logits: Tensor) -> None:
        """Keep the scores and logits of a row's next token, (1, vocabulary), if the caller gets them."""
        if self.returns_scores:
            row.scores.append(scores)
        if self.returns_logits:
            row.logits.append(logits)

    def _accept_row(
        self, index: int, row: Row, logits: Any, tokens: list[list[int]] | None, draft: Draft, depth: int
    ) -> Accepted:
        found, node = Accepted(), ROOT
        for _ in range(self.limit(row)):
            position = node + 1  # of the node in the pass, whose first token is the row's last
            if tokens is not None:
                token = tokens[index][position]
            else:
                [token] = self._choose([row], logits[index, position][None], [_tokens_after(draft, node)])
            if self.device_choice is not None and tokens is not None:
                self.device_choice.check(token, index, position)
                if self.returns_scores or self.returns_logits:
                    self._keep(row, *self.device_choice.at(index, position))
            child = self._add(row, token, draft, node, depth, found)
            stops = row.stopped_at is None and self.stopping(row)
            if stops:
                row.stopped_at = len(row.tokens)
            if self.streamer is not None:  # after the criteria, as in plain decoding
                self.streamer.put(torch.tensor([token]))
            if stops or child is None:
                break
            node = child
        return found

    def _accept_in_lockstep(self, logits: Any, drafts: list[Draft], depths: list[int]) -> list[Accepted]:
        """As `_accept_row`, for rows whose drafts are chains, position by position."""
        found = [Accepted() for _ in self.rows]
        for position in range(min(logits.shape[1], self.limit(self.rows[0]))):
            node = position - 1
            chosen = self._choose(self.rows, logits[:, position], [_tokens_after(draft, node) for draft in drafts])
            goes_on = [
                self._add(row, token, draft, node, depth, own) is not None or self._may_differ(row)
                for row, token, draft, depth, own in zip(self.rows, chosen, drafts, depths, found, strict=True)
            ]
            for row, stops in zip(self.rows, self.stopping.of_rows(self.rows), strict=True):
                if row.stopped_at is None and stops:
                    row.stopped_at = len(row.tokens)
            if not all(goes_on) or all(row.stopped_at is not None for row in self.rows):
                break
        return found

    def _add(self, row: Row, token: int, draft: Draft, node: int, depth: int, found: Accepted) -> int | None:
        """Add a token, or padding if the row has ended; return the child of `node` that drafted it, if one did."""
        if row.stopped_at is not None and self.stopping.pads:
            token = self.stopping.pad_token_id
        child = next((index for index in draft.children(node) if draft.nodes[index].token == token), None)
        row.tokens.append(token)
        row.depths.append(depth if child is None else draft.nodes[child].exit_layer)
        found.tokens.append(token)
        if child is not None and len(found.path) == len(found.tokens) - 1:
            found.path.append(child)
        return child

    def _may_differ(self, row: Row) -> bool:
        """Whether `row` may differ from its draft: it has ended, and the model's output for its padding is not used."""
        return row.stopped_at is not None and self.stopping.pads and not self.padding_is_returned


def _tokens_after(draft: Draft, node: int) -> list[int]:
    return [draft.nodes[index].token for index in draft.children(node)]


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
