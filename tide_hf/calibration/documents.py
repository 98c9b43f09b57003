"""Documents as token ids: read from lists, local files or a data set on the Hub, split, and batched."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import HTTPError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from ..common.data_files import FORMATS, import_extra, read_rows
from ..common.errors import CalibrationError, ChatTemplateError
from ..common.token_ids import message_tokens

SHARES = {"fit": 0.5, "tune": 0.1, "certify": 0.4}  # certifying 2% at 95% confidence takes at least 149 documents
MOST = {"tune": 150, "certify": 500}  # maximum number of documents; further documents are of more use in the fit split
TOKENS_PER_BATCH = 16_384  # padding included
MAX_PROMPT = 8  # limit of a chat's prompt, in multiples of max_length; one long prompt pads a whole batch
SHOWN = 80  # maximum number of characters of a text that an error quotes
logger = logging.getLogger(__name__)
# Matches "org/name", "org/name:config", "org/name[split]" and "org/name:config[split]".
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(?::(?P<config>[^\[\]]+))?(?:\[(?P<split>[\w.-]+)\])?")
POOL = 10_000  # number of rows to draw from, plus ten rows for each requested document
SHOWN_KEYS = 10  # maximum number of keys that an error lists
SHUFFLE_BUFFER = 2_000  # rows


@dataclass(frozen=True)
class Document:
    """One text as token ids, the model's input."""

    tokens: list[int]
    first: int  # first counted position; positions before it are not used for fitting or measuring

    @property
    def num_positions(self) -> int:
        """Number of counted positions."""
        return len(self.tokens) - self.first


@dataclass(frozen=True)
class TokenBatch:
    """Right-padded documents, (rows, length) each."""

    input_ids: Tensor
    attention_mask: Tensor  # 1 where there is a token
    counted: Tensor  # True at counted positions


def num_positions(documents: Sequence[Document]) -> int:
    """Number of counted positions of all documents."""
    return sum(document.num_positions for document in documents)


def split_documents(documents: Sequence[Document], seed: int) -> dict[str, list[Document]]:
    """Split documents at random: `"fit"` trains heads and routers, `"tune"` selects them, `"certify"` tests thresholds.

    The split sizes follow `SHARES`; documents beyond `MOST` go to the fit split. At least three documents are required.
    """
    if len(documents) < len(SHARES):
        raise CalibrationError(
            "too few documents for separate fit, tune and certify splits",
            got=len(documents),
            expected=f"at least {len(SHARES)}, better several hundred",
            do="Pass more texts, or raise samples.",
        )
    rest = random.Random(seed).sample(list(documents), len(documents))
    splits = {}
    for split in ("tune", "certify"):
        count = min(max(1, round(SHARES[split] * len(documents))), MOST[split])
        splits[split], rest = rest[:count], rest[count:]
    return {"fit": rest, **splits}


def plan_batches(documents: Sequence[Document], batch_size: int) -> list[list[int]]:
    """Group indices of documents by length, at most `batch_size` documents and `TOKENS_PER_BATCH` tokens a batch."""
    batches: list[list[int]] = []
    for i in sorted(range(len(documents)), key=lambda i: len(documents[i].tokens)):
        last = batches[-1] if batches else []
        if 0 < len(last) < batch_size and (len(last) + 1) * len(documents[i].tokens) <= TOKENS_PER_BATCH:
            last.append(i)
        else:
            batches.append([i])
    return batches


def token_batch(documents: Sequence[Document], rows: Sequence[int]) -> TokenBatch:
    """Right-pad the documents at indices `rows` into one batch.

    Right padding leaves position ids unchanged, and no token attends to it.
    """
    chosen = [documents[i] for i in rows]
    input_ids = pad_sequence([torch.tensor(document.tokens) for document in chosen], batch_first=True)
    positions = torch.arange(input_ids.shape[1])
    is_token = positions < torch.tensor([len(document.tokens) for document in chosen])[:, None]
    counted = is_token & (positions >= torch.tensor([document.first for document in chosen])[:, None])
    return TokenBatch(input_ids, is_token.long(), counted)


class UnusableRowError(CalibrationError):
    """One row cannot be used; it is skipped."""


