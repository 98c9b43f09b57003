"""Prompts that the model writes itself: what it expects a user to say, once its chat template has opened a user's turn.

A model that was tuned on chats has learnt to write both sides. Its own questions are of many more kinds than a list
of templates could be, and near to those that it was tuned on (Magpie, Xu et al. 2024, arXiv 2406.08464).
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..common.chat_prompts import chat_text
from .continuing import continued

SHARE = 0.25  # of all prompts: a guess, since half of them taught a block much about chats and cost it more on tasks
LONGEST = 48  # tokens; what is longer is cut
PLACEHOLDER = "\ue000"  # private use: no template has it
TEMPERATURE = 1.0


@dataclass(frozen=True)
class UserTurn:
    """What a chat template puts around a user's message.

    Attributes:
        before: Tokens in front of it.
        behind: Tokens that end it and let the assistant speak.
    """

    before: list[int]
    behind: list[int]


def find_user_turn(tokenizer: PreTrainedTokenizerBase) -> UserTurn | None:
    """Find a template's user turn; `None` where there is no template, or none that ends a user's turn."""
    if getattr(tokenizer, "chat_template", None) is None:
        return None
    messages = [{"role": "user", "content": PLACEHOLDER}]
    before, found, behind = chat_text(tokenizer, messages).partition(PLACEHOLDER)
    turn = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, behind)]
    return UserTurn(*turn) if found and all(turn) else None


def write_prompts(model: PreTrainedModel, turn: UserTurn, count: int, ends: set[int]) -> list[list[int]]:
    """Let the model write users' turns.

    Args:
        model: The base model, at full depth.
        turn: What stands around them.
        count: How many are begun; empty ones are left out.
        ends: Tokens that end a text; what stands behind a turn ends it as well.

    Returns:
        Whole prompts, ready for an answer.
    """
    starts = [turn.before] * count
    written = continued(model, starts, LONGEST, temperature=TEMPERATURE, ends={*ends, turn.behind[0]})
    return [turn.before + row + turn.behind for row in written if row]
