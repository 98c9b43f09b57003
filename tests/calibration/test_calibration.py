"""Calibration on tiny models: each step against what it should compute, and the whole in one call."""

import json
import random

import pytest
import torch
from families import VOCAB, tiny_model
from transformers import AutoTokenizer

from tide_hf import TIDEModelForCausalLM, TIDERouters, calibrate
from tide_hf.base_model.structure import find_structure
from tide_hf.base_model.unembed import Unembed
from tide_hf.calibration.documents import Document, split_documents
from tide_hf.calibration.heads import Moments, round_weights
from tide_hf.calibration.routers import area_under_curve, expected_calibration_error, platt_scaling
from tide_hf.calibration.states import StateReader
from tide_hf.calibration.text import draw_prompts
from tide_hf.common.errors import CalibrationError, ConfigurationError
from tide_hf.routers.config import NEVER_EXIT

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = [1, 2, 3]


def texts(count=40):
    words = [
        "the", "river", "runs", "to", "the", "sea", "and", "the", "sea", "is", "wide", "and", "cold", "in", "spring",
    ]  # fmt: skip
    chance = random.Random(0)
    return [" ".join(chance.choices(words, k=chance.randint(4, 9))) + f" {number}" for number in range(count)]


def small(model, tokenizer, dataset=None, **options):
    options = {"samples": 24, "max_length": 10, "exit_layers": LAYERS, "batch_size": 8, "progress": False} | options
    return calibrate(model, tokenizer, dataset, **options)


def test_one_call_makes_routers_that_work(parts, tmp_path):
    model, tokenizer = parts
    before = {name: value.clone() for name, value in model.state_dict().items()}
    routers = small(model, tokenizer, notes={"command": "python make.py", "num_documents": -1})
    assert routers.exit_layers == LAYERS
    record = json.loads(json.dumps(routers.config.calibration))
    assert record["command"] == "python make.py"
    assert sorted(record["exit_layers"]) == ["1", "2", "3"]
    for row in record["exit_layers"].values():
        assert 0 <= row["agreement"] <= 1
        assert set(row) >= {"agreement", "router_auc", "expected_calibration_error", "exit_rate", "coverage", "cost"}
    assert sum(part["documents"] for part in record["splits"].values()) == record["num_documents"] == 24
    assert routers.config.exit_threshold == record["threshold"]["chosen"]
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert not any(module._forward_hooks for module in model.modules())
    routers.save_pretrained(tmp_path)
    attached = TIDEModelForCausalLM.attach(model, tmp_path)
    try:
        inputs = tokenizer("the river", return_tensors="pt")
        for mode in ("self_speculative", "early_exit", "post_hoc"):
            attached.generate(**inputs, max_new_tokens=6, tide_mode=mode, do_sample=False)
    finally:
        TIDEModelForCausalLM.detach(model)


def test_the_same_seed_gives_the_same_routers_attached_or_not(parts):
    model, tokenizer = parts
    first = small(model, tokenizer, seed=3)
    TIDEModelForCausalLM.attach(model, first, mode="early_exit", exit_threshold=0.0)
    try:
        second = small(model, tokenizer, seed=3)
        assert isinstance(model, TIDEModelForCausalLM)
    finally:
        TIDEModelForCausalLM.detach(model)
    other = small(model, tokenizer, seed=4)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


def test_what_was_in_training_and_what_was_not_stay_so(tiny_llama, tiny_tokenizer):
    model = tiny_llama().train()
    model.model.layers[0].eval()
    small(model, tiny_tokenizer, texts())
    assert model.training
    assert model.model.layers[1].mlp.training
    assert not model.model.layers[0].mlp.training


def test_a_head_learns_what_can_be_learnt(parts):
    """Fitted to texts of few words, a linear head agrees more often than the identity on texts it has not seen."""
    model, tokenizer = parts
    agreement = {}
    for strategy in ("identity", "linear"):
        routers = small(model, tokenizer, texts(160), samples=160, max_length=40, exit_strategy=strategy)
        agreement[strategy] = routers.config.calibration["exit_layers"]["2"]["agreement"]
    assert agreement["linear"] > agreement["identity"] + 0.1


def test_ridge_from_moments_is_the_weighted_least_squares_solution():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator) * 3 + 5
    translation = torch.randn(6, 6, generator=generator)
    y = x + x @ translation.T + torch.arange(6.0) + 0.1 * torch.randn(400, 6, generator=generator)
    weights = torch.rand(400, generator=generator) + 0.1
    moments = Moments(6)
    for start in range(0, 400, 150):  # whatever the batches are
        part = slice(start, start + 150)
        moments.add(x[part], y[part], weights[part])
    solved, bias = moments.solve(penalty=0.0)
    ones = torch.cat([x, torch.ones(400, 1)], dim=1).double()
    root = weights.double().sqrt()[:, None]
    expected = torch.linalg.lstsq(ones * root, (y - x).double() * root).solution
    torch.testing.assert_close(solved, expected[:6].T.float(), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bias, expected[6].float(), atol=1e-3, rtol=1e-3)
    shrunk, _ = moments.solve(penalty=100.0)
    assert shrunk.norm() < 0.1 * solved.norm()


