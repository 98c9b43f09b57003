"""The tables of the suite `published`: the published figure, the published code here, ours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from statistics import median
from typing import Any

from ..checks import FULL_PRECISION, Check
from ..common import FOLDER, markdown
from ..measuring import in_words, median_ms, paired_speedups

PUBLISHED = json.loads((FOLDER / "published.json").read_text(encoding="utf-8"))
NAMES = {"published": "published code, here", "ours": "ours, here"}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    return {
        "prefill_exits": _prefill_exits(record),
        "prefill_latency": _prefill_latency(record),
        "throughput": _throughput(record),
        "decode_exits": _decode_exits(record),
        "convergence": _convergence(record),
        "calibration": _calibration(record),
    }


def _reported(name: str, blanks: int) -> list[list[str]]:
    return [[f"published: {row['model']}", row["value"], *["-"] * blanks] for row in PUBLISHED[name]]


def _prefill_exits(record: dict[str, Any]) -> str:
    rows = _reported("prefill_exits", 1)
    for model in record["prefill_exits"]:
        where = f"{model['model']} ({model['num_layers']} layers)"
        for threshold, found in model.get("published", {}).items():
            earlier = found["exit_rate"] - found["behind_the_last_layer"]
            name = f"{NAMES['published']}: {where}, {threshold}"
            rows.append([name, f"{found['exit_rate']:.1%}", f"{earlier:.1%}"])
        for threshold, share in model.get("ours", {}).items():
            rows.append([f"{NAMES['ours']}: {where}, {threshold}", f"{share:.1%}", f"{share:.1%}"])
    return markdown(["threshold last", "exit rate", "of them before the last layer"], [*rows, *_left_out(record, 2)])


def _prefill_latency(record: dict[str, Any]) -> str:
    found = record["prefill_latency"]
    rows = _reported("prefill_latency", 1)
    for name, seconds in found.items():
        base = found["base model, generate" if name.endswith("generate") else "base model"]
        rows.append([f"here: {name}", f"{median_ms(seconds)} ms", in_words(paired_speedups(base, seconds))])
    return markdown(["", "median", "against the base model"], [*rows, *_left_out(record, 2)])


def _throughput(record: dict[str, Any]) -> str:
    rows = _reported("throughput", 2)
    for size, found in record["throughput"].items():
        for kind, tokens in (("forward", None), ("decode", found["new_tokens"])):
            for name, seconds in found[kind].items():
                count = found["prompt_tokens"] if tokens is None else tokens[name]
                what = "prompt pass" if kind == "forward" else "decoding"
                rate = f"{count / median(seconds):.0f} tokens/s"
                base = found["prompt_tokens"] if tokens is None else tokens["base model"]
                ratios = [count / base * one for one in paired_speedups(found[kind]["base model"], seconds)]
                kept = "-" if kind == "forward" else f"{found['same_start'][name]:.0%}"
                rows.append([f"here, batch {size}, {what}: {name}", rate, in_words(ratios), kept])
    return markdown(["", "rate", "against the base model", "same start"], [*rows, *_left_out(record, 3)])


def _decode_exits(record: dict[str, Any]) -> str:
    rows = [[f"published, {row['exit_threshold']:g}", row["value"], "-", "-"] for row in PUBLISHED["decode_exits"]]
    for row in record["decode_exits"]:
        threshold = "" if row["exit_threshold"] is None else f", {row['exit_threshold']:g}"
        exits = "0%" if row["exit_threshold"] is None else f"{row['exit_rate']:.1%}"
        said = f"{exits}, {row['unique_tokens']:.0f} unique tokens"
        equal = f"{row['equal']}/{row['answers']}"
        rows.append([f"{NAMES.get(row['who'], row['who'])}{threshold}", said, equal, f"{row['same_start']:.0%}"])
    return markdown(["threshold", "exit rate", "answers equal", "same start"], [*rows, *_left_out(record, 3)])


def _convergence(record: dict[str, Any]) -> str:
    rows = _reported("convergence", 1)
    for model in record["convergence"]:
        shares = {int(layer): share for layer, share in model["ours"].items()}
        last = model["num_layers"]
        reached = next((layer for layer, share in sorted(shares.items()) if share > 0), None)
        said = "0% before the last layer" if reached is None else f"first above 0% after {reached} of {last} layers"
        positions = model.get("published_positions")
        routers = "-" if positions is None else ", ".join(map(str, positions))
        if positions is not None and last - 1 in positions:
            routers += " (the last is the last layer)"
        rows.append([f"here: {model['model']} ({last} layers)", said, routers])
    return markdown(["", "states within 0.98 of the final one", "published routers behind layers (from 0)"], rows)


def _calibration(record: dict[str, Any]) -> str:
    rows = _reported("calibration", 2)
    for row in record["calibration"]:
        size = f"{row['bytes'] / 1e6:.1f} MB"
        rows.append([NAMES[row["who"]], f"{row['texts']} texts", f"{row['seconds']:.0f} s", size])
    return markdown(["", "texts", "time", "size"], [*rows, *_left_out(record, 3)])


def _left_out(record: dict[str, Any], columns: int) -> Sequence[list[str]]:
    return [[NAMES["published"], why, *["-"] * (columns - 1)] for why in record["left_out"].values()]


def checks(record: dict[str, Any]) -> list[Check]:
    """Ours, where it claims the base model's tokens, has them; a speed of something else is none."""
    if record["dtype"] not in FULL_PRECISION:
        return []
    return [
        Check(f"published tables, batch {size}: self_speculative gives the tokens of generate", found["equal"][name])
        for size, found in record["throughput"].items()
        for name in found["equal"]
        if name in ("base model", "ours, self_speculative")
    ]
