"""Drafts from earlier answers and passes: the same tokens in fewer passes, while the attachment lives and no longer."""

import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from drafters import use_costs
from families import tiny_model
from on_steps import ATTACH, attach_captured, linear_heads, prompts

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation import benchmark
from tide_hf.evaluation.benchmark import DecodingMethod
from tide_hf.speculation.answer_memory import AnswerMemory
from tide_hf.speculation.rows import Row

NEW = 40
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLING = GREEDY | {"do_sample": True, "temperature": 1.0, "top_k": 50}
MILLISECONDS = {("verify", 1): 10.0, ("verify", 2): 10.5, ("verify", 16): 14.0}


@pytest.fixture(autouse=True)
def _same_costs(monkeypatch):
    use_costs(monkeypatch, MILLISECONDS)


def num_remembered(model):
    return model._tide.answers.num_tokens  # in an assertion, pytest would show all of `_tide`


def generate(model, options, rows=1, seed=0):
    torch.manual_seed(7)
    return model.generate(**prompts(rows, pads=2 if rows > 1 else 0, seed=seed), **options)


def rounds_of(model, options, expected, rows=1, times=4):
    """Passes that each of several equal calls took; all must give the expected tokens."""
    found = []
    for _ in range(times):
        assert torch.equal(generate(model, options, rows), expected)
        assert model.last_exit_stats.fallback_reason is None
        found.append(model.last_exit_stats.rounds)
    return found


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize(("options", "rows"), [(SAMPLING, 1), (GREEDY, 3)], ids=["sampling", "greedy batch"])
def test_a_repeated_prompt_takes_fewer_passes_and_gives_the_same_tokens(engine, options, rows):
    model = tiny_model("llama")
    expected = generate(model, options, rows)
    ATTACH[engine](model, linear_heads(model) if engine == "eager" else None)  # which draft together
    rounds = rounds_of(model, options, expected, rows)
    assert rounds[1] < rounds[0]
    assert rounds[-1] < 0.4 * rounds[0]


def test_it_can_be_turned_off():
    model = tiny_model("llama")
    expected = generate(model, SAMPLING)
    TIDEModelForCausalLM.attach(model, remembered_tokens=0, successors=0)
    assert min(rounds_of(model, SAMPLING, expected)) > 0.8 * NEW
    assert num_remembered(model) == len(model._tide.successors) == 0


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_successors_that_passes_gave_serve_later_calls_until_they_are_released(engine):
    model = tiny_model("llama")
    expected = generate(model, GREEDY)
    ATTACH[engine](model)
    model._tide.answers = AnswerMemory(0)
    rounds = rounds_of(model, GREEDY, expected)
    assert rounds[-1] < rounds[0]
    assert "successor" in model.last_exit_stats.sources[0]
    assert len(pickle.loads(pickle.dumps(model))._tide.successors) == 0
    model.tide_release()
    assert len(model._tide.successors) == 0


def test_threads_share_the_memory():
    model = tiny_model("llama")
    seeds = [0, 1, 2, 0, 1, 2] * 4
    expected = {seed: generate(model, GREEDY, seed=seed) for seed in set(seeds)}
    TIDEModelForCausalLM.attach(model, remembered_tokens=100)  # two answers at a time
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda seed: generate(model, GREEDY, seed=seed), seeds))
    assert all(torch.equal(result, expected[seed]) for result, seed in zip(results, seeds, strict=True))
    assert 0 < num_remembered(model) <= 100


def test_what_is_remembered_ends_where_the_answer_ends():
    model = tiny_model("llama")
    first = generate(model, GREEDY, rows=2)[0].tolist()
    eos = next(token for token in first[12:] if token not in first[8:12])
    TIDEModelForCausalLM.attach(model)
    generate(model, GREEDY | {"eos_token_id": eos, "return_dict_in_generate": True}, rows=2)  # which keeps padding
    texts = list(model._tide.answers._texts)
    assert (tuple(first[: first.index(eos, 8) + 1]), 8) in texts


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_answers_that_may_differ_from_the_base_model_s_are_not_remembered(mode):
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, linear_heads(model), mode=mode)
    generate(model, GREEDY)
    assert num_remembered(model) == 0


def test_it_ends_with_the_attachment_and_never_leaves_the_process():
    model = TIDEModelForCausalLM.attach(tiny_model("gpt2"))
    generate(model, GREEDY)
    answers = model._tide.answers
    assert answers.num_tokens == 48
    twin = pickle.loads(pickle.dumps(model))._tide.answers
    assert (twin.num_tokens, twin.max_tokens) == (0, answers.max_tokens)
    model.tide_release()
    assert answers.num_tokens == 0
    generate(model, GREEDY)
    assert answers.num_tokens == 48
    TIDEModelForCausalLM.attach(model, linear_heads(model))
    assert num_remembered(model) == 0
    assert not hasattr(TIDEModelForCausalLM.detach(model), "_tide")


def test_warm_up_is_not_remembered():
    model = tiny_model("llama")
    attach_captured(model)
    model.tide_warm_up()
    assert num_remembered(model) == 0


def test_benchmarks_do_not_draft_from_the_run_before(monkeypatch):
    model, timed_run, held = TIDEModelForCausalLM.attach(tiny_model("llama")), benchmark.timed_run, []

    def spy(method, *args):
        held.append(num_remembered(method.model))
        return timed_run(method, *args)

    monkeypatch.setattr(benchmark, "timed_run", spy)
    benchmark.compare([DecodingMethod("ours", model)], [prompts()], max_new_tokens=NEW, repeats=2)
    assert held == [0, 0, 0]
    assert num_remembered(model) > 0


@pytest.mark.parametrize("name", ["remembered_tokens", "successors"])
@pytest.mark.parametrize("limit", [-1, 1.5, True, "many", None])
def test_limits_that_make_no_sense_are_refused(name, limit, tmp_path):
    message = rf"{name} makes no sense: got .*\. Expected a whole number of at least 0\. "
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.attach(tiny_model("llama"), **{name: limit})
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.from_pretrained(tmp_path, **{name: limit})


def test_prompts_are_remembered_as_drafters_see_them():
    """The token id of an image placeholder may lie outside the vocabulary."""
    attachment = TIDEModelForCausalLM.attach(tiny_model("llama"))._tide
    row = Row(0, torch.empty(1, 0), tokens=[5, 6, 7])
    attachment.remember([[1, 2, attachment.structure.vocab_size]], [row])
    found = attachment.answers.find([1, 2, 0, 5], 5)
    assert found == (4, (6, 7))
