"""`calibrate` as a whole, on tiny models: what one call gives, in one process or several, and what it refuses."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from calibrations import OPTIONS, PackedHead, assert_same, small, texts
from families import tiny_model
from repository import in_two_processes
from torch import nn

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.calibration import work_folder
from tide_hf.calibration.documents import read_documents, split_documents
from tide_hf.calibration.states import StateReader
from tide_hf.common.errors import CalibrationError, ConfigurationError, UnsupportedModelError
from tide_hf.routers.config import NEVER_EXIT
from tide_hf.speculation.ranks import Ranks


@pytest.fixture(scope="module")
def made(parts):
    """Routers from text that the model wrote."""
    before = copy.deepcopy(parts[0].state_dict())
    routers = small(*parts, notes={"command": "python make.py", "num_documents": -1})
    assert all(torch.equal(parts[0].state_dict()[name], value) for name, value in before.items())
    return routers


def test_one_call_makes_routers_that_work(parts, made, tmp_path):
    model, tokenizer = parts
    assert made.exit_layers == [1, 2]
    assert made.config.calibration["cut_short"] == []
    record = json.loads(json.dumps(made.config.calibration))
    assert record["command"] == "python make.py"
    assert sorted(record["exit_layers"]) == ["1", "2"]
    for row in record["exit_layers"].values():
        assert 0 <= row["agreement"] <= 1
        assert set(row) >= {"agreement", "router_auc", "expected_calibration_error", "exit_rate", "coverage", "cost"}
    assert sum(part["documents"] for part in record["splits"].values()) == record["num_documents"] == 20
    # far too few documents for a tolerance of 2%
    assert made.config.exit_threshold == record["threshold"]["chosen"] == NEVER_EXIT
    assert not any(module._forward_hooks for module in model.modules())
    made.save_pretrained(tmp_path)
    attached = TIDEModelForCausalLM.attach(model, tmp_path)
    try:
        inputs = tokenizer("the river", return_tensors="pt")
        for mode in ("self_speculative", "early_exit", "post_hoc"):
            attached.generate(**inputs, max_new_tokens=6, tide_mode=mode, do_sample=False)
    finally:
        TIDEModelForCausalLM.detach(model)


def test_the_routers_are_the_same_if_others_are_attached(parts, made):
    model, tokenizer = parts
    TIDEModelForCausalLM.attach(model, copy.deepcopy(made), mode="early_exit", exit_threshold=0.0)
    try:
        again = small(model, tokenizer)
        assert isinstance(model, TIDEModelForCausalLM)
    finally:
        TIDEModelForCausalLM.detach(model)
    assert all(torch.equal(a, b) for a, b in zip(made.parameters(), again.parameters(), strict=True))


def test_labels_change_the_routers_but_not_the_heads_or_what_is_certified(parts):
    options = {"samples": 12, "max_length": 10, "exit_layers": [2]}
    made = [small(*parts, texts(12), labels=labels, **options) for labels in ("agreement", "cosine", "kl")]
    assert [routers.config.calibration["labels"] for routers in made] == ["agreement", "cosine", "kl"]
    heads = [routers[2].head.translator.weight for routers in made]
    rows = [routers.config.calibration["exit_layers"]["2"] for routers in made]
    for other in (1, 2):
        assert torch.equal(heads[0], heads[other])
        assert rows[0]["agreement"] == rows[other]["agreement"]
        assert rows[0]["reliability"] != rows[other]["reliability"]


def test_time_runs_out_but_certification_does_not(parts):
    options = {"samples": 48, "confidence": 0.5}
    record = small(*parts, max_minutes=1e-4, **options).config.calibration
    cut = ["6 of 8 batches of text", "6 of 16 documents", "distillation at layer 1", "distillation at layer 2"]
    assert record["cut_short"] == cut
    assert record["max_minutes"] == 1e-4
    assert {row["method"] for row in record["heads"].values()} == {"ridge"}
    assert len(record["threshold"]["table"]) > 50


def test_useful_layers_are_chosen_if_none_are_named_and_training_mode_stays(tiny_llama, tiny_tokenizer):
    model = tiny_llama(num_hidden_layers=13).train()
    model.model.layers[0].eval()
    routers = small(model, tiny_tokenizer, exit_layers=None)
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].mlp.training
    record = routers.config.calibration
    kept, dropped = routers.exit_layers, sorted(map(int, record["dropped_exit_layers"]))
    assert sorted(kept + dropped) == [4, 8, 12]
    assert kept == sorted(map(int, record["exit_layers"])) == sorted(map(int, routers.exits))
    assert dropped  # of three heads on noise not all can be of use


def test_the_draft_vocabulary_holds_the_most_frequent_tokens(parts, made):
    model, tokenizer = parts
    dataset = texts(30)
    routers = small(model, tokenizer, dataset, samples=30, max_length=40, exit_layers=[1], draft_vocab_size=20)
    counts = torch.zeros(260)
    documents, _ = read_documents(dataset, tokenizer, samples=30, max_length=40, seed=0)
    for document in split_documents(documents, 0)["fit"]:
        with torch.no_grad():
            top = model(torch.tensor([document.tokens])).logits[0].argmax(-1)
        counts += torch.bincount(torch.tensor(document.tokens), minlength=260)
        counts += torch.bincount(top[document.first :], minlength=260)
    vocab = routers.draft_vocab.tolist()
    assert len(vocab) == routers.config.draft_vocab_size == 20
    others = [token for token in range(260) if token not in vocab]
    assert counts[vocab].min() >= counts[others].max()
    assert made.draft_vocab.tolist() == list(range(260))  # the model has fewer than the default size


def test_a_tokenizer_without_special_tokens_and_template_and_no_draft_vocabulary(parts):
    tokenizer = copy.deepcopy(parts[1])
    tokenizer.pad_token = tokenizer.eos_token = tokenizer.chat_template = None
    routers = small(parts[0], tokenizer, exit_layers=[1], draft_vocab_size=None)
    assert routers.config.calibration["num_documents"] > 0
    assert routers.draft_vocab is routers.config.draft_vocab_size is None


# Several processes

SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from tide_hf import calibrate
from tide_hf.calibration.work_folder import WorkFolder

folder, output, options = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
torch.set_num_threads(1)
written, write = [], WorkFolder.write
WorkFolder.write = lambda self, name, *args: written.append(name) or write(self, name, *args)
model = AutoModelForCausalLM.from_pretrained(folder)
routers = calibrate(model, AutoTokenizer.from_pretrained(folder), output_dir=output, **options)
rank = torch.distributed.get_rank()
torch.save([written, routers.state_dict(), routers.config.calibration], f"{output}/rank{rank}.pt")
torch.distributed.destroy_process_group()
"""


