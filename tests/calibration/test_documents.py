"""Where calibration's documents come from: texts and chats in lists, files, folders and data sets of the Hub."""

import copy
import json
import sys

import pytest
from calibrations import small

from tide_hf.calibration.documents import Document, describe_source, read_documents
from tide_hf.calibration.text import Text
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


def write_json(path, rows):
    path.write_text(json.dumps(rows), encoding="utf-8")


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")


def write_parquet(path, rows):
    datasets.Dataset.from_list(rows).to_parquet(path)


def rows_of(values, column="text"):
    return [{"id": number, column: value} for number, value in enumerate(values)]


# Files and folders


@pytest.mark.parametrize(
    ("name", "write", "rows"),
    [
        ("texts.jsonl", write_json_lines, rows_of(TEXTS)),
        ("texts.csv", lambda path, rows: datasets.Dataset.from_list(rows).to_csv(path), rows_of(TEXTS)),
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
        ("\n\none line\ntwo lines\n\n", ["one line", "two lines"]),
        ("wrapped\nlines\n\nsecond\n \t\n\nthird\n", ["second", "third", "wrapped\nlines"]),
        ("wrapped\r\nlines\r\n\r\nsecond\r\n", ["second", "wrapped\nlines"]),
        ("\ufefffirst\nse\u2028cond", ["first", "se\u2028cond"]),
    ],
)
def test_a_text_file_is_split_at_blank_lines_or_else_at_every_line(content, expected, tokenizer, tmp_path):
    (tmp_path / "texts.txt").write_bytes(content.encode())
    assert sorted(texts_of(tmp_path / "texts.txt", tokenizer)) == expected


def test_a_folder_of_files_of_all_kinds_with_repeats(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    write_json_lines(tmp_path / "a.jsonl", rows_of(TEXTS[:3]))
    write_json(tmp_path / "b.json", TEXTS[2:4])
    write_parquet(tmp_path / "deeper" / "c.parquet", rows_of(TEXTS[3:]))
    (tmp_path / "deeper" / "d.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    (tmp_path / "README.md").write_text("not a text to calibrate on", encoding="utf-8")
    monkeypatch.setenv("HOME", str(tmp_path))
    for folder in (tmp_path, "~"):
        assert sorted(texts_of(folder, tokenizer)) == TEXTS


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b'{"text": "x y"}\n{"text": \n', r"cannot read .*a\.jsonl: got \w+: .*Expected a read"),
        ("a.json", b"[1", r"cannot read .*a\.json: got \w+"),
        ("a.txt", b"caf\xe9", r"cannot read .*a\.txt: got UnicodeDecodeError"),
        ("a.parquet", b"PAR1 no more", r"cannot read .*a\.parquet: got ArrowInvalid"),
        ("a.jsonl", b"", r"the dataset is empty \(a\.jsonl\): got no texts"),
        ("a.xml", b"text\nx", r"cannot read this kind of file: .*a\.xml: got \.xml\. Expected \.txt, \.csv, \.json"),
        ("a.txt", b"x\ny\n", r"is empty \(a\.txt\): got 2 rows, of which none can be used.*too short .*got 1 tokens"),
        ("folder/LICENSE", b"x", r"no file to read in .*: got LICENSE\. Expected \.txt, \.csv, \.json, \.jsonl"),
        ("folder/deeper", None, r"no file to read in .*: got an empty folder"),
    ],
)
def test_files_and_folders_that_cannot_be_used(name, content, message, tokenizer, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.mkdir() if content is None else path.write_bytes(content)
    with pytest.raises(CalibrationError, match=message):
        read(tmp_path / name.partition("/")[0], tokenizer)


@pytest.mark.parametrize(
    "name", ["wikitext", "org/missing.parquet", "./org/name", "/org/name", "a river runs to the sea\n" * 900]
)
def test_names_that_neither_a_file_nor_the_hub_can_have(name, tokenizer, monkeypatch):
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: pytest.fail("the Hub was asked"))
    with pytest.raises(CalibrationError, match=r"the dataset cannot be found: got '.*Expected a file or folder"):
        read(name, tokenizer)


def test_a_file_is_drawn_from_evenly(tokenizer, tmp_path, monkeypatch):
    """Also where it has more rows than are drawn from."""
    monkeypatch.setattr("tide_hf.calibration.documents.POOL", 0)
    (tmp_path / "a.txt").write_text("\n".join(f"{number:02}" for number in range(40)))
    hits = dict.fromkeys((f"{number:02}" for number in range(40)), 0)
    for seed in range(200):
        for text in texts_of(tmp_path / "a.txt", tokenizer, samples=2, seed=seed):
            hits[text] += 1
    assert sum(hits.values()) == 400
    assert sum(hits[f"{number:02}"] for number in range(20)) == pytest.approx(200, abs=40)
    assert max(hits.values()) < 30


