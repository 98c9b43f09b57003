"""`calibrate(start_from=...)`: a block head that is trained further, on other text."""

from unittest.mock import Mock

import pytest
import torch

from tide_hf import calibrate
from tide_hf.calibration.block_head import FURTHER, BlockTrainer, Plan
from tide_hf.common.errors import BaseModelMismatchError, CalibrationError, ConfigurationError, RoutersNotFoundError
from tide_hf.routers.routers import TIDERouters


@pytest.fixture(scope="module")
def trained(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """A model, texts, options, and routers with a block head that were made from half of the texts; their folder."""
    model, folder = tiny_llama(), tmp_path_factory.mktemp("trained")
    texts = [f"text number {number} of many, and what follows is {number * 7}" for number in range(120)]
    options = {"samples": 60, "max_length": 24, "exit_layers": [2], "progress": False, "draft_vocab_size": 128}
    options["exit_strategy"] = "block"
    calibrate(model, tiny_tokenizer, texts[:60], output_dir=folder, **options)
    return model, texts, options, folder


@pytest.mark.parametrize("as_folder", [True, False])
def test_a_block_is_trained_further(trained, tiny_tokenizer, as_folder, monkeypatch):
    model, texts, options, folder = trained
    before = TIDERouters.from_pretrained(folder)
    kept = {name: value.clone() for name, value in before.state_dict().items()}
    monkeypatch.setattr(BlockTrainer, "start", lambda *_: pytest.fail("a block made anew"))
    start = folder if as_folder else before
    routers = calibrate(model, tiny_tokenizer, texts[60:], start_from=start, **options)
    figures = routers.config.calibration["block"]
    assert figures["epochs"] == FURTHER.epochs
    assert figures["documents_before"] == 60
    assert figures["tune_agreement"] >= figures["tune_agreement_before"]
    assert not torch.equal(routers.block.head.translator.weight, kept["block.head.translator.weight"])
    assert {name: value.tolist() for name, value in before.state_dict().items()} == {
        name: value.tolist() for name, value in kept.items()
    }
    again = calibrate(model, tiny_tokenizer, texts[60:], start_from=routers, **options)
    assert again.config.calibration["block"]["documents_before"] == 120


def test_a_block_that_further_training_makes_worse_stays_what_it_was(trained, tiny_tokenizer, monkeypatch):
    model, texts, options, folder = trained
    monkeypatch.setattr("tide_hf.calibration.block_head.FURTHER", Plan(epochs=1, rate=1e4))
    routers = calibrate(model, tiny_tokenizer, texts[60:], start_from=folder, **options)
    figures = routers.config.calibration["block"]
    assert figures["tune_agreement"] < figures["tune_agreement_before"]
    before = TIDERouters.from_pretrained(folder).block.head.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in routers.block.head.state_dict().items())


def test_unfinished_work_from_another_start_is_not_gone_on_with(trained, tiny_tokenizer, tmp_path, monkeypatch):
    model, texts, options, folder = trained
    monkeypatch.setattr(BlockTrainer, "train", Mock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        calibrate(model, tiny_tokenizer, texts[60:], start_from=folder, output_dir=tmp_path, **options)
    other = TIDERouters.from_pretrained(folder)
    other.block.head.translator.weight.data += 1
    for start in (None, other):
        with pytest.raises(CalibrationError, match="start_from"):
            calibrate(model, tiny_tokenizer, texts[60:], start_from=start, output_dir=tmp_path, **options)


def test_what_a_block_cannot_start_from_is_refused(trained, tiny_tokenizer, tiny_llama, tmp_path):
    model, texts, options, folder = trained
    linear = TIDERouters.for_model(model, exit_layers=[2])
    with pytest.raises(ConfigurationError, match="routers without a block head, and exit_strategy='block'"):
        calibrate(model, tiny_tokenizer, texts, start_from=linear, **options)
    with pytest.raises(ConfigurationError, match="routers with a block head, and exit_strategy='linear'"):
        calibrate(model, tiny_tokenizer, texts, start_from=folder, **{**options, "exit_strategy": "linear"})
    with pytest.raises(BaseModelMismatchError):
        calibrate(tiny_llama(hidden_size=64), tiny_tokenizer, texts, start_from=folder, **options)
    with pytest.raises(RoutersNotFoundError):
        calibrate(model, tiny_tokenizer, texts, start_from=tmp_path, **options)
