"""Where calibration's documents come from: texts and chats in lists, files, folders and data sets of the Hub."""

import copy
import json
import sys

import pytest
from calibrations import small

from tide_hf.calibration.documents import read_documents
from tide_hf.common.errors import CalibrationError, MissingPackageError

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


@pytest.fixture(scope="module")
def tokenizer(tiny_tokenizer):
    """A tokenizer whose chat template shows where the last answer begins."""
    own = copy.deepcopy(tiny_tokenizer)
    own.chat_template = CHAT_TEMPLATE
    return own


def read(dataset, tokenizer, samples=100, max_length=50, seed=0):
    return read_documents(dataset, tokenizer, samples=samples, max_length=max_length, seed=seed)


def texts_of(dataset, tokenizer, **options):
    documents, _ = read(dataset, tokenizer, **options)
    return [tokenizer.decode(document.tokens) for document in documents]


def write(path, rows):
    """Write rows in the format of a file's suffix."""
    if path.suffix in (".parquet", ".csv"):
        getattr(datasets.Dataset.from_list(rows), f"to_{path.suffix[1:]}")(path)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    else:
        path.write_text(json.dumps(rows), encoding="utf-8")


def rows_of(values, column="text"):
    return [{"id": number, column: value} for number, value in enumerate(values)]


# Files and folders


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("\n\none line\ntwo lines\n\n", ["one line", "two lines"]),
        ("wrapped\r\nlines\n\nsecond\n \t\n\nthird\n", ["second", "third", "wrapped\nlines"]),
        ("\ufefffirst\nse\u2028cond", ["first", "se\u2028cond"]),
    ],
)
def test_a_text_file_is_split_at_blank_lines_or_else_at_every_line(content, expected, tokenizer, tmp_path):
    (tmp_path / "texts.txt").write_bytes(content.encode())
    assert sorted(texts_of(tmp_path / "texts.txt", tokenizer)) == expected


def test_files_of_all_kinds_and_their_folder_with_repeats(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    files = {
        "a.jsonl": rows_of(TEXTS[:2]),
        "b.JSON": TEXTS[1:3],
        "c.csv": rows_of(TEXTS[2:4]),
        "e[1].parquet": rows_of(TEXTS[3:5]),
    }
    for name, rows in files.items():
        write(tmp_path / name, rows)
        assert len(texts_of(str(tmp_path / name), tokenizer)) == 2
    (tmp_path / "deeper" / "d.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "README.md").write_text("not a text to calibrate on", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, "~"):
        assert sorted(texts_of(folder, tokenizer)) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x y"}\n{"text": \n', r"cannot read .*a\.jsonl: got \w+: .*Expected a read"),
        ("a.txt", b"caf\xe9", r"cannot read .*a\.txt: got UnicodeDecodeError"),
        ("a.parquet", b"PAR1 no more", r"cannot read .*a\.parquet: got ArrowInvalid"),
        ("a.jsonl", b"", r"the dataset is empty \(a\.jsonl\): got no texts"),
        ("a.xml", b"text\nx", r"cannot read this kind of file: .*a\.xml: got \.xml\. Expected \.txt, \.csv, \.json"),
        ("a.txt", b"x\ny\n", r"is empty \(a\.txt\): got 2 rows, of which none can be used.*too short .*got 1 tokens"),
        ("folder/LICENSE", b"x", r"no file to read in .*: got LICENSE\. Expected \.txt, \.csv, \.json, \.jsonl"),
    ],
)
def test_files_and_folders_that_cannot_be_used(name, content, message, tokenizer, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path / name.partition("/")[0], tokenizer)


@pytest.mark.parametrize("name", ["wikitext", "org/missing.parquet", "./org/name", "a river runs to the sea\n" * 900])
def test_names_that_neither_a_file_nor_the_hub_can_have(name, tokenizer, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(CalibrationError, match=r"the dataset cannot be found: got '.*Expected a file or folder"):
        read(name, tokenizer)


# Objects in memory


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: [row["text"] for row in rows],
        lambda rows: (row for row in rows),
        datasets.Dataset.from_list,
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


def test_unusable_rows_are_skipped_and_counted(tokenizer, tmp_path, caplog):
    texts = [*TEXTS, "", "x", None]
    write(tmp_path / "a.jsonl", rows_of(texts))
    for source in (tmp_path / "a.jsonl", texts):
        caplog.clear()
        documents, num_skipped = read(source, tokenizer)
        assert (len(documents), num_skipped) == (6, 3)
        assert "rows that cannot be used and were skipped: 3; reason for the last: a " in caplog.text


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (7, r"cannot read this kind of dataset: got int\. Expected None, texts"),
        ({"text": TEXTS}, r"cannot read this kind of dataset: got dict with the keys text\."),
        (CHATS[0], r"no column to read .*: got the columns role, content"),
        ([{"text": 7}], r"cannot read this kind of row \(rows given by the caller\): got int"),
        ([{"text": None, "messages": None}], r"a row is empty .*: got None"),
        (iter(()), r"the dataset is empty \(rows given by the caller\): got no texts"),
    ],
)
def test_objects_that_cannot_be_used(dataset, message, tokenizer):
    with pytest.raises(CalibrationError, match=message):
        read(dataset, tokenizer)


# Chats


