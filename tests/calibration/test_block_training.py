"""Training of the block head: what it learns from, that it learns, and what a calibration tells of it."""

import pytest
import torch
from block_heads import attach_drafting, document_batches, routers_for

from tide_hf import TIDEModelForCausalLM, calibrate
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.block_head import (
    FRESH,
    BlockTrainer,
    _after_right_tokens,
    gains_by_bfloat16,
    mixed_precision,
)
from tide_hf.calibration.documents import Document
from tide_hf.calibration.heads import distillation_loss
from tide_hf.common.errors import ConfigurationError


def test_documents_are_laid_side_by_side_in_their_own_order(tiny_llama):
    documents = [Document([5, 6, 7], first=1), Document([8, 9], first=0)]
    (batch,) = document_batches(tiny_llama(), 1, documents, 2)
    assert sorted(
        zip(batch.input_ids.tolist(), batch.attention_mask.tolist(), batch.counted.tolist(), strict=True)
    ) == [
        ([5, 6, 7], [1, 1, 1], [False, True, True]),
        ([8, 9, 0], [1, 1, 0], [True, True, False]),
    ]
    assert batch.states.shape == batch.final.shape == (2, 3, 32)


def training_batches(model):
    torch.manual_seed(0)
    documents = [Document(torch.randint(3, 250, (24,)).tolist(), first=1) for _ in range(32)]
    return list(document_batches(model, 1, documents, 8))


def started_trainer(model, routers, batches):
    unembed = Unembed(model, find_structure(model))
    trainer = BlockTrainer(model, unembed, lambda x: unembed(x).log_softmax(-1), routers.block.head, 1)
    trainer.start(batches)
    return trainer


@pytest.mark.parametrize("in_bfloat16", [False, True])
def test_training_brings_the_block_nearer_to_the_full_model(tiny_llama, monkeypatch, in_bfloat16):
    monkeypatch.setattr("tide_hf.calibration.block_head.gains_by_bfloat16", lambda _: in_bfloat16)
    model = tiny_llama()
    batches = training_batches(model)
    routers = routers_for(model, 1)
    model.requires_grad_(False)
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
    steps = [step for step, _ in trainer.train(lambda: batches, len(batches), epochs=8, deadline=0.0)]
    assert steps == [1]  # a deadline that is over stops it at once


def test_second_drafts_are_learnt_after_right_tokens_first_ones():
    counted = torch.tensor([[False, True, True, True], [True, True, False, True]])
    teacher = torch.eye(3)[[0, 1, 2, 0, 1, 2]]
    student = torch.eye(3)[[0, 0, 2, 0, 2, 2]]  # wrong at its second and its fifth
    assert _after_right_tokens(counted, student, teacher).tolist() == [
        [False, False, True, False],
        [False, True, False, False],
    ]


def test_training_on_its_own_guesses_makes_second_drafts_better(tiny_llama, monkeypatch):
    model = tiny_llama()
    batches = training_batches(model)
    monkeypatch.setattr("tide_hf.calibration.block_head.gains_by_bfloat16", lambda _: False)
    monkeypatch.setattr(
        "tide_hf.calibration.block_head._after_right_tokens", lambda counted, *_: counted
    )  # a random model is seldom right

    def second_loss(share):
        monkeypatch.setattr("tide_hf.calibration.block_head.SECOND_SHARE", share)
        torch.manual_seed(0)
        trainer = started_trainer(model, routers_for(model, 1), batches)
        list(trainer.train(lambda: batches, len(batches), epochs=30))
        with torch.no_grad():
            losses = [
                distillation_loss(student, teacher, teacher.argmax(dim=-1))
                for batch in batches
                for guesses in [trainer.states(batch, trainer.states(batch))]
                for student, teacher in [(trainer.taught(states)[batch.counted] for states in (guesses, batch.final))]
            ]
        return float(sum(losses))

    assert second_loss(4.0) < 0.97 * second_loss(0.0)


def test_what_bfloat16_gains_is_measured_once_on_a_cpu(monkeypatch):
    seconds = {torch.float32: 1.0, torch.bfloat16: 0.5}
    for gains in (True, False):
        gains_by_bfloat16.cache_clear()
        monkeypatch.setattr("tide_hf.calibration.block_head._seconds", seconds.__getitem__)
        assert gains_by_bfloat16("cpu") == gains
        seconds[torch.bfloat16] = 0.9
        assert gains_by_bfloat16("cpu") == gains
    gains_by_bfloat16.cache_clear()
    assert not gains_by_bfloat16("mps")


def test_calibrate_makes_a_block_that_drafts(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    texts = [f"text number {number} of many, and what follows is {number * 7}" for number in range(60)]
    options = {"samples": 60, "max_length": 24, "exit_layers": [2], "progress": False, "draft_vocab_size": 128}
    routers = calibrate(model, tiny_tokenizer, texts, exit_strategy="block", output_dir=tmp_path, **options)
    figures = routers.config.calibration["block"]
    assert routers.config.block_layer == figures["layer"] == 1
    assert figures["epochs"] == FRESH.epochs
    assert not figures["stopped"]
    assert 0.0 <= figures["agreement"] <= 1.0
    assert figures["parameters"] == sum(parameter.numel() for parameter in routers.block.parameters())
    assert routers.config.exit_strategy == "linear"
    ids = torch.tensor([tiny_tokenizer(texts[0])["input_ids"]])
    expected = model.generate(ids, max_new_tokens=16, do_sample=False)
    attached = TIDEModelForCausalLM.attach(model, str(tmp_path))
    made = attach_drafting(attached, attached._tide.routers, width=2)
    assert torch.equal(attached.generate(ids, max_new_tokens=16, do_sample=False), expected)
    drafted = {token for _, draft in made[0].drafted for token in draft}
    assert drafted <= set(routers.draft_vocab.tolist())


def test_a_block_trained_in_no_time_says_so(tiny_llama, tiny_tokenizer):
    texts = [f"{number} is the number of this text" for number in range(60)]
    options = {"samples": 60, "max_length": 12, "exit_layers": [2], "progress": False, "max_minutes": 1e-6}
    routers = calibrate(tiny_llama(), tiny_tokenizer, texts, exit_strategy="block", **options)
    assert routers.config.calibration["block"]["stopped"]
    assert "training of the block head" in routers.config.calibration["cut_short"]


def test_an_unknown_exit_strategy_is_refused(tiny_llama, tiny_tokenizer):
    with pytest.raises(ConfigurationError, match=r"unknown exit_strategy.*'identity', 'linear', 'block'"):
        calibrate(tiny_llama(), tiny_tokenizer, ["a text"], exit_strategy="magic")
