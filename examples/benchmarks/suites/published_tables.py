"""The published tables redone: the published figure, the published code on this machine, and ours.

Prefill exits and convergence are measured on the model at hand and on a random one whose number of layers is a
multiple of four, as it is in the published tables: there the published routers sit behind the last layer as well, so
that every token "exits" after all layers have run. Latency is also taken with autograd switched on for the base model
alone, as the published benchmark script does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from tide_hf import calibrate
from tide_hf.calibration.documents import Document
from tide_hf.evaluation.benchmark import DecodingMethod, same_start, timed_run
from tide_hf.evaluation.inspection import convergence_by_layer
from tide_hf.evaluation.quality import score_texts

from ..adapters import attached
from ..bench import Bench, CannotRunError
from ..common import rows_like
from ..measuring import interleaved
from ..published import PublishedModel, calibrated, engine, load_package
from ..random_models import random_llama


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        thresholds: Exit thresholds.
        samples: Texts that both systems are calibrated on.
        max_length: Tokens of a text.
        prompts: Prompts of each category, for exits and answers.
        max_new_tokens: Tokens of an answer.
        repeats: Timed runs.
        batches: Sizes of the batches.
        random_layers: Layers of the random model; 0 for none.
    """

    thresholds: Sequence[float] = (1.0, 0.85, 0.7, 0.5)
    samples: int = 2000
    max_length: int = 128
    prompts: int = 3
    max_new_tokens: int = 64
    repeats: int = 10
    batches: Sequence[int] = (1, 8)
    random_layers: int = 12


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Redo all tables."""
    texts = list(bench.texts(settings.samples, settings.max_length))
    models = [bench]
    if settings.random_layers:
        other = random_llama(settings.random_layers, 128, len(bench.tokenizer))
        models.append(Bench(other.to(bench.model.device, bench.model.dtype), bench.tokenizer, None, text=texts))
    prompts = [one["input_ids"] for found in bench.prompts(settings.prompts).values() for one in found]
    record: dict[str, Any] = {"left_out": {}}
    try:
        load_package()
    except CannotRunError as error:
        record["left_out"]["published"] = str(error)
    there = not record["left_out"]
    record["prefill_exits"] = [prefill_exits(one, prompts, settings, there) for one in models]
    record["convergence"] = [convergence(one, texts, settings, there) for one in models]
    record["prefill_latency"] = prefill_latency(bench, prompts[0], settings, there)
    record["throughput"] = {
        str(size): throughput(bench, rows_like(prompts[0], size), settings, there) for size in settings.batches
    }
    record["decode_exits"] = decode_exits(bench, prompts, settings, there)
    record["calibration"] = calibration(bench, texts, settings, there)
    return record


def prefill_exits(bench: Bench, prompts: Sequence[Tensor], settings: Settings, there: bool) -> dict[str, Any]:
    """Share of prompt tokens that leave, by threshold; of the published ones also those behind the last layer."""
    record: dict[str, Any] = {"model": bench.model.config._name_or_path, "num_layers": bench.num_layers}
    if bench.routers is not None:
        documents = [Document(prompt[0].tolist(), first=0) for prompt in prompts]
        scores = score_texts(bench.model, bench.routers, documents, batch_size=8).scores
        record["ours"] = {str(one): float((scores >= one).any(dim=1).double().mean()) for one in settings.thresholds}
    if there:
        record["published"] = {}
        for threshold in settings.thresholds:
            running = engine(bench, settings.samples, settings.max_length, threshold)
            exits: Counter[int] = Counter()
            for prompt in prompts:
                running(prompt.to(bench.model.device))
                exits.update(running.last_stats.exits_per_layer)
            total = sum(prompt.numel() for prompt in prompts)
            shares = {str(position): count / total for position, count in sorted(exits.items())}
            record["published"][str(threshold)] = {
                "exit_rate": sum(exits.values()) / total,
                "behind_the_last_layer": exits[bench.num_layers - 1] / total,
                "by_position": shares,
            }
    return record


def convergence(bench: Bench, texts: Sequence[str], settings: Settings, there: bool) -> dict[str, Any]:
    """Share of states within 0.98 of the final one, layer by layer; and where the published routers sit."""
    found = convergence_by_layer(bench.model, bench.tokenizer, texts[:50], max_length=settings.max_length)
    record: dict[str, Any] = {"model": bench.model.config._name_or_path, "num_layers": bench.num_layers}
    record["ours"] = {str(one.layer): one.converged for one in found}
    if there:
        record["published_positions"] = calibrated(bench, settings.samples, settings.max_length)["positions"]
    return record


def prefill_latency(bench: Bench, prompt: Tensor, settings: Settings, there: bool) -> dict[str, list[float]]:
    """Seconds of one pass over a prompt, all ways in turn."""
    prompt = prompt.to(bench.model.device)

    def forward(with_autograd: bool) -> Any:
        with torch.set_grad_enabled(with_autograd):
            return bench.model(prompt)

    calls = {"base model": lambda: forward(False), "base model, autograd on": lambda: forward(True)}
    if there:
        for threshold in (0.85, 0.5):
            running = engine(bench, settings.samples, settings.max_length, threshold)
            calls[f"published {threshold:g}"] = lambda running=running: running(prompt)
    if bench.routers is not None:
        options = {"max_new_tokens": 1, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
        calls["base model, generate"] = lambda: bench.model.generate(prompt, **options)
        calls["ours, generate"] = lambda: attached(bench).generate(prompt, **options)  # no prompt token exits
    return interleaved(calls, settings.repeats, prompt.device)


def throughput(bench: Bench, prompts: Tensor, settings: Settings, there: bool) -> dict[str, Any]:
    """The published meaning (prompt tokens of one pass per second), and decoding."""
    prompts = prompts.to(bench.model.device)
    forward = {"base model": torch.no_grad()(lambda: bench.model(prompts))}
    mask = torch.ones_like(prompts)
    inputs = {"input_ids": prompts, "attention_mask": mask}
    methods = [DecodingMethod("base model", bench.model)]
    if there:
        running = engine(bench, settings.samples, settings.max_length)
        forward["published 0.85"] = lambda: running(prompts)
        methods.append(DecodingMethod("published 0.85", PublishedModel(running)))
    if bench.routers is not None:
        for mode, options in {"early_exit": {"exit_threshold": 0.85}, "self_speculative": {}}.items():
            methods.append(DecodingMethod(f"ours, {mode}", attached(bench), {"tide_mode": mode, **options}))
    tokens: dict[str, list[int]] = {}

    def decode(method: DecodingMethod) -> None:
        tokens[method.name] = timed_run(method, inputs, settings.max_new_tokens).new_tokens

    calls = {one.name: lambda one=one: decode(one) for one in methods}
    repeats = max(3, settings.repeats // 3)
    decoding = interleaved(calls, repeats, prompts.device)
    return {
        "prompt_tokens": prompts.numel(),
        "forward": interleaved(forward, settings.repeats, prompts.device),
        "decode": decoding,
        "new_tokens": {name: len(found) for name, found in tokens.items()},
        "equal": {name: found == tokens["base model"] for name, found in tokens.items()},
        "same_start": {name: same_start(tokens["base model"], found) for name, found in tokens.items()},
    }


def decode_exits(bench: Bench, prompts: Sequence[Tensor], settings: Settings, there: bool) -> list[dict[str, Any]]:
    """Share of decoded tokens that leave, and what becomes of the answers, by threshold."""
    options = {"max_new_tokens": settings.max_new_tokens, "do_sample": False}
    inputs = [{"input_ids": one.to(bench.model.device), "attention_mask": torch.ones_like(one)} for one in prompts]
    plain = [_answer(bench.model.generate(**one, **options), one) for one in inputs]
    rows = [{"who": "base model", "exit_threshold": None} | _kept(plain, plain)]
    for threshold in settings.thresholds:
        if there:
            running = engine(bench, settings.samples, settings.max_length, threshold)
            answers, counts = [], []
            for one in inputs:
                answers.append(_answer(PublishedModel(running).generate(**one, **options), one))
                counts.append((running.last_stats.total_exited, running.last_stats.total_tokens))
            rate = sum(exits for exits, _ in counts) / max(1, sum(total for _, total in counts))
            rows.append({"who": "published", "exit_threshold": threshold, "exit_rate": rate} | _kept(plain, answers))
        if bench.routers is not None:
            model, answers, counts = attached(bench), [], []
            for one in inputs:
                own = {"tide_mode": "early_exit", "exit_threshold": 2.0 if threshold >= 1 else threshold}
                answers.append(_answer(model.generate(**one, **options, **own), one))
                stats = model.last_exit_stats
                counts.append((sum(stats.exits_per_layer.values()), stats.total_tokens))
            rate = sum(exits for exits, _ in counts) / sum(total for _, total in counts)
            rows.append({"who": "ours", "exit_threshold": threshold, "exit_rate": rate} | _kept(plain, answers))
    return rows


def _answer(output: Tensor, inputs: dict[str, Tensor]) -> list[int]:
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def _kept(plain: Sequence[list[int]], answers: Sequence[list[int]]) -> dict[str, Any]:
    pairs = list(zip(plain, answers, strict=True))
    return {
        "equal": sum(one == other for one, other in pairs),
        "answers": len(pairs),
        "same_start": sum(same_start(one, other) for one, other in pairs) / len(pairs),
        "unique_tokens": sum(len(set(other)) for _, other in pairs) / len(pairs),
    }


def calibration(bench: Bench, texts: Sequence[str], settings: Settings, there: bool) -> list[dict[str, Any]]:
    """Time and size of routers made from the same texts."""
    rows = []
    if there:
        facts = calibrated(bench, settings.samples, settings.max_length)
        rows.append({"who": "published", **{name: facts[name] for name in ("texts", "seconds", "bytes")}})
    start = perf_counter()
    limits = {"samples": len(texts), "max_length": settings.max_length, "progress": False}
    routers = calibrate(bench.model, bench.tokenizer, texts, **limits)
    seconds = perf_counter() - start
    routers.save_pretrained(bench.work / "ours")
    size = (bench.work / "ours" / "model.safetensors").stat().st_size
    return [*rows, {"who": "ours", "texts": len(texts), "seconds": seconds, "bytes": size}]
