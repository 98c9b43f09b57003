"""The draft of a row, a tree of tokens, and what a round makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from ..common.errors import ConfigurationError
from ..common.token_sources import FULL_PASS

ROOT = -1  # as a parent: the row's last token, which every draft continues


class Node(NamedTuple):
    """A draft token and the node that it follows."""

    token: int
    parent: int  # index among the draft's nodes, lower than its own; or `ROOT`
    source: str  # what drafted it, see `common.token_sources`
    exit_layer: int = 0  # layers executed to draft it
    probability: float = 1.0  # that the base model's token after its parent is this one, as the source estimates


@dataclass
class Draft:
    """The draft tokens of one row in one round, possibly none; a chain is a tree without siblings."""

    nodes: list[Node] = field(default_factory=list)

    def add(
        self,
        tokens: list[int],
        source: str,
        exit_layer: int = 0,
        *,
        parent: int | None = None,
        probability: float = 1.0,
    ) -> Draft:
        """Append a chain of tokens that follow the node `parent`, by default the end of the chain; return self.

        `probability` is that of each token after the one before it. Once there are siblings, `parent` has to be given.
        """
        if parent is None and not self.is_chain:
            raise ConfigurationError(
                "a draft with siblings has no one end to go on from",
                got="no parent",
                expected="the index of a node, or ROOT",
                do="Pass parent=..., or add the chain before its siblings.",
            )
        parent = len(self.nodes) - 1 if parent is None else parent
        for token in tokens:
            self.nodes.append(Node(token, parent, source, exit_layer, probability))
            parent = len(self.nodes) - 1
        return self

    @property
    def tokens(self) -> list[int]:
        """The token of each node."""
        return [node.token for node in self.nodes]

    def parents(self, width: int) -> list[int]:
        """The index of what each token of a pass of this width follows; -1 for its first, the row's last token.

        Padding follows that one.
        """
        nodes = [node.parent + 1 for node in self.nodes]
        return [-1, *nodes, *[0] * (width - 1 - len(nodes))]

    def children(self, parent: int) -> list[int]:
        """The nodes that follow a node, or `ROOT`."""
        return [index for index, node in enumerate(self.nodes) if node.parent == parent]

    @property
    def is_chain(self) -> bool:
        """Whether there are no siblings."""
        return all(node.parent == index - 1 for index, node in enumerate(self.nodes))

    def chain(self) -> Draft:
        """The branch that goes on with the likeliest child of each node; the draft itself where it has no siblings."""
        if self.is_chain:
            return self
        branch = [self.nodes[index] for index in self.branch(ROOT)]
        return Draft([node._replace(parent=place - 1) for place, node in enumerate(branch)])

    def branch(self, parent: int) -> list[int]:
        """The likeliest child of a node, the likeliest child of that one, and so on."""
        found = []
        while children := self.children(parent):
            parent = max(children, key=lambda index: self.nodes[index].probability)
            found.append(parent)
        return found

    def with_tokens(self, tokens: list[int]) -> Draft:
        """The same tree with these tokens."""
        return Draft([node._replace(token=token) for node, token in zip(self.nodes, tokens, strict=True)])


@dataclass
class Accepted:
    """What a round has added to a row.

    Attributes:
        tokens: The new tokens: those of `path`, and one more unless the row may add none.
        path: The nodes of the row's draft that the base model has chosen as well, from a child of the root on.
    """

    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)

    @property
    def kept(self) -> list[int]:
        """The tokens of the pass, by index, whose K/V stay: the row's last one and those that new tokens follow."""
        kept = [0, *(node + 1 for node in self.path)][: len(self.tokens)]
        return kept + list(range(len(kept), len(self.tokens)))  # after a chain's path, padding of a row that has ended

    def sources(self, draft: Draft) -> list[str]:
        """The source of each new token: that of its node, else the full-depth pass."""
        sources = [draft.nodes[index].source for index in self.path]
        return sources + [FULL_PASS] * (len(self.tokens) - len(sources))


def num_shared(tokens: Sequence[int], others: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(tokens, others, strict=False)))
