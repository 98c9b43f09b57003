"""What makes no sense for a calibration, or for its model, is said before any work is done."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload
from calibrations import OPTIONS, PackedHead, texts
from families import tiny_model

from tide_hf import calibrate
from tide_hf.calibration import work_folder
from tide_hf.calibration.states import StateReader
from tide_hf.common.errors import CalibrationError, ConfigurationError, UnsupportedModelError
from tide_hf.speculation.ranks import Ranks


@pytest.fixture(autouse=True)
def no_work(monkeypatch):
    """Reading states is where the work begins."""

    def read(*_args):
        pytest.fail("states were read")

    monkeypatch.setattr(StateReader, "read", read)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"exit_layers": 2}, "exit_layers makes no sense: got 2. Expected a list"),
        ({"exit_layers": "12"}, "exit_layers makes no sense: got '12'"),
        ({"draft_vocab_size": "all"}, "draft_vocab_size makes no sense: got 'all'"),
        ({"translator_rank": 0}, "translator_rank makes no sense: got 0"),
        ({"translator_rank": 33}, "translator_rank makes no sense: got 33. Expected at most 32"),
        ({"seed": None}, "seed makes no sense: got None"),
        ({"seed": 2**70}, "seed makes no sense: got a number beyond 64 bits"),
        ({"notes": {"x": object()}}, "notes makes no sense: got Object of type object is not JSON serializable"),
    ],
)
def test_arguments(parts, changed, message):
    with pytest.raises(ConfigurationError, match=message):
        calibrate(*parts, texts(9), **OPTIONS | changed)


def test_an_output_dir_that_is_a_file(parts, tmp_path):
    file = tmp_path / "routers"
    file.write_text("mine")
    with pytest.raises(ConfigurationError, match=r"output_dir makes no sense: got .*routers.*Expected a folder"):
        calibrate(*parts, texts(9), output_dir=file, **OPTIONS)
    assert file.read_text() == "mine"


@pytest.mark.parametrize("dataset", [None, [f"a river that runs and runs to the sea {i}" for i in range(9)]])
def test_more_tokens_than_the_model_has_positions(tiny_tokenizer, dataset):
    model = tiny_model("gpt2", vocab_size=260, max_position_embeddings=24)
    with pytest.raises(ConfigurationError, match=r"than the model has positions for: got up to \d+ .*at most 24"):
        calibrate(model, tiny_tokenizer, dataset, **OPTIONS | {"max_length": 64})


@pytest.mark.parametrize("change", [lambda model: cpu_offload(model, torch.device("cpu")), None])
def test_a_block_head_needs_a_head_to_learn_from(tiny_llama, tiny_tokenizer, change):
    model = tiny_llama()
    if change is None:
        model.lm_head = PackedHead(model.lm_head.weight.detach())
    else:
        change(model)
    with pytest.raises(UnsupportedModelError, match=r"a block head cannot be trained here: .*'linear'"):
        calibrate(model, tiny_tokenizer, texts(20), **OPTIONS, exit_strategy="block")


def test_processes_that_share_a_model_share_no_work(parts, monkeypatch):
    monkeypatch.setattr(work_folder, "ranks_of", lambda _: Ranks(group=SimpleNamespace()))
    with pytest.raises(UnsupportedModelError, match=r"got a model that was loaded with tp_plan"):
        calibrate(*parts, texts(9), **OPTIONS)


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('a system message comes first') }}", "{% if %}", {"tool_use": "x", "rag": "y"}]
)
def test_a_template_that_takes_no_message_alone(parts, template):
    model, tokenizer = parts
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(CalibrationError, match="refuses a user's message that stands alone: got '"):
        calibrate(model, tokenizer, **OPTIONS)