# Objects in memory


@pytest.mark.parametrize(
    "make",
    [
        lambda rows: [row["text"] for row in rows],
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


def test_an_endless_iterable(tokenizer):
    def endless():
        for number in range(50_000):
            yield f"number {number}"
        pytest.fail("it is read on and on")

    assert len(read(endless(), tokenizer, samples=5)[0]) == 5


def test_texts_that_are_the_same_once_truncated_count_once(tokenizer):
    assert texts_of(["abcdef", "abcxyz", "xyz"], tokenizer, max_length=3, seed=1) in (["abc", "xyz"], ["xyz", "abc"])


def test_unusable_rows_are_skipped_and_counted(tokenizer, tmp_path, caplog):
    texts = [*TEXTS, "", "x", None]
    write_json_lines(tmp_path / "a.jsonl", rows_of(texts))
    for source in (tmp_path / "a.jsonl", texts):
        caplog.clear()
        documents, num_skipped = read(source, tokenizer)
        assert (len(documents), num_skipped) == (6, 3)
        (warning,) = caplog.messages
        assert warning.startswith("rows that cannot be used and were skipped: 3; of the last: a ")


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (7, r"cannot read this kind of dataset: got int\. Expected None, texts"),
        ({"text": TEXTS}, r"cannot read this kind of dataset: got dict with the keys text\."),
        (dict.fromkeys(range(99)), r"got dict with the keys 0, 1, 2, 3, 4, 5, 6, 7, 8, 9\."),
        (b"some text", "cannot read this kind of dataset: got bytes"),
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


def test_of_a_chat_the_last_answer_counts(tokenizer, tmp_path):
    write_parquet(tmp_path / "chats.parquet", rows_of(CHATS, "messages"))
    documents, num_skipped = read(tmp_path / "chats.parquet", tokenizer)
    assert (len(documents), num_skipped) == (6, 0)
    for document in documents:
        prompt, answer = document.tokens[: document.first + 1], document.tokens[document.first + 1 :]
        number = tokenizer.decode(answer)[-2]
        assert tokenizer.decode(answer) == f"It is {number}."  # without the end of the turn
        assert tokenizer.decode(prompt) == f"<system>Be brief.<eos><user>What is {number}?<eos><assistant>"


def test_of_a_chat_only_the_last_answer_is_truncated_and_what_follows_is_not_read(tokenizer):
    (document,) = read([CHATS[3]], tokenizer, max_length=7)[0]
    assert document.num_positions == 8  # the position that predicts the first token is the prompt's last
    assert tokenizer.decode(document.tokens).endswith("<assistant>It is 3")
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
    (document,) = read([CHATS[3][2:]], tokenizer)[0]  # no prompt
    assert document.first == 1
    assert tokenizer.decode(document.tokens) == "<assistant>It is 3.<eos>"


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        ([{"role": "user", "content": None}], r"a message cannot be read \(chats given by the caller\): got \{'role'"),
        (["hello", "there"], r"a message cannot be read .*: got hello\. Expected a mapping"),
        (
            [*CHATS[0][:2], {"role": "assistant", "content": ""}],
            r"a prompt of 46 tokens.* answer of 0",
        ),
        (
            [{"role": "user", "content": "why? " * 90}, CHATS[0][2]],
            r"a prompt of 4\d\d tokens.*Expected .* at most 400",
        ),
        ([], r"a chat is empty .*: got no messages"),
    ],
)
def test_chats_that_cannot_be_used(chat, message, tokenizer):
    with pytest.raises(CalibrationError, match=f"got 1 rows, of which none can be used.*{message}"):
        read([chat], tokenizer)
    documents, num_skipped = read([chat, *CHATS], tokenizer)
    assert (len(documents), num_skipped) == (6, 1)