def test_states_are_those_before_the_final_norm(parts):
    model, _ = parts
    structure = find_structure(model)
    reader = StateReader(model, structure, Unembed(model, structure), [1, 3])
    documents = [Document([5, 6, 7, 8], first=1), Document([9, 10], first=0)]
    batch = reader.read(documents, [0, 1])
    with torch.no_grad():
        output = model(input_ids=torch.tensor([[5, 6, 7, 8]]), output_hidden_states=True)
    rows = batch.document_ids == 0
    torch.testing.assert_close(batch.hidden_states[1][rows], output.hidden_states[1][0])
    torch.testing.assert_close(batch.hidden_states[3][rows], output.hidden_states[3][0])
    assert batch.top_tokens[rows].tolist() == output.logits[0].argmax(-1).tolist()
    assert batch.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert batch.counted.tolist() == [False, True, True, True, True, True]
    assert batch.document_ids.tolist() == [0, 0, 0, 0, 1, 1]
    torch.testing.assert_close(Unembed(model, structure)(batch.final_states[rows]), output.logits[0])
    assert batch.only_counted().tokens.tolist() == [6, 7, 8, 9, 10]


def test_splits_are_disjoint_and_complete():
    documents = [Document([number, 1], first=0) for number in range(50)]
    splits = split_documents(documents, seed=0)
    seen = [document.tokens[0] for part in splits.values() for document in part]
    assert sorted(seen) == list(range(50))
    assert {name: len(part) for name, part in splits.items()} == {"fit": 25, "tune": 5, "certify": 20}


def test_prompts_are_many_and_differ():
    prompts = draw_prompts(1500, seed=0)
    assert len(set(prompts)) == 1500
    assert prompts == draw_prompts(1500, seed=0)
    assert not any("{" in prompt and "}" in prompt and "slot" in prompt for prompt in prompts)


def test_router_figures():
    labels = torch.tensor([True, True, False, False])
    assert area_under_curve(torch.tensor([0.9, 0.8, 0.2, 0.1]), labels) == 1.0
    assert area_under_curve(torch.tensor([0.1, 0.2, 0.8, 0.9]), labels) == 0.0
    assert area_under_curve(torch.tensor([0.5] * 4), labels) == 0.5
    assert expected_calibration_error(torch.tensor([0.5] * 4), labels) == pytest.approx(0.0)
    assert expected_calibration_error(torch.tensor([0.99] * 4), labels) == pytest.approx(0.49)


def test_scores_become_probabilities():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(20_000, generator=generator)
    labels = torch.rand(20_000, generator=generator) < torch.sigmoid(0.5 * logits - 1.0)
    scale, shift = platt_scaling(logits, labels)
    assert scale == pytest.approx(0.5, abs=0.05)
    assert shift == pytest.approx(-1.0, abs=0.05)


def test_where_nothing_can_be_certified_nothing_leaves(parts):
    routers = small(*parts)  # far too few documents for 2%
    assert routers.config.exit_threshold == NEVER_EXIT


def test_other_labels_change_the_routers_and_not_the_heads_or_what_is_certified(parts):
    made = {labels: small(*parts, texts(12), samples=12, labels=labels) for labels in ("agreement", "cosine", "kl")}
    records = {labels: routers.config.calibration for labels, routers in made.items()}
    for labels, record in records.items():
        assert record["labels"] == labels
        for layer in LAYERS:
            assert torch.equal(made[labels][layer].head.translator.weight, made["kl"][layer].head.translator.weight)
            assert (
                record["exit_layers"][str(layer)]["agreement"] == records["kl"]["exit_layers"][str(layer)]["agreement"]
            )
    scores = [[row["reliability"] for row in record["exit_layers"].values()] for record in records.values()]
    assert scores[0] != scores[1] != scores[2]


def test_a_tokenizer_without_pad_or_template(parts, tiny_model_folder):
    model, _ = parts
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    tokenizer.pad_token = tokenizer.chat_template = None
    assert small(model, tokenizer).config.calibration["num_documents"] > 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ([], r"the dataset is empty .*: got no texts\. Expected texts or chats"),
        (
            ["a river runs", "x", "to the sea"],
            r"too few documents .*: got 2\. Expected at least 3",
        ),
        (["a river", "runs on"], r"too few documents .*: got 2\. Expected at least 3"),
        ("wikitext", r"the dataset cannot be found: got 'wikitext'\. Expected a file or folder that exists, or a Hub"),
        (7, r"cannot read this kind of dataset: got int\. Expected None, texts"),
        ([1, 2, 3], r"cannot read this kind of row \(rows given by the caller\): got int"),
    ],
)
def test_data_that_cannot_be_used(parts, dataset, message):
    with pytest.raises(CalibrationError, match=message):
        small(*parts, dataset)


def test_nan_states(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.fill_(float("nan"))
    structure = find_structure(model)
    reader = StateReader(model, structure, Unembed(model, structure), [2])
    with pytest.raises(CalibrationError, match=r"after layer 2 cannot be used: got NaN.*Expected finite"):
        reader.read([Document([3, 4, 5], 0)], [0])
    assert not any(module._forward_hooks for module in model.modules())


def test_options_that_make_no_sense(parts):
    with pytest.raises(ConfigurationError, match=r"unknown labels: got 'euclid'\. Expected one of 'agreement'"):
        small(*parts, labels="euclid")
    for options in ({"tolerance": 0}, {"tolerance": "low"}, {"confidence": 1.5}):
        with pytest.raises(ConfigurationError, match=r"makes no sense: got .*Expected a number between 0 and 1"):
            small(*parts, **options)
    with pytest.raises(ConfigurationError, match="exit layer out of range"):
        small(*parts, exit_layers=[9])


def test_weights_are_rounded_to_what_is_stored():
    routers = TIDERouters.for_model(tiny_model("llama"), exit_layers=[1], exit_strategy="linear")
    torch.nn.init.normal_(routers[1].head.translator.weight)
    round_weights(routers)
    for parameter in routers.parameters():
        assert torch.equal(parameter, parameter.to(torch.bfloat16).float())
    assert routers.config.vocab_size == VOCAB