@dataclass(frozen=True)
class RowEncoder:
    """Tokenises rows of a dataset (texts or chats) into documents; `source` names the dataset in errors.

    A text, or the last answer of a chat, is truncated to `max_length` tokens.
    """

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    source: str

    def __call__(self, row: object) -> Document:
        """Encode a text, a chat (a list of messages), or a mapping with a "text" or "messages" entry."""
        if isinstance(row, Mapping):
            row = self._column(row)
        if isinstance(row, str):
            return self._text(self.tokenizer(row, truncation=True, max_length=self.max_length)["input_ids"], row)
        if isinstance(row, (list, tuple)):
            return self._chat(row)
        if row is None:
            raise self._unusable("a row is empty", got="None", expected="a text or a chat")
        raise CalibrationError(
            f"cannot read this kind of row ({self.source})",
            got=type(row).__name__,
            expected="a str, a chat (a list of messages), or a mapping with a text or a messages column",
            do="Turn the rows into texts, say [row['question'] for row in dataset].",
        )

    def _column(self, row: Mapping[str, object]) -> object:
        # A text column next to messages is usually the same chat, formatted with another model's template.
        chats_first = self.tokenizer.chat_template is not None
        values = [row[name] for name in (("messages", "text") if chats_first else ("text", "messages")) if name in row]
        if not values:
            raise CalibrationError(
                f"no column to read ({self.source})",
                got=f"the columns {', '.join(map(str, row))}",
                expected="a column named text or messages",
                do="Rename the column that holds the text, or pass a list of texts.",
            )
        return next((value for value in values if value is not None), None)

    def _text(self, tokens: list[int], text: object) -> Document:
        if len(tokens) < 2:
            got = f"{len(tokens)} tokens for {str(text)[:SHOWN]!r}"
            raise self._unusable("a text is too short", got=got, expected="at least 2 tokens")
        return Document(tokens, first=1)

    def _chat(self, chat: Sequence[object]) -> Document:
        """Encode a chat; only the last answer counts, or the whole chat if the prompt's tokens are no prefix of it."""
        if self.tokenizer.chat_template is None:
            raise CalibrationError(
                f"a chat needs a chat template ({self.source})",
                got="a tokenizer without one",
                expected="a tokenizer with a chat_template",
                do="Pass the tokenizer of an instruction-tuned model, or plain texts.",
            )
        messages = [self._message(message) for message in chat]
        if not messages:
            raise self._unusable("a chat is empty", got="no messages", expected="at least one")
        last = max((i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0)
        read = messages[: last + 1] if last > 0 else messages
        try:
            whole = message_tokens(self.tokenizer, read, add_generation_prompt=False)
            prompt = message_tokens(self.tokenizer, messages[:last]) if last > 0 else None
        except ChatTemplateError as error:
            expected = "roles in the order that it knows"
            raise self._unusable("the chat template refuses a chat", got=error.got, expected=expected) from error
        if prompt is None or whole[: len(prompt)] != prompt:
            return self._text(whole[: self.max_length], chat)
        return self._answer(prompt, whole[len(prompt) :])

    def _message(self, message: object) -> dict[str, str]:
        if isinstance(message, Mapping):
            role, content = message.get("role"), message.get("content")
            if isinstance(role, str) and isinstance(content, str):
                return {"role": role, "content": content}  # chat templates react to other keys, even if None
        expected = 'a mapping whose "role" and "content" are strings'
        raise self._unusable("a message cannot be read", got=str(message)[:SHOWN], expected=expected)

    def _answer(self, prompt: list[int], answer: list[int]) -> Document:
        """Truncate an answer at its end-of-sequence token; count from the position that predicts its first token."""
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

    def _unusable(self, problem: str, *, got: object, expected: str) -> UnusableRowError:
        do = "Leave such rows out of the dataset, or raise max_length."
        return UnusableRowError(f"{problem} ({self.source})", got=got, expected=expected, do=do)


def read_documents(
    dataset: object, tokenizer: PreTrainedTokenizerBase, *, samples: int, max_length: int, seed: int
) -> tuple[list[Document], int]:
    """Draw at most `samples` distinct documents from a dataset; return them and the number of skipped rows.

    Duplicates are dropped, so that no text is in two splits. Rows of fewer than two tokens, and chats that the template
    refuses or whose prompt is too long, are skipped with a warning that gives the last reason.
    """
    source = describe_source(dataset)
    encode = RowEncoder(tokenizer, max_length, source)
    documents: dict[tuple[int, ...], Document] = {}
    num_skipped, last = 0, ""
    for row in random_rows(dataset, POOL + 10 * samples, seed):
        if len(documents) >= samples:
            break
        try:
            document = encode(row)
        except UnusableRowError as error:
            num_skipped, last = num_skipped + 1, str(error)
            continue
        documents.setdefault(tuple(document.tokens), document)
    if not documents:
        raise CalibrationError(
            f"the dataset is empty ({source})",
            got=f"{num_skipped} rows, of which none can be used; reason for the last: {last}" if last else "no texts",
            expected="texts or chats",
            do="Pass other data, or none: calibrate() then lets the model write the text.",
        )
    if num_skipped:
        logger.warning("rows that cannot be used and were skipped: %d; reason for the last: %s", num_skipped, last)
    return list(documents.values()), num_skipped


def describe_source(dataset: object) -> str:
    """Short name of a dataset for the calibration record; paths are reduced to their last part."""
    if dataset is None:
        return "the model's own answers to the package's prompts"
    path = _local_path(dataset)
    if path is not None:
        return path.absolute().name
    if isinstance(dataset, (str, os.PathLike)):
        match = _match_hub_name(dataset)
        config = f":{match['config']}" if match and match["config"] else ""
        return f"{match['name']}{config} ({match['split'] or 'train'})" if match else repr(dataset)
    if isinstance(dataset, (list, tuple)) and dataset:
        kind = "texts" if isinstance(dataset[0], str) else "chats" if isinstance(dataset[0], (list, tuple)) else "rows"
        return f"{kind} given by the caller"
    return "rows given by the caller"


def random_rows(dataset: Any, size: int, seed: int) -> Iterator[object]:
    """Yield up to `size` rows in random order; of an iterable without a length, only the first `size` rows are read."""
    rng = random.Random(seed)
    path = _local_path(dataset)
    if path is not None:
        return _draw(read_rows(path), size, rng)
    datasets = sys.modules.get("datasets")  # already imported if the dataset is one of its objects
    if isinstance(dataset, (str, os.PathLike)) or (datasets and isinstance(dataset, datasets.IterableDataset)):
        return islice(_stream_rows(dataset, seed), size)
    has_keys = hasattr(dataset, "keys")  # a DatasetDict or a table
    if not has_keys and not isinstance(dataset, (bytes, bytearray)):
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return (dataset[i] for i in rng.sample(range(len(dataset)), min(len(dataset), size)))
        if isinstance(dataset, Iterable):
            return _draw(islice(dataset, size), size, rng)
    keys = f" with the keys {', '.join(map(str, islice(dataset.keys(), SHOWN_KEYS)))}" if has_keys else ""
    raise CalibrationError(
        "cannot read this kind of dataset",
        got=type(dataset).__name__ + keys,
        expected="None, texts, chats, a file, a folder, the name of a Hub data set, or one split of a data set",
        do="Choose a split, say dataset['train'], or turn the data into a list of texts.",
    )


def _draw(rows: Iterable[object], size: int, rng: random.Random) -> Iterator[object]:
    """Draw `size` rows, in random order, without keeping more than these."""
    return iter(nsmallest(size, rows, key=lambda _: rng.random()))


def _local_path(dataset: object) -> Path | None:
    if not isinstance(dataset, (str, os.PathLike)):
        return None
    path = os.path.expanduser(dataset)
    return Path(path) if os.path.exists(path) else None  # Path.exists raises for a very long name


def _match_hub_name(dataset: str | os.PathLike[str]) -> re.Match[str] | None:
    if not isinstance(dataset, str) or dataset.lower().endswith(tuple(FORMATS)):
        return None
    return HUB_NAME.fullmatch(dataset)


def _stream_rows(dataset: Any, seed: int) -> Iterator[object]:
    """Yield rows of an `IterableDataset`, or of the Hub data set named `dataset`, shuffled in a buffer."""
    source = describe_source(dataset)
    match = _match_hub_name(dataset)
    if match is None and isinstance(dataset, (str, os.PathLike)):
        raise CalibrationError(
            "the dataset cannot be found",
            got=repr(os.fspath(dataset)),
            expected='a file or folder that exists, or a Hub data set as "org/name" or "org/name:config[split]"',
            do="Check the spelling; to pass texts themselves, put them into a list.",
        )
    datasets = import_extra("datasets", f"read {source}")
    try:
        if match is not None:
            split = match["split"] or "train"
            dataset = datasets.load_dataset(match["name"], match["config"], split=split, streaming=True)
        yield from dataset.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    except (OSError, ValueError, RuntimeError, HTTPError, datasets.exceptions.DatasetsError) as error:
        raise CalibrationError(
            f"the data set cannot be read ({source})",
            got=f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}",
            expected="a data set that exists, can be reached, and that you may read",
            do="Check name and connection; where access has to be granted, run `hf auth login`. Or pass a local file.",
        ) from error
