"""What `early_exit` with a draft head would do on documents: how many tokens exit in a row, and which ones differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

UNKNOWN = -1.0  # score of a token that no document tells about; below every threshold


@dataclass(frozen=True)
class DraftExits:
    """The run of exits that would follow a full-depth pass at each of N positions, in the documents' order.

    Decoding is followed along each document: a pass gives the token after its first counted position, tokens exit while
    their scores reach the threshold, a pass gives the token after them, and so on. A token that exits is compared with
    the full model's after the same text, which is the document's. So a run is followed as far as the document goes on
    with its tokens. A token that differs is counted, and ends its run; decoding would go on after that token, with what
    the head makes of it. Nor is a run followed beyond the place where a document leaves the full model's top tokens, as
    one that was sampled does. What follows such places is left out.

    Attributes:
        lowest: (N, steps) lowest score of a run's tokens up to each step, float32; `UNKNOWN` beyond what is followed.
        agrees: (N, steps) whether a step's token is the full model's.
        document_ids: (N,) document of each position, ascending.
    """

    lowest: Tensor
    agrees: Tensor
    document_ids: Tensor

    @property
    def is_known(self) -> Tensor:
        """(N, steps) whether a step is followed."""
        return self.lowest > UNKNOWN

    def disagreement_per_document(self, threshold: float) -> Tensor:
        """Share of each document's tokens that exit and differ from the full model's, (documents,) float64.

        Tokens of full-depth passes count among all tokens, as those that do not differ.
        """
        _, differ, counts = self._follow(threshold)
        return differ.double() / counts

    def depth_fraction(self, threshold: float) -> float:
        """Full-depth passes per token."""
        passes, _, counts = self._follow(threshold)
        return int(passes.sum()) / int(counts.sum())

    def agreement_by_step(self) -> list[float]:
        """For each step of a run, how often its token is the full model's after steps whose tokens were."""
        known = self.is_known
        right = (self.agrees & known).sum(dim=0) / known.sum(dim=0).clamp(min=1)
        return right.tolist()

    def _follow(self, threshold: float) -> tuple[Tensor, Tensor, Tensor]:
        """For each document, the number of passes, of tokens that exit and differ, and of tokens."""
        lengths = (self.lowest >= threshold).sum(dim=1)
        differing = functional.pad((~self.agrees).cumsum(dim=1), (1, 0)).gather(1, lengths[:, None])[:, 0]
        _, counts = self.document_ids.unique_consecutive(return_counts=True)
        ends = counts.cumsum(dim=0)
        position, passes, differ = ends - counts, torch.zeros_like(ends), torch.zeros_like(ends)
        while bool((going := position < ends).any()):
            at = position.clamp(max=len(lengths) - 1)
            passes += going
            differ += torch.where(going, differing[at], 0)
            position = torch.where(going, at + 1 + lengths[at], position)
        return passes, differ, counts
