"""What to know of a GPU before its times mean anything: `python -m examples.benchmarks.gpu_probe WHAT --output FILE`.

- `facts`: versions, the order in which PyTorch tries its attention kernels, bandwidth of copies and of reads.
- `smoke`: tokens of both engines against the base model's, and kernels per token, on two small models.
- `attention`: times of each kind of attention over a filled cache, for the shapes of an 8B model's steps.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, LlamaConfig

from tide_hf import TIDEModelForCausalLM
from tide_hf.evaluation.benchmark import same_start

from .common import write_record
from .gpu_lines import milliseconds, or_error
from .gpu_speed import SHAPE, SMALL, copy_bandwidth

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS, WIDTHS = (256, 1024, 4096), (1, 4, 16)
HEADS, KV_HEADS, HEAD_SIZE = 32, 8, 128  # Llama 3.1 8B
NEW_TOKENS = 16
aten = torch.ops.aten


def facts(rehearse: bool) -> dict[str, Any]:
    """Of the machine."""
    size = 2**24 if rehearse else 2**30
    order: Any = getattr(torch._C, "_get_sdp_priority_order", list)
    source = torch.ones(size // 4, device=DEVICE)
    read = milliseconds(source.sum, torch.device(DEVICE))
    heads = torch.ones(1, 1, 8, HEAD_SIZE, device=DEVICE)
    scaled_dot_product_attention(heads, heads, heads)  # the first call sets the order for this GPU
    found = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "attention_order": [int(backend) for backend in order()],
        "copy_bytes_per_s": copy_bandwidth(DEVICE, size),
        "read_bytes_per_s": 1000 * size / read,
    }
    if DEVICE == "cuda":
        properties = torch.cuda.get_device_properties(0)
        found |= {"gpu": properties.name, "multiprocessors": properties.multi_processor_count}
        found |= {"memory": properties.total_memory, "cuda": torch.version.cuda}
    return found


def smoke(rehearse: bool) -> dict[str, Any]:
    """Both engines on a small model in float32, and on two layers of an 8B model's shape in bfloat16."""
    large = SMALL if rehearse else SHAPE | {"num_hidden_layers": 2}
    models = {"small, float32": (SMALL, torch.float32), "two layers of 8B, bfloat16": (large, torch.bfloat16)}
    return {
        f"{name}, {engine}": or_error(lambda shape=shape, dtype=dtype, engine=engine: _tokens_of(shape, dtype, engine))
        for name, (shape, dtype) in models.items()
        for engine in ("eager", "compiled")
    }


def _tokens_of(shape: dict[str, Any], dtype: torch.dtype, engine: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape), dtype=dtype).eval()
    ids = torch.arange(3, 40, device=DEVICE)[None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    expected = model.generate(ids, **options)[0].tolist()
    TIDEModelForCausalLM.attach(model, engine=engine, remembered_tokens=0)
    start = perf_counter()
    tokens = model.generate(ids, **options)[0].tolist()
    found = {"equal": tokens == expected, "same_start": same_start(expected, tokens), "first_s": perf_counter() - start}
    steps = model._tide.engines["compiled"].steps.get(DEVICE)
    if engine == "compiled" and steps is not None:
        found |= {"refused": steps.refused, "steps": steps.warm_up.num_prepared}
    if DEVICE == "cuda":
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            model.generate(ids, **options)
        kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        found["kernels_per_token"] = len(kernels) / NEW_TOKENS
    return found


def attention(rehearse: bool) -> dict[str, Any]:
    """Milliseconds by slots, width of the step, and kind of attention."""
    dtype = torch.float32 if rehearse else torch.bfloat16
    return {
        f"{slots} slots, width {width}": {
            name: or_error(lambda function=function: {"ms": milliseconds(function, torch.device(DEVICE))})
            for name, function in _kinds_of_attention(slots, width, dtype).items()
        }
        for slots in (SLOTS[:1] if rehearse else SLOTS)
        for width in WIDTHS
    }


def _kinds_of_attention(slots: int, width: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Attention of `width` queries to half-filled slots: masked as in a step, or with lengths on the device."""
    group, filled = HEADS // KV_HEADS, slots // 2
    keys, values = torch.randn(2, 1, KV_HEADS, slots, HEAD_SIZE, device=DEVICE, dtype=dtype)
    queries = torch.randn(1, KV_HEADS, group * width, HEAD_SIZE, device=DEVICE, dtype=dtype)
    mask = torch.arange(slots, device=DEVICE) < filled
    mask = mask.expand(1, 1, group * width, slots).contiguous()

    def grouped(backend: SDPBackend) -> Callable[[], Any]:
        def attend() -> Any:
            with sdpa_kernel(backend):
                return scaled_dot_product_attention(queries, keys, values, attn_mask=mask)

        return attend

    lengths = torch.tensor([filled], device=DEVICE, dtype=torch.int32)
    ends = torch.tensor([0, width], device=DEVICE, dtype=torch.int32)
    slots_of = torch.tensor([0, slots], device=DEVICE, dtype=torch.int32)
    flat = queries.reshape(HEADS, width, HEAD_SIZE).transpose(0, 1).contiguous()

    def with_lengths() -> Any:
        """FlashAttention that reads the number of filled slots on the device; no mask, K/V as they are stored."""
        stored = keys[0].transpose(0, 1), values[0].transpose(0, 1)
        cumulative = (ends, slots_of, width, slots)
        return aten._flash_attention_forward(flat, *stored, *cumulative, 0.0, True, False, seqused_k=lengths)

    backends = ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "FLASH_ATTENTION", "MATH")
    return {name: grouped(getattr(SDPBackend, name)) for name in backends} | {"lengths on the device": with_lengths}


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, and write."""
    kinds = {"facts": facts, "smoke": smoke, "attention": attention}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=kinds)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rehearse", action="store_true", help="small shapes")
    options = parser.parse_args(arguments)
    write_record(kinds[options.what](options.rehearse), options.output)


if __name__ == "__main__":
    main()
