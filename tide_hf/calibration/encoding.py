"""A row of a dataset, be it a text or a chat, as a document."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from ..common.chat_prompts import message_tokens
from ..common.errors import CalibrationError, ChatTemplateError, describe
from .data import Document

MAX_PROMPT = 8  # longest prompt of a chat, in multiples of max_length: a forward pass pads all rows to the longest
SHOWN = 80  # characters of a text that an error shows


class UnusableRowError(CalibrationError):
    """One row cannot be used; the rest can do without it."""


@dataclass(frozen=True)
class RowEncoder:
    """Turns rows into documents.

    Attributes:
        tokenizer: The base model's.
        max_length: Tokens after which a text, or the last answer of a chat, is cut.
        source: Where the rows come from, for errors.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    source: str

    def __call__(self, row: object) -> Document:
        """Encode a text, a chat (a list of messages), or a mapping that has one under "text" or "messages".

        Raises:
            UnusableRowError: This row holds too little or too much, or the chat template refuses it.
            CalibrationError: No row like this one can be read.
        """
        if isinstance(row, Mapping):
            row = self._column(row)
        if isinstance(row, str):
            return self._text(self.tokenizer(row, truncation=True, max_length=self.max_length)["input_ids"], row)
        if isinstance(row, (list, tuple)):
            return self._chat(row)
        if row is None:
            raise self._unusable("a row is empty", got="None", expected="a text or a chat")
        raise CalibrationError(
            describe(
                f"cannot read this kind of row ({self.source})",
                got=type(row).__name__,
                expected="a str, a chat (a list of messages), or a mapping with a text or a messages column",
                do="Turn the rows into texts, say [row['question'] for row in dataset].",
            )
        )

    def _column(self, row: Mapping[str, object]) -> object:
        chats_first = self.tokenizer.chat_template is not None  # a text column beside messages has another's template
        names = ("messages", "text") if chats_first else ("text", "messages")
        there = [row[name] for name in names if name in row]
        if there:
            return next((value for value in there if value is not None), None)
        raise CalibrationError(
            describe(
                f"no column to read ({self.source})",
                got=f"the columns {', '.join(map(str, row))}",
                expected="a column named text or messages",
                do="Rename the column that holds the text, or pass a list of texts.",
            )
        )

    def _text(self, tokens: list[int], text: object) -> Document:
        if len(tokens) < 2:
            raise self._unusable(
                "a text is too short",
                got=f"{len(tokens)} tokens for {str(text)[:SHOWN]!r}",
                expected="at least 2 tokens",
            )
        return Document(tokens, first=1)

    def _chat(self, chat: Sequence[object]) -> Document:
        """Look at the last answer where the template tells what stands before it, else at the whole chat."""
        if self.tokenizer.chat_template is None:
            raise CalibrationError(
                describe(
                    f"a chat needs a chat template ({self.source})",
                    got="a tokenizer without one",
                    expected="a tokenizer with a chat_template",
                    do="Pass the tokenizer of an instruction-tuned model, or plain texts.",
                )
            )
        messages = [self._message(message) for message in chat]
        if not messages:
            raise self._unusable("a chat is empty", got="no messages", expected="at least one")
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        try:
            if last == 0:
                return self._text(self._encode(messages)[: self.max_length], chat)
            whole = self._encode(messages[: last + 1])
            prompt = self._encode(messages[:last], add_generation_prompt=True)
        except ChatTemplateError as error:
            raise self._unusable(
                "the chat template refuses a chat", got=error.reason, expected="roles in the order that it knows"
            ) from error
        if whole[: len(prompt)] != prompt:
            return self._text(whole[: self.max_length], chat)
        return self._answer(prompt, whole[len(prompt) :])

    def _encode(self, messages: list[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
        return message_tokens(self.tokenizer, messages, add_generation_prompt=add_generation_prompt)

    def _message(self, message: object) -> dict[str, str]:
        if isinstance(message, Mapping):
            role, content = message.get("role"), message.get("content")
            if isinstance(role, str) and isinstance(content, str):
                return {"role": role, "content": content}  # templates read meaning into further keys, even into None
        raise self._unusable(
            "a message cannot be read",
            got=str(message)[:SHOWN],
            expected='a mapping whose "role" and "content" are strings',
        )

    def _answer(self, prompt: list[int], answer: list[int]) -> Document:
        """Cut the answer where decoding would end, and count from the position that predicts its first token."""
        end = self.tokenizer.eos_token_id
        answer = answer[: answer.index(end)] if end in answer else answer
        longest = MAX_PROMPT * self.max_length
        if not answer or len(prompt) > longest:
            raise self._unusable(
                "a chat cannot be used",
                got=f"a prompt of {len(prompt)} tokens and an answer of {len(answer)}",
                expected=f"a prompt of at most {longest} ({MAX_PROMPT} x max_length) and an answer of at least 1",
            )
        return Document(prompt + answer[: self.max_length], first=max(len(prompt) - 1, 0))

    def _unusable(self, problem: str, *, got: str, expected: str) -> UnusableRowError:
        do = "Leave such rows out of the dataset, or raise max_length."
        return UnusableRowError(describe(f"{problem} ({self.source})", got=got, expected=expected, do=do))
