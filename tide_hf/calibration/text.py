"""The text to calibrate on: the user's, or what the model is about to write."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from transformers import PreTrainedTokenizerBase

from ..common.chat_prompts import prompt_tokens
from ..common.errors import CalibrationError, ChatTemplateError, describe
from .data import Document
from .own_prompts import SHARE as OWN_SHARE
from .own_prompts import find_user_turn
from .sources import describe_source, read_documents
from .writing import PromptBatch, draw_prompts, plan_writing


@dataclass(frozen=True)
class Text:
    """Documents that are there, or prompts that the model has yet to answer.

    Attributes:
        documents: The user's.
        prompts: Batches of prompts where there are none.
        description: What the text is, for the record.
        num_skipped: Rows of the user's data that could not be used.
    """

    documents: list[Document]
    prompts: list[PromptBatch]
    description: str
    num_skipped: int = 0

    def digest(self) -> str:
        """A hash of all of it."""
        documents = [(document.tokens, document.first) for document in self.documents]
        prompts = [asdict(batch) for batch in self.prompts]
        return hashlib.sha256(json.dumps([documents, prompts]).encode()).hexdigest()

    def longest(self, max_length: int) -> int:
        """Tokens of the longest document, the most that it may have where it has yet to be written."""
        if self.documents:
            return max(len(document.tokens) for document in self.documents)
        return max(batch.longest_prompt for batch in self.prompts) + max_length


def load_documents(
    dataset: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    max_length: int,
    batch_size: int,
    seed: int,
) -> Text:
    """Read the user's data, or draw prompts where there is none; see `calibrate` for the arguments.

    Raises:
        CalibrationError: The data cannot be used.
    """
    if dataset is not None:
        documents, num_skipped = read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)
        return Text(documents, [], describe_source(dataset), num_skipped)
    try:
        turn = find_user_turn(tokenizer)
        num_own = round(OWN_SHARE * samples) if turn is not None else 0
        prompts = [prompt_tokens(tokenizer, prompt) for prompt in draw_prompts(samples - num_own, seed)]
    except ChatTemplateError as error:
        raise CalibrationError(
            describe(
                "the chat template refuses a user's message that stands alone",
                got=f"'{error.reason}'",
                expected="a template that takes one",
                do="Pass texts or chats of your own as dataset, or a tokenizer with another chat_template.",
            )
        ) from error
    source = describe_source(None) + (", and to prompts of its own" if num_own else "")
    return Text([], plan_writing(prompts, batch_size, seed, turn, num_own), source)
