"""Tables of what a run on a GPU has measured, for `report`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .common import markdown
from .gpu_speed import LLAMA

SPEED = "speed.json"
EAGER = "eager generate"
NAMES = {
    EAGER: "plain `generate`",
    "our plain decoding": '`engine="compiled"`, no drafts',
    "our scripted drafts": '`engine="compiled"`, scripted drafts',
}
BATCH = ", batch 8"
MASKED, LENGTHS = "EFFICIENT_ATTENTION", "lengths on the device"


def sections(folder: Path) -> dict[str, str]:
    """What stands between the markers, by name; `folder` has the files that the steps of `gpu` wrote."""
    facts, speed, attention, exits, kernels = (
        json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        for name in ("facts", "speed", "attention", "exits", "kernels")
    )
    model = speed["models"][LLAMA]
    return {
        "gpu-origin": origin(facts, model["provenance"], speed),
        "gpu-speed": speed_table(model["lines"]),
        "gpu-replays": replays_table(model["lines"]),
        "gpu-attention": attention_table(attention),
        "gpu-exits": exits_table(exits["models"][LLAMA]["lines"]),
        "gpu-kernels": kernels_table(kernels["results"]),
    }


def origin(facts: dict[str, Any], provenance: dict[str, Any], speed: dict[str, Any]) -> str:
    """Model, device, versions and commit, in a sentence."""
    return (
        f"{facts['gpu']}, {speed['copy_bandwidth'] / 1e12:.2f} TB/s in a copy; a random model of Llama 3.1 8B's "
        f"shape in bfloat16, {speed['options']['prompt']} tokens of prompt, {speed['options']['tokens']} new ones; "
        f"{provenance['date'][:10]}, commit {provenance['commit'][:7]}, torch {facts['torch']}, "
        f"transformers {facts['transformers']}."
    )


def speed_table(lines: dict[str, Any]) -> str:
    """Milliseconds a token, the speed-up, and the share of what the memory's bandwidth allows; one row and eight."""
    rows = []
    for suffix, rest in (("", ""), (BATCH, ", batch of 8")):
        base = lines[f"{EAGER}{suffix}"]["ms_per_token"]
        for name, shown in NAMES.items():
            line = lines.get(f"{name}{suffix}")
            if line is None:
                continue
            share = f"{line['share_of_bandwidth_limit']:.0%}" if "share_of_bandwidth_limit" in line else "-"
            accepted = f"{line['acceptance_rate']:.0%}" if "acceptance_rate" in line else "-"
            speed = base / line["ms_per_token"]
            rows.append([f"{shown}{rest}", f"{line['ms_per_token']:.2f}", f"{speed:.2f}", share, accepted])
    return markdown(["", "ms a token", "speed", "of the bandwidth's limit", "drafts accepted"], rows)


def replays_table(lines: dict[str, Any]) -> str:
    """Milliseconds of a captured verify pass by its width, and the share of what the memory's bandwidth allows."""
    replays, limit = lines["replays of steps"]["replays_ms"], lines["our plain decoding"]["limit_ms"]
    passes = {name.split(",")[0].removeprefix("verify "): found for name, found in replays.items() if "verify" in name}
    shares = (f"{limit / found:.0%}" for found in passes.values())
    rows = [["ms", *(f"{found:.2f}" for found in passes.values())], ["of the bandwidth's limit", *shares]]
    return markdown(["tokens of a pass", *passes], rows)


def attention_table(attention: dict[str, Any]) -> str:
    """Microseconds of attention over a half-filled cache, called by itself."""
    rows = [
        [where, *(f"{1000 * kinds[kind]['ms']:.0f}" for kind in (MASKED, LENGTHS))]
        for where, kinds in attention.items()
    ]
    return markdown(["", "with a mask, us", "with the number of filled slots on the device, us"], rows)


def exits_table(lines: dict[str, Any]) -> str:
    """Milliseconds a token by the depth at which all tokens exit, on the eager engine."""
    rows = [
        [
            name.removeprefix("early_exit, all leave at ").replace(EAGER, "plain `generate`"),
            f"{line['ms_per_token']:.1f}",
        ]
        for name, line in lines.items()
        if "ms_per_token" in line and BATCH not in name
    ]
    return markdown(["", "ms a token"], rows)


def kernels_table(results: list[dict[str, Any]]) -> str:
    """Microseconds of an op on the GPU alone, and as called from Python, by its size."""
    named = {"eager": "PyTorch", "torch.compile": "`torch.compile`", "torch-cuda": "Triton kernel"}
    sizes = list(dict.fromkeys(one["size"] for one in results))
    by_size = {(one["size"], one["implementation"]): one for one in results}
    rows = [
        [size, *(f"{by_size[size, name][time]:.0f}" for time in ("gpu_us", "called_us") for name in named)]
        for size in sizes
    ]
    return markdown(["", *(f"{name}, {where}" for where in ("GPU", "called") for name in named.values())], rows)
