"""Where calibration's documents come from: the model itself, a list, local files, or a data set on the Hub."""

from __future__ import annotations

import logging
import os
import random
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from huggingface_hub.errors import HTTPError
from transformers import PreTrainedTokenizerBase

from ..common.errors import CalibrationError, describe
from .data import Document
from .encoding import RowEncoder, UnusableRowError
from .files import FORMATS, import_extra, read_rows

logger = logging.getLogger(__name__)

# "org/name", "org/name:config", "org/name[split]", "org/name:config[split]"
HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*/[\w.-]+)(?::(?P<config>[^\[\]]+))?(?:\[(?P<split>[\w.-]+)\])?")
POOL = 10_000  # rows at hand to draw from, besides ten for every document that is wanted
SHOWN_KEYS = 10  # by an error; a column of a table has one for each row
SHUFFLE_BUFFER = 2_000  # rows of a stream that are shuffled at a time


def read_documents(
    dataset: object,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    max_length: int,
    seed: int,
) -> tuple[list[Document], int]:
    """Draw different documents from a dataset; see `calibrate` for what it may be.

    Documents whose tokens are the same count once, since one text must not stand on both sides of a split.

    Args:
        dataset: Not None.
        tokenizer: The base model's.
        samples: At most this many documents are drawn, at random.
        max_length: Tokens after which a text, or the last answer of a chat, is cut.
        seed: Of the draw.

    Returns:
        The documents, and the number of rows that were skipped: those of fewer than two tokens, and chats that the
        template refuses or whose prompt is very long. A warning tells how many, and why the last one.

    Raises:
        CalibrationError: The dataset cannot be found or read, or holds nothing that can be used.
        MissingPackageError: A package that reads this kind of data is not installed.
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
            describe(
                f"the dataset is empty ({source})",
                got=f"{num_skipped} rows, of which none can be used; of the last: {last}" if last else "no texts",
                expected="texts or chats",
                do="Pass other data; calibrate() without any lets the model write its own text.",
            )
        )
    if num_skipped:
        logger.warning("rows that cannot be used and were skipped: %d; of the last: %s", num_skipped, last)
    return list(documents.values()), num_skipped


def describe_source(dataset: object) -> str:
    """Say in a few words where the documents come from, for the calibration record; folders are not named."""
    if dataset is None:
        return "the model's own answers to the package's prompts"
    path = _local_path(dataset)
    if path is not None:
        return path.absolute().name
    if isinstance(dataset, (str, os.PathLike)):
        match = _match_hub_name(dataset)
        return f"{_builder_name(match)} ({match['split'] or 'train'})" if match else repr(dataset)
    if isinstance(dataset, (list, tuple)) and dataset:
        kind = "texts" if isinstance(dataset[0], str) else "chats" if isinstance(dataset[0], (list, tuple)) else "rows"
        return f"{kind} given by the caller"
    return "rows given by the caller"


def random_rows(dataset: Any, size: int, seed: int) -> Iterator[object]:
    """Yield up to `size` rows of the dataset in random order; of an iterable without a length, of its first `size`.

    Args:
        dataset: Not None; see `calibrate` for what it may be.
        size: Most rows.
        seed: Of the order.

    Raises:
        CalibrationError: The dataset cannot be found or read.
        MissingPackageError: A package that reads this kind of data is not installed.
    """
    chance = random.Random(seed)
    path = _local_path(dataset)
    if path is not None:
        return iter(_draw(read_rows(path), size, chance))
    if isinstance(dataset, (str, os.PathLike)):
        return islice(_hub_rows(dataset, seed), size)
    if _is_stream(dataset):
        return islice(_stream_rows(lambda: dataset, describe_source(dataset), seed), size)
    has_keys = hasattr(dataset, "keys")  # a mapping of splits, a table of columns
    if not has_keys and not isinstance(dataset, (bytes, bytearray)):
        if hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__"):
            return (dataset[i] for i in chance.sample(range(len(dataset)), min(len(dataset), size)))
        if isinstance(dataset, Iterable):
            return iter(_draw(islice(dataset, size), size, chance))
    keys = f" with the keys {', '.join(map(str, islice(dataset.keys(), SHOWN_KEYS)))}" if has_keys else ""
    raise CalibrationError(
        describe(
            "cannot read this kind of dataset",
            got=type(dataset).__name__ + keys,
            expected="None, texts, chats, a file, a folder, the name of a Hub data set, or one split of a data set",
            do="Choose a split, say dataset['train'], or turn the data into a list of texts.",
        )
    )


def _draw(rows: Iterable[object], size: int, chance: random.Random) -> list[object]:
    """Draw `size` rows, all equally likely, in one pass and in random order."""
    drawn: list[object] = []
    for count, row in enumerate(rows):
        if count < size:
            drawn.append(row)
        elif (place := chance.randrange(count + 1)) < size:
            drawn[place] = row
    chance.shuffle(drawn)
    return drawn


def _local_path(dataset: object) -> Path | None:
    if not isinstance(dataset, (str, os.PathLike)):
        return None
    path = os.path.expanduser(dataset)
    return Path(path) if os.path.exists(path) else None  # where pathlib raises, as for a very long name, this does not


def _match_hub_name(dataset: str | os.PathLike[str]) -> re.Match[str] | None:
    if not isinstance(dataset, str) or dataset.lower().endswith(tuple(FORMATS)):
        return None
    return HUB_NAME.fullmatch(dataset)


def _builder_name(match: re.Match[str]) -> str:
    return match["name"] + (f":{match['config']}" if match["config"] else "")


def _hub_rows(dataset: str | os.PathLike[str], seed: int) -> Iterator[object]:
    match = _match_hub_name(dataset)
    if match is None:
        raise CalibrationError(
            describe(
                "the dataset cannot be found",
                got=repr(os.fspath(dataset)),
                expected='a file or folder that exists, or a Hub data set as "org/name", "org/name:config" or '
                '"org/name:config[split]"',
                do="Check the spelling; texts themselves go into a list.",
            )
        )
    datasets = import_extra("datasets", f"read {match['name']} from the Hub")
    split = match["split"] or "train"

    def load() -> Any:
        return datasets.load_dataset(match["name"], match["config"], split=split, streaming=True)

    return _stream_rows(load, describe_source(dataset), seed)


def _stream_rows(load: Callable[[], Any], source: str, seed: int) -> Iterator[object]:
    """Shuffle and read a stream of the datasets library; whatever goes wrong there names the source."""
    exceptions = import_extra("datasets.exceptions", f"read {source}")
    try:
        yield from load().shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER)
    except (OSError, ValueError, RuntimeError, HTTPError, exceptions.DatasetsError) as error:
        raise CalibrationError(
            describe(
                f"the data set cannot be read ({source})",
                got=f"{type(error).__name__}: {' '.join(str(error).split()).rstrip('.')}",
                expected="a data set that exists, can be reached, and that you may read",
                do='Check the name ("org/name:config[split]") and the connection; where access has to be granted, '
                "run `hf auth login`. Or pass a local file.",
            )
        ) from error


def _is_stream(dataset: object) -> bool:
    datasets = sys.modules.get("datasets")  # loaded, if this is one of its objects
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)
