"""Another engine as a process: `python peer_worker.py ENGINE MODEL WEIGHTS THREADS [MORE]`, in its own environment.

MORE is what the engine drafts or is calibrated with; its function below says what that is. The first line on standard
output is a JSON object of versions. Then the process reads a line `[token ids, new tokens]` at a time and answers with
a line of new token ids. No K/V are kept from one prompt to the next, since a benchmark repeats them.
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
LOOKUP_TOKENS, LOOKUP_NGRAM = 5, 3  # of a draft, and of what is looked up; OpenVINO's samples and economize have these
HEAD_TOKENS = 3  # of a draft: economize's default
LAYERS = "eagle_aux_hidden_state_layer_ids"
SEED = 0


def openvino(model: str, weights: str, threads: int, drafts: str | None = None) -> Answer:
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

    return answer


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


def vllm(model: str, weights: str, threads: int) -> Answer:
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

    return answer


def economize(model: str, weights: str, threads: int, head: str | None = None) -> Answer:
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

    return answer


def tide_inference(model: str, weights: str, threads: int, texts: str) -> Answer:
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

    return answer


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
    "tide-inference": (tide_inference, "tide-inference"),
}


def main() -> None:
    """Start the engine that the arguments name, and answer until standard input ends."""
    name, model, weights, threads, *more = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w")  # engines print; what they print goes to standard error
    os.dup2(2, 1)
    start, package = ENGINES[name]
    answer = start(model, weights, int(threads), *more)
    print(json.dumps({package: metadata.version(package)}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
