"""Answers to a data set: the same by any number of processes, and after any number of kills."""

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from repository import ROOT
from transformers import AutoTokenizer, GenerationConfig

from tide_hf import TIDEModelForCausalLM, folders, generate_dataset
from tide_hf.errors import DatasetError, UnsupportedOptionError

OPTIONS = {"max_new_tokens": 6, "do_sample": False}
LAYOUT = {"batch_size": 2, "shard_size": 4}


class Killed(BaseException):
    """Stands for a kill."""


@pytest.fixture
def parts(tiny_llama, tiny_tokenizer):
    return TIDEModelForCausalLM.attach(tiny_llama()), tiny_tokenizer


def prompts(count=10):
    chats = [{"messages": [{"role": "user", "content": "sea " * i}], "id": i} for i in range(1, count, 3)]
    texts = [{"prompt": f"tide {i} " + "ebb " * (i % 4), "id": i} for i in range(count)]
    return [*texts[: count - len(chats)], *chats]


def read(files):
    return [json.loads(line) for file in files for line in Path(file).read_text(encoding="utf-8").splitlines()]


def test_every_row_gets_the_answer_it_would_get_alone(parts, tmp_path):
    model, tokenizer = parts
    files = generate_dataset(model, tokenizer, prompts(), tmp_path, **LAYOUT, **OPTIONS)
    assert [file.name for file in files] == ["00000.jsonl", "00001.jsonl", "00002.jsonl"]
    assert [len(read([file])) for file in files] == [4, 4, 2]
    rows = read(files)
    TIDEModelForCausalLM.detach(model)
    for row, given in zip(rows, prompts(), strict=True):
        text = given["prompt"] if "prompt" in given else f"<user>{given['messages'][0]['content']}<answer>"
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        new = model.generate(ids, **OPTIONS)[0, ids.shape[1] :]
        assert row == {**given, "answer": tokenizer.decode(new, skip_special_tokens=True), "num_new_tokens": len(new)}


def test_an_answer_ends_where_the_model_ends_it(parts, tmp_path):
    model, tokenizer = parts
    whole = read(generate_dataset(model, tokenizer, ["a b", "c d e"], tmp_path / "whole", **OPTIONS))
    assert [row["prompt"] for row in whole] == ["a b", "c d e"]
    ids = tokenizer("a b", return_tensors="pt").input_ids
    third = int(model.generate(ids, **OPTIONS)[0, ids.shape[1] + 2])
    short = read(
        generate_dataset(model, tokenizer, ["a b", "c d e"], tmp_path / "short", eos_token_id=third, **OPTIONS)
    )
    assert short[0]["num_new_tokens"] <= 3
    assert whole[0]["num_new_tokens"] == 6


def test_an_answer_ends_where_a_passed_config_ends_it(parts, tmp_path):
    model, tokenizer = parts
    ids = tokenizer("a b", return_tensors="pt").input_ids
    third = int(model.generate(ids, **OPTIONS)[0, ids.shape[1] + 2])
    options = {"shard_size": 2, "max_new_tokens": 6, "generation_config": GenerationConfig(eos_token_id=[third])}
    files = generate_dataset(model, tokenizer, ["a b", "a longer prompt"], tmp_path, **options)
    numbers = [row["num_new_tokens"] for row in read(files)]
    assert numbers[0] <= 3 < numbers[1]  # so that padding followed the first


@pytest.mark.parametrize("said_by", ["option", "config", "model"])
def test_an_answer_ends_at_a_stop_string(parts, tmp_path, said_by):
    given = ["sea", "a"]  # of the answers one has an r, as its second token
    whole = read(generate_dataset(*parts, given, tmp_path / "whole", **OPTIONS))
    assert ["r" in row["answer"] for row in whole] == [True, False]
    options = OPTIONS | {"stop_strings": ["r"]} if said_by == "option" else dict(OPTIONS)
    if said_by == "config":
        options = {"generation_config": GenerationConfig(stop_strings="r", **OPTIONS)}
    elif said_by == "model":
        parts[0].generation_config.stop_strings = ["r"]
    stopped, other = read(generate_dataset(*parts, given, tmp_path / "stopped", **options))
    assert (stopped["num_new_tokens"], other) == (2, whole[1])
    assert stopped["answer"] == whole[0]["answer"].partition("r")[0] + "r"


def run(launcher, *arguments):
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *launcher, str(ROOT / "examples" / "generate_dataset.py"), *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_two_processes_write_what_one_writes(parts, tiny_model_folder, tmp_path):
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in prompts()))
    options = ["--model", tiny_model_folder, "--batch-size", 2, "--shard-size", 4, "--max-new-tokens", 6]
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run(launcher, source, tmp_path / "two", *options, "--temperature", 0.9)
    assert done.returncode == 0, done.stderr[-3000:]
    model = TIDEModelForCausalLM.from_pretrained(tiny_model_folder)
    settings = {**LAYOUT, "max_new_tokens": 6, "do_sample": True, "temperature": 0.9}
    files = generate_dataset(model, parts[1], source, tmp_path / "one", **settings)
    names = [*(file.name for file in files), "fingerprint.json"]
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == names
    for file in files:
        assert (tmp_path / "two" / file.name).read_text() == file.read_text()
    assert len({row["answer"] for row in read(files)}) > 5