def test_of_a_chat_only_the_last_answer_is_truncated_and_what_follows_is_not_read(tokenizer):
    (document,) = read([CHATS[3]], tokenizer, max_length=7)[0]
    assert document.num_positions == 8  # the position that predicts the first token is the prompt's last
    start = "<system>Be brief.<eos><user>What is 3?<eos><assistant>"
    assert tokenizer.decode(document.tokens[: document.first + 1]) == start
    assert tokenizer.decode(document.tokens) == start + "It is 3"
    assert tokenizer.decode(read([CHATS[3]], tokenizer)[0][0].tokens) == start + "It is 3."  # without the turn's end
    own = copy.deepcopy(tokenizer)
    own.eos_token = None  # at which the answer would be truncated
    (document,) = read([[*CHATS[3], {"role": "user", "content": "Thanks!"}]], own)[0]
    assert own.decode(document.tokens).endswith("<assistant>It is 3.<eos>")


def test_the_whole_chat_counts_if_the_template_does_not_show_the_answer(tokenizer, tiny_tokenizer):
    (document,) = read([CHATS[3]], tiny_tokenizer, max_length=30)[0]  # its template always ends in <answer>
    assert (document.first, len(document.tokens)) == (1, 30)
    assert tiny_tokenizer.decode(document.tokens).startswith("<user>Be brief.<user>What")
    (document,) = read([CHATS[3][:2]], tokenizer)[0]  # no answer
    assert document.first == 1
    assert tokenizer.decode(document.tokens) == "<system>Be brief.<eos><user>What is 3?<eos>"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": None}], r"a message cannot be read \(chats given by the caller\): got \{'role'"),
        (["hello", "there"], r"a message cannot be read .*: got hello\. Expected a mapping"),
        ([*CHATS[0][:2], {"role": "assistant", "content": ""}], "a prompt of 46 tokens.* answer of 0"),
        ([{"role": "user", "content": "why? " * 90}, CHATS[0][2]], "a prompt of 4.. tokens.*Expected .* at most 400"),
        ([], r"a chat is empty .*: got no messages"),
    ],
)
def test_chats_that_cannot_be_used(chat, message, tokenizer):
    with pytest.raises(CalibrationError, match=f"got 1 rows, of which none can be used.*{message}"):
        read([chat], tokenizer)
    documents, num_skipped = read([chat, *CHATS], tokenizer)
    assert (len(documents), num_skipped) == (6, 1)


def test_messages_need_a_template_and_are_then_read_before_texts(tokenizer):
    rows = [{"text": text, "messages": chat} for text, chat in zip(TEXTS, CHATS, strict=True)]
    assert all("<user>" in text for text in texts_of(rows, tokenizer))
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(CalibrationError, match=r"the chat template refuses a chat .*: got 'no system role'"):
        read(CHATS, own)
    own.chat_template = None
    assert sorted(texts_of(rows, own)) == TEXTS
    with pytest.raises(CalibrationError, match=r"a chat needs a chat template .*: got a tokenizer without one"):
        read(iter(CHATS), own)


# Data sets of the Hub

HUB_CARD = """---
configs:
- {config_name: plain, default: true, data_files: [{split: train, path: train.parquet}]}
- {config_name: chats, data_files: [{split: test, path: chats.parquet}]}
---
"""


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
    write(folder / "train.parquet", rows_of([*TEXTS, "x", TEXTS[0]]))
    write(folder / "chats.parquet", rows_of(CHATS, "messages"))
    (folder / "README.md").write_text(HUB_CARD, encoding="utf-8")
    return calls


def test_a_hub_data_set_by_name(hub, tokenizer):
    documents, num_skipped = read("org/name", tokenizer)
    assert sorted(tokenizer.decode(document.tokens) for document in documents) == TEXTS
    assert num_skipped == 1
    assert len(read("org/name:chats[test]", tokenizer)[0]) == 6
    streams = ((None, "train"), ("chats", "test"))
    assert hub == [("org/name", config, {"split": split, "streaming": True}) for config, split in streams]


def test_a_stream_is_not_read_further_than_needed(tokenizer, monkeypatch):
    read_rows = []

    def rows():
        for number in range(100_000):
            read_rows.append(number)
            yield {"text": f"text number {number}"}

    monkeypatch.setattr("tide_hf.calibration.documents.SHUFFLE_BUFFER", 100)
    for stream in (datasets.IterableDataset.from_generator(rows), rows()):
        read_rows.clear()
        assert len(texts_of(stream, tokenizer, samples=20)) == 20
        assert 100 <= len(read_rows) < 50_000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/name[validation]", r"\(org/name \(validation\)\): got ValueError: Bad split: validation\. Available spl"),
        ("org/name:french", r"\(org/name:french \(train\)\): got ValueError: BuilderConfig 'french' not found\."),
        ("org/nothing", r"\(org/nothing \(train\)\): got \w+Error: .*org/nothing"),
    ],
)
def test_hub_data_sets_that_do_not_exist(name, message, hub, tokenizer):
    with pytest.raises(CalibrationError, match=rf"the data set cannot be read {message}.*`hf auth login`"):
        read(name, tokenizer)


def test_without_the_datasets_library(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    for dataset in ("org/name", tmp_path / "a.parquet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "datasets", None)
            with pytest.raises(MissingPackageError, match=r"missing to read .*Run: pip install tide-hf\[calibrate\]"):
                read(dataset, tokenizer)
            assert len(read(TEXTS, tokenizer)[0]) == len(read(tmp_path / "a.txt", tokenizer)[0]) == 6


def test_the_record_names_the_file_and_counts_skipped_rows(tiny_llama, tokenizer, tmp_path):
    write(tmp_path / "chats.jsonl", [*rows_of(CHATS, "messages"), {"messages": []}])
    record = small(tiny_llama(), tokenizer, tmp_path / "chats.jsonl", exit_layers=[2], seed=1).config.calibration
    assert record["data"] == "chats.jsonl"
    assert record["num_documents"] == 6
    assert record["num_tokens"] == 6 * 9
    assert record["rows_skipped"] == 1
