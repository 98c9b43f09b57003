"""What drafts by default: one tree for each row and round, of what all sources and the draft heads offer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..common.token_sources import head_source
from .drafts import Accepted, Draft
from .growth import GrowingTree, Path
from .policy import (
    MAX_DRAFT,
    MIN_GAIN,
    TOP_DRAFTS,
    AcceptanceTable,
    CostTable,
    Key,
    Plan,
    Prices,
    best_plan,
    best_rate,
    expected_tokens,
    step_gains,
)
from .protocols import DraftEngine
from .sources import Offer, TreeSource
from .successors import SuccessorTable

LEARNING_RATE = 0.1  # share by which each draft moves the rates kept between calls towards the current estimate
PRIOR_RATE = 0.05  # share by which each call first moves these rates back to their priors
# Each round multiplies the weight of a head's observations by this. Otherwise, a few rejected drafts in a row would end
# drafting for the rest of the answer, since a head that does not draft is not observed.
HEAD_MEMORY = 0.95
RANK_SHARE = 0.35  # of a head's prior: how often its second choice is right, and so on with each further one
LOOK_AHEAD = 3  # draft steps that are weighed together, since a wide pass may pay only for several


class HybridDrafter:
    """Drafts a tree for each row, best node first, or nothing where the policy expects no gain.

    Args:
        sources: What offers nodes without a model. All that they offer at the places that a round reaches is judged,
            drafted or not.
        costs_of: Returns the measured costs for a number of rows; the costs are kept between calls.
        head_priors: For each exit layer that drafts, how often its head agreed with the base model in calibration.
        engine: Runs the passes and the draft heads.
        learned: Acceptance rate of each source and rank in earlier calls at this temperature; updated in place. The
            rates return to their priors over time, since otherwise a rejected source would never be tried again.
        successors: Gets what each pass gives after each token that it reads.
    """

    def __init__(
        self,
        sources: Sequence[TreeSource],
        costs_of: Callable[[int], CostTable],
        head_priors: dict[int, float],
        engine: DraftEngine,
        learned: dict[Key, float] | None = None,
        successors: SuccessorTable | None = None,
    ) -> None:
        self.sources, self.costs_of, self.engine = sources, costs_of, engine
        self.successors = successors if successors is not None else SuccessorTable(0)
        self.heads = {layer: head_source(layer) for layer in sorted(head_priors)}
        priors = {key: prior for source in sources for key, prior in source.priors.items()}
        for layer, source in self.heads.items():
            priors |= {(source, rank): head_priors[layer] * RANK_SHARE**rank for rank in range(TOP_DRAFTS)}
        self.learned = learned if learned is not None else {}
        for key, prior in priors.items():
            before = self.learned.get(key, prior)
            self.learned[key] = before + PRIOR_RATE * (prior - before)
        self.acceptances = AcceptanceTable({key: self.learned[key] for key in priors})
        self._trees: dict[int, GrowingTree] = {}  # of each row, in this round
        self._costs: CostTable | None = None  # of the last round's batch
        self._rows: list[int] = []  # of the last round
        self._num_tokens = 0
        self._has_seen = True  # whether successors have been taken from the last pass, or are not to be

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft for each row the tree that gives the most tokens per millisecond."""
        costs = self._next_round(rows)
        if costs.is_idle:
            return [Draft() for _ in rows]
        for source in self.heads.values():
            self.acceptances.forget(source, HEAD_MEMORY)
        is_chain, probability = not self.engine.takes_trees, self._probability
        trees = [
            GrowingTree(limit, partial(self._offers, row), probability, is_chain)
            for row, limit in zip(rows, limits, strict=True)
        ]
        self._trees = dict(zip(rows, trees, strict=True))
        prices = Prices(costs)
        plain = Plan(1, MIN_GAIN * len(rows) / prices.verify(1))
        plan = max(plain, best_plan([tree.promised for tree in trees], prices), key=lambda one: one.rate)
        if self.heads and not self.engine.reads_drafts:
            unread = self._draft_unread(trees, prices, plan)
            if unread is not None:
                return unread
        elif self.heads:
            plan = self._draft_with_head(trees, prices, plan)
        return [tree.draft(plan.width - 1) for tree in trees]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Let the sources go on, and learn how often what they offered was right."""
        self._take_successors()
        for source in self.sources:
            source.extend(row, accepted.tokens)
        self._num_tokens += len(accepted.tokens)
        tree = self._trees.pop(row, None)
        if tree is None:
            return
        if draft.nodes and draft.nodes[0].source in self.heads.values() and not self.engine.reads_drafts:
            self._judge_unread(draft, accepted)
        path: Path = ()
        for token in accepted.tokens:
            for offer in tree.offers.get(path, ()):
                self._learn((offer.source, offer.rank), offer.token == token, offer.score)
            path = (*path, token)

    def _next_round(self, rows: list[int]) -> CostTable:
        """End the last round; return the costs of one over these rows."""
        if self._costs is not None and self._num_tokens:
            self._costs.end_round(self._num_tokens / len(self._rows))
        self._costs, self._rows, self._num_tokens = self.costs_of(len(rows)), rows, 0
        self._costs.begin_round()
        self._has_seen = self._costs.is_idle
        return self._costs

    def _offers(self, row: int, path: Path) -> list[Offer]:
        return [offer for source in self.sources for offer in source.offers(row, path)]

    def _probability(self, offer: Offer) -> float:
        return self.acceptances.probability((offer.source, offer.rank), offer.score)

    def _learn(self, key: Key, is_right: bool, score: float | None) -> None:
        self.acceptances.record(key, is_right, score)
        self.learned[key] += LEARNING_RATE * (self.acceptances.probability(key) - self.learned[key])

    def _take_successors(self) -> None:
        """Take in what the last pass gave after each of its tokens, once a round."""
        if self._has_seen or not self.successors.max_tokens:
            return
        self._has_seen = True
        for tokens, after in self.engine.likeliest():
            self.successors.see(tokens, after)

    def _rates(self, exit_layer: int) -> list[float]:
        """How often each rank of a head's tokens is right; a chain takes the first alone."""
        ranks = TOP_DRAFTS if exit_layer == self.engine.head_layer and self.engine.takes_trees else 1
        return [self.acceptances.probability((self.heads[exit_layer], rank)) for rank in range(ranks)]

    def _draft_with_head(self, trees: list[GrowingTree], prices: Prices, plan: Plan) -> Plan:
        """Let a head draft along the best path of each row, as long as one more step is expected to pay."""
        paths: list[Path] = [() for _ in trees]
        layer = self._best_head(trees, prices, plan)
        spent, num_steps = 0.0, 0
        while layer is not None and num_steps < MAX_DRAFT:
            found, scores = self.engine.draft(layer, [list(path) for path in paths])
            num_steps, spent = num_steps + 1, spent + prices.draft(layer)
            for tree, path, tokens, own in zip(trees, paths, found, scores, strict=True):
                if len(path) < tree.limit:
                    offers = zip(tokens, own, strict=True)
                    source = self.heads[layer]
                    tree.add(path, [Offer(token, source, rank, p, layer) for rank, (token, p) in enumerate(offers)])
            plan = best_plan([tree.promised for tree in trees], prices, spent)
            paths = [
                (*path, tree.best_after(path, tokens[0]))
                for tree, path, tokens in zip(trees, paths, found, strict=True)
            ]
            if self._rate_after(layer, trees, paths, prices, spent) <= plan.rate:
                break
        return plan

    def _best_head(self, trees: list[GrowingTree], prices: Prices, plan: Plan) -> int | None:
        """The exit layer whose head should draft in this round, if any."""
        paths: list[Path] = [() for _ in trees]
        gains = {layer: self._rate_after(layer, trees, paths, prices, 0.0) for layer in self.heads}
        best = max(gains, key=lambda layer: gains[layer])
        return best if gains[best] > plan.rate else None

    def _rate_after(
        self, layer: int, trees: list[GrowingTree], paths: list[Path], prices: Prices, spent: float
    ) -> float:
        """Expected tokens per millisecond of the best plan after one more draft step along these paths, or several."""
        reaches = [
            tree.reach(path) * (1.0 - sum(share for share, _ in tree.children(path))) if len(path) < tree.limit else 0.0
            for tree, path in zip(trees, paths, strict=True)
        ]
        known, rates = [tree.known() for tree in trees], self._rates(layer)
        return max(
            best_rate(step_gains(known, reaches, rates, steps), prices, spent + steps * prices.draft(layer))
            for steps in (1, LOOK_AHEAD)
        )

    def _draft_unread(self, trees: list[GrowingTree], prices: Prices, plan: Plan) -> list[Draft] | None:
        """Let a head draft chains that the host does not read before they are verified, if they promise more.

        They cannot be merged with what other sources offer.
        """
        best, limits = plan.rate, [min(tree.limit, MAX_DRAFT) for tree in trees]
        layer, length = None, 0
        for head in self.heads:
            [rate, *_] = self._rates(head)
            for count in range(1, max(limits, default=0) + 1):
                tokens = sum(expected_tokens(rate, min(count, limit)) for limit in limits)
                found = tokens / (count * prices.draft(head) + prices.verify(count + 1))
                if found > best:
                    best, layer, length = found, head, count
        if layer is None:
            return None
        lengths = [min(length, limit) for limit in limits]
        chains, _ = self.engine.draft(layer, [[] for _ in trees], max(lengths))
        source = self.heads[layer]
        return [
            Draft().add(tokens[:own], source, layer, probability=rate)
            for tokens, own in zip(chains, lengths, strict=True)
        ]

    def _judge_unread(self, draft: Draft, accepted: Accepted) -> None:
        """Learn from a chain that the host has read by now."""
        for node, token in zip(draft.nodes, accepted.tokens, strict=False):
            self._learn((node.source, 0), node.token == token, None)


class NoDrafter:
    """Drafts nothing, and lets the engine know: for passes of which each gives one token."""

    def __init__(self, _attachment: Any, _call: Any, engine: DraftEngine) -> None:
        self.engine = engine

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        """Draft nothing."""
        self.engine.costs_of(len(rows)).begin_round(is_off=True)
        return [Draft() for _ in rows]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        """Learn nothing."""
