"""Where calibration's documents come from: lists, files, folders, data sets; each kind really read."""

import copy

import pytest
from documents import CHATS, TEXTS, read, rows_of, telling, texts_of, write_json, write_json_lines, write_parquet

from tide_hf import calibrate
from tide_hf.calibration.documents import Document
from tide_hf.calibration.sources import describe_source
from tide_hf.calibration.text import Text
from tide_hf.common.errors import CalibrationError

datasets = pytest.importorskip("datasets")


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    return telling(tiny_tokenizer)


# Files and folders


@pytest.mark.parametrize(
    ("name", "write", "rows"),
    [
        ("texts.jsonl", write_json_lines, rows_of(TEXTS)),
        ("texts.csv", lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path), rows_of(TEXTS)),
        ("texts.json", write_json, rows_of(TEXTS)),
        ("texts.JSON", write_json, TEXTS),
        ("texts[1].parquet", write_parquet, rows_of(TEXTS)),
    ],
)
def test_a_file_of_texts(name, write, rows, tokenizer, tmp_path):
    write(tmp_path / name, rows)
    for dataset in (tmp_path / name, str(tmp_path / name)):
        assert sorted(texts_of(dataset, tokenizer)) == TEXTS


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("one line\ntwo lines\n", ["one line", "two lines"]),
        ("\n\none line\ntwo lines\n\n", ["one line", "two lines"]),
        ("wrapped\nlines\n\nsecond\n \t\n\nthird\n", ["second", "third", "wrapped\nlines"]),
        ("wrapped\r\nlines\r\n\r\nsecond\r\n", ["second", "wrapped\nlines"]),
        ("\ufefffirst\nse\u2028cond", ["first", "se\u2028cond"]),
    ],
)
def test_a_text_file_is_split_at_blank_lines_or_else_at_every_line(content, expected, tokenizer, tmp_path):
    (tmp_path / "texts.txt").write_bytes(content.encode())
    assert sorted(texts_of(tmp_path / "texts.txt", tokenizer)) == expected


def test_a_folder_of_files_of_all_kinds_with_repeats(tokenizer, tmp_path):
    (tmp_path / "deeper").mkdir()
    write_json_lines(tmp_path / "a.jsonl", rows_of(TEXTS[:3]))
    write_json(tmp_path / "b.json", TEXTS[2:4])
    write_parquet(tmp_path / "deeper" / "c.parquet", rows_of(TEXTS[3:]))
    (tmp_path / "deeper" / "d.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "README.md").write_text("not a text to calibrate on", encoding="utf-8")
    assert sorted(texts_of(tmp_path, tokenizer)) == TEXTS


def test_a_home_folder_is_found(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write_json(tmp_path / "texts.json", TEXTS)
    assert len(read("~/texts.json", tokenizer)[0]) == 6
    assert describe_source("~/texts.json") == "texts.json"


def test_texts_that_are_the_same_once_cut_count_once(tokenizer):
    assert texts_of(["abcdef", "abcxyz", "xyz"], tokenizer, max_length=3, seed=1) in (["abc", "xyz"], ["xyz", "abc"])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x y"}\n{"text": \n',
            r"cannot read .*a\.jsonl: got \w+: .*Expected a read",
        ),
        ("a.json", b"[1", r"cannot read .*a\.json: got \w+"),
        ("a.txt", b"caf\xe9", r"cannot read .*a\.txt: got UnicodeDecodeError"),
        ("a.parquet", b"PAR1 no more", r"cannot read .*a\.parquet: got ArrowInvalid"),
        ("a.jsonl", b"", r"the dataset is empty \(a\.jsonl\): got no texts"),
        ("a.xml", b"text\nx", r"cannot read this kind of file: .*a\.xml: got \.xml\. Expected \.txt, \.csv, \.json"),
        ("a.txt", b" \n", r"the dataset is empty \(a\.txt\): got no texts"),
        ("a.txt", b"x\ny\n", r"is empty \(a\.txt\): got 2 rows, of which none can be used.*too short .*got 1 tokens"),
    ],
)
def test_files_that_cannot_be_used(name, content, message, tokenizer, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path / name, tokenizer)


def test_folders_that_cannot_be_used(tokenizer, tmp_path):
    with pytest.raises(CalibrationError, match=r"no file to read in .*: got an empty folder"):
        read(tmp_path, tokenizer)
    (tmp_path / "README.md").write_text("x", encoding="utf-8")
    (tmp_path / "LICENSE").write_text("x", encoding="utf-8")
    with pytest.raises(
        CalibrationError, match=r"no file .*: got \.md, LICENSE\. Expected \.txt, \.csv, \.json, \.jsonl"
    ):
        read(str(tmp_path), tokenizer)


