"""Measuring: fair order, honest ratios, and a plain model that is really plain."""

import itertools
import json
import subprocess
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common.choices import MODES
from tide_hf.common.errors import ConfigurationError
from tide_hf.common.stats import ExitStats
from tide_hf.common.token_ids import encode_prompt
from tide_hf.depth.gates import LayerGate
from tide_hf.evaluation import benchmark
from tide_hf.evaluation.baselines import tide_methods, usable_threshold, weight_sharing_copy
from tide_hf.evaluation.benchmark import DecodingMethod
from tide_hf.hub import provenance
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


def test_runs_are_interleaved_after_one_warm_up_each(stub):
    progress = []
    methods = [stub(name, [1, 2], [1.0]) for name in "ab"]
    benchmark.compare(methods, prompts(2), max_new_tokens=2, repeats=2, progress=lambda: progress.append(1))
    assert stub.calls == [("a", 0), ("b", 0), *2 * [("a", 0), ("b", 0), ("a", 1), ("b", 1)]]
    assert len(progress) == benchmark.count_runs(2, 2, 2) == 10


def test_a_run_that_makes_an_engine_ready_is_made_again(stub):
    method = stub("a", [1, 2], [1.0])
    model, generate = method.model, method.model.generate
    spent = iter([3.0, 2.0, 0.0, 0.0, 1.5])

    def with_warm_up(*args, **kwargs):
        output = generate(*args, **kwargs)
        model.last_exit_stats.warm_up_s = next(spent, 0.0)
        return output

    model.generate = with_warm_up
    (result,) = benchmark.compare([method], prompts(2), max_new_tokens=2, repeats=1)
    assert [prompt for _, prompt in stub.calls] == [0, 0, 0, 0, 1, 1]
    assert result.to_dict()["warm_up_s"] == 6.5
    assert [len(prompt.runs) for prompt in result.prompts] == [1, 1]


def test_ratios_are_of_medians_and_leave_the_warm_up_out(stub):
    plain = stub("plain", [1, 2, 3, 4], [100.0, 2.0, 1.0, 2.0])
    fast = stub("fast", [1, 2, 3, 4], [100.0, 1.0, 0.5, 50.0])
    results = benchmark.compare([plain, fast], prompts(1), max_new_tokens=4, repeats=3)
    assert [result.tokens_per_s for result in results] == [2.0, 4.0]
    assert [result.speedup for result in results] == [1.0, 2.0]
    assert results[1].prompts[0].speedup == 2.0
    assert results[1].layers_per_token == 25 / 4
    assert results[1].acceptance_rate == 3 / 4


def test_rates_are_pooled_over_prompts_by_time(stub):
    plain = stub("plain", [1, 2], [1.0, 1.0, 3.0])
    results = benchmark.compare([plain], prompts(2), max_new_tokens=2, repeats=1)
    assert results[0].tokens_per_s == 4 / (1.0 + 3.0)


@pytest.mark.parametrize("lossless", [True, False])
def test_a_lossless_method_with_other_tokens_gets_no_speedup(stub, lossless):
    plain = stub("plain", [1, 2, 3, 4], [1.0])
    other = stub("other", [1, 2, 9, 4], [0.5], lossless=lossless)
    result = benchmark.compare([plain, other], prompts(1), max_new_tokens=4, repeats=1)[1]
    assert result.num_equal == 0
    assert result.same_start == 0.5
    assert result.speedup == (None if lossless else 2.0)
    assert result.to_dict()["speedup"] == result.speedup


@pytest.mark.parametrize(
    ("expected", "got", "share"),
    [([1, 2], [1, 2], 1.0), ([1, 2], [1, 2, 3], 1.0), ([1, 2], [1], 0.5), ([1, 2], [2, 2], 0.0), ([], [1], 1.0)],
)
def test_same_start(expected, got, share):
    assert benchmark.same_start(expected, got) == share


def test_a_weight_sharing_copy_shares_every_tensor_and_no_module(tiny_llama):
    model = tiny_llama()
    twin = weight_sharing_copy(model)
    for tensors in ("parameters", "buffers"):
        ours, theirs = (list(getattr(one, tensors)()) for one in (model, twin))
        assert [id(tensor) for tensor in ours] == [id(tensor) for tensor in theirs]
    assert not {id(module) for module in model.modules()} & {id(module) for module in twin.modules()}


