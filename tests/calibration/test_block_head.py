"""Training of the block head: what it learns from, that it learns, and `calibrate(start_from=...)`."""

from unittest.mock import Mock

import pytest
import torch
from block_heads import attach_drafting, document_batches, routers_for

from tide_hf import TIDEModelForCausalLM, TIDERouters, calibrate
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.block_head import (
    FRESH,
    FURTHER,
    BlockTrainer,
    _after_right_tokens,
)
from tide_hf.calibration.documents import Document
from tide_hf.calibration.heads import distillation_loss
from tide_hf.calibration.training import mixed_precision
from tide_hf.common.errors import BaseModelMismatchError, CalibrationError, ConfigurationError, RoutersNotFoundError

TEXTS = [f"text number {number} of many, and what follows is {number * 7}" for number in range(60)]
OPTIONS = {"samples": 30, "max_length": 24, "exit_layers": [2], "progress": False, "draft_vocab_size": 128}
OPTIONS |= {"exit_strategy": "block"}


@pytest.fixture(scope="module")
def trained(parts, tmp_path_factory):
    """The folder of routers with a block head, from half of the texts."""
    folder = tmp_path_factory.mktemp("trained")
    calibrate(*parts, TEXTS[:30], output_dir=folder, **OPTIONS)
    return folder


# The trainer


@pytest.fixture(scope="module")
def batches(parts):
    torch.manual_seed(0)
    documents = [Document(torch.randint(3, 250, (16,)).tolist(), first=1) for _ in range(16)]
    return list(document_batches(parts[0], 1, documents, 8))


def started_trainer(model, routers, batches):
    unembed = Unembed(model, find_structure(model))
    trainer = BlockTrainer(model, unembed, routers.block, 1, torch.arange(260))
    trainer.start(batches)
    return trainer


@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_training_lowers_the_loss(parts, batches, monkeypatch, in_bfloat16):
    monkeypatch.setattr("tide_hf.calibration.training.gains_by_bfloat16", lambda _: in_bfloat16)
    model, _ = parts
    routers = routers_for(model, 1)
    trainer = started_trainer(model, routers, batches)
    assert not any("forward" in module.__dict__ for module in model.modules())
    losses = [loss for _, loss in trainer.train(lambda: batches, len(batches), epochs=30)]
    assert len(losses) == 30
    assert losses[-1] < 0.9 * losses[0]
    assert not any(parameter.requires_grad for parameter in routers.block.head.parameters())
    assert {parameter.dtype for parameter in routers.block.head.parameters()} == {torch.float32}
    with mixed_precision(torch.device("cpu")):
        states = trainer.states(batches[0])
    assert (states.dtype is torch.bfloat16) == in_bfloat16


def test_second_draft_tokens_are_learnt_after_right_first_ones():
    counted = torch.tensor([[False, True, True, True], [True, True, False, True]])
    teacher = torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    student = torch.eye(3)[[0, 0, 2, 0, 2, 2]]  # wrong at its second and its fifth
    assert _after_right_tokens(counted, student, teacher).tolist() == [
        [False, False, True, False],
        [False, True, False, False],
    ]


def test_training_on_its_own_predictions_makes_second_draft_tokens_better(parts, batches, monkeypatch):
    model, _ = parts
    monkeypatch.setattr("tide_hf.calibration.training.gains_by_bfloat16", lambda _: False)
    # a random model is seldom right
    monkeypatch.setattr("tide_hf.calibration.block_head._after_right_tokens", lambda counted, *_: counted)

    def second_loss(share):
        monkeypatch.setattr("tide_hf.calibration.block_head.SECOND_SHARE", share)
        torch.manual_seed(0)
        trainer = started_trainer(model, routers_for(model, 1), batches)
        list(trainer.train(lambda: batches, len(batches), epochs=30))
        loss = 0.0
        with torch.no_grad():
            for batch in batches:
                second = trainer.states(batch, trainer.states(batch))
                student, teacher = (trainer.log_probs(states)[batch.counted] for states in (second, batch.final))
                loss += float(distillation_loss(student, teacher, teacher.argmax(dim=-1)))
        return loss

    assert second_loss(4.0) < 0.97 * second_loss(0.0)


