"""The cost of nothing, and how costs grow: exits off, memory, attaching, long prompts, long answers, batches, depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.evaluation.benchmark import DecodingMethod, compare, usable_threshold, weight_sharing_copy
from tide_hf.routers.config import NEVER_EXIT

from ..adapters import attached
from ..bench import Bench
from ..checks import Check, checks_of_results
from ..common import markdown, rows_like
from ..measuring import in_words, median_ms, records_of, result_speedups
from ..random_models import random_llama, random_routers

OFF = {"tide_mode": "early_exit", "exit_threshold": NEVER_EXIT}


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        prompts: Prompts of each category for the overhead with exits off.
        max_new_tokens: Tokens of an answer, where its length is not what varies.
        repeats: Timed runs.
        prompt_lengths: Tokens of a prompt.
        output_lengths: Tokens of an answer.
        batches: Rows.
        num_exit_layers: Numbers of exit layers, none of which lets a token leave.
        depths: Layers of random models.
        hidden_size: Width of the random models.
        vocab_size: Of the random models.
    """

    prompts: int = 2
    max_new_tokens: int = 32
    repeats: int = 5
    prompt_lengths: Sequence[int] = (128, 512, 2048, 8192)
    output_lengths: Sequence[int] = (16, 64, 256)
    batches: Sequence[int] = (1, 4, 8)
    num_exit_layers: Sequence[int] = (1, 4, 8, 16)
    depths: Sequence[int] = (8, 20, 40, 80)
    hidden_size: int = 256
    vocab_size: int = 4096


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Measure all of it."""
    limits = {"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats}
    prompts = [one for found in bench.prompts(settings.prompts).values() for one in found]
    ways = methods(bench)
    record: dict[str, Any] = {"memory": memory(bench), "times_s": times(bench, settings.repeats)}
    record["exits_off"] = records_of(compare(exits_off(bench), prompts, **limits))
    scaling: dict[str, dict[str, list[dict[str, Any]]]] = {}
    scaling["tokens of the prompt"] = {
        str(length): records_of(compare(ways, [bench.long_prompt(length, settings.max_new_tokens)], **limits))
        for length in settings.prompt_lengths
    }
    scaling["tokens of the answer"] = {
        str(length): records_of(compare(ways, prompts[:1], max_new_tokens=length, repeats=settings.repeats))
        for length in settings.output_lengths
    }
    scaling["rows"] = {
        str(rows): records_of(compare(ways, [side_by_side(prompts[0], rows)], **limits)) for rows in settings.batches
    }
    scaling["exit layers, exits off"] = by_exit_layers(bench, prompts[0], settings)
    scaling["layers of a random model"] = by_depth(settings, bench.model.device)
    return record | {"scaling": scaling}


def methods(bench: Bench) -> list[DecodingMethod]:
    """Plain decoding, and ours in the two modes that are meant to be fast."""
    found = [DecodingMethod("generate", bench.model)]
    if bench.routers is None:
        copy = TIDEModelForCausalLM.attach(weight_sharing_copy(bench.model))
        return [*found, DecodingMethod("self_speculative, n-grams only", copy)]
    threshold = usable_threshold(bench.routers, None)
    options = {"tide_mode": "early_exit", "exit_threshold": threshold}
    model = attached(bench)
    found.append(DecodingMethod("self_speculative", model, {"tide_mode": "self_speculative"}))
    return [*found, DecodingMethod("early_exit", model, options, lossless=False, exit_threshold=threshold)]


def exits_off(bench: Bench) -> list[DecodingMethod]:
    """Plain decoding, and ours where nothing can leave or be drafted, so that only the machinery costs."""
    found = [DecodingMethod("generate", bench.model)]
    if bench.routers is None:
        return found
    found.append(DecodingMethod("early_exit, exits off", attached(bench), OFF))
    return [*found, DecodingMethod("post_hoc, exits off", attached(bench), OFF | {"tide_mode": "post_hoc"})]


def memory(bench: Bench) -> dict[str, int]:
    """Bytes of the model's and the routers' weights."""
    found = {"model": _bytes(bench.model)}
    if bench.routers is not None:
        found["routers"] = _bytes(bench.routers)
    return found


def _bytes(module: torch.nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in module.parameters())


def times(bench: Bench, repeats: int) -> dict[str, list[float]]:
    """Seconds of attaching, detaching and reading routers."""
    found: dict[str, list[float]] = {"attach": [], "detach": []}
    copy = weight_sharing_copy(bench.model)
    for _ in range(repeats):
        found["attach"].append(_seconds(lambda: TIDEModelForCausalLM.attach(copy, bench.routers)))
        found["detach"].append(_seconds(lambda: TIDEModelForCausalLM.detach(copy)))
    if bench.routers is not None:
        bench.routers.save_pretrained(bench.work / "routers")
        found["read routers"] = [
            _seconds(lambda: TIDERouters.from_pretrained(bench.work / "routers")) for _ in range(repeats)
        ]
    return found


def _seconds(call: Any) -> float:
    start = perf_counter()
    call()
    return perf_counter() - start


def side_by_side(inputs: dict[str, Tensor], rows: int) -> dict[str, Tensor]:
    """A batch of prompts of one length."""
    ids = rows_like(inputs["input_ids"], rows)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def by_exit_layers(bench: Bench, inputs: dict[str, Tensor], settings: Settings) -> dict[str, list[dict[str, Any]]]:
    """What routers cost that let nothing leave."""
    found = {}
    for count in settings.num_exit_layers:
        if count >= bench.num_layers:
            continue
        layers = sorted({round((i + 1) * bench.num_layers / (count + 1)) for i in range(count)})
        model = TIDEModelForCausalLM.attach(
            weight_sharing_copy(bench.model), random_routers(bench.model, layers), mode="early_exit"
        )
        ways = [DecodingMethod("generate", bench.model), DecodingMethod("early_exit, exits off", model, OFF)]
        limits = {"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats}
        found[str(len(layers))] = records_of(compare(ways, [inputs], **limits))
    return found


def by_depth(settings: Settings, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """Random models of many depths: exits off, and every token leaving half-way."""
    found = {}
    for depth in settings.depths:
        model = random_llama(depth, settings.hidden_size, settings.vocab_size).to(device)
        routers = random_routers(model, [depth // 2])
        copy = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers, mode="early_exit")
        leaving = {"tide_mode": "early_exit", "exit_criterion": "fixed", "exit_threshold": 1.0}
        ways = [
            DecodingMethod("generate", model),
            DecodingMethod("early_exit, exits off", copy, OFF),
            DecodingMethod("all tokens leave half-way", copy, leaving, lossless=False),
        ]
        ids = torch.randint(settings.vocab_size, (1, 64), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        limits = {"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats}
        found[str(depth)] = records_of(compare(ways, [inputs], **limits))
    return found


def tables(record: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    plain = record["exits_off"][0]
    rows = [
        [one["name"], in_words(result_speedups(plain, one)), f"{one['num_equal']}/{len(one['prompts'])}"]
        for one in record["exits_off"]
    ]
    found = {"exits_off": markdown(["", "speed against generate", "answers equal"], rows)}
    rows = [
        [f"weights: {name}", f"{record['memory'][name] / 1e6:.1f} MB"]
        for name in ("model", "routers")
        if name in record["memory"]
    ]
    rows += [[f"time: {name}", f"{median_ms(seconds)} ms"] for name, seconds in record["times_s"].items()]
    found["memory"] = markdown(["", ""], rows)
    found["scaling"] = _scaling(record)
    return found


def _scaling(record: dict[str, Any]) -> str:
    """One row for each way and what varies; the columns are small, middle and large values of it."""
    rows = []
    for what, parts in record["scaling"].items():
        names = list(dict.fromkeys(one["name"] for results in parts.values() for one in results))
        for name in names[1:]:
            cells = [f"{x}: {_ratio(results, name, record['dtype'])}" for x, results in parts.items()]
            rows.append([what, name, ", ".join(cells)])
    return markdown(["what varies", "", "speed against generate, by its value"], rows)


def _ratio(results: list[dict[str, Any]], name: str, dtype: str) -> str:
    one = next(one for one in results if one["name"] == name)
    if any(not check.passed for check in checks_of_results("", [one], dtype)):
        return "differs"
    return in_words(result_speedups(results[0], one)).partition(" ")[0]


def checks(record: dict[str, Any]) -> list[Check]:
    """The token checks that a report relies on."""
    parts = {"exits off": record["exits_off"]}
    parts |= {f"{what}, {x}": part for what, found in record["scaling"].items() for x, part in found.items()}
    return [check for part, results in parts.items() for check in checks_of_results(part, results, record["dtype"])]
