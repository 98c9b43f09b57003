"""Training of the draft head: it reads what it reads in a draft, it learns, and it drafts afterwards."""

from itertools import product
from statistics import mean
from unittest.mock import Mock

import pytest
import torch
from calibrations import small, texts
from draft_heads import draft_head_for, tapped_batch
from families import tiny_model
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.documents import Document
from tide_hf.calibration.draft_head_training import (
    FURTHER,
    MEASURED_STEPS,
    DraftHeadStage,
    DraftHeadTrainer,
    TappedBatch,
)
from tide_hf.common.errors import (
    BaseModelMismatchError,
    CalibrationError,
    ConfigurationError,
    RoutersNotFoundError,
    UnsupportedModelError,
)

TEXTS = texts(60)
FURTHER_OPTIONS = {"samples": 30, "draft_vocab_size": 40, "exit_strategy": "eagle3"}
FAMILIES = ("llama", "mistral", "qwen3_moe", "gemma2")  # plain; its layers slide; routed; its logits are softcapped


def trainer_of(model, **changes):
    routers = draft_head_for(model, tap_layers=[1, 2, find_structure(model).num_layers], **changes)
    tokens = torch.arange(model.config.get_text_config().vocab_size)
    return DraftHeadTrainer(model, Unembed(model, find_structure(model)), routers.draft_head, tokens)


@pytest.mark.parametrize("changes", [{}, {"norm_output": True, "qk_norm": True, "norm_before_residual": True}])
def test_it_is_trained_on_what_it_reads_while_it_drafts(tiny_llama, changes):
    model = tiny_llama()
    trainer, document = trainer_of(model, **changes), torch.randint(3, 90, (12,)).tolist()
    batch = tapped_batch(model, trainer.head, [Document(document, 1), Document(document[:7], 1)])
    outputs, head = trainer.unroll(batch, 3), trainer.head
    fused, embeddings = head.fuse(batch.tapped), model.get_input_embeddings()(batch.input_ids)
    for row, length in enumerate((12, 7)):
        for last in range(1, length):
            kv, state = DynamicLayer(), fused[row : row + 1, last - 1 : last]
            positions = torch.arange(last)[None]  # relative ones are all that counts
            if last > 1:
                head.store(embeddings[row : row + 1, 1:last], fused[row : row + 1, : last - 1], positions[:, :-1], kv)
            for step in range(min(3, length - last)):
                at = last + step
                output = head(embeddings[row : row + 1, at : at + 1], state, torch.tensor([[at - 1]]), kv, None)
                torch.testing.assert_close(outputs[step][row, last - 1], output[0, 0], atol=1e-5, rtol=1e-5)
                _, _, state = head.draft(output)


@pytest.mark.parametrize("family", FAMILIES)
def test_training_lowers_the_loss(family, monkeypatch):
    monkeypatch.setattr("tide_hf.calibration.training.gains_by_bfloat16", lambda _: False)
    model = tiny_model(family)
    trainer = trainer_of(model, num_key_value_heads=4)
    torch.manual_seed(0)
    documents = [Document(torch.randint(3, 90, (16,)).tolist(), first=1) for _ in range(8)]
    batch = tapped_batch(model, trainer.head, documents)
    trainer.start([batch])
    losses = [loss for _, loss in trainer.train(lambda: [batch] * 4, 4, epochs=12)]
    assert losses[-1] < 0.9 * losses[0]
    assert not any(parameter.requires_grad for parameter in trainer.head.parameters())


