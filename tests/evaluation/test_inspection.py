"""Convergence of a base model's states, by layer."""

import pytest
import torch
from families import tiny_model

from tide_hf.common.errors import CalibrationError
from tide_hf.evaluation.inspection import convergence_by_layer


def test_convergence_is_that_of_the_states_before_the_final_norm(tiny_llama, tiny_tokenizer):
    model, without_norm = tiny_llama(), tiny_llama()
    without_norm.model.norm = torch.nn.Identity()
    texts = ["the river runs", "to the sea, and on"]
    states = []
    for text in texts:
        ids = tiny_tokenizer(text, return_tensors="pt").input_ids
        states.append(without_norm(ids, output_hidden_states=True).hidden_states[1:])
    *by_layer, final = (torch.cat(layer, dim=1)[0].detach() for layer in zip(*states, strict=True))
    cosine = [torch.cosine_similarity(state, final, dim=-1) for state in by_layer]
    threshold = float(cosine[1].median())
    rows = convergence_by_layer(model, tiny_tokenizer, ["", *texts], convergence_threshold=threshold)
    assert [row.layer for row in rows] == [1, 2, 3]
    for row, expected in zip(rows, cosine, strict=True):
        assert row.mean_cosine == pytest.approx(float(expected.mean()), abs=1e-5)
        assert row.converged == pytest.approx(float((expected > threshold).double().mean()), abs=1.5 / len(expected))
    assert 0 < rows[1].converged < 1


def test_convergence_truncates_long_texts_and_needs_one(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    truncated = convergence_by_layer(model, tiny_tokenizer, ["abcdefgh" * 9], max_length=8)
    assert truncated == convergence_by_layer(model, tiny_tokenizer, ["abcdefgh"])
    with pytest.raises(CalibrationError, match=r"convergence cannot be measured: got no text\. Expected at least one"):
        convergence_by_layer(model, tiny_tokenizer, [""])
    few = tiny_model("gpt2", vocab_size=260, max_position_embeddings=24)
    with pytest.raises(CalibrationError, match=r"model has positions for: got 30 tokens\. Expected at most 24"):
        convergence_by_layer(few, tiny_tokenizer, ["a" * 30])