def test_chats_without_a_template_or_with_one_that_refuses(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    with pytest.raises(CalibrationError, match=r"the chat template refuses a chat .*: got 'no system role'"):
        read(CHATS, own)
    own.chat_template = None
    with pytest.raises(CalibrationError, match=r"a chat needs a chat template .*: got a tokenizer without one"):
        read(iter(CHATS), own)


def test_messages_are_read_before_texts_if_there_is_a_template(tokenizer):
    rows = [{"text": text, "messages": chat} for text, chat in zip(TEXTS, CHATS, strict=True)]
    assert all("<user>" in text for text in texts_of(rows, tokenizer))
    rows[0]["messages"] = None
    assert TEXTS[0] in texts_of(rows, tokenizer)
    own = copy.deepcopy(tokenizer)
    own.chat_template = None
    assert sorted(texts_of(rows, own)) == TEXTS


# Data sets of the Hub

HUB_CARD = """---
configs:
- config_name: plain
  default: true
  data_files: [{split: train, path: train.parquet}]
- config_name: chats
  data_files: [{split: train, path: chats.parquet}, {split: test, path: chats.parquet}]
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
    write_parquet(folder / "train.parquet", rows_of([*TEXTS, "x", TEXTS[0]]))
    write_parquet(folder / "chats.parquet", rows_of(CHATS, "messages"))
    (folder / "README.md").write_text(HUB_CARD, encoding="utf-8")
    return calls


def test_a_hub_data_set_by_name(hub, tokenizer):
    documents, num_skipped = read("org/name", tokenizer)
    assert sorted(tokenizer.decode(document.tokens) for document in documents) == TEXTS
    assert num_skipped == 1
    for name in ("org/name[train]", "org/name:chats", "org/name:chats[test]"):
        assert len(read(name, tokenizer)[0]) == 6
    assert hub == [
        ("org/name", config, {"split": split, "streaming": True})
        for config, split in ((None, "train"), (None, "train"), ("chats", "train"), ("chats", "test"))
    ]


def test_a_stream_is_not_read_further_than_needed(tokenizer, monkeypatch):
    read_rows = []

    def rows():
        for number in range(100_000):
            read_rows.append(number)
            yield {"text": f"text number {number}"}

    stream = datasets.IterableDataset.from_generator(rows)
    monkeypatch.setattr("tide_hf.calibration.documents.SHUFFLE_BUFFER", 100)
    assert len(texts_of(stream, tokenizer, samples=20)) == 20
    assert 100 <= len(read_rows) <= 130


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("org/name[validation]", r"\(org/name \(validation\)\): got ValueError: Bad split: validation\. Available spl"),
        ("org/name:french", r"\(org/name:french \(train\)\): got ValueError: BuilderConfig 'french' not found\."),
        ("org/nothing", r"\(org/nothing \(train\)\): got \w+Error: .*org/nothing"),
    ],
)
def test_hub_data_sets_that_do_not_exist(name, message, hub, tokenizer):
    with pytest.raises(CalibrationError, match=r"the data set cannot be read " + message):
        read(name, tokenizer)


@pytest.mark.parametrize(
    "error",
    [
        datasets.exceptions.DatasetNotFoundError("Dataset 'org/name' is a gated dataset on the Hub."),
        RuntimeError("Dataset scripts are no longer supported, but found name.py"),
        ConnectionError("Server Disconnected"),
    ],
)
def test_a_stream_that_breaks_off(error, tokenizer, monkeypatch):
    def rows():
        yield {"text": TEXTS[0]}
        raise error

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(rows))
    with pytest.raises(
        CalibrationError,
        match=rf"\(org/name \(train\)\): got {type(error).__name__}: .*[^.]\. Expected .*`hf auth login`",
    ):
        read("org/name", tokenizer)


def test_without_the_datasets_library(tokenizer, tmp_path, monkeypatch):
    (tmp_path / "a.parquet").touch()
    (tmp_path / "a.txt").write_text("\n".join(TEXTS))
    for dataset in ("org/name", tmp_path / "a.parquet"):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "datasets", None)
            with pytest.raises(MissingPackageError, match=r"missing to read .*Run: pip install tide-hf\[calibrate\]"):
                read(dataset, tokenizer)
            assert len(read(TEXTS, tokenizer)[0]) == len(read(tmp_path / "a.txt", tokenizer)[0]) == 6


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


def test_the_digest_depends_on_tokens_and_counted_positions():
    documents = [Document([1, 2, 3], first=1), Document([4, 5], first=1)]
    others = [[Document([1, 2], 1), Document([3, 4, 5], 1)], [Document([1, 2, 3], 1), Document([4, 5], 0)]]
    digests = [Text(one, [], "texts").digest() for one in (documents, copy.deepcopy(documents), *others)]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_the_record_names_the_file_and_counts_skipped_rows(tiny_llama, tokenizer, tmp_path):
    write_json_lines(tmp_path / "chats.jsonl", [*rows_of(CHATS, "messages"), {"messages": []}])
    record = small(tiny_llama(), tokenizer, tmp_path / "chats.jsonl", exit_layers=[2], seed=1).config.calibration
    assert record["data"] == "chats.jsonl"
    assert record["num_documents"] == 6
    assert record["num_tokens"] == 6 * 9
    assert record["rows_skipped"] == 1
