"""Another engine as a process: `python peer_worker.py ENGINE MODEL WEIGHTS THREADS`, in that engine's environment.

Its first line on standard output is a JSON object of versions. Then it reads a line `[token ids, new tokens]` at a time
and answers with a line of new token ids. No K/V are kept from one prompt to the next, since a benchmark repeats them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

Answer = Callable[[list[int], int], list[int]]


def openvino(model: str, weights: str, threads: int) -> Answer:
    """OpenVINO GenAI, computing in float32, on a model that optimum-intel exports."""
    import numpy  # noqa: PLC0415
    import openvino_genai  # noqa: PLC0415
    from openvino import Tensor  # noqa: PLC0415

    export = [Path(sys.executable).with_name("optimum-cli"), "export", "openvino", "--model", model]
    export += ["--task", "text-generation-with-past", "--weight-format", "fp32" if weights == "float32" else weights]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*export, folder], check=True, stdout=sys.stderr)
        scheduling = openvino_genai.SchedulerConfig()
        scheduling.enable_prefix_caching = False
        options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32"}
        pipeline = openvino_genai.LLMPipeline(folder, "CPU", scheduler_config=scheduling, **options)
    config = pipeline.get_generation_config()
    config.do_sample = False

    def answer(ids: list[int], new_tokens: int) -> list[int]:
        config.max_new_tokens = new_tokens
        return list(pipeline.generate(Tensor(numpy.array([ids])), config).tokens[0])

    return answer


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


ENGINES = {"openvino": (openvino, "openvino-genai"), "vllm": (vllm, "vllm-cpu")}


def main() -> None:
    """Start the engine that the arguments name, and answer until standard input ends."""
    name, model, weights, threads = sys.argv[1:]
    channel = os.fdopen(os.dup(1), "w")  # engines print; what they print goes to standard error
    os.dup2(2, 1)
    start, package = ENGINES[name]
    answer = start(model, weights, int(threads))
    print(json.dumps({package: metadata.version(package)}), file=channel, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(*json.loads(line))), file=channel, flush=True)


if __name__ == "__main__":
    main()
