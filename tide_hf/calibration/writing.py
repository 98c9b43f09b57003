"""Text that the model itself writes: prompts from the package, cut into batches that can each be redone alone."""

from __future__ import annotations

import json
import random
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..base_model.structure import input_device
from ..common.padding import end_tokens, pad_token
from .continuing import continued
from .data import Document, seeded
from .own_prompts import LONGEST, UserTurn, write_prompts

TEMPERATURES = (0.7, 0.85, 1.0)  # of the sampled half of the documents


@dataclass(frozen=True)
class PromptBatch:
    """Prompts of like length that are answered together.

    Attributes:
        prompts: Their tokens; none where the model is to write them.
        temperature: Of the answers; `None` is greedy.
        seed: Of all that is sampled.
        turn: What stands around prompts that the model is to write.
        num_own: How many of those.
    """

    prompts: list[list[int]]
    temperature: float | None
    seed: int
    turn: UserTurn | None = None
    num_own: int = 0

    @property
    def longest_prompt(self) -> int:
        """Tokens of the longest prompt, the most that it may have where it has yet to be written."""
        own = [] if self.turn is None else [len(self.turn.before) + LONGEST + len(self.turn.behind)]
        return max([*map(len, self.prompts), *own])


def draw_prompts(count: int, seed: int) -> list[str]:
    """Draw different prompts from the package's own, every kind of prompt as often as it can be.

    Args:
        count: How many; fewer come back where the package has no more.
        seed: Of the draw.
    """
    package = json.loads(resources.files(__package__).joinpath("prompts.json").read_text(encoding="utf-8"))
    templates = [template for group in package["prompts"].values() for template in group]
    rng = random.Random(seed)
    rng.shuffle(templates)
    prompts: dict[str, None] = {}
    before = -1
    while len(prompts) < count and len(prompts) > before:
        before = len(prompts)
        prompts |= dict.fromkeys(_fill_slots(template, package["slots"], rng) for template in templates)
    return list(prompts)[:count]


def plan_writing(
    prompts: list[list[int]], batch_size: int, seed: int, turn: UserTurn | None = None, num_own: int = 0
) -> list[PromptBatch]:
    """Cut prompts into batches, one half to be answered greedily, the other half sampled.

    The batches come in random order, so that those from first to any one are a fair part of the whole.

    Args:
        prompts: Their tokens.
        batch_size: Prompts a batch, those of like length together.
        seed: Of everything random.
        turn: What stands around prompts that the model writes itself.
        num_own: How many of those there shall be besides.
    """
    halves = prompts[: (len(prompts) + 1) // 2], prompts[(len(prompts) + 1) // 2 :]
    batches: list[dict[str, Any]] = []
    for half, temperatures in zip(halves, ((None,), TEMPERATURES), strict=True):
        rows = sorted(half, key=len)  # little padding
        for number, start in enumerate(range(0, len(rows), batch_size)):
            temperature = temperatures[number % len(temperatures)]
            batches.append({"prompts": rows[start : start + batch_size], "temperature": temperature})
    for number, start in enumerate(range(0, num_own, batch_size)):
        temperature = TEMPERATURES[number // 2 % len(TEMPERATURES)] if number % 2 else None
        own = {"turn": turn, "num_own": min(batch_size, num_own - start)}
        batches.append({"prompts": [], "temperature": temperature, **own})
    random.Random(seed).shuffle(batches)
    return [
        PromptBatch(**batch, seed=random.Random(f"{seed} {number}").getrandbits(63))
        for number, batch in enumerate(batches)
    ]


def write_documents(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: PromptBatch, max_length: int
) -> list[Document]:
    """Let the model answer a batch of prompts, and write them first where it is to.

    Args:
        model: The base model, at full depth.
        tokenizer: Its tokenizer; it need not know a padding token.
        batch: The prompts.
        max_length: Tokens that the model may add to a prompt.

    Returns:
        The documents that hold at least one new position; their prompts are read but not counted.
    """
    pad, ends = pad_token(tokenizer), end_tokens(model.generation_config.eos_token_id)
    with seeded(batch.seed, input_device(model)):
        prompts = list(batch.prompts)
        if batch.turn is not None:
            prompts += write_prompts(model, batch.turn, batch.num_own, ends)
        if not prompts:
            return []
        answers = continued(model, prompts, max_length, temperature=batch.temperature, ends=ends, pad=pad)
    documents = []
    for prompt, answer in zip(prompts, answers, strict=True):
        kept = answer[: max_length - 1]  # what follows was predicted
        documents.append(Document(prompt + kept, first=len(prompt) - 1))
    return [document for document in documents if document.num_positions > 0]


def _fill_slots(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """Replace each `{slot}`; two slots of one kind get different words."""
    names = re.findall(r"\{(\w+)\}", template)
    words = {name: iter(rng.sample(slots[name], names.count(name))) for name in slots if name in names}
    return re.sub(r"\{(\w+)\}", lambda match: next(words[match[1]]), template)
