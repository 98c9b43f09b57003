"""Drafters that follow a script, to drive the self-speculative loop through every path."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tide_hf import TIDERouters
from tide_hf.engines.static import UNREAD
from tide_hf.speculation.attachment import Attachment
from tide_hf.speculation.drafts import ROOT, Accepted, Draft
from tide_hf.speculation.policy import CostTable

KINDS = ("right", "wrong", "random", "wrong at the last position")


class ScriptedDrafter:
    """Drafts `width` tokens a round that repeat, contradict or ignore what plain decoding generates for each row.

    `kind` is one of `KINDS`, or "mixed", where the kind changes with row and round.
    """

    def __init__(self, kind: str, continuations: list[list[int]], vocab_size: int, width: int = 3) -> None:
        self.kind, self.continuations, self.vocab_size, self.width = kind, continuations, vocab_size, width
        self.generated, self.rounds, self.random = [0] * len(continuations), 0, random.Random(0)

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        self.rounds += 1
        return [self._draft(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, row: int, limit: int) -> Draft:
        start = self.generated[row]
        right = self.continuations[row][start : start + min(self.width, limit)]
        wrong = [(token + 1) % self.vocab_size for token in right]
        tokens = {
            "right": right,
            "wrong": wrong,
            "random": [self.random.randrange(self.vocab_size) for _ in right],
            "wrong at the last position": right[:-1] + wrong[-1:],
        }[KINDS[(row + self.rounds) % len(KINDS)] if self.kind == "mixed" else self.kind]
        return Draft().add(tokens, "script")

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        self.generated[row] += len(accepted.tokens)


class TreeDrafter(ScriptedDrafter):
    """Drafts random trees of up to `width` nodes, through which the right tokens run a random way.

    Wrong nodes stand before, beside and after the right ones, and have children of their own.
    """

    def _draft(self, row: int, limit: int) -> Draft:
        start, draft, depths, right = self.generated[row], Draft(), {ROOT: 0}, ROOT
        while limit and len(draft.nodes) < self.width:
            parent = right if self.random.random() < 0.5 else self.random.choice(list(depths))
            text = self.continuations[row][start + depths[parent] :]
            is_right = parent == right and text and self.random.random() < 0.7
            token = text[0] if is_right else self.random.randrange(self.vocab_size)
            taken = [draft.nodes[child].token for child in draft.children(parent)]
            if depths[parent] == limit or token in taken or (not is_right and token in text[:1]):
                limit *= self.random.random() < 0.9  # ends a tree that has no room left
                continue
            draft.add([token], "script", parent=parent)
            depths[len(draft.nodes) - 1] = depths[parent] + 1
            right = len(draft.nodes) - 1 if is_right else right
        return draft


class HeadDrafter:
    """Drafts `width` tokens in each `every`-th round, with the head at one exit layer or at several in turn.

    On engines whose draft tokens the host does not read, draft tokens are read only after they are verified.
    """

    def __init__(self, prompts, engine, exit_layer: int | Sequence[int], width: int, every: int = 1) -> None:
        self.engine, self.width, self.every, self.rounds = engine, width, every, 0
        self.exit_layers = [exit_layer] if isinstance(exit_layer, int) else exit_layer
        self.texts = [list(prompt) for prompt in prompts]
        self.drafted: list[tuple[list[int], list[int]]] = []  # (tokens of the row before, draft tokens) of each draft
        self.scores: list[list[list[float]]] = []  # exit scores of draft steps, on engines that read drafts

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        self.rounds += 1
        if self.rounds % self.every:
            return [Draft() for _ in rows]
        exit_layer = self.exit_layers[self.rounds % len(self.exit_layers)]
        draft = self._draft if self.engine.reads_drafts else self._draft_unread
        return [Draft().add(tokens, "head", exit_layer) for tokens in draft(exit_layer, limits)]

    def _draft(self, exit_layer: int, limits: list[int]) -> list[list[int]]:
        tokens: list[list[int]] = [[] for _ in limits]
        for _ in range(min(self.width, *limits)):
            new, scores = self.engine.draft(exit_layer, tokens)
            assert all(0.0 <= score <= 1.0 for row in scores for score in row)
            self.scores.append(scores)
            tokens = [before + candidates[:1] for before, candidates in zip(tokens, new, strict=True)]
        return tokens

    def _draft_unread(self, exit_layer: int, limits: list[int]) -> list[list[int]]:
        lengths = [min(self.width, limit) for limit in limits]
        if max(lengths) < 1:
            return [[] for _ in lengths]
        found, _ = self.engine.draft(exit_layer, [[] for _ in lengths], max(lengths))
        return [tokens[:length] for tokens, length in zip(found, lengths, strict=True)]

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        assert UNREAD not in draft.tokens
        if draft.tokens:
            self.drafted.append((list(self.texts[row]), draft.tokens))
        self.texts[row] += accepted.tokens


class Alternating:
    """Drafts with heads and by script in alternate rounds, so that more than one token is accepted."""

    def __init__(self, heads: HeadDrafter, script: ScriptedDrafter) -> None:
        self.heads, self.script, self.rounds = heads, script, 0

    def draft(self, rows: list[int], limits: list[int]) -> list[Draft]:
        self.rounds += 1
        return (self.heads if self.rounds % 2 == 0 else self.script).draft(rows, limits)

    def observe(self, row: int, draft: Draft, accepted: Accepted) -> None:
        self.script.observe(row, draft, accepted)
        is_script = self.rounds % 2 == 1 or not self.rounds
        self.heads.observe(row, Draft() if is_script else draft, accepted)


def drafting_routers(model, **config) -> TIDERouters:
    """Routers whose heads are so good, by their record, that the default drafter drafts with them."""
    record = {"exit_layers": {"1": {"agreement": 0.9}, "3": {"agreement": 0.9}}}
    return TIDERouters.for_model(model, exit_layers=[1, 3], calibration=record, **config)


def use_drafter(model, kind: str, continuations: list[list[int]], width: int = 3) -> None:
    """Let an attached model draft with a `ScriptedDrafter`, or a `TreeDrafter` if `kind` is "trees"."""
    drafter, vocab_size = TreeDrafter if kind == "trees" else ScriptedDrafter, model._tide.structure.vocab_size
    model._tide.make_drafter = lambda *_: drafter(kind, continuations, vocab_size, width)


def use_heads(
    model, exit_layer: int | Sequence[int], width=3, every=1, continuations=None, kind="right"
) -> list[HeadDrafter]:
    """Let an attached model draft with heads; return a list to which each call of `generate` adds its drafter.

    With `continuations`, the tokens of plain decoding, a script of this `kind` drafts in every other round.
    """
    made: list[HeadDrafter] = []

    def make(_attachment, call, engine):
        made.append(HeadDrafter(call.prompts, engine, exit_layer, width, every))
        if continuations is None:
            return made[-1]
        script = (TreeDrafter if kind == "trees" else ScriptedDrafter)(
            kind, continuations, model._tide.structure.vocab_size, 3 * width if kind == "trees" else width
        )
        return Alternating(made[-1], script)

    model._tide.make_drafter = make
    return made


def cost_table(milliseconds, num_layers, widths=()):
    """A table in which the pass of each key has cost that many milliseconds a few times."""
    table = CostTable(num_layers, widths=widths)
    for key, cost in milliseconds.items():
        for _ in range(6):
            table.record(key, cost)
    return table


def use_costs(monkeypatch, milliseconds):
    """Let passes of tiny models cost `milliseconds`, not what the clock says, so that drafts can be counted."""

    def costs_of(_attachment, _rows, _engine, _reads_once, widths=()):
        table = cost_table(milliseconds, 4, widths)
        table.record = lambda *_, **__: None
        return table

    monkeypatch.setattr(Attachment, "costs_of", costs_of)
