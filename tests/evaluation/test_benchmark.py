"""The benchmark: order of runs, ratios, and a baseline without code of this library."""

import copy
import itertools
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tide_hf import TIDERouters
from tide_hf.common.choices import MODES
from tide_hf.common.stats import ExitStats
from tide_hf.depth.gates import LayerGate
from tide_hf.evaluation import benchmark
from tide_hf.evaluation.benchmark import DecodingMethod, tide_methods
from tide_hf.routers.config import NEVER_EXIT

PROMPT_LENGTH = 3


class Stub:
    """A model that answers with fixed tokens and takes a fixed time on a clock that only it moves."""

    def __init__(self, name, tokens, seconds, clock, calls):
        self.name, self.tokens, self.seconds, self.clock, self.calls = name, tokens, seconds, clock, calls

    def get_input_embeddings(self):
        return torch.nn.Embedding(1, 1)

    def generate(self, input_ids, max_new_tokens, do_sample, streamer):
        assert not do_sample
        self.calls.append((self.name, int(input_ids[0, 0])))
        self.clock.now += next(self.seconds)
        self.last_exit_stats = ExitStats("self_speculative", 10, 25, [[10] * len(self.tokens)], drafted=4, accepted=3)
        return torch.cat([input_ids, torch.tensor([self.tokens[:max_new_tokens]])], dim=-1)


