"""Questions of own making, the same on every machine: sums in words, and a multiple-choice set."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NAMES = ("Ada", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Ida", "Jonas", "Lena", "Noah")
THINGS = ("apples", "books", "coins", "eggs", "marbles", "pencils", "stamps", "shells", "tickets", "buttons")
PLACES = ("a box", "a drawer", "a shop", "a school", "a garden shed", "a kitchen", "an office", "a market stall")
NUM_ENDINGS = 4

# Common knowledge by sentence: its key, and the ending that is right for it.
FACTS = Path(__file__).parent / "data" / "facts.json"


def _buys(rng: random.Random) -> tuple[str, int]:
    name, thing, have, more = rng.choice(NAMES), rng.choice(THINGS), rng.randint(3, 40), rng.randint(2, 30)
    return f"{name} has {have} {thing} and buys {more} more. How many {thing} does {name} have now?", have + more


def _gives(rng: random.Random) -> tuple[str, int]:
    (one, two), thing, have = rng.sample(NAMES, 2), rng.choice(THINGS), rng.randint(10, 60)
    gone = rng.randint(2, have - 1)
    return f"{one} has {have} {thing} and gives {gone} to {two}. How many {thing} does {one} have left?", have - gone


def _rows(rng: random.Random) -> tuple[str, int]:
    place, thing, rows, each = rng.choice(PLACES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 12)
    return f"In {place} there are {rows} rows of {each} {thing}. How many {thing} are there altogether?", rows * each


def _shares(rng: random.Random) -> tuple[str, int]:
    name, thing, friends, each = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 9), rng.randint(2, 12)
    asked = f"{name} shares {friends * each} {thing} equally among {friends} friends. How many does each friend get?"
    return asked, each


def _two_steps(rng: random.Random) -> tuple[str, int]:
    name, thing, packs, each = rng.choice(NAMES), rng.choice(THINGS), rng.randint(2, 8), rng.randint(3, 10)
    lost = rng.randint(1, packs * each - 1)
    asked = f"{name} buys {packs} packs of {each} {thing} and loses {lost} of them. How many {thing} are left?"
    return asked, packs * each - lost


KINDS: tuple[Callable[[random.Random], tuple[str, int]], ...] = (_buys, _gives, _rows, _shares, _two_steps)


def maths_questions(count: int, seed: int = 0) -> list[dict[str, str]]:
    """Different sums in words, all kinds equally often.

    Args:
        count: How many.
        seed: Of the draw.

    Returns:
        Rows with "question" and "answer".
    """
    rng = random.Random(f"maths {seed}")
    rows: dict[str, str] = {}
    while len(rows) < count:
        question, answer = KINDS[len(rows) % len(KINDS)](rng)
        rows.setdefault(question, str(answer))
    return [{"question": question, "answer": answer} for question, answer in rows.items()]


@dataclass(frozen=True)
class Choices:
    """A text and endings of which one is right.

    Attributes:
        context: What stands before.
        endings: All endings.
        right: Position of the right one.
    """

    context: str
    endings: tuple[str, ...]
    right: int


def multiple_choice(count: int, seed: int = 0) -> list[Choices]:
    """Items of four endings each; the wrong ones are right for other items of the same kind.

    Args:
        count: At most so many.
        seed: Of the order and the wrong endings.
    """
    rng = random.Random(f"choices {seed}")
    items = []
    for template, facts in json.loads(FACTS.read_text(encoding="utf-8")).items():
        for key, right in facts.items():
            others = sorted({ending for ending in facts.values() if ending != right})
            if len(others) < NUM_ENDINGS - 1:
                continue
            endings = rng.sample(others, NUM_ENDINGS - 1)
            place = rng.randrange(NUM_ENDINGS)
            endings.insert(place, right)
            items.append(Choices(template.format(key), tuple(" " + ending for ending in endings), place))
    rng.shuffle(items)
    return items[:count]