def test_two_processes_make_the_routers_of_one(made, tiny_model_folder, tmp_path):
    (tmp_path / "share.py").write_text(SCRIPT)
    output = tmp_path / "routers"
    options = json.dumps(OPTIONS | {"notes": {"command": "python make.py"}})
    in_two_processes("share.py", tiny_model_folder, output, options, cwd=tmp_path)
    ranks = [torch.load(output / f"rank{rank}.pt", weights_only=False) for rank in (0, 1)]
    assert not set(ranks[0][0]) & set(ranks[1][0])
    for written, _, _ in ranks:
        assert {"documents", "states", "heads", "routers"} <= {name.partition("/")[0] for name in written}
    for _, state, record in ranks:
        assert record["num_processes"] == 2
        for name, value in made.state_dict().items():
            torch.testing.assert_close(state[name], value, atol=1e-4, rtol=0)
    assert_same(TIDERouters.from_pretrained(output), made)


# What is refused before any work


@pytest.fixture
def no_work(monkeypatch):
    """Reading states is where the work begins."""
    monkeypatch.setattr(StateReader, "read", lambda *_: pytest.fail("states were read"))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"labels": "euclid"}, r"unknown labels: got 'euclid'\. Expected one of 'agreement', 'cosine', 'kl'"),
        ({"exit_strategy": "magic"}, r"unknown exit_strategy.*'identity', 'linear', 'eagle3'"),
        ({"tolerance": 0}, r"tolerance makes no sense: got .*Expected a number between 0 and 1"),
        ({"max_minutes": 0}, "max_minutes makes no sense: got .*Expected a"),
        ({"batch_size": 2.5}, "batch_size makes no sense: got .*Expected a"),
        ({"max_length": -1}, "max_length makes no sense: got .*Expected a"),
        ({"exit_layers": [9]}, "exit layer out of range"),
        ({"exit_layers": 2}, "exit_layers makes no sense: got 2. Expected a list"),
        ({"draft_vocab_size": "all"}, "draft_vocab_size makes no sense: got 'all'"),
        ({"draft_intermediate_size": 0}, "draft_intermediate_size makes no sense: got 0"),
        ({"draft_intermediate_size": 8, "exit_strategy": "linear"}, "got 8. Expected None without a draft head"),
        ({"translator_rank": 33}, "translator_rank makes no sense: got 33. Expected at most 32"),
        ({"seed": 2**70}, "seed makes no sense: got a number beyond 64 bits"),
        ({"notes": {"x": object()}}, "notes makes no sense: got Object of type object is not JSON serializable"),
        ({"output_dir": __file__}, r"output_dir makes no sense: got .*test_calibration.*Expected a folder"),
    ],
)
def test_invalid_arguments(parts, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        small(*parts, texts(9), **changed)


def test_too_few_documents(parts):
    with pytest.raises(CalibrationError, match=r"too few documents .*: got 2\. Expected at least 3"):
        small(*parts, ["a river runs", "x", "to the sea"])


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("dataset", [None, [f"a river that runs and runs to the sea {i}" for i in range(9)]])
def test_more_tokens_than_the_model_has_positions(tiny_tokenizer, dataset):
    model = tiny_model("gpt2", vocab_size=260, max_position_embeddings=24)
    with pytest.raises(ConfigurationError, match=r"than the model has positions for: got up to \d+ .*at most 24"):
        small(model, tiny_tokenizer, dataset, max_length=64)


@pytest.mark.usefixtures("no_work")
def test_processes_that_share_a_tensor_parallel_model(parts, monkeypatch):
    monkeypatch.setattr(work_folder, "ranks_of", lambda _: Ranks(group=SimpleNamespace()))
    with pytest.raises(UnsupportedModelError, match=r"got a model that was loaded with tp_plan"):
        small(*parts, texts(9))


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("template", ["{{ raise_exception('a system message comes first') }}", {"tool_use": "x"}])
def test_a_template_that_refuses_a_message_that_stands_alone(parts, template):
    model, tokenizer = parts
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(CalibrationError, match="refuses a chat of a single user message: got '"):
        small(model, tokenizer)


def test_an_8_bit_head_that_dequantises_itself_gets_heads_in_closed_form_and_no_draft_head(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.lm_head = PackedHead(model.lm_head.weight.detach())
    record = small(model, tiny_tokenizer).config.calibration
    assert {row["method"] for row in record["heads"].values()} == {"ridge"}
    for one in (model, cpu_offload(tiny_llama(), torch.device("cpu"))):
        with pytest.raises(UnsupportedModelError, match=r"cannot be trained here: .*'linear'"):
            small(one, tiny_tokenizer, texts(20), exit_strategy="eagle3")


@pytest.mark.usefixtures("no_work")
def test_8_bit_weights_that_nothing_dequantises(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().to(torch.int8), requires_grad=False)
    with pytest.raises(CalibrationError, match=r"precision: got Linear with torch.int8 weights .*Expected float"):
        small(model, tiny_tokenizer)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.data = parameter.data.to(torch.uint8)
    with pytest.raises(CalibrationError, match=r"got nothing but torch.uint8 weights"):
        small(model, tiny_tokenizer)
