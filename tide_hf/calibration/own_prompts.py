"""Prompts that the model writes itself: what it expects a user to say, once its chat template has opened a user's turn.

A model that was tuned on chats has learnt to write both sides. Its own questions are of many more kinds than a list
of templates could be, and near to those that it was tuned on (Magpie, Xu et al. 2024, arXiv 2406.08464).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from ..padding import left_padded
from ..structure import input_device

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
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    before, found, behind = text.partition(PLACEHOLDER)
    turn = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in (before, behind)]
    return UserTurn(*turn) if found and all(turn) else None


def write_prompts(model: PreTrainedModel, turn: UserTurn, count: int, config: GenerationConfig) -> list[list[int]]:
    """Let the model write users' turns.

    Args:
        model: The base model, at full depth.
        turn: What stands around them.
        count: How many are begun; empty ones are left out.
        config: How to write; a turn ends at one of its list of `eos_token_id`.

    Returns:
        Whole prompts, ready for an answer.
    """
    ends: Any = config.eos_token_id
    inputs: dict[str, Any] = left_padded([turn.before] * count, device=input_device(model))
    written = model.generate(**inputs, generation_config=config)
    prompts = []
    for row in written[:, len(turn.before) :].tolist():
        length = next((i for i, token in enumerate(row) if token in ends), len(row))
        prompts += [turn.before + row[:length] + turn.behind] if length else []
    return prompts
