"""Choose tokens on an accelerator at all positions of a pass, so that the host waits for the device once per round.

The token at a position counts only if all draft tokens before it are accepted, so the position's processors get these
as the tokens of the row. Random numbers are drawn position by position, as plain decoding draws them; once the host
knows how many tokens were accepted, the device's generator goes back to where plain decoding would have left it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from .rows import Row

# Stateless processors that treat each row by itself, and do not look at its tokens: one call is for all positions.
SCORES_ONLY = (
    logits_process.EpsilonLogitsWarper,
    logits_process.EtaLogitsWarper,
    logits_process.InfNanRemoveLogitsProcessor,
    logits_process.LogitNormalization,
    logits_process.MinPLogitsWarper,
    logits_process.SuppressTokensLogitsProcessor,
    logits_process.TemperatureLogitsWarper,
    logits_process.TopHLogitsWarper,
    logits_process.TopKLogitsWarper,
    logits_process.TopPLogitsWarper,
    logits_process.TypicalLogitsWarper,
)
# Those that look at the row's tokens, or their number, without a read by the host.
BY_POSITION = (
    logits_process.ExponentialDecayLengthPenalty,
    logits_process.ForcedBOSTokenLogitsProcessor,
    logits_process.ForcedEOSTokenLogitsProcessor,
    logits_process.MinLengthLogitsProcessor,
    logits_process.MinNewTokensLengthLogitsProcessor,
    logits_process.NoBadWordsLogitsProcessor,
    logits_process.RepetitionPenaltyLogitsProcessor,
    logits_process.SequenceBiasLogitsProcessor,
    logits_process.SuppressTokensAtBeginLogitsProcessor,
)
NO_TOKEN = -1  # the token of a position without valid probabilities
PROBE_SHAPE = (3, 1, 4096)  # positions, rows, tokens

logger = logging.getLogger(__name__)


class DeviceChoice:
    """Chooses the tokens of all positions of a pass; see [`can_choose_on`].

    `processors_of` has the processors of each row of the call.
    """

    def __init__(self, processors_of: Sequence[Any], do_sample: bool) -> None:
        self.processors_of, self.do_sample = processors_of, do_sample
        self.logits: Any = None  # (rows, width, vocabulary) of the pass, float32
        self.scores: Any = None  # the same after the processors
        self._states: list[Tensor] = []  # of the device's generator, before the draw of each position

    def choose(self, rows: Sequence[Row], logits: Tensor, inputs: Tensor | None) -> Tensor:
        """Choose the token of each position, on the device.

        Args:
            rows: The rows in the batch.
            logits: (rows, width, vocabulary) of a full-depth pass.
            inputs: (rows, width) tokens that the pass read: each row's last token and its draft. `None` for prefill.

        Returns:
            (rows, width) int64 tokens, `NO_TOKEN` where the probabilities are not valid.
        """
        self.logits = logits.to(copy=True, dtype=torch.float32, device=rows[0].prompt.device)
        self.scores = self._processed(rows, inputs).view(self.logits.shape)
        if not self.do_sample:
            return self.scores.argmax(dim=-1)
        probabilities = torch.softmax(self.scores, dim=-1)
        tokens, self._states = _draw(probabilities.transpose(0, 1))
        # Softmax gives NaN for all tokens if it does for one.
        return torch.where(probabilities[..., 0].isnan(), NO_TOKEN, tokens.T)

    def check(self, token: int, number: int, position: int) -> None:
        """Raise the error of plain decoding if the `number`-th row's probabilities at a position are not valid."""
        if token == NO_TOKEN:
            torch.multinomial(torch.softmax(self.scores[number, position], dim=-1), num_samples=1)

    def at(self, number: int, position: int) -> tuple[Tensor, Tensor]:
        """Copies of the `number`-th row's scores and logits at a position, (1, vocabulary) each."""
        return self.scores[number, position].clone()[None], self.logits[number, position].clone()[None]

    def end(self, num_used: int) -> None:
        """End the round, of which the longest row uses `num_used` positions."""
        if num_used < len(self._states):
            _set_state(self.scores.device, self._states[num_used])
        self.logits = self.scores = None

    def _processed(self, rows: Sequence[Row], inputs: Tensor | None) -> Tensor:
        """The scores of all positions, (rows * width, vocabulary)."""
        width = self.logits.shape[1]
        texts: list[Tensor] = []  # of each row, with its draft
        scores = self.logits.reshape(-1, self.logits.shape[-1])
        for index, processor in enumerate(self.processors_of[rows[0].index]):
            if type(processor) in SCORES_ONLY:
                scores = processor(rows[0].prompt, scores)
                continue
            if not texts:
                texts = [row.ids if inputs is None else row.ids_before(inputs[i : i + 1]) for i, row in enumerate(rows)]
            parts = iter(scores.split(1))
            scores = torch.cat(
                [
                    self.processors_of[row.index][index](text[:, : text.shape[1] - after], next(parts))
                    for row, text in zip(rows, texts, strict=True)
                    for after in reversed(range(width))
                ]
            )
        return scores


def can_choose_on(device: torch.device, processors: Sequence[Any], do_sample: bool) -> bool:
    """Whether a `DeviceChoice` gives on `device` what plain decoding gives. On a CPU there is no wait to save."""
    if device.type == "cpu" or not all(type(one) in (*SCORES_ONLY, *BY_POSITION) for one in processors):
        return False
    return not do_sample or _draws_as_plain_decoding(device)


@cache
def _draws_as_plain_decoding(device: torch.device) -> bool:
    """Whether [`_draw`] draws what `torch.multinomial` would on `device`; takes no random number."""
    if device.type == "mps":  # its module sets the state of no particular device
        return False
    before = _state(device)
    probabilities = torch.softmax(torch.linspace(-4, 4, PROBE_SHAPE[-1], device=device), dim=0).expand(PROBE_SHAPE)
    expected = [torch.multinomial(one, num_samples=1) for one in probabilities]
    _set_state(device, before)
    is_same = torch.equal(_draw(probabilities)[0], torch.cat(expected))
    _set_state(device, before)
    if not is_same:
        logger.info("sampling on %s reads each token by itself: its draws are not those expected", device)
    return is_same


def _draw(probabilities: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Draw tokens as `torch.multinomial` does at each position, without its checks, for which the host would wait.

    `probabilities` are (positions, rows, vocabulary). Returns tokens, (positions, rows), and for each position the
    state of the generator before its draw.
    """
    noise, states = torch.empty_like(probabilities, memory_format=torch.contiguous_format), []
    for one in noise:
        states.append(_state(probabilities.device))
        one.exponential_()
    return (probabilities / noise).argmax(dim=-1), states


def _state(device: torch.device) -> Tensor:
    state: Tensor = torch.get_device_module(device).get_rng_state(device)
    return state


def _set_state(device: torch.device, state: Tensor) -> None:
    torch.get_device_module(device).set_rng_state(state, device)
