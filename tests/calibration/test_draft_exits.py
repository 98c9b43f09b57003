"""Exits of a draft head on documents: what is followed, what counts as a disagreement, and the threshold's choice."""

from dataclasses import replace

import pytest
import torch
from calibrations import small, texts
from draft_heads import draft_head_for, tapped_batch
from families import LAYERS, VOCAB, tiny_model
from on_steps import prompts

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.documents import Document
from tide_hf.calibration.draft_exits import UNKNOWN, DraftExits
from tide_hf.calibration.draft_head import DraftHeadStage, DraftHeadTrainer
from tide_hf.calibration.threshold import choose_threshold
from tide_hf.routers.config import NEVER_EXIT


class OneBatch(DraftHeadStage):
    """A stage on one batch, given with the full model's top tokens."""

    @property
    def given(self):
        return self.__dict__.setdefault("_given", [])

    def _batches(self, split, seed=None):
        batch, top = self.given[0]
        yield replace(batch, top=top)


def made_up(lowest, agrees, documents):
    return DraftExits(torch.tensor(lowest), torch.tensor(agrees), torch.tensor(documents))


def test_decoding_is_followed_from_pass_to_pass():
    exits = made_up(
        [[0.9, 0.8], [0.9, 0.9], [0.6, 0.5], [0.9, UNKNOWN], [UNKNOWN, UNKNOWN], [0.7, UNKNOWN], [UNKNOWN, UNKNOWN]],
        [[True, True], [True, True], [True, True], [False, True], [True, True], [False, True], [True, True]],
        [0, 0, 0, 0, 0, 1, 1],
    )
    # Passes at positions 0 and 3, after which a token exits wrongly; the second document has the pass and its exit.
    assert exits.disagreement_per_document(0.7).tolist() == [1 / 5, 1 / 2]
    assert exits.depth_fraction(0.7) == pytest.approx(3 / 7)
    assert exits.disagreement_per_document(0.85).tolist() == [1 / 5, 0.0]  # passes at 0, 2 and 3; at 5 and 6
    assert exits.depth_fraction(0.85) == pytest.approx(5 / 7)
    assert exits.disagreement_per_document(NEVER_EXIT).tolist() == [0.0, 0.0]
    assert exits.depth_fraction(NEVER_EXIT) == 1.0
    assert exits.agreement_by_step() == [pytest.approx(3 / 5), 1.0]


def test_a_head_that_is_sure_and_wrong_gets_no_threshold():
    lowest, documents = torch.full((400, 1), 0.9), torch.arange(400)
    lowest[1::2], right = UNKNOWN, torch.ones(400, 1, dtype=torch.bool)
    exits = DraftExits(lowest, right, documents // 2)
    choice = choose_threshold(exits, tolerance=0.02, confidence=0.95)
    assert choice.chosen <= 0.9
    assert min(row.depth_fraction for row in choice.table if row.certified) == 0.5
    wrong = DraftExits(lowest, ~right, documents // 2)
    assert 0.9 < choose_threshold(wrong, tolerance=0.02, confidence=0.95).chosen <= 1.0


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("threshold", [0.0, 0.4])
def test_it_follows_what_early_exit_does(family, threshold):
    model, prompt = tiny_model(family), prompts()
    routers = draft_head_for(model, tap_layers=[1, 2, LAYERS])
    head, plain = routers.draft_head, tiny_model(family)
    head.confidence.data = torch.tensor([8.0, 28.0])  # spreads the scores
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=threshold)
    answer = model.generate(**prompt, max_new_tokens=40, do_sample=False, eos_token_id=None)[0].tolist()
    depths = model.last_exit_stats.per_token[0]
    last = [i for i, depth in enumerate(depths[:-1]) if depth == LAYERS][-1]  # the call's end made the very last one
    depths, first = depths[: last + 1], prompt["input_ids"].shape[1] - 1
    tokens = answer[: first + 1 + last]
    top = torch.tensor([answer[1 : len(tokens) + 1]])  # as if the full model agreed with the head

    trainer = DraftHeadTrainer(plain, Unembed(plain, find_structure(plain)), head, torch.arange(VOCAB))
    batch, stage = tapped_batch(plain, head, [Document(tokens, first)]), OneBatch(trainer, None, 0)
    stage.given.append((batch, top))
    exits = stage.exits("certify")
    assert len(exits.lowest) == len(depths)
    assert exits.depth_fraction(threshold) == depths.count(LAYERS) / len(depths) < 1
    assert exits.disagreement_per_document(threshold).tolist() == [0.0]
    if threshold == 0.0:  # the first run has all steps
        assert (exits.lowest[0] > UNKNOWN).all()
        top[0, first + 3] += 1  # the full model disagrees with the third token that exits
        assert ends_of(stage.exits("certify")) == [True, True, False]
        top[0, first + 3] -= 1
        batch.input_ids[0, first + 4] += 1  # it agrees, but the text goes on with another token
        assert ends_of(stage.exits("certify")) == [True, True, True]


def ends_of(exits):
    """What is known about the first run."""
    known = exits.lowest[0] > UNKNOWN
    assert known.tolist() == sorted(known.tolist(), reverse=True)
    return exits.agrees[0, known].tolist()


def test_calibrate_certifies_the_draft_heads_threshold(tiny_llama, tiny_tokenizer, tmp_path):
    options = {"exit_strategy": "eagle3", "draft_vocab_size": 40, "output_dir": tmp_path, "samples": 60}
    small(tiny_llama(), tiny_tokenizer, texts(60), **options, tolerance=0.9, confidence=0.5)
    config = TIDERouters.from_pretrained(tmp_path).config
    record = config.calibration["draft_head"]
    assert config.draft_exit_threshold == record["threshold"]["chosen"]
    assert len(record["tolerances"]) == 5
    card = (tmp_path / "README.md").read_text()
    assert "## Draft head\n" in card
    assert "## Tolerances of the draft head\n" in card
    assert "what it does after a token that differs is left out" in card
    chosen = f"draft_exit_threshold {config.draft_exit_threshold:g} (disagreement below 90.0% with 50% confidence)"
    assert f"Draft head: {chosen}" in card
