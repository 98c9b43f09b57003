"""Time each op on a GPU: the staged variants beside eager PyTorch, torch.compile and the published router kernel.

    python hub_kernels/tide-kernels/benchmarks/benchmark.py VARIANT [VARIANT ...] [--ops OP ...] [--published FOLDER]
        [--json FILE]

A result that differs from the reference ends the run. Two times are given: as called from Python, one call after the
other, which is what decoding pays; and on the GPU alone, replayed from a CUDA graph. The share of the memory bandwidth
is that of the second, against a large copy on the same GPU; what stays in the L2 cache between calls may exceed it.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import plain
import stage

CALLS, REPEATS = 50, 9
DTYPE = torch.bfloat16
PUBLISHED_SOURCES = ("extensions/torch_bindings.cpp", "kernels/*.cu")


@dataclass
class Case:
    """One op at one size.

    Attributes:
        op: Its name.
        size: A description of the size.
        args: Its arguments.
        kwargs: Its keyword arguments.
        num_bytes: The least number of bytes that it reads and writes.
    """

    op: str
    size: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    num_bytes: int


@dataclass
class Result:
    """Times of one implementation, in microseconds."""

    op: str
    size: str
    implementation: str
    called_us: float
    gpu_us: float | None
    bandwidth_share: float | None
    speedup_over_eager: float


def cases() -> list[Case]:
    """Every op at the sizes that decoding and prompts have."""
    torch.manual_seed(0)
    found = [_route_case(rows, 4096) for rows in (1, 2, 8, 32, 64, 1024)]
    found += [_route_case(1, 576), _route_case(1, 8192)]
    keys, values = _random(8, 8, 2048, 128), _random(8, 8, 2048, 128)
    order = torch.stack([torch.randperm(2048)[:1536].sort().values for _ in range(8)]).cuda()
    found.append(Case("kv_compact", "B=8 H=8 S=2048->1536 D=128", (keys, values, order), {}, 3 * keys.nbytes))
    for rows, vocab_size in ((1, 32000), (1, 128256), (8, 128256)):
        head = _random(vocab_size, 4096) / 64
        found.append(
            Case("draft_top1", f"N={rows} V={vocab_size} D=4096", (_random(rows, 4096), head), {}, head.nbytes)
        )
    return found


def _route_case(rows: int, size: int, rank: int = 128) -> Case:
    router = [torch.randn(*shape, device="cuda") / size**0.5 for shape in ((rank, size), (rank,), (1, rank), (1,))]
    args = (_random(rows, size), _random(size), None, *router)
    return Case("norm_route", f"N={rows} D={size}", args, {"eps": 1e-5}, args[0].nbytes + router[0].nbytes)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=DTYPE)


@cache
def compiled(op: str) -> Callable[..., Any]:
    """The reference under torch.compile; cached, since it compiles for dynamic sizes once it has seen a second one."""
    return torch.compile(getattr(plain, op))


def measure(case: Case, variants: dict[str, ModuleType], published: Any, copy_bytes_per_us: float) -> list[Result]:
    """Check and time one op in every implementation."""
    calls: dict[str, Callable[..., Any]] = {
        "eager": getattr(plain, case.op),
        "torch.compile": compiled(case.op),
    }
    calls |= {name: getattr(module, case.op) for name, module in variants.items()}
    for name, module in variants.items():
        check(case, name, getattr(module, case.op))
    runs = {name: (lambda call=call: call(*case.args, **case.kwargs)) for name, call in calls.items()}
    if published is not None and case.op == "norm_route":
        states, weight, _, down, _, up, _ = case.args  # it takes no biases, and transposed weights
        prepared = weight.float(), down.t().contiguous(), up.t().contiguous()
        runs["published"] = lambda: published(states, *prepared, 1e-5)
    results = []
    for name, run in runs.items():
        called, on_gpu = time_called(run), time_on_gpu(run)
        share = case.num_bytes / on_gpu / copy_bytes_per_us if on_gpu else None
        eager_us = results[0].called_us if results else called
        results.append(Result(case.op, case.size, name, called, on_gpu, share, eager_us / called))
    return results


def check(case: Case, name: str, call: Callable[..., Any]) -> None:
    """End the run where an implementation is wrong."""
    expected = getattr(plain, case.op)(*_copied(case.args), **case.kwargs)
    got = call(*_copied(case.args), **case.kwargs)
    expected, got = (result if isinstance(result, tuple) else (result,) for result in (expected, got))
    for position, (left, right) in enumerate(zip(got, expected, strict=True)):
        if case.op == "draft_top1" and position == 0:
            agrees = float((left == right).double().mean()) >= 0.5  # in bfloat16 the reference has ties
        else:
            difference = (left.double() - right.double()).abs().max() if left.numel() else 0.0
            agrees = left.dtype == torch.bool or float(difference) <= 0.05
        if not agrees:
            raise SystemExit(f"{case.op} ({case.size}) of {name} is wrong: no times while it is")


def _copied(args: tuple[Any, ...]) -> list[Any]:
    return [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]


def time_called(run: Callable[[], Any]) -> float:
    """Median microseconds of a call, its launch included."""
    samples = []
    for _ in range(REPEATS + 2):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / CALLS * 1e6)
    return statistics.median(samples[2:])


def time_on_gpu(run: Callable[[], Any]) -> float | None:
    """Median microseconds in a CUDA graph; `None` where the op cannot be captured."""
    try:
        return triton.testing.do_bench_cudagraph(run, rep=50, return_mode="median") * 1e3
    except RuntimeError:
        return None


def copy_speed() -> float:
    """Bytes read and written per microsecond by a large copy."""
    source = torch.empty(2**29, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (triton.testing.do_bench(lambda: target.copy_(source), return_mode="median") * 1e3)


def build_published(folder: Path) -> Any:
    """Compile the router kernel of the unpacked sources of tide-inference."""
    from torch.utils.cpp_extension import load  # noqa: PLC0415 (only where it is asked for)

    sources = [str(path) for pattern in PUBLISHED_SOURCES for path in sorted((folder / "csrc").glob(pattern))]
    load("published_tide", sources, extra_cuda_cflags=["-O3", "--use_fast_math"], is_python_module=False)
    return torch.ops.tide.fused_layernorm_route


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("variants", nargs="+", type=Path, help="folders of staged variants")
    parser.add_argument("--ops", nargs="+", help="only these")
    parser.add_argument("--published", type=Path, help="unpacked sources of tide-inference")
    parser.add_argument("--json", type=Path, help="write the results there")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("This needs an NVIDIA GPU.")
    variants = {folder.name: stage.load_variant(folder) for folder in args.variants}
    published = build_published(args.published) if args.published else None
    speed = copy_speed()
    environment = {
        "gpu": torch.cuda.get_device_name(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability())),
        "copy_gb_per_s": round(speed / 1e3, 1),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "dtype": str(DTYPE),
    }
    print(json.dumps(environment))
    results = []
    for case in cases():
        if args.ops and case.op not in args.ops:
            continue
        for result in measure(case, variants, published, speed):
            results.append(result)
            gpu = "      -" if result.gpu_us is None else f"{result.gpu_us:7.1f}"
            share = "   -" if result.bandwidth_share is None else f"{result.bandwidth_share:4.0%}"
            print(
                f"{result.op:14} {result.size:28} {result.implementation:44} {result.called_us:8.1f} us called "
                f"{gpu} us on GPU {share} of bandwidth {result.speedup_over_eager:6.2f}x eager"
            )
    if args.json:
        record = {"environment": environment, "results": [asdict(result) for result in results]}
        args.json.write_text(json.dumps(record, indent=2) + "\n")
    slow = [
        result
        for result in results
        if result.op == "norm_route"
        and result.implementation in variants
        and result.size.endswith("D=4096")
        and int(result.size.split()[0].removeprefix("N=")) <= 64
    ]
    best = {size: max(r.speedup_over_eager for r in slow if r.size == size) for size in {r.size for r in slow}}
    print("norm_route, best variant, times eager:", {size: round(value, 2) for size, value in sorted(best.items())})


if __name__ == "__main__":
    main()