def test_a_draft_is_judged_while_its_tokens_are_the_full_models_and_the_texts(tiny_llama, monkeypatch):
    rows, length, counts = 5, 40, torch.tensor([40, 40, 31, 12, 2])
    torch.manual_seed(0)
    ids, top = (torch.rand(2, rows, length) < 0.9).long()
    drafted = (torch.rand(MEASURED_STEPS, rows, length - 1) < 0.9).long()
    positions = torch.arange(length).expand(rows, -1)
    mask = (positions < counts[:, None]).long()
    counted = (positions >= 1) & (mask == 1)
    trainer, states = trainer_of(tiny_llama()), torch.zeros(rows, length, 32)
    batch = TappedBatch(ids, mask, counted, states, states, top)
    trainer.head.requires_grad_(False)
    stage = DraftHeadStage(trainer, None, 0)
    monkeypatch.setattr(DraftHeadStage, "_batches", lambda *_: [batch])
    monkeypatch.setattr(trainer, "unroll", lambda _, steps: drafted[:steps, ..., None].float())
    monkeypatch.setattr(DraftHeadStage, "_read", lambda _, output: (output[..., 0] - 2, output[..., 0].long()))
    expected = [[] for _ in drafted]
    for row, start in product(range(rows), range(length - 1)):
        for step, last in enumerate(range(start + 1, min(start + 1 + MEASURED_STEPS, int(counts[row])))):
            token = drafted[step, row, start]
            expected[step].append(float(token == top[row, last]))
            if token != top[row, last] or last + 1 == length or token != ids[row, last + 1]:
                break
    figures = stage.figures()
    assert figures["agreement_by_step"] == [pytest.approx(mean(one)) for one in expected]
    assert figures["agreement"] == figures["agreement_by_step"][0]


def test_calibrate_makes_a_draft_head_that_drafts(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    options = {"exit_strategy": "eagle3", "draft_vocab_size": 40, "output_dir": tmp_path}
    routers = small(model, tiny_tokenizer, texts(30), **options | {"samples": 30})
    figures = routers.config.calibration["draft_head"]
    assert not figures["stopped"]
    assert 0.0 <= figures["agreement"] <= 1.0
    assert len(figures["agreement_by_step"]) == MEASURED_STEPS
    ids = torch.randint(3, 90, (1, 6))
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    TIDEModelForCausalLM.attach(model, TIDERouters.from_pretrained(tmp_path))
    head = model._tide.draft_head
    assert len(head.d2t) == 40
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), plain)


def test_the_size_of_a_draft_head_follows_from_its_vocabulary_and_the_width_of_its_mlp(tiny_llama, tiny_tokenizer):
    options = {"exit_strategy": "eagle3", "exit_layers": [2], "samples": 30}
    model = tiny_llama()
    for vocab_size, width in ((40, None), (40, 24), (20, 24)):
        sizes = {"draft_vocab_size": vocab_size, "draft_intermediate_size": width}
        head = small(model, tiny_tokenizer, texts(30), **options, **sizes).draft_head
        own, hidden = width or model.config.intermediate_size, model.config.hidden_size
        assert head.config.intermediate_size == head.layers[0].mlp.up_proj.out_features == own
        fused = len(head.config.tap_layers) * hidden
        rows = fused + 7 * hidden + 3 * own + vocab_size + 4  # of fc; q, k, v, o; the MLP; lm_head; norms
        assert sum(parameter.numel() for parameter in head.parameters()) == hidden * rows + len(head.confidence)


def test_a_model_whose_embeddings_are_narrower_is_refused(tiny_tokenizer):
    with pytest.raises(UnsupportedModelError, match="a draft head cannot be made"):
        small(tiny_model("opt"), tiny_tokenizer, texts(20), exit_strategy="eagle3")


# Training further


@pytest.fixture(scope="module")
def start(tiny_llama, tiny_tokenizer, tmp_path_factory):
    """The folder of routers with a draft head, from half of the texts."""
    folder = tmp_path_factory.mktemp("start")
    small(tiny_llama(), tiny_tokenizer, TEXTS[:30], output_dir=folder, **FURTHER_OPTIONS)
    return folder


