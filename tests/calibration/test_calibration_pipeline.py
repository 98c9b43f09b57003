"""Calibration as a whole: it can be shared between processes and cut short, and refuses what cannot work."""

import json
import os
import subprocess
import sys

import pytest
import torch
from calibrations import OPTIONS, PackedHead, assert_same, texts
from repository import ROOT
from torch import nn
from transformers import AutoTokenizer

from tide_hf import TIDERouters, calibrate
from tide_hf.calibration import sources
from tide_hf.calibration.documents import split_documents
from tide_hf.calibration.work_folder import Processes
from tide_hf.common.errors import CalibrationError, ConfigurationError

pytestmark = pytest.mark.usefixtures("one_thread")


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
    path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
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
    for document in split_documents(documents, 0)["fit"]:
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