def test_the_plain_method_runs_nothing_of_this_library(tiny_llama, monkeypatch):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[2])
    plain, attached = tide_methods(model, routers, ["self_speculative"])

    def refuse(*args, **kwargs):
        raise RuntimeError("a layer gate ran")

    monkeypatch.setattr(LayerGate, "__call__", refuse)
    assert plain.model is model
    assert benchmark.timed_run(plain, prompts(1)[0], 4).stats is None
    with pytest.raises(RuntimeError, match="a layer gate ran"):
        benchmark.timed_run(attached, prompts(1)[0], 4)


def test_all_modes_of_a_real_comparison(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[1, 2])
    methods = tide_methods(model, routers, MODES, exit_threshold=0.0)
    inputs = [encode_prompt(tiny_tokenizer, text) for text in ("hello", "abcabcabc")]
    results = {
        result.method.name: result for result in benchmark.compare(methods, inputs, max_new_tokens=12, repeats=2)
    }
    assert list(results) == ["generate", *MODES]
    assert results["generate"].layers_per_token is None
    assert results["self_speculative"].num_equal == 2
    assert results["self_speculative"].speedup is not None
    assert results["early_exit"].layers_per_token < 4 <= results["post_hoc"].layers_per_token
    assert results["early_exit"].speedup is not None
    json.dumps([result.to_dict() for result in results.values()])


def test_an_attached_model_is_no_plain_model(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    with pytest.raises(ConfigurationError, match="detach"):
        tide_methods(model, None, ["self_speculative"])


@pytest.mark.parametrize(
    ("calibrated", "asked", "used"),
    [(0.7, None, 0.7), (NEVER_EXIT, None, 0.9), (NEVER_EXIT, 0.4, 0.4), (0.7, 0.4, 0.4), (0.7, 1.5, 1.5)],
)
def test_threshold_of_the_approximate_modes(tiny_llama, calibrated, asked, used):
    routers = TIDERouters.for_model(tiny_llama(), exit_layers=[2], exit_threshold=calibrated)
    assert usable_threshold(routers, asked) == used
    by_name = {one.name: one for one in tide_methods(tiny_llama(), routers, MODES, exit_threshold=asked)}
    assert by_name["early_exit"].options == {"tide_mode": "early_exit", "exit_threshold": used}
    assert by_name["self_speculative"].exit_threshold is None


def test_provenance_names_what_one_needs_to_measure_again(tiny_llama, tmp_path):
    record = provenance.provenance(tiny_llama().to(torch.bfloat16))
    assert record["dtype"] == "bfloat16"
    assert record["torch_threads"] == torch.get_num_threads()
    assert record["versions"]["torch"] == torch.__version__
    json.dumps(record)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert provenance.cpu_name(cpuinfo) == "Some CPU @ 2 GHz"
    assert provenance.cpu_name(tmp_path / "none")


@pytest.mark.parametrize(("named", "told"), [("/home/me/secret/some-model", "some-model"), ("org/model", "org/model")])
def test_provenance_tells_no_place_in_the_files_of_a_machine(tiny_llama, named, told):
    model = tiny_llama()
    model.config._name_or_path = named
    assert provenance.provenance(model)["model"] == told


def test_a_commit_is_told_of_a_file_that_git_tracks_alone(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True)

    tracked, ignored = tmp_path / "app.py", tmp_path / "venv" / "provenance.py"
    ignored.parent.mkdir()
    for file in (tracked, ignored):
        file.write_text("")
    assert provenance.commit(tracked) is None  # no repository
    git("init", "-q")
    git("add", "app.py")
    assert provenance.commit(tracked) is None  # no commit
    git("commit", "-q", "-m", "somebody else's")
    assert provenance.commit(ignored) is None
    assert provenance.commit(tracked) == git("rev-parse", "HEAD").stdout.strip()


def test_an_offloaded_model_runs_where_its_tokens_go(tiny_llama):
    offloaded = cpu_offload(tiny_llama(), execution_device=torch.device("cpu"))
    assert provenance.provenance(offloaded)["device"] == "cpu"


def test_a_command_is_told_without_the_folders_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "texts.txt").write_text("")
    words = ["calibrate", "org/name", "--dataset=/home/me/chats.jsonl", "--output-dir", "../secret/routers"]
    words += ["data/texts.txt", "--seed", "1", "a prompt / or two"]
    assert provenance.command_line(words) == (
        "tide-hf calibrate org/name --dataset=chats.jsonl --output-dir routers texts.txt --seed 1 'a prompt / or two'"
    )
