"""Grow a row's draft, best node first, from what all sources offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from .drafts import ROOT, Draft, Node
from .policy import MAX_DRAFT
from .sources import Offer

LEAST_PROMISE = 0.01  # nodes that are less likely to be accepted are not worth the time to consider them

Path = tuple[int, ...]  # the tokens of a node and its ancestors


class GrowingTree:
    """The tree of one row in one round: the likeliest nodes of all that are offered.

    Args:
        limit: Maximum number of tokens of a path.
        find_offers: What sources offer after a path.
        probability: Of an offer, that the base model takes it.
        is_chain: Whether no node may have siblings.
    """

    def __init__(
        self,
        limit: int,
        find_offers: Callable[[Path], list[Offer]],
        probability: Callable[[Offer], float],
        is_chain: bool = False,
    ) -> None:
        self.limit, self.is_chain = limit, is_chain
        self._find_offers, self._probability = find_offers, probability
        self.offers: dict[Path, list[Offer]] = {}  # at each place that was considered
        self._children: dict[Path, list[tuple[float, Offer]]] = {}
        self._regrow()

    def children(self, path: Path) -> list[tuple[float, Offer]]:
        """What may follow a path, with its probability, the likeliest first."""
        if path not in self._children:
            if path not in self.offers:
                self.offers[path] = self._find_offers(path)
            self._children[path] = merged(self.offers[path], self._probability)
        return self._children[path]

    def promised(self, count: int) -> list[float]:
        """The probabilities of the paths to the best `count` nodes, in descending order; fewer if there are no more."""
        while len(self._nodes) < min(count, MAX_DRAFT) and self._heap:
            self._grow()
        return self._promises

    def known(self) -> list[float]:
        """The same of the nodes that were considered so far."""
        return self._promises

    def add(self, path: Path, offers: Sequence[Offer]) -> None:
        """Add offers after a path, with which the tree grows anew."""
        self.children(path)
        self.offers[path] = [*self.offers[path], *offers]
        del self._children[path]
        self._regrow()

    def reach(self, path: Path) -> float:
        """The probability that a path is accepted; 0 beyond the limit."""
        found = 1.0 if len(path) < self.limit else 0.0
        for length, token in enumerate(path):
            found *= next((share for share, offer in self.children(path[:length]) if offer.token == token), 0.0)
        return found

    def best_after(self, path: Path, otherwise: int) -> int:
        """The likeliest token after a path."""
        children = self.children(path) if len(path) < self.limit else []
        return children[0][1].token if children else otherwise

    def draft(self, count: int) -> Draft:
        """The tree of the best `count` nodes."""
        self.promised(count)
        return Draft(self._nodes[:count])

    def _regrow(self) -> None:
        self._nodes: list[Node] = []
        self._promises: list[float] = []
        # Of each node that may have further children: what the next one promises, a number so that entries compare, the
        # node, its path and promise, and the child's place among its children.
        self._heap: list[tuple[float, int, int, Path, float, int]] = []
        self._number = 0
        self._consider(ROOT, (), 1.0, 0)

    def _consider(self, parent: int, path: Path, promise: float, place: int) -> None:
        """Consider one of the children of a node."""
        if len(path) >= self.limit or (self.is_chain and place):
            return
        children = self.children(path)
        if place < len(children) and (found := promise * children[place][0]) >= LEAST_PROMISE:
            self._number += 1
            heappush(self._heap, (-found, self._number, parent, path, promise, place))

    def _grow(self) -> None:
        negative, _, parent, path, promise, place = heappop(self._heap)
        share, offer = self.children(path)[place]
        self._nodes.append(Node(offer.token, parent, offer.source, offer.exit_layer, share))
        self._promises.append(-negative)
        self._consider(parent, path, promise, place + 1)
        self._consider(len(self._nodes) - 1, (*path, offer.token), -negative, 0)


def merged(offers: Sequence[Offer], probability: Callable[[Offer], float]) -> list[tuple[float, Offer]]:
    """The different tokens among offers at one place, with their probabilities, the likeliest first.

    A token that several sources offer is as likely as the surest of them says; where they offer different tokens, a
    likelier one leaves the others what remains.
    """
    best: dict[int, tuple[float, Offer]] = {}
    for offer in offers:
        own, known = probability(offer), best.get(offer.token)
        if own < LEAST_PROMISE:
            continue
        if known is None or own > known[0]:
            best[offer.token] = own, offer
    claimed: dict[str, float] = {}
    found, total = [], 0.0
    for own, offer in sorted(best.values(), key=_share, reverse=True):
        others = total - claimed.get(offer.source, 0.0)  # a source's own tokens exclude each other
        share = min(own * max(0.0, 1.0 - others), 1.0 - total)
        claimed[offer.source] = claimed.get(offer.source, 0.0) + share
        total += share
        found.append((share, offer))
    return sorted(found, key=_share, reverse=True)


def _share(found: tuple[float, Offer]) -> float:
    return found[0]
