"""Texts and chats to calibrate on, and ways to write them down and read them."""

import copy
import json

import pytest

from tide_hf.calibration.sources import read_documents

datasets = pytest.importorskip("datasets")

TEXTS = [f"the river number {number} runs to the sea" for number in range(6)]
CHATS = [
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": f"What is {number}?"},
        {"role": "assistant", "content": f"It is {number}."},
    ]
    for number in range(6)
]
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def telling(tokenizer):
    """A copy whose chat template tells where the last answer begins."""
    own = copy.deepcopy(tokenizer)
    own.chat_template = CHAT_TEMPLATE
    return own


def read(dataset, tokenizer, samples=100, max_length=50, seed=0):
    return read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)


def texts_of(dataset, tokenizer, **options):
    documents, _ = read(dataset, tokenizer, **options)
    return [tokenizer.decode(document.tokens) for document in documents]


def write_json(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)


def rows_of(values, column="text"):
    return [{"id": number, column: value} for number, value in enumerate(values)]
