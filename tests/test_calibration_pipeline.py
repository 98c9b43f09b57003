"""Calibration as a whole: it can be killed, shared between processes, cut short, and refuses what cannot work."""

import errno
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoTokenizer

from tide_hf import TIDERouters, calibrate, folders, model_card
from tide_hf.calibration import data, hidden_states, sources, store, work_folder
from tide_hf.calibration.processes import Processes
from tide_hf.errors import CalibrationError, ConfigurationError
from tide_hf.structure import find_structure
from tide_hf.unembed import Unembed

OPTIONS = {"samples": 20, "max_length": 8, "exit_layers": [1, 2], "batch_size": 8, "progress": False}
WORDS = [
    "the",
    "river",
    "runs",
    "to",
    "a",
    "wide",
    "cold",
    "sea",
    "and",
    "then",
    "it",
    "comes",
    "back",
    "as",
    "rain",
    "in",
    "spring",
]
pytestmark = pytest.mark.usefixtures("one_thread")

TIMES = ("seconds", "resumed_units", "num_processes")


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch it."""


@pytest.fixture(scope="module")
def parts(tiny_llama, tiny_tokenizer):
    return tiny_llama(), tiny_tokenizer


def texts(count):
    chance = random.Random(0)
    return [" ".join(chance.choices(WORDS, k=6)) + f" {number}" for number in range(count)]


def without_times(routers):
    record = {name: value for name, value in routers.config.calibration.items() if name not in TIMES}
    return json.loads(json.dumps(record)), routers.config.exit_layers, routers.config.exit_threshold


def assert_same(first, second):
    assert without_times(first) == without_times(second)
    ours, theirs = first.state_dict(), second.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def kill_at_write(monkeypatch, number):
    """Kill the process just before its `number`-th unit would be in place; return what counts the writes."""
    written = []
    replace = os.replace

    def replace_or_die(source, target):
        if Path(target).parent.parent.name == work_folder.NAME:
            if len(written) == number:
                raise Killed
            written.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", replace_or_die)
    return written


@pytest.mark.parametrize("exit_layers", [[1, 2], None])
def test_killed_at_every_unit_it_ends_with_the_same_routers(parts, tmp_path, monkeypatch, exit_layers):
    """Each call gets one unit further than the one before."""
    options = OPTIONS | {"exit_layers": exit_layers}
    expected = calibrate(*parts, output_dir=tmp_path / "whole", **options)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "plots",
    ]
    folder, kills = tmp_path / "killed", 0
    for call in range(100):
        torch.manual_seed(call)  # what the caller drew before is of no account
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, 1)
            try:
                routers = calibrate(*parts, output_dir=folder, **options)
                break
            except Killed:
                kills += 1
                assert len(written) == 1
    assert kills == (12 if exit_layers else 11)  # a unit for each batch, shard, head, router, and the list of batches
    assert routers.config.calibration["resumed_units"] >= kills - 1
    assert_same(routers, expected)
    assert_same(TIDERouters.from_pretrained(folder), expected)
    assert not (folder / work_folder.NAME).exists()


def test_killed_while_saving(parts, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_card, "write_model_card", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    written = kill_at_write(monkeypatch, 0)
    assert_same(calibrate(*parts, output_dir=tmp_path, **OPTIONS), calibrate(*parts, **OPTIONS | {}))
    assert not written


SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tide_hf import calibrate
from tide_hf.calibration import work_folder

folder, output, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
written = []
write = work_folder.WorkFolder.write
def noted(self, name, *args):
    written.append(name)
    write(self, name, *args)
work_folder.WorkFolder.write = noted
model = AutoModelForCausalLM.from_pretrained(folder)
routers = calibrate(model, AutoTokenizer.from_pretrained(folder), output_dir=output, **options)
rank = torch.distributed.get_rank()
torch.save([written, routers.state_dict(), routers.config.calibration], f"{output}/rank{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_what_few_processes_can_do_gets_the_threads_of_the_others(monkeypatch):
    four = Processes(0, 4)
    for units, threads in ((1, 4), (2, 2), (3, 1), (8, 1), (0, 4)):
        with four.threads_for(units):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the others are on another machine
    with four.threads_for(1):
        assert torch.get_num_threads() == 2


TORCHRUN = ["torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
# With --cpu in place of --multi_gpu accelerate starts one process, unless MPI starts more.
ACCELERATE = ["accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--main_process_port", "0"]


@pytest.mark.parametrize("launcher", [TORCHRUN, ACCELERATE], ids=["torchrun", "accelerate"])
def test_two_processes_make_the_routers_of_one(parts, tiny_model_folder, tmp_path, launcher):
    (tmp_path / "share.py").write_text(SCRIPT)
    output = tmp_path / "routers"
    command = [sys.executable, "-m", *launcher, "share.py", str(tiny_model_folder), str(output), json.dumps(OPTIONS)]
    path = os.pathsep.join([str(Path(__file__).parent.parent), *filter(None, sys.path)])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    alone = calibrate(*parts, **OPTIONS)
    ranks = [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    first, second = set(ranks[0][0]), set(ranks[1][0])
    assert not first & second
    for stage in ("documents/0", "states/", "heads/", "routers/", "decisions/"):
        assert any(name.startswith(stage) for name in first), stage
        assert stage == "decisions/" or any(name.startswith(stage) for name in second), stage
    for _, state, record in ranks:
        assert record["num_processes"] == 2
        for name, value in alone.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)
    assert_same(TIDERouters.from_pretrained(output), alone)


def killed_in(parts, folder, monkeypatch, number=3, **options):
    with monkeypatch.context() as patch:
        kill_at_write(patch, number)
        with pytest.raises(Killed):
            calibrate(*parts, output_dir=folder, **OPTIONS | options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed=0 \(now 1\)"),
        ({"max_length": 9}, r"max_length=8 \(now 9\)"),
        ({"dataset": texts(9)}, r"data_hash="),
        ({"exit_layers": [1, 3]}, r"exit_layers=\[1, 2\] \(now \[1, 3\]\)"),
    ],
)
def test_the_unfinished_work_of_another_calibration(parts, tmp_path, monkeypatch, changed, message):
    killed_in(parts, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match=message) as caught:
        calibrate(*parts, output_dir=tmp_path, **OPTIONS | changed)
    assert f"{tmp_path / work_folder.NAME} holds the unfinished work of another calibration" in str(caught.value)
    assert f"Delete {tmp_path / work_folder.NAME}" in str(caught.value)


def test_the_unfinished_work_on_another_model(parts, tiny_llama, tmp_path, monkeypatch):
    killed_in(parts, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match=r"unembed_hash='\w+' \(now '\w+'\)"):
        calibrate(tiny_llama(seed=5), parts[1], output_dir=tmp_path, **OPTIONS)


def test_a_damaged_unit_is_named(parts, tmp_path, monkeypatch):
    killed_in(parts, tmp_path, monkeypatch, number=8)
    shard = next((tmp_path / work_folder.NAME / "states").glob("fit-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=rf"{shard.name} cannot be read.*Delete that file"):
        calibrate(*parts, output_dir=tmp_path, **OPTIONS)


def test_a_disk_too_small_is_refused_before_states_are_read(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CalibrationError, match=r"do not fit on the disk: got 1000 bytes free .*Expected \d+ bytes"):
        calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("**/states/*"))


def test_a_disk_that_fills_up(parts, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", full)
        with pytest.raises(CalibrationError, match=r"the disk is full: .*states.* could not be written: got \d+ bytes"):
            calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob(f"**/*{folders.UNFINISHED}"))
    routers = calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert routers.config.calibration["resumed_units"] > 0
    assert_same(routers, calibrate(*parts, **OPTIONS))


def test_time_runs_out_but_certification_does_not(parts):
    options = OPTIONS | {"samples": 48, "confidence": 0.5}
    record = calibrate(*parts, max_minutes=1e-4, **options).config.calibration
    assert record["cut_short"] == ["6 of 8 batches of text", "distillation at layer 1", "distillation at layer 2"]
    assert record["max_minutes"] == 1e-4
    assert {row["method"] for row in record["heads"].values()} == {"ridge"}
    assert len(record["threshold"]["table"]) > 50
    assert calibrate(*parts, max_minutes=60, **options).config.calibration["cut_short"] == []


@pytest.mark.parametrize("option", [{"max_minutes": 0}, {"batch_size": 0}, {"samples": 2.5}, {"max_length": -1}])
def test_numbers_that_make_no_sense(parts, option):
    with pytest.raises(ConfigurationError, match=rf"{next(iter(option))} makes no sense: got .*Expected a"):
        calibrate(*parts, **OPTIONS | option)


def test_layers_are_chosen_where_none_are_named(tiny_llama, tiny_tokenizer):
    model = tiny_llama(num_hidden_layers=13)
    routers = calibrate(model, tiny_tokenizer, **OPTIONS | {"exit_layers": None})
    record = routers.config.calibration
    kept, dropped = routers.exit_layers, sorted(map(int, record["dropped_exit_layers"]))
    assert sorted(kept + dropped) == [4, 8, 12]
    assert kept == sorted(map(int, record["exit_layers"]))
    assert dropped  # of three heads on noise not all can be of use
    for row in record["dropped_exit_layers"].values():
        assert set(row) <= set(record["exit_layers"][str(kept[0])])
    assert sorted(map(int, routers.exits)) == kept


def test_the_draft_vocabulary_is_that_of_the_text(parts):
    model, tokenizer = parts
    dataset = texts(30)
    options = OPTIONS | {"samples": 30, "max_length": 40}
    routers = calibrate(model, tokenizer, dataset, **options, draft_vocab_size=20)
    counts = torch.zeros(260)
    documents, _ = sources.read_documents(dataset, tokenizer, samples=30, max_length=40, seed=0)
    for document in data.split_documents(documents, 0).fit:
        with torch.no_grad():
            top = model(torch.tensor([document.tokens])).logits[0].argmax(-1)
        counts += torch.bincount(torch.tensor(document.tokens), minlength=260)
        counts += torch.bincount(top[document.first :], minlength=260)
    vocab = routers.draft_vocab.tolist()
    assert len(vocab) == routers.config.draft_vocab_size == 20
    assert vocab == sorted(set(vocab))
    others = [token for token in range(260) if token not in vocab]
    assert counts[vocab].min() >= counts[others].max()
    assert calibrate(model, tokenizer, dataset, **options).draft_vocab.tolist() == list(range(260))  # all there are
    without = calibrate(model, tokenizer, dataset, **options, draft_vocab_size=None)
    assert without.draft_vocab is None
    assert without.config.draft_vocab_size is None


class PackedHead(nn.Module):
    """A head in 8 bits that unpacks itself."""

    def __init__(self, weight):
        super().__init__()
        self.scale = float(weight.abs().max()) / 127
        self.weight = nn.Parameter((weight / self.scale).round().to(torch.int8), requires_grad=False)

    def forward(self, states):
        return states @ (self.weight.to(states.dtype) * self.scale).T


def test_an_8_bit_head_that_unpacks_itself_gets_heads_in_closed_form(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.lm_head = PackedHead(model.lm_head.weight.detach())
    record = calibrate(model, tiny_tokenizer, **OPTIONS).config.calibration
    assert {row["method"] for row in record["heads"].values()} == {"ridge"}


def test_8_bit_weights_that_nothing_unpacks(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(
        CalibrationError, match=r"in this precision: got Linear with torch.int8 weights .*Expected float"
    ):
        calibrate(model, tiny_tokenizer, **OPTIONS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.uint8)
    with pytest.raises(CalibrationError, match=r"got nothing but torch.uint8 weights"):
        calibrate(model, tiny_tokenizer, **OPTIONS)


def test_a_tokenizer_without_pad_token(parts, tiny_model_folder):
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.pad_token = tokenizer.eos_token = None
    assert calibrate(parts[0], tokenizer, **OPTIONS).config.calibration["num_documents"] > 0


def made_store(model, folder, dtype=torch.float32):
    documents = [data.Document([3 + i, 4, 5, 6 + i], first=2) for i in range(20)]
    work = work_folder.WorkFolder(folder)
    states = store.StateStore(work, data.split_documents(documents, 0), 4, [1, 3], dtype)
    structure = find_structure(model)
    reader = hidden_states.StateReader(model, structure, Unembed(model, structure), [1, 3])
    expected = states.missing_bytes(structure.hidden_size)
    for shard in states.shards():
        states.write(shard, reader)
    assert states.missing_bytes(structure.hidden_size) == 0
    actual = sum(file.stat().st_size for file in folder.glob("states/*"))
    assert 0.8 * actual < expected + 1000 * len(states.shards()) < 1.5 * actual
    return states


def test_a_shard_keeps_whole_documents(parts, tmp_path):
    model, _ = parts
    states = made_store(model, tmp_path)
    documents = states.splits.fit
    for batch in states.batches("fit"):
        assert sorted(batch.hidden_states) == [1, 3]
        assert batch.final_states.dtype == torch.float32
        for document in batch.document_ids.unique().tolist():
            whole = batch.select(batch.document_ids == document)
            assert whole.tokens.tolist() == documents[document].tokens
            assert whole.counted.tolist() == [False, False, True, True]
            with torch.no_grad():
                output = model(whole.tokens[None], output_hidden_states=True)
            torch.testing.assert_close(whole.hidden_states[3], output.hidden_states[3][0], atol=0.05, rtol=0.01)
            assert whole.top_tokens.tolist() == output.logits[0].argmax(-1).tolist()
    (unrounded,) = {states.read(shard).final_states.dtype for shard in states.shards("certify")}
    assert unrounded == torch.float32
    assert states.read(states.shards("fit")[0]).final_states.dtype == torch.bfloat16


def test_samples_are_bounded_and_seeded(parts, tmp_path):
    states = made_store(parts[0], tmp_path)
    assert states.num_counted("fit") == 20
    kept = [states.sample("fit", [3], capacity=9, seed=seed) for seed in (0, 0, 1)]
    assert [len(part) for part in kept] == [9, 9, 9]
    assert all(bool(part.counted.all()) for part in kept)
    assert torch.equal(kept[0].tokens, kept[1].tokens)
    assert not torch.equal(kept[0].document_ids, kept[2].document_ids)
    assert len(states.sample("fit", [3], capacity=100, seed=0)) == 20


def test_shards_are_read_one_at_a_time(parts, tmp_path):
    states = made_store(parts[0], tmp_path)
    batches = states.batches("fit")
    next(batches)
    for file in tmp_path.glob("states/fit-*"):
        file.unlink()
    with pytest.raises(CalibrationError, match="cannot be read"):
        next(batches)


def test_long_documents_share_no_batch():
    documents = [data.Document([1] * length, first=0) for length in (3, 9000, 4, 9000, 5)]
    assert data.plan_batches(documents, 8) == [[0, 2, 4], [1], [3]]
    assert data.plan_batches(documents, 2)[0] == [0, 2]