@pytest.mark.parametrize("kills", [1, 3])
def test_killed_it_goes_on_where_it_was(parts, tmp_path, monkeypatch, kills):
    options = {**LAYOUT, "max_new_tokens": 6, "do_sample": True}
    expected = read(generate_dataset(*parts, prompts(), tmp_path / "whole", **options))
    replace, written = os.replace, []

    def replace_or_die(source, target):
        if len(written) % 2:  # after each file
            written.append("killed")
            raise Killed
        written.append(Path(target).name)
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(folders.os, "replace", replace_or_die)
        for _ in range(kills):
            with pytest.raises(Killed):
                generate_dataset(*parts, prompts(), tmp_path / "killed", **options)
    before = set((tmp_path / "killed").glob("*.jsonl"))
    assert len(before) == kills - 1  # the first write is the fingerprint's
    times = {file: file.stat().st_mtime_ns for file in before}
    torch.manual_seed(kills)  # what the caller drew before is of no account
    files = generate_dataset(*parts, prompts(), tmp_path / "killed", **options)
    assert read(files) == expected
    assert {file: file.stat().st_mtime_ns for file in before} == times
    assert not list((tmp_path / "killed").glob("*.unfinished"))


@pytest.mark.parametrize(
    "said", [{"return_dict_in_generate": True}, {"num_return_sequences": 2, "do_sample": True}], ids=str
)
def test_one_answer_a_row_whatever_the_model_s_own_config_says(parts, tmp_path, said):
    expected = read(generate_dataset(*parts, ["a", "b c"], tmp_path / "expected", **OPTIONS))
    parts[0].generation_config.update(**said)
    assert read(generate_dataset(*parts, ["a", "b c"], tmp_path / "said", **OPTIONS)) == expected


@pytest.mark.parametrize(
    ("row", "got"),
    [
        ({"question": "Why?"}, "keys question"),
        ({"prompt": ""}, "an empty prompt"),
        (7, "int"),
        ({"messages": [{"role": "user", "content": "Why?"}, 3]}, "messages without a role"),
        ({"messages": [{"role": 1, "content": "Why?"}]}, "messages without a role"),
    ],
)
def test_a_row_that_cannot_be_answered_is_named_before_any_work(parts, tmp_path, row, got):
    with pytest.raises(DatasetError, match=rf"row 3 cannot be answered: got {got}.*Expected a mapping with a prompt"):
        generate_dataset(*parts, ["a", "b", row], tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"answer": "42"}, "row 2 has a column that the answer would take the place of: got answer.*Rename the column"),
        ({"num_new_tokens": 3}, "row 2 has a column .*: got num_new_tokens"),
        ({"when": datetime.date(2024, 1, 1)}, "row 2 cannot be written to a file: got 'Object of type date.*Turn the"),
        ({"text": "\ud800"}, "row 2 cannot be written to a file: got .*surrogates"),
    ],
    ids=str,
)
def test_a_row_that_cannot_be_written_is_named_before_any_work(parts, tmp_path, columns, message):
    with pytest.raises(DatasetError, match=message):
        generate_dataset(*parts, ["a", {"prompt": "b", **columns}], tmp_path / "out", **OPTIONS)
    assert not (tmp_path / "out").exists()


def test_files_of_others_are_left_alone(parts, tmp_path):
    names = ["mine/novel.unfinished", "mine/novel.7.unfinished", "00000.jsonl.12.unfinished"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("a tide")
    generate_dataset(*parts, ["a"], tmp_path, **OPTIONS)
    assert [(tmp_path / name).exists() for name in names] == [True, True, False]


def test_messages_need_a_template(parts, tiny_model_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = None
    with pytest.raises(DatasetError, match="got messages, and a tokenizer without chat template"):
        generate_dataset(parts[0], tokenizer, prompts()[-1:], tmp_path, **OPTIONS)


def test_messages_that_the_template_refuses(parts, tiny_model_folder, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(DatasetError, match=r"got messages that the chat template refuses \(.*roles must alternate\)"):
        generate_dataset(parts[0], tokenizer, prompts()[-1:], tmp_path, **OPTIONS)


@pytest.mark.parametrize("option", [{"num_return_sequences": 2}, {"return_dict_in_generate": True}])
def test_one_answer_a_row(parts, tmp_path, option):
    name, value = next(iter(option.items()))
    with pytest.raises(UnsupportedOptionError, match=rf"one answer a row: got {name}={value}\. Expected none of these"):
        generate_dataset(*parts, ["a"], tmp_path, **OPTIONS, **option)
    with pytest.raises(UnsupportedOptionError, match=rf"one answer a row: got {name}={value}"):
        generate_dataset(*parts, ["a"], tmp_path, generation_config=GenerationConfig(do_sample=True, **option))
    with pytest.raises(DatasetError, match="batch_size is no usable number: got 0"):
        generate_dataset(*parts, ["a"], tmp_path, batch_size=0)
