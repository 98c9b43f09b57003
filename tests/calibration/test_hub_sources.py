"""Data sets of the Hub to calibrate on; a folder with the layout of a repository takes its place."""

import sys

import pytest
from documents import CHATS, TEXTS, read, rows_of, telling, texts_of, write_parquet

from tide_hf.common.errors import CalibrationError, MissingPackageError

datasets = pytest.importorskip("datasets")

HUB_CARD = """---
configs:
- config_name: plain
  default: true
  data_files: [{split: train, path: train.parquet}]
- config_name: chats
  data_files: [{split: train, path: chats.parquet}, {split: test, path: chats.parquet}]
---
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return telling(tiny_tokenizer)


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folders that `datasets.load_dataset` finds by name, and the calls that it gets."""
    real, calls = datasets.load_dataset, []

    def load_dataset(name, config, **options):
        calls.append((name, config, options))
        return real(str(tmp_path / name), config, **options)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(datasets.config, "SLEEP_TIME_ON_THREADS_SHUTDOWN", 0)  # 5 seconds a stream
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    write_parquet(folder / "train.parquet", rows_of([*TEXTS, "x", TEXTS[0]]))
    write_parquet(folder / "chats.parquet", rows_of(CHATS, "messages"))
    (folder / "README.md").write_text(HUB_CARD, encoding="utf-8")
    return calls


def test_a_hub_data_set_by_name(hub, tokenizer):
    documents, num_skipped = read("org/name", tokenizer)
    assert sorted(tokenizer.decode(document.tokens) for document in documents) == TEXTS
    assert num_skipped == 1
    assert len(read("org/name:chats", tokenizer)[0]) == 6
    assert len(read("org/name:chats[test]", tokenizer)[0]) == 6
    assert len(read("org/name[train]", tokenizer)[0]) == 6
    assert hub == [
        ("org/name", None, {"split": "train", "streaming": True}),
        ("org/name", "chats", {"split": "train", "streaming": True}),
        ("org/name", "chats", {"split": "test", "streaming": True}),
        ("org/name", None, {"split": "train", "streaming": True}),
    ]


def test_only_as_many_rows_are_read_as_are_needed(tokenizer, monkeypatch):
    read_rows = []

    def rows():
        for number in range(100_000):
            read_rows.append(number)
            yield {"text": f"text number {number}"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: stream)
    monkeypatch.setattr("tide_hf.calibration.sources.SHUFFLE_BUFFER", 100)
    texts = texts_of("org/name", tokenizer, samples=20)
    assert len(texts) == 20
    assert 100 <= len(read_rows) <= 130
    assert texts_of("org/name", tokenizer, samples=20) == texts
    assert texts_of("org/name", tokenizer, samples=20, seed=1) != texts


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "org/name[validation]",
            r"\(org/name \(validation\)\): got ValueError: Bad split: validation\. Available splits: ",
        ),
        ("org/name:french", r"\(org/name:french \(train\)\): got ValueError: BuilderConfig 'french' not found\."),
        ("org/nothing", r"\(org/nothing \(train\)\): got \w+Error: .*org/nothing"),
    ],
)
def test_hub_names_that_lead_nowhere(name, message, hub, tokenizer):
    with pytest.raises(CalibrationError, match=r"the data set cannot be read " + message):
        read(name, tokenizer)


def test_a_hub_that_cannot_be_reached(tokenizer, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CalibrationError, match=r"cannot be read \(org/name \(train\)\): got ConnectionError: Couldn't re"
    ):
        read("org/name", tokenizer)


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."),
        datasets.exceptions.DataFilesNotFoundError("No (supported) data files found in org/name"),
        datasets.data_files.EmptyDatasetError("The directory at org/name doesn't contain any data files"),
        datasets.exceptions.DatasetGenerationError("An error occurred while generating the dataset"),
        RuntimeError("Dataset scripts are no longer supported, but found name.py"),
    ],
)
def test_a_hub_data_set_that_cannot_be_loaded(error, tokenizer, monkeypatch):
    def load_dataset(*_, **__):
        raise error

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        CalibrationError,
        match=rf"\(org/name \(train\)\): got {type(error).__name__}: .*[^.]\. Expected .*`hf auth login`",
    ):
        read("org/name", tokenizer)


def test_a_connection_that_breaks_off(tokenizer):
    def rows():
        yield {"text": TEXTS[0]}
        raise ConnectionError("Server Disconnected")

    with pytest.raises(
        CalibrationError, match=r"\(rows given by the caller\): got ConnectionError: Server Disconnected"
    ):
        read(datasets.IterableDataset.from_generator(rows), tokenizer)


def test_without_the_extra(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    for dataset in ("org/name", tmp_path / "a.parquet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "datasets", None)
            with pytest.raises(MissingPackageError, match=r"missing to read .*Run: pip install tide-hf\[calibrate\]"):
                read(dataset, tokenizer)
            assert len(read(TEXTS, tokenizer)[0]) == len(read(tmp_path / "a.txt", tokenizer)[0]) == 6
