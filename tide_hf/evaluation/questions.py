"""Question answering with one right answer: read rows, let a model answer, compare."""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from transformers import PreTrainedTokenizerBase

from ..calibration.sources import describe_source, random_rows
from ..chat_prompts import prompt_tokens
from ..errors import CalibrationError, ConfigurationError, describe
from ..padding import end_tokens, left_padded, pad_token, up_to_end
from ..structure import input_device

NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


@dataclass(frozen=True)
class Question:
    """What is asked, and the answers that are right."""

    prompt: str
    answers: tuple[str, ...]


@dataclass(frozen=True)
class QuestionColumns:
    """Where questions and answers stand.

    Attributes:
        question: Column of the question.
        answer: Column of the answer: a text or a number, a list of these of which any is right, or a mapping with
            such a list under "text".
        template: What is asked, with {question} in it.
    """

    question: str = "question"
    answer: str = "answer"
    template: str = "{question}"


@dataclass(frozen=True)
class Answers:
    """What a model said to a list of questions.

    Attributes:
        texts: Its answers.
        tokens: Their tokens.
        depths: For each, the mean number of layers that its tokens were read from.
        layers_executed: Decoder layers that ran to their end, over all questions, prompts included; `None` for plain
            decoding, which counts nothing.
    """

    texts: list[str]
    tokens: list[list[int]]
    depths: list[float]
    layers_executed: int | None


def read_questions(dataset: object, columns: QuestionColumns, *, samples: int, seed: int) -> list[Question]:
    """Draw questions at random.

    Args:
        dataset: A file, folder, Hub data set or list of rows; see `calibrate`.
        columns: Where the questions and answers stand.
        samples: At most this many.
        seed: Of the draw.

    Raises:
        CalibrationError: The data cannot be read, or a row lacks a question or an answer.
        ConfigurationError: The template has no {question}.
        MissingPackageError: A package that reads this kind of data is not installed.
    """
    if "{question}" not in columns.template:
        raise ConfigurationError(
            describe(
                "the prompt's template has no place for the question",
                got=repr(columns.template),
                expected="a text with {question} in it",
                do="Write 'Answer in one word. {question}', say.",
            )
        )
    source = describe_source(dataset)
    rows = random_rows(dataset, samples, seed, (columns.question, columns.answer))
    questions = [_question(row, columns, source) for row in rows]
    if not questions:
        raise CalibrationError(
            describe("there are no questions", got=f"no rows ({source})", expected="at least one", do="Check the data.")
        )
    return questions


def is_right(answer: str, accepted: Sequence[str], match: str) -> bool:
    """Compare an answer with those that are right.

    Args:
        answer: What the model said.
        accepted: Any of these is right.
        match: `"exact"`: equal but for case, punctuation, articles and white space, as SQuAD compares. `"number"`: the
            last number of the answer is the last number of the right one, as GSM8K is scored.
    """
    if match == "number":
        said = _last_number(answer)
        return said is not None and any(said == _last_number(right) for right in accepted)
    return any(_normalized(answer) == _normalized(right) for right in accepted)


def answer_questions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
    batch_size: int,
    advance: Callable[[int], None] = lambda count: None,
    **options: Any,
) -> Answers:
    """Answer greedily, in batches of prompts of like length.

    Args:
        model: The base model, or one with TIDE attached.
        tokenizer: Its tokenizer; where it has a chat template, questions go through it.
        questions: What to answer.
        max_new_tokens: Most tokens per answer.
        batch_size: Most questions per `generate` call.
        advance: Told the number of questions done.
        **options: Further options of `generate`.
    """
    prompts = [prompt_tokens(tokenizer, question.prompt) for question in questions]
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    ends = end_tokens(model.generation_config.eos_token_id)
    answers: dict[int, tuple[list[int], float]] = {}
    counted: list[int] = []
    for start in range(0, len(order), batch_size):
        rows = order[start : start + batch_size]
        inputs = left_padded([prompts[i] for i in rows], device=input_device(model))
        sequences = model.generate(
            **inputs, do_sample=False, max_new_tokens=max_new_tokens, pad_token_id=pad_token(tokenizer), **options
        )
        padded = sequences[:, inputs["input_ids"].shape[1] :].tolist()
        new_tokens = [up_to_end(row, ends) for row in padded]
        stats = getattr(model, "last_exit_stats", None)
        num_layers = model.config.get_text_config().num_hidden_layers
        per_token = stats.per_token if stats is not None else [[num_layers] * len(tokens) for tokens in new_tokens]
        counted += [stats.layers_executed] if stats is not None else []
        for row, tokens, layers in zip(rows, new_tokens, per_token, strict=True):
            answers[row] = tokens, sum(layers) / len(layers)
        advance(len(rows))
    said = [answers[i][0] for i in range(len(prompts))]
    texts = [tokenizer.decode(one, skip_special_tokens=True) for one in said]
    depths = [answers[i][1] for i in range(len(prompts))]
    return Answers(texts, said, depths, sum(counted) if counted else None)


def _question(row: object, columns: QuestionColumns, source: str) -> Question:
    found = row if isinstance(row, Mapping) else {}
    text, answers = found.get(columns.question), _accepted(found.get(columns.answer))
    if not isinstance(text, str) or not answers:
        got = f"the columns {', '.join(map(str, found))}" if isinstance(row, Mapping) else type(row).__name__
        raise CalibrationError(
            describe(
                f"a row holds no question with an answer ({source})",
                got=got,
                expected=f"a text under {columns.question!r}, and a text, a number or a list of these under "
                f"{columns.answer!r}",
                do="Name the columns with --question-column and --answer-column.",
            )
        )
    return Question(columns.template.replace("{question}", text), answers)


def _accepted(value: object) -> tuple[str, ...]:
    if isinstance(value, Mapping):
        value = value.get("text")
    values = value if isinstance(value, (list, tuple)) else [value]
    return tuple(str(one) for one in values if isinstance(one, (str, int, float)))


def _last_number(text: str) -> Decimal | None:
    numbers = NUMBER.findall(text)
    return Decimal(numbers[-1].replace(",", "")) if numbers else None


def _normalized(text: str) -> str:
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())
