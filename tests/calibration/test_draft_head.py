"""Training of the draft head: it reads what it reads in a draft, it learns, and it drafts afterwards."""

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
from tide_hf.calibration.draft_head import DraftHeadTrainer
from tide_hf.common.errors import UnsupportedModelError
from tide_hf.speculation.exits import MAX_EXITS

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
    losses = [loss for _, loss in trainer.train(lambda: [batch] * 4, 4)]
    assert losses[-1] < 0.9 * losses[0]
    assert not any(parameter.requires_grad for parameter in trainer.head.parameters())


def test_calibrate_makes_a_draft_head_that_drafts(tiny_llama, tiny_tokenizer, tmp_path):
    model = tiny_llama()
    options = {"exit_strategy": "eagle3", "draft_vocab_size": 40, "output_dir": tmp_path}
    routers = small(model, tiny_tokenizer, texts(30), **options | {"samples": 30})
    figures = routers.config.calibration["draft_head"]
    assert not figures["stopped"]
    assert 0.0 <= figures["agreement"] <= 1.0
    assert len(figures["agreement_by_step"]) == MAX_EXITS
    ids = torch.randint(3, 90, (1, 6))
    plain = model.generate(ids, max_new_tokens=24, do_sample=False)
    TIDEModelForCausalLM.attach(model, TIDERouters.from_pretrained(tmp_path))
    head = model._tide.draft_head
    assert len(head.d2t) == 40
    assert torch.equal(model.generate(ids, max_new_tokens=24, do_sample=False), plain)


def test_a_model_whose_embeddings_are_narrower_is_refused(tiny_tokenizer):
    with pytest.raises(UnsupportedModelError, match="a draft head cannot be made"):
        small(tiny_model("opt"), tiny_tokenizer, texts(20), exit_strategy="eagle3")