@pytest.fixture
def stub(monkeypatch):
    """A function that makes methods of stubs; its `calls` are the calls in order."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(benchmark, "perf_counter", lambda: clock.now)

    def make(name, tokens, seconds, **options):
        return DecodingMethod(name, Stub(name, tokens, itertools.cycle(seconds), clock, make.calls), **options)

    make.calls = []
    return make


def prompts(count):
    return [{"input_ids": torch.full((1, PROMPT_LENGTH), index)} for index in range(count)]


def test_runs_are_interleaved_and_repeated_after_an_engine_s_warm_up(stub):
    method, other = stub("a", [1, 2], [1.0]), stub("b", [1, 2], [1.0])
    model, generate = method.model, method.model.generate
    spent = iter([3.0, 2.0, 0.0, 0.0, 1.5])

    def with_warm_up(*args, **kwargs):
        output = generate(*args, **kwargs)
        model.last_exit_stats.warm_up_s = next(spent, 0.0)
        return output

    model.generate = with_warm_up
    result, _ = benchmark.compare([method, other], prompts(2), max_new_tokens=2, repeats=1)
    warm_up, runs = [("a", 0), ("a", 0), ("a", 0), ("b", 0)], [("a", 0), ("b", 0), ("a", 1), ("a", 1), ("b", 1)]
    assert stub.calls == warm_up + runs
    assert result.to_dict()["warm_up_s"] == 6.5
    assert [len(prompt.runs) for prompt in result.prompts] == [1, 1]


def test_ratios_are_of_medians_and_leave_the_warm_up_out(stub):
    plain = stub("plain", [1, 2, 3, 4], [100.0, 2.0, 1.0, 2.0])
    fast = stub("fast", [1, 2, 3, 4], [100.0, 1.0, 0.5, 50.0])
    results = benchmark.compare([plain, fast], prompts(1), max_new_tokens=4, repeats=3)
    assert len(stub.calls) == benchmark.count_runs(2, 1, 3) == 8
    assert [result.tokens_per_s for result in results] == [2.0, 4.0]
    assert [result.speedup for result in results] == [1.0, 2.0]
    assert results[1].layers_per_token == 25 / 4
    assert results[1].acceptance_rate == 3 / 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_method_with_other_tokens_gets_a_speedup_beside_how_many_answers_are_equal(stub, dtype):
    plain = stub("plain", [1, 2, 3, 4], [1.0])
    other = stub("other", [1, 2, 9, 4], [0.5])
    other.model.dtype = dtype
    result = benchmark.compare([plain, other], prompts(1), max_new_tokens=4, repeats=1)[1]
    assert result.num_equal == 0
    assert result.num_as_float32 is None  # the plain model is not in half precision
    assert result.same_start == 0.5
    assert result.method.must_be_equal == (dtype is torch.float32)
    assert result.to_dict()["speedup"] == result.speedup == 2.0
    assert benchmark.same_start([1, 2], [1, 2, 3]) == benchmark.same_start([], [1]) == 1.0


def test_below_float32_answers_are_compared_with_those_of_the_weights_in_float32(tiny_llama, monkeypatch):
    model = tiny_llama(eos_token_id=None).to(torch.bfloat16)
    head = model.lm_head.weight.data
    head[1::2] = head[::2]
    head[1::2, 0] *= 1 + 2**-6  # pairs of tokens that often tie in bfloat16 and never in float32, on any CPU
    methods = tide_methods(model, None, ["self_speculative"], compute_dtype="float32")
    inputs = [{"input_ids": torch.tensor([[3, 4, 5 + one] * 4])} for one in range(4)]
    plain, ours = benchmark.compare(methods, inputs, max_new_tokens=24, repeats=1)
    exact = copy.deepcopy(model).float()
    answers = [exact.generate(**one, do_sample=False, max_new_tokens=24)[0, 12:].tolist() for one in inputs]
    own = [prompt.runs[0].new_tokens == answer for prompt, answer in zip(plain.prompts, answers, strict=True)]
    assert ours.num_as_float32 == 4
    assert plain.num_as_float32 == sum(own) < 4
    assert [prompt.to_dict()["as_float32"] for prompt in plain.prompts] == own
    monkeypatch.setattr(benchmark, "copy_if_it_fits", lambda *_: None)
    assert benchmark.compare(methods, inputs[:1], max_new_tokens=2, repeats=1)[0].num_as_float32 is None


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        ([1.0], "one run each, so speeds are unsteady"),
        ([1.0, 1.2, 0.9], "median of 3 interleaved runs"),
        ([1.0, 3.0, 1.5], "median of 3 interleaved runs (unsteady: those of a prompt differ by a factor of 3.0)"),
    ],
)
def test_the_note_says_what_a_speed_is_and_whether_it_is_steady(stub, seconds, said):
    methods = stub("plain", [1, 2], [1.0]), stub("other", [1, 2], [9.0, *seconds])
    results = benchmark.compare(methods, prompts(1), max_new_tokens=2, repeats=len(seconds))
    assert benchmark.runs_note(results) == said


def test_without_drafts_the_same_engine_gives_a_token_a_pass(tiny_llama):
    plain, drafted = tide_methods(tiny_llama(eos_token_id=None), None, ["self_speculative"])
    prompt = {"input_ids": torch.tensor([[3, 4, 5] * 4])}
    run = benchmark.timed_run(benchmark.without_drafts(drafted), prompt, 24)
    assert run.new_tokens == benchmark.timed_run(plain, prompt, 24).new_tokens
    assert (run.stats.rounds, run.stats.drafted, run.stats.engine, run.stats.dtype) == (23, 0, "eager", "float32")
    assert drafted.model._tide.answers.num_tokens == 0  # a later run with drafts has not seen the answer


def test_the_baseline_shares_the_weights_and_runs_no_code_of_this_library(tiny_llama, monkeypatch):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[2])
    plain, attached = tide_methods(model, routers, ["self_speculative"])
    for tensors in ("parameters", "buffers"):
        ours, theirs = (list(getattr(one.model, tensors)()) for one in (plain, attached))
        assert [id(tensor) for tensor in ours] == [id(tensor) for tensor in theirs]
    monkeypatch.setattr(LayerGate, "__call__", Mock(side_effect=RuntimeError("a layer gate ran")))
    assert plain.model is model
    assert benchmark.timed_run(plain, prompts(1)[0], 4).stats is None
    with pytest.raises(RuntimeError, match="a layer gate ran"):
        benchmark.timed_run(attached, prompts(1)[0], 4)


@pytest.mark.parametrize(
    ("calibrated", "asked", "used"),
    [(0.7, None, 0.7), (NEVER_EXIT, None, 0.9), (NEVER_EXIT, 0.4, 0.4), (0.7, 1.5, 1.5)],
)
def test_threshold_of_the_approximate_modes(tiny_llama, calibrated, asked, used):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[2], exit_threshold=calibrated)
    by_name = {one.name: one for one in tide_methods(model, routers, MODES, exit_threshold=asked)}
    assert by_name["early_exit"].options == {"tide_mode": "early_exit", "exit_threshold": used}
    assert by_name["self_speculative"].exit_threshold is None
