"""Maths questions in words: what a model answers, and whether it is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from tide_hf.base_model.structure import input_device
from tide_hf.calibration.text import without_generation_defaults
from tide_hf.common.token_ids import eos_token_ids, left_padded, pad_token, prompt_tokens, truncate_at_eos

# A hyphen after a word or a number is no sign: "12-15", "3-5 dollars", "covid-19".
NUMBER = re.compile(r"(?:(?<![\w%)\]])([-\N{MINUS SIGN}])[$€£]?)?(\d+(?:,\d{3})*(?:\.\d+)?)")


def is_right(answer: str, expected: str) -> bool:
    """Whether the last number of an answer is the expected one, as GSM8K is scored."""
    said = _last_number(answer)
    return said is not None and said == _last_number(expected)


def answer_questions(
    model: Any, tokenizer: Any, questions: Sequence[str], *, max_new_tokens: int, batch_size: int, **options: Any
) -> tuple[list[str], list[float]]:
    """Answer greedily, whatever the model's own generation config says.

    Args:
        model: The base model, or one with TIDE attached.
        tokenizer: Its tokenizer; where it has a chat template, questions go through it.
        questions: What to answer.
        max_new_tokens: Most tokens of an answer.
        batch_size: Most questions a call of `generate`.
        **options: Further options of `generate`.

    Returns:
        The answers, and for each the mean number of layers that its tokens were read from.
    """
    prompts = [prompt_tokens(tokenizer, question) for question in questions]
    pad, ends = pad_token(tokenizer), eos_token_ids(model.generation_config.eos_token_id)
    num_layers = model.config.get_text_config().num_hidden_layers
    texts: list[str] = []
    depths: list[float] = []
    for start in range(0, len(prompts), batch_size):
        with without_generation_defaults(model):
            batch = prompts[start : start + batch_size]
            inputs = left_padded(batch, pad=pad, device=input_device(model))
            found = model.generate(**inputs, max_new_tokens=max_new_tokens, pad_token_id=pad, **options)
        new_tokens = found[:, inputs["input_ids"].shape[1] :].tolist()
        answers = [truncate_at_eos(tokens, ends, keep_eos=False) for tokens in new_tokens]
        stats = getattr(model, "last_exit_stats", None)
        layers = [[num_layers]] * len(answers) if stats is None else stats.per_token
        texts += [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        depths += [sum(one) / len(one) for one in layers]
    return texts, depths


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    if not numbers:
        return None
    sign, digits = numbers[-1]
    return Decimal(f"{'-' if sign else ''}{digits.replace(',', '')}")