# In a calibration


def test_calibrate_makes_a_block_head_that_drafts(tiny_llama, tiny_tokenizer, trained):
    model, routers = tiny_llama(), TIDERouters.from_pretrained(trained)
    figures = routers.config.calibration["block"]
    assert routers.config.block_layer == figures["layer"] == 1
    assert figures["epochs"] == FRESH[0]
    assert not figures["stopped"]
    assert 0.0 <= figures["agreement"] <= 1.0
    assert figures["parameters"] == sum(parameter.numel() for parameter in routers.block.parameters())
    assert routers.config.exit_strategy == "linear"
    ids = torch.tensor([tiny_tokenizer(TEXTS[0])["input_ids"]])
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    attached = TIDEModelForCausalLM.attach(model, str(trained))
    made = attach_drafting(attached, attached._tide.routers, width=2)
    assert torch.equal(attached.generate(ids, max_new_tokens=16, do_sample=False), expected)
    drafted = {token for _, draft in made[0].drafted for token in draft}
    assert drafted <= set(routers.draft_vocab.tolist())


def test_start_from_trains_a_block_head_further(parts, trained, monkeypatch):
    before = TIDERouters.from_pretrained(trained)
    weights = {name: value.clone() for name, value in before.state_dict().items()}
    monkeypatch.setattr(BlockTrainer, "start", lambda *_: pytest.fail("a new block head"))
    routers = calibrate(*parts, TEXTS[30:], start_from=before, **OPTIONS)
    figures = routers.config.calibration["block"]
    assert figures["epochs"] == FURTHER[0]
    assert figures["documents_before"] == 30
    assert figures["tune_agreement"] >= figures["tune_agreement_before"]
    assert not torch.equal(routers.block.head.translator.weight, weights["block.head.translator.weight"])
    assert all(torch.equal(value, weights[name]) for name, value in before.state_dict().items())


def test_a_block_head_that_a_step_before_the_deadline_makes_worse_keeps_its_weights(parts, trained, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.block_head.FURTHER", (2, 1e4))
    routers = calibrate(*parts, TEXTS[30:], start_from=trained, max_minutes=1e-6, **OPTIONS)
    figures = routers.config.calibration["block"]
    assert figures["stopped"]
    assert "training of the block head" in routers.config.calibration["cut_short"]
    assert figures["tune_agreement"] < figures["tune_agreement_before"]
    before = TIDERouters.from_pretrained(trained).block.head.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in routers.block.head.state_dict().items())


def test_unfinished_work_from_another_start_is_refused(parts, trained, tmp_path, monkeypatch):
    monkeypatch.setattr(BlockTrainer, "train", Mock(side_effect=OSError("killed")))
    with pytest.raises(OSError, match="killed"):
        calibrate(*parts, TEXTS[30:], start_from=trained, output_dir=tmp_path, **OPTIONS)
    other = TIDERouters.from_pretrained(trained)
    other.block.head.translator.weight.data += 1
    for start in (None, other):
        with pytest.raises(CalibrationError, match="start_from"):
            calibrate(*parts, TEXTS[30:], start_from=start, output_dir=tmp_path, **OPTIONS)


def test_what_start_from_refuses(parts, trained, tiny_llama, tmp_path):
    linear = TIDERouters.for_model(parts[0], exit_layers=[2])
    with pytest.raises(ConfigurationError, match="routers without a block head, and exit_strategy='block'"):
        calibrate(*parts, TEXTS, start_from=linear, **OPTIONS)
    with pytest.raises(ConfigurationError, match="routers with a block head, and exit_strategy='linear'"):
        calibrate(*parts, TEXTS, start_from=trained, **OPTIONS | {"exit_strategy": "linear"})
    with pytest.raises(BaseModelMismatchError):
        calibrate(tiny_llama(hidden_size=64), parts[1], TEXTS, start_from=trained, **OPTIONS)
    with pytest.raises(RoutersNotFoundError):
        calibrate(*parts, TEXTS, start_from=tmp_path, **OPTIONS)