@pytest.mark.parametrize(
    "name", ["missing.jsonl", "org/missing.parquet", "./org/name", "/org/name", "a river runs to the sea\n" * 900]
)
def test_a_file_that_is_not_there(name, tokenizer, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(CalibrationError, match=r"the dataset cannot be found: got '.*Expected a file or folder"):
        read(name, tokenizer)


# Rows


def test_a_row_without_a_column_to_read(tokenizer, tmp_path):
    write_parquet(tmp_path / "a.parquet", rows_of(TEXTS, "answer"))
    with pytest.raises(CalibrationError, match=r"no column to read \(a\.parquet\): got the columns id, answer\."):
        read(tmp_path / "a.parquet", tokenizer)


def test_useless_rows_of_a_file_or_a_list_are_skipped_counted_and_told(tokenizer, tmp_path, caplog):
    texts = [*TEXTS, "", "x", None]
    write_json_lines(tmp_path / "a.jsonl", rows_of(texts))
    for source in (tmp_path / "a.jsonl", texts, tuple(texts)):
        caplog.clear()
        documents, num_skipped = read(source, tokenizer)
        assert (len(documents), num_skipped) == (6, 3)
        (warning,) = caplog.messages
        assert warning.startswith("rows that cannot be used and were skipped: 3; of the last: a ")


# Objects in memory


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: [row["text"] for row in rows],
        tuple,
        lambda rows: (row for row in rows),
        lambda rows: dict(enumerate(rows)).values(),
        datasets.Dataset.from_list,
        lambda rows: datasets.Dataset.from_list(rows).to_iterable_dataset(num_shards=2),
        lambda rows: datasets.IterableDataset.from_generator(lambda: iter(rows)),
    ],
)
def test_objects_in_memory_are_drawn_from_at_random_but_repeatably(make, tokenizer):
    rows = rows_of([f"text number {number}" for number in range(40)] + ["text number 7"])
    assert len(texts_of(make(rows), tokenizer)) == 40
    draws = [texts_of(make(rows), tokenizer, samples=12, seed=seed) for seed in (0, 0, 1)]
    assert draws[0] == draws[1]
    assert set(draws[0]) != set(draws[2])
    assert len(set(draws[0])) == 12
    assert draws[0] != [row["text"] for row in rows[:12]]


def test_a_file_is_drawn_from_evenly(tokenizer, tmp_path, monkeypatch):
    """Also where it has more rows than are kept at hand."""
    monkeypatch.setattr("tide_hf.calibration.sources.POOL", 0)
    (tmp_path / "a.txt").write_text("\n".join(f"{number:02}" for number in range(40)))
    hits = dict.fromkeys((f"{number:02}" for number in range(40)), 0)
    for seed in range(200):
        for text in texts_of(tmp_path / "a.txt", tokenizer, samples=2, seed=seed):
            hits[text] += 1
    assert sum(hits.values()) == 400
    assert sum(hits[f"{number:02}"] for number in range(20)) == pytest.approx(200, abs=40)
    assert max(hits.values()) < 30


def test_an_iterable_without_end(tokenizer):
    def endless():
        for number in range(50_000):
            yield f"number {number}"
        pytest.fail("it is read on and on")

    assert len(read(endless(), tokenizer, samples=5)[0]) == 5


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (
            datasets.DatasetDict(test=datasets.Dataset.from_list(rows_of(TEXTS))),
            r"got DatasetDict with the keys test\.",
        ),
        ({"text": TEXTS}, r"cannot read this kind of dataset: got dict with the keys text\."),
        (dict.fromkeys(range(99)), r"got dict with the keys 0, 1, 2, 3, 4, 5, 6, 7, 8, 9\."),
        (b"some text", "cannot read this kind of dataset: got bytes"),
        (CHATS[0], r"no column .*: got the columns role, content"),
        ([{"text": 7}], r"cannot read this kind of row .*: got int"),
        (iter(()), r"the dataset is empty \(rows given by the caller\): got no texts"),
    ],
)
def test_objects_that_cannot_be_used(dataset, message, tokenizer):
    with pytest.raises(CalibrationError, match=message):
        read(dataset, tokenizer)


# What the record says


def test_sources_in_words(tmp_path):
    assert describe_source(None) == "the model's own answers to the package's prompts"
    assert describe_source(TEXTS) == "texts given by the caller"
    assert describe_source(CHATS) == "chats given by the caller"
    assert describe_source(datasets.Dataset.from_list(rows_of(TEXTS))) == "rows given by the caller"
    assert describe_source("org/name") == "org/name (train)"
    assert describe_source("org/name:en-US.1[test]") == "org/name:en-US.1 (test)"
    (tmp_path / "texts.txt").touch()
    assert describe_source(tmp_path / "texts.txt") == "texts.txt"
    assert describe_source(str(tmp_path)) == tmp_path.name


def digest(documents):
    return Text(documents, [], "texts").digest()


def test_the_digest_is_that_of_the_tokens():
    documents = [Document([1, 2, 3], first=1), Document([4, 5], first=1)]
    fingerprint = digest(documents)
    assert fingerprint == digest(copy.deepcopy(documents))
    assert len(fingerprint) == 64
    others = [
        [Document([1, 2, 3], first=1), Document([4, 6], first=1)],
        [Document([1, 2, 3], first=1), Document([4, 5], first=0)],
        [Document([1, 2], first=1), Document([3, 4, 5], first=1)],
        documents[::-1],
        documents[:1],
    ]
    assert len({fingerprint, *map(digest, others)}) == 6


def test_calibrate_reads_a_file_and_says_so(tiny_llama, tokenizer, tmp_path):
    write_json_lines(tmp_path / "chats.jsonl", [*rows_of(CHATS, "messages"), {"messages": []}])
    options = {"samples": 6, "max_length": 12, "exit_layers": [2], "progress": False}
    record = calibrate(tiny_llama(), tokenizer, tmp_path / "chats.jsonl", **options, seed=1).config.calibration
    assert record["data"] == "chats.jsonl"
    assert record["num_documents"] == 6
    assert record["num_tokens"] == 6 * 9
    assert record["rows_skipped"] == 1
