"""Drafters with a script, to drive the self-speculative loop through every path."""

from __future__ import annotations

import random

from tide_hf.speculation.drafters import UNREAD, Draft


class ScriptedDrafter:
    """Drafts `width` tokens a round that follow, defy or ignore the base model's own continuation.

    Args:
        kind: "right", "wrong", "random", "wrong at the last position", or "mixed" (another kind in each row).
        continuations: What plain decoding gives after each row's prompt.
        vocab_size: Range of the tokens.
        width: Tokens per draft.
    """

    def __init__(self, kind: str, continuations: list[list[int]], vocab_size: int, width: int = 3) -> None:
        self.kind, self.continuations, self.vocab_size, self.width = kind, continuations, vocab_size, width
        self.done = [0] * len(continuations)
        self.random = random.Random(0)

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        return [self._draft(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, row: int, limit: int) -> Draft:
        done = self.done[row]
        right = self.continuations[row][done : done + min(self.width, limit)]
        wrong = [(token + 1) % self.vocab_size for token in right]
        tokens = {
            "right": right,
            "wrong": wrong,
            "random": [self.random.randrange(self.vocab_size) for _ in right],
            "wrong at the last position": right[:-1] + wrong[-1:],
        }[KINDS[row % len(KINDS)] if self.kind == "mixed" else self.kind]
        return Draft().add(tokens, "script")

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        self.done[row] += len(new_tokens)


KINDS = ("right", "wrong", "random", "wrong at the last position")


def use_drafter(model, kind: str, continuations: list[list[int]], width: int = 3) -> None:
    """Let an attached model draft by script."""
    vocab_size = model._tide.structure.vocab_size
    model._tide.make_drafter = lambda *_: ScriptedDrafter(kind, continuations, vocab_size, width)


class HeadDrafter:
    """Drafts with the head at one exit layer, as many tokens every round, whatever they are worth.

    Args:
        prompts: The prompt of each row.
        shallow: The shallow layers.
        exit_layer: The layer.
        width: Tokens per draft.
        every: It drafts in every so many-th round alone.

    Attributes:
        drafted: (tokens of the row before, draft tokens) of each round and row.
    """

    def __init__(self, prompts: list[list[int]], shallow, exit_layer: int, width: int, every: int = 1) -> None:
        self.shallow, self.exit_layer, self.width, self.every = shallow, exit_layer, width, every
        self.rounds = 0
        self.texts = [list(prompt) for prompt in prompts]
        self.drafted: list[tuple[list[int], list[int]]] = []

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        tokens: list[list[int]] = [[] for _ in rows]
        self.rounds += 1
        if self.rounds % self.every:
            return [Draft() for _ in rows]
        for _ in range(min(self.width, *limits)):
            new, scores = self.shallow.draft(self.exit_layer, tokens)
            assert all(0.0 <= score <= 1.0 for score in scores)
            tokens = [[*before, token] for before, token in zip(tokens, new, strict=True)]
        self.shallow.rollback()
        self.drafted += [(list(self.texts[row]), new) for row, new in zip(rows, tokens, strict=True)]
        return [Draft().add(new, "head", self.exit_layer) for new in tokens]

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        self.texts[row] += new_tokens


class AheadDrafter:
    """Drafts `width` tokens each round with the head at one exit layer, on captured steps, which nobody reads.

    Attributes:
        drafted: Draft tokens of each round and row, once they are verified.
    """

    def __init__(self, prompts: list[list[int]], shallow, exit_layers: list[int], width: int) -> None:
        self.drafted: list[list[int]] = []
        self.shallow, self.exit_layers, self.width, self.rounds = shallow, exit_layers, width, 0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        exit_layer = self.exit_layers[self.rounds % len(self.exit_layers)]
        self.rounds += 1
        lengths = [min(self.width, limit) for limit in limits]
        if max(lengths) > 0:
            self.shallow.draft_unread(exit_layer, max(lengths))
        return [Draft().add([UNREAD] * length, "head", exit_layer) for length in lengths]

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        assert UNREAD not in draft.tokens
        if self.rounds:
            self.drafted.append(draft.tokens)


class Alternating:
    """Heads draft in every other round, and a script what is right in the others, so that several tokens are kept."""

    def __init__(self, heads, script: ScriptedDrafter) -> None:
        self.heads, self.script, self.rounds = heads, script, 0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        self.rounds += 1
        return (self.heads if self.rounds % 2 == 0 else self.script).draft(rows, limits)

    def observe(self, row: int, draft: Draft, new_tokens: list[int], n_matches: int) -> None:
        self.script.observe(row, draft, new_tokens, n_matches)
        if self.rounds and self.rounds % 2 == 0:
            self.heads.observe(row, draft, new_tokens, n_matches)
