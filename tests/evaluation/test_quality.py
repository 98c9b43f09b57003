"""Early exit over a given text against decoding token by token; perplexity and quality by hand."""

import copy
import json

import pytest
import torch
from accelerate import cpu_offload
from families import VOCAB, tiny_model
from skipping_calls import random_routers

from tide_hf import TIDEModelForCausalLM
from tide_hf.calibration.documents import Document
from tide_hf.common.errors import BaseModelMismatchError, ConfigurationError
from tide_hf.evaluation import QualityOptions, exit_logits, measure_quality
from tide_hf.evaluation.quality import score_texts

PROMPT = 7
NEW = 12


def random_ids(rows, length, seed=3):
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("family", ["llama", "gemma2", "granite", "opt", "mixtral"])
def test_one_pass_gives_the_logits_of_decoding(family):
    model = tiny_model(family)
    routers = random_routers(model, seed=4)
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=0.5)
    options = {"do_sample": False, "eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    decoded = model.generate(random_ids(1, PROMPT), max_new_tokens=NEW, **options)
    depths = model.last_exit_stats.per_token[0]
    assert len(set(depths[1:])) > 1
    read = exit_logits(model, routers, decoded.sequences, exit_threshold=0.5)
    decoding = slice(PROMPT, PROMPT + NEW - 1)  # the prompt's pass, of which comes the first token, runs at full depth
    assert read.exit_layers[0, decoding].tolist() == depths[1:]
    expected = torch.cat(decoded.logits[1:])
    torch.testing.assert_close(read.logits[0, decoding], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_padding_attachment_and_a_threshold_above_one():
    model = tiny_model("granite")
    routers = random_routers(model)
    ids = random_ids(2, 10)
    never = exit_logits(model, routers, ids, exit_threshold=1.5)
    assert never.exit_layers.unique().tolist() == [4]
    torch.testing.assert_close(never.logits, model(input_ids=ids).logits.detach(), rtol=1e-4, atol=1e-4)
    ids[1, 6:] = 0
    read = exit_logits(model, routers, ids, exit_threshold=0.5)
    short = exit_logits(model, routers, ids[1:, :6], exit_threshold=0.5)
    torch.testing.assert_close(read.logits[1:, :6], short.logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(read.exit_layers[1:, :6], short.exit_layers)
    attached = TIDEModelForCausalLM.attach(model, routers, mode="early_exit")
    torch.testing.assert_close(exit_logits(attached, routers, ids, exit_threshold=0.5).logits, read.logits)
    assert isinstance(attached, TIDEModelForCausalLM)


def test_perplexity_by_hand():
    model = tiny_model("llama")
    routers = random_routers(model)
    lengths, firsts = (9, 4, 12, 2), (0, 0, 5, 0)
    texts = [random_ids(1, length, seed=length) for length in lengths]
    documents = [Document(ids[0].tolist(), first) for ids, first in zip(texts, firsts, strict=True)]
    scores = score_texts(model, routers, documents, batch_size=3)
    for threshold in (None, 0.7, 0.5, 0.0):
        losses, agrees, depths = [], [], []
        for ids, first in zip(texts, firsts, strict=True):
            read = exit_logits(model, routers, ids, exit_threshold=2.0 if threshold is None else threshold)
            logits, full = read.logits[0, first:-1], model(input_ids=ids).logits[0, first:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, ids[0, first + 1 :], reduction="none"))
            agrees.append(logits.argmax(-1) == full.argmax(-1))
            depths.append(read.exit_layers[0, first:-1])
        row = scores.row(threshold, confidence=0.9)
        assert row["perplexity"]["value"] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-4)
        low, high = row["perplexity"]["interval"]
        assert low < row["perplexity"]["value"] < high
        if threshold is None:
            assert set(row) == {"exit_threshold", "perplexity"}
            continue
        assert row["agreement"]["value"] == pytest.approx(float(torch.cat(agrees).double().mean()))
        assert row["depth_fraction"]["value"] == pytest.approx(float(torch.cat(depths).double().mean()) / 4)
        base = scores.row(None, confidence=0.9)["perplexity"]["value"]
        assert row["ratio"]["value"] == pytest.approx(row["perplexity"]["value"] / base)
    assert scores.row(0.0, 0.9)["exit_rates"] == {"1": 1.0, "3": 0.0}


def test_the_record_compares_thresholds_with_the_base_model(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    routers = random_routers(model)
    routers.config.exit_threshold = 0.75
    texts = [f"River number {n} runs on and on, {'x' * n}." for n in range(6)]
    options = QualityOptions(text=texts, thresholds=(0.5, 1.5), samples=5, batch_size=2)
    record = measure_quality(model, tiny_tokenizer, routers, options)
    assert not isinstance(model, TIDEModelForCausalLM)
    assert json.loads(json.dumps(record)) == record
    assert record["calibrated_threshold"] == 0.75
    text = record["perplexity"]["rows"]
    assert [row["exit_threshold"] for row in text] == [None, 1.5, 0.75, 0.5]
    assert text[1]["ratio"] == {"value": 1.0, "interval": None}
    assert text[1]["agreement"]["value"] == text[1]["depth_fraction"]["value"] == 1.0
    assert text[3]["depth_fraction"]["value"] < text[2]["depth_fraction"]["value"] < 1
    assert record["perplexity"]["num_documents"] == 5


def test_an_offloaded_model_gives_the_same_and_the_routers_are_unchanged(tiny_llama, tiny_tokenizer):
    model, offloaded = tiny_llama(), cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    assert offloaded.device.type == "meta"
    routers = random_routers(model)
    expected, read = (
        exit_logits(one, copy.deepcopy(routers), random_ids(1, 9), exit_threshold=0.5) for one in (model, offloaded)
    )
    torch.testing.assert_close(read.logits, expected.logits)
    routers.bfloat16()
    texts = ["one text", "too long"]
    options = QualityOptions(text=texts, thresholds=(0.5,))
    expected, record = (measure_quality(one, tiny_tokenizer, routers, options) for one in (model, offloaded))
    assert json.dumps(record) == json.dumps(expected)
    ids = torch.tensor(tiny_tokenizer(texts)["input_ids"])
    perplexity = model(input_ids=ids, labels=ids).loss.exp().item()
    assert record["perplexity"]["rows"][0]["perplexity"]["value"] == pytest.approx(perplexity, rel=1e-4)
    assert all(parameter.dtype == torch.bfloat16 and parameter.requires_grad for parameter in routers.parameters())


def test_a_recurrent_model_is_measured(tiny_tokenizer):
    model = tiny_model("mamba", vocab_size=260)
    options = QualityOptions(text=["a text", "another"], thresholds=(0.0,))
    record = measure_quality(model, tiny_tokenizer, random_routers(model), options)
    assert record["perplexity"]["rows"][1]["depth_fraction"]["value"] == 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"thresholds": (-1.0,)}, "invalid exit_threshold"),
        ({"thresholds": 0.9}, r"thresholds are no list: got 0\.9\. Expected a list of exit thresholds"),
        ({"confidence": 95}, "confidence makes no sense"),
        ({"samples": 0}, r"samples makes no sense: got 0\. Expected a whole number of at least 1"),
    ],
)
def test_options_with_impossible_values_are_refused(settings, message):
    with pytest.raises(ConfigurationError, match=message):
        QualityOptions(**{"text": ["a text"], **settings}).check()


def test_attached_models_and_routers_of_another_model_are_refused(tiny_llama, tiny_tokenizer):
    options = QualityOptions(text=["a text", "another"])
    routers = random_routers(tiny_llama())
    attached = TIDEModelForCausalLM.attach(tiny_llama(), routers, mode="early_exit", exit_threshold=0.0)
    with pytest.raises(ConfigurationError, match=r"nothing to compare with: got a model with TIDE attached\. Expected"):
        measure_quality(attached, tiny_tokenizer, routers, options)
    with pytest.raises(BaseModelMismatchError):
        measure_quality(tiny_llama(seed=5), tiny_tokenizer, routers, options)