def test_start_from_trains_a_draft_head_further(tiny_llama, tiny_tokenizer, start, monkeypatch):
    before = TIDERouters.from_pretrained(start)
    weights = {name: value.clone() for name, value in before.state_dict().items()}
    monkeypatch.setattr(DraftHeadTrainer, "start", lambda *_: pytest.fail("a new draft head"))
    routers = small(tiny_llama(), tiny_tokenizer, TEXTS[30:], start_from=before, **FURTHER_OPTIONS)
    figures = routers.config.calibration["draft_head"]
    assert figures["epochs"] == FURTHER[0]
    assert figures["documents_before"] == before.config.calibration["num_documents"]
    assert figures["tune_agreement"] >= figures["tune_agreement_before"]
    assert torch.equal(routers.draft_head.d2t, weights["draft_head.d2t"])
    assert not torch.equal(routers.draft_head.fc.weight, weights["draft_head.fc.weight"])
    assert all(torch.equal(value, weights[name]) for name, value in before.state_dict().items())


def test_a_head_that_a_step_before_the_deadline_makes_worse_keeps_its_weights(
    tiny_llama, tiny_tokenizer, start, monkeypatch
):
    monkeypatch.setattr("tide_hf.calibration.draft_head_training.FURTHER", (2, 1e4))
    monkeypatch.setattr("tide_hf.calibration.pipeline.FEWEST_DOCUMENTS", len(TEXTS))  # none is left out
    options = FURTHER_OPTIONS | {"max_minutes": 1e-6, "start_from": start}
    routers = small(tiny_llama(), tiny_tokenizer, TEXTS[30:], **options)
    figures = routers.config.calibration["draft_head"]
    assert figures["stopped"]
    assert "training of the draft head" in routers.config.calibration["cut_short"]
    assert figures["tune_agreement"] < figures["tune_agreement_before"]
    before = TIDERouters.from_pretrained(start).draft_head.state_dict()
    found = routers.draft_head.state_dict()
    assert all(torch.equal(value, before[name]) for name, value in found.items() if name != "confidence")


def test_unfinished_work_from_another_start_is_refused(tiny_llama, tiny_tokenizer, start, tmp_path, monkeypatch):
    monkeypatch.setattr(DraftHeadTrainer, "train", Mock(side_effect=OSError("killed")))
    options = FURTHER_OPTIONS | {"output_dir": tmp_path}
    with pytest.raises(OSError, match="killed"):
        small(tiny_llama(), tiny_tokenizer, TEXTS[30:], start_from=start, **options)
    other = TIDERouters.from_pretrained(start)
    other.draft_head.fc.weight.data += 1
    for another in (None, other):
        with pytest.raises(CalibrationError, match="start_from"):
            small(tiny_llama(), tiny_tokenizer, TEXTS[30:], start_from=another, **options)


def test_what_start_from_refuses(tiny_llama, tiny_tokenizer, start, tmp_path):
    model = tiny_llama()
    linear, embedded = TIDERouters.for_model(model, exit_layers=[2]), draft_head_for(model, has_embedding=True)
    for routers, strategy, got in (
        (linear, "eagle3", "routers with no draft head, and exit_strategy='eagle3'"),
        (start, "linear", "routers with a draft head, and exit_strategy='linear'"),
        (embedded, "eagle3", "routers with a draft head with embeddings of its own, and exit_strategy='eagle3'"),
    ):
        with pytest.raises(ConfigurationError, match=got):
            small(model, tiny_tokenizer, TEXTS, start_from=routers, **FURTHER_OPTIONS | {"exit_strategy": strategy})
    width = TIDERouters.from_pretrained(start).config.draft_head["intermediate_size"]
    with pytest.raises(ConfigurationError, match=f"keeps its shape: got draft_intermediate_size=8. Expected {width}"):
        small(model, tiny_tokenizer, TEXTS, start_from=start, draft_intermediate_size=8, **FURTHER_OPTIONS)
    with pytest.raises(BaseModelMismatchError):
        small(tiny_llama(hidden_size=64), tiny_tokenizer, TEXTS, start_from=start, **FURTHER_OPTIONS)
    with pytest.raises(RoutersNotFoundError):
        small(model, tiny_tokenizer, TEXTS, start_from=tmp_path, **FURTHER_OPTIONS)
