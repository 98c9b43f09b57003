"""Decode speed against plain ``generate`` and what else there is, in the same run on the same prompts.

All methods share weights, prompts, dtype, threads and process; their runs are interleaved prompt by prompt; tokens
are compared in the runs that are timed. Parts: one prompt at a time by category, batches, time to the first token, and
sampling at temperature 1.5, where nothing can be drafted and only the overhead shows. Decoding stands apart from the
prompt where each prompt is answered with one token as well; the memory is then read in turn with the prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import track

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError
from tide_hf.evaluation.benchmark import DecodingMethod, Result, compare

from ..adapters import PEER_NAMES, WAYS, make_methods
from ..bench import Bench
from ..checks import Check, checks_of_results
from ..common import markdown, precision, read_prompts
from ..measuring import MemoryReads, bytes_read, in_words, records_of, result_speedups
from ..peers import PeerModel

SUMMARY = {
    "generate": "plain `generate`",
    "prompt_lookup_num_tokens=10": "transformers' prompt lookup",
    "generate, static cache, compiled": "transformers' static cache, compiled",
    "the published TIDE, float32": "`tide-inference`, the published TIDE",
    "economize, prompt lookup, float32": "economize, prompt lookup",
    "economize, our draft head, float32": "economize with our draft head",
    "vLLM, float32": "vLLM",
    "OpenVINO GenAI, float32": "OpenVINO GenAI",
    "OpenVINO GenAI, fp16": "OpenVINO GenAI, weights in fp16",
    "OpenVINO GenAI, prompt lookup, float32": "OpenVINO GenAI, prompt lookup",
    "OpenVINO GenAI, our draft head, float32": "OpenVINO GenAI with our draft head",
    "OpenVINO GenAI, int8": "OpenVINO GenAI, its own int8 weights",
    "ONNX Runtime GenAI, float32": "ONNX Runtime GenAI",
    "ONNX Runtime GenAI, int8": "ONNX Runtime GenAI, its own int8 weights",
    "ONNX Runtime GenAI, int4": "ONNX Runtime GenAI, its own int4 weights",
    "llama.cpp, BF16": "llama.cpp, BF16",
    "llama.cpp, Q8_0": "llama.cpp, Q8_0",
    "llama.cpp, the 4-bit file": "llama.cpp, the 4-bit file that the weights come from",
    "no drafts": "with tide_hf, no drafts: the engine alone",
    "self_speculative, no kernels": "with tide_hf, without a C++ compiler",
    "self_speculative": "with tide_hf",
    "self_speculative, warmed up": "with tide_hf, after `model.tide_warm_up()`",  # in results of earlier versions
    "no drafts, compiled": 'with tide_hf, `engine="compiled"`, no drafts: the engine alone',
    "self_speculative, n-grams only, compiled": 'with tide_hf, `engine="compiled"`, drafts from n-grams alone',
    "self_speculative, compiled": 'with tide_hf, `engine="compiled"`',
}
AS_FLOAT32 = "equal to float32's"
LOSSLESS = ("generate", "prompt_lookup", "ngrams", "heads", "no_kernels", "self_speculative")


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes:
        ways: Names in `adapters.WAYS`, "generate" first.
        slow_ways: Ways so slow that they get one prompt of each category, once.
        max_new_tokens: Tokens of an answer.
        repeats: Timed runs.
        prompts: Of each category.
        categories: Of prompts; empty for all.
        batches: Sizes of the batches, one batch of each.
        first_token: Whether to time the first token.
        decode_apart: Whether to time it behind each prompt of each category, and to read the memory in turn.
        read_mb: Size of the buffer that is read then.
        prompt_lengths: Tokens of longer prompts, behind which it is timed as well.
        temperature: Of all parts; 0 is greedy. Single answers have the draws of plain `generate`, batches have not.
        sampling_repeats: Runs at temperature 1.5, times `repeats`; 0 for none.
        published_samples: Texts that the published system is calibrated on.
        published_length: Tokens of each.
    """

    ways: Sequence[str] = LOSSLESS
    slow_ways: Sequence[str] = ("assistant_early_exit",)
    max_new_tokens: int = 48
    repeats: int = 3
    prompts: int = 6
    categories: Sequence[str] = ()
    batches: Sequence[int] = (8,)
    first_token: bool = True
    decode_apart: bool = False
    read_mb: int = 512
    prompt_lengths: Sequence[int] = ()
    temperature: float = 0.0
    sampling_repeats: int = 3  # a few percent are looked for
    published_samples: int = 200
    published_length: int = 128

    def __post_init__(self) -> None:
        """Refuse categories that there are not."""
        known = read_prompts()
        if unknown := sorted(set(self.categories) - set(known)):
            raise ConfigurationError(
                "the config names categories that no prompt has",
                got=", ".join(unknown),
                expected=", ".join(known),
                do="Correct the config.",
            )


def run(bench: Bench, settings: Settings) -> dict[str, Any]:
    """Measure all parts."""
    bench.published_samples, bench.published_length = settings.published_samples, settings.published_length
    made, left_out = make_methods(bench, settings.ways)
    slow, slow_left_out = make_methods(bench, settings.slow_ways)
    if settings.temperature:
        made, slow = (
            {name: sampling(one, settings.temperature) for name, one in ways.items()} for ways in (made, slow)
        )
    record: dict[str, Any] = {"left_out": left_out | slow_left_out}
    record["categories"], memory = by_category(list(made.values()), list(slow.values()), bench, settings)
    if settings.decode_apart:
        bytes_read = {method.name: bytes_of(method.model) for method in made.values()}
        record["apart"] = {"bytes": bytes_read, "num_layers": bench.num_layers, "memory": memory}
    record["batches"] = {}
    for size in settings.batches:
        together = [method for name, method in made.items() if WAYS[name].batches]
        record["batches"][str(size)] = in_a_batch(together, bench.tokenizer, size, settings)
    if settings.first_token:
        firsts = [prompts[0] for prompts in bench.prompts(1).values()]
        record["first_token"] = to_first_token(list(made.values()), firsts, settings)
    if settings.prompt_lengths:
        record["prompt_lengths"] = {
            str(prompt["input_ids"].shape[1]): to_first_token(list(made.values()), [prompt], settings)
            for prompt in (bench.long_prompt(length, 1) for length in settings.prompt_lengths)
        }
    if settings.sampling_repeats and "self_speculative" in made:
        record["sampling"] = without_drafts(made["generate"], made["self_speculative"], bench, settings)
    return record


def sampling(method: DecodingMethod, temperature: float, **more: Any) -> DecodingMethod:
    """The same way of decoding, by sampling."""
    return replace(method, options=method.options | {"do_sample": True, "temperature": temperature, **more})


def by_category(
    methods: list[DecodingMethod], slow: list[DecodingMethod], bench: Bench, settings: Settings
) -> tuple[dict[str, Any], dict[str, Any]]:
    """One prompt at a time; and what was found of the memory in between."""
    prompts, categories = bench.prompts(settings.prompts), {}
    memory = MemoryReads(settings.read_mb, bench.model.device) if settings.decode_apart else None
    for category in track(settings.categories or list(prompts), description="Measuring", console=Console(stderr=True)):
        inputs = prompts[category]
        if memory is not None:
            memory.read()
        results = compare(methods, inputs, max_new_tokens=settings.max_new_tokens, repeats=settings.repeats)
        if slow:
            one = compare([methods[0], *slow], inputs[:1], max_new_tokens=settings.max_new_tokens, repeats=1)
            results += one[1:]
        categories[category] = records_of(results)
        if memory is not None:
            memory.read()
            firsts = compare(methods, inputs, max_new_tokens=1, repeats=settings.repeats)
            add_first_tokens(categories[category], firsts)
    return categories, memory.to_dict() if memory is not None else {}


def add_first_tokens(records: list[dict[str, Any]], firsts: list[Result]) -> None:
    """Add to each prompt's record the median seconds of its first token."""
    for record, first in zip(records, firsts, strict=False):  # slow ways are behind those that have one
        for prompt, one in zip(record["prompts"], first.prompts, strict=True):
            prompt["first_token_s"] = median(run.seconds for run in one.runs)


def in_a_batch(methods: list[DecodingMethod], tokenizer: Any, size: int, settings: Settings) -> list[dict[str, Any]]:
    """Prompts of different lengths and kinds at once."""
    mixed = [text for column in zip(*read_prompts().values(), strict=False) for text in column]
    chats = [[{"role": "user", "content": text}] for text in (mixed * size)[:size]]
    templated = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(templated, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    limits = {"max_new_tokens": settings.max_new_tokens, "repeats": settings.repeats}
    return records_of(compare(methods, [inputs], **limits))


def to_first_token(methods: list[DecodingMethod], inputs: list[dict[str, Any]], settings: Settings) -> list[dict]:
    """Answers of one token."""
    return records_of(compare(methods, inputs, max_new_tokens=1, repeats=max(3, settings.repeats)))


def first_token_table(record: dict[str, Any]) -> str:
    """How much sooner the first token comes, by the prompt's length."""
    parts = record["prompt_lengths"]
    rows = [
        [name, *(_mean(_prompts_of(name, results), record["dtype"]) for results in parts.values())]
        for name in _names(parts, lossless=True)
    ]
    return markdown(["first token behind", *(f"{length} tokens" for length in parts)], rows)


def without_drafts(
    plain: DecodingMethod, ours: DecodingMethod, bench: Bench, settings: Settings
) -> list[dict[str, Any]]:
    """Random text: what the loop costs when it never drafts."""
    chosen = [sampling(one, 1.5, top_k=0) for one in (plain, ours)]
    inputs = [prompts[0] for prompts in bench.prompts(1).values()]
    repeats = settings.sampling_repeats * settings.repeats
    return records_of(compare(chosen, inputs, max_new_tokens=settings.max_new_tokens, repeats=repeats))


def table(record: dict[str, Any]) -> str:
    """Means of per-prompt ratios to plain decoding, and how many answers were equal; the lossless ways, and peers."""
    others = {f"batch of {size}": results for size, results in record["batches"].items()}
    others |= {"temperature 1.5": record["sampling"]} if "sampling" in record else {}
    parts = record["categories"] | others
    rows = []
    for name in _names(parts, lossless=True, peers=True):
        claims = None if name in PEER_NAMES else record["dtype"]
        cells, everything = {}, []
        for part, results in parts.items():
            prompts = _prompts_of(name, results)
            cells[part] = _mean(prompts, claims)
            everything += prompts if part in record["categories"] else []
        equal = _counts(everything)
        own = [cells[part] for part in record["categories"]]
        rows.append([name, *own, _mean(everything, claims), *equal, *(cells[part] for part in others)])
    headings = ["equal", AS_FLOAT32][: len(equal)]
    return markdown(["", *record["categories"], "mean", *headings, *others], rows)


def _counts(prompts: list[dict[str, Any]]) -> list[str]:
    """How many answers are plain decoding's; below float32, also how many those of the weights loaded in float32."""
    counts = [sum(prompt["equal"] for prompt in prompts)]
    if prompts and all(prompt.get("as_float32") is not None for prompt in prompts):
        counts.append(sum(prompt["as_float32"] for prompt in prompts))
    return [f"{count}/{len(prompts)}" for count in counts]


def summary_table(record: dict[str, Any]) -> str:
    """The means of a few ways, in words of their own."""
    rows = []
    for name, words in SUMMARY.items():
        found = [one for results in record["categories"].values() for one in results if one["name"] == name]
        prompts = [prompt for one in found for prompt in one["prompts"]]
        if prompts:
            claims = record["dtype"] if found[0].get("lossless", True) else None
            cells = [_mean(prompts, claims), *_counts(prompts)]
            is_ours = words.startswith("with tide_hf")
            rows.append([f"**{cell}**" if is_ours else cell for cell in [words, *cells]])
    threads = f"{record['torch_threads']} CPU threads" if record["device"] == "cpu" else record["device"]
    model = record["model"].rpartition("/")[2]
    headings = [f"{model}, {precision(record)}, {threads}", "speed", "answers equal", AS_FLOAT32]
    return markdown(headings[: len(rows[0])] if rows else headings[:3], rows)


def bytes_of(model: Any) -> int | None:
    """Bytes of weights that a token without drafts reads; `None` if nobody knows."""
    if isinstance(model, PeerModel):
        return model.bytes_read
    return bytes_read(model) if isinstance(model, TIDEModelForCausalLM) else None


def apart_table(record: dict[str, Any]) -> str:
    """Whole calls and decoding alone, in tokens/s, with the bytes of weights that a token reads and the memory's share.

    A pass over drafts gives several tokens, and each has read a part of its bytes. What draft heads read is left out.
    """
    apart, rows = record["apart"], []
    memory = apart["memory"]["bytes"] / median(apart["memory"]["seconds"])
    for name in dict.fromkeys(one["name"] for results in record["categories"].values() for one in results):
        found = [one for results in record["categories"].values() for one in results if one["name"] == name]
        prompts = [prompt for one in found for prompt in one["prompts"]]
        if not all("first_token_s" in prompt for prompt in prompts):
            continue
        tokens, seconds = sum(one["num_new_tokens"] for one in prompts), sum(median(one["seconds"]) for one in prompts)
        firsts = [prompt["first_token_s"] for prompt in prompts]
        rate = (tokens - len(prompts)) / (seconds - sum(firsts))
        cells = [f"{tokens / seconds:.1f}", f"{rate:.1f}", f"{1000 * mean(firsts):.0f}"]
        read = apart["bytes"].get(name)
        if read is not None:
            read *= _passes_per_token(found, apart["num_layers"])
            cells += [f"{read / 1e6:.0f}", f"{read * rate / 1e9:.1f}", f"{read * rate / memory:.2f}"]
        equal = _counts(prompts)
        rows.append([name, *cells, *["-"] * (6 - len(cells)), *equal])
    counts = ["equal", AS_FLOAT32][: len(equal)]
    rows.append(["reading the memory", "-", "-", "-", "-", f"{memory / 1e9:.1f}", "1.00", *["-"] * len(counts)])
    headings = ["", "whole call, tokens/s", "decoding, tokens/s", "first token, ms", "MB a token", "GB/s"]
    return markdown([*headings, "of the read speed", *counts], rows)


def _passes_per_token(results: list[dict[str, Any]], num_layers: int) -> float:
    """Full passes for each token behind the first, over results of one way; 1 for what executes no counted layers."""
    prompts = [prompt for one in results for prompt in one["prompts"]]
    if any(one["layers_per_token"] is None for one in results):
        return 1.0
    tokens = sum(prompt["num_new_tokens"] for prompt in prompts)
    layers = sum(
        one["layers_per_token"] * sum(prompt["num_new_tokens"] for prompt in one["prompts"]) for one in results
    )
    return (layers / num_layers - len(prompts)) / (tokens - len(prompts))


def _names(parts: dict[str, list[dict[str, Any]]], lossless: bool, peers: bool = False) -> list[str]:
    results = [result for results in parts.values() for result in results]
    wanted = [one for one in results if one.get("lossless", True) == lossless or (peers and one["name"] in PEER_NAMES)]
    return list(dict.fromkeys(one["name"] for one in wanted))


def _prompts_of(name: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return next((result["prompts"] for result in results if result["name"] == name), [])


def _mean(prompts: list[dict[str, Any]], dtype: str | None) -> str:
    if not prompts:
        return "-"
    if dtype == "float32" and not all(prompt["equal"] for prompt in prompts):
        return "differs"  # no speed for other tokens, where rounding does not explain them
    return f"{mean(prompt['speedup'] for prompt in prompts):.2f}"


def approximate_table(record: dict[str, Any]) -> str:
    """The ways that do not claim the base model's tokens, with how much of its answers they keep."""
    rows = []
    for name in _names(record["categories"], lossless=False):
        prompts = [
            prompt
            for results in record["categories"].values()
            for result in results
            if result["name"] == name
            for prompt in result["prompts"]
        ]
        layers = [
            result["layers_per_token"]
            for results in record["categories"].values()
            for result in results
            if result["name"] == name and result["layers_per_token"] is not None
        ]
        equal = f"{sum(prompt['equal'] for prompt in prompts)}/{len(prompts)}"
        cells = [f"{mean(prompt['speedup'] for prompt in prompts):.2f}", equal]
        cells += [f"{mean(prompt['same_start'] for prompt in prompts):.0%}", f"{mean(layers):.1f}" if layers else "-"]
        rows.append([name, *cells])
    rows += [[name, why, "-", "-", "-"] for name, why in record.get("left_out", {}).items()]
    return markdown(["", "speed-up", "answers equal", "same start", "layers per token"], rows)


def spread_table(record: dict[str, Any]) -> str:
    """Median, 10th and 90th percentile of the ratios of interleaved pairs, and of the time to the first token."""
    parts = {"one at a time": [result for results in record["categories"].values() for result in results]}
    parts |= {f"batch of {size}": results for size, results in record["batches"].items()}
    parts |= {"first token": record["first_token"]} if "first_token" in record else {}
    names = list(dict.fromkeys(result["name"] for results in parts.values() for result in results))
    rows = [[name, *(_part_cell(results, name, record["dtype"]) for results in parts.values())] for name in names]
    return markdown(["", *parts], rows)


def _part_cell(results: list[dict[str, Any]], name: str, dtype: str) -> str:
    plain, speedups = None, []
    for result in results:  # each category begins with plain decoding
        plain = result if result["name"] == "generate" else plain
        if result["name"] == name and plain is not None:
            if result["lossless"] and dtype == "float32" and result["num_equal"] < len(result["prompts"]):
                return "differs"
            pairs = plain | {"prompts": [_cut(one, len(result["prompts"][0]["seconds"])) for one in plain["prompts"]]}
            pairs["prompts"] = pairs["prompts"][: len(result["prompts"])]
            speedups += result_speedups(pairs, result)
    return in_words(speedups) if speedups else "-"


def _cut(prompt: dict[str, Any], runs: int) -> dict[str, Any]:
    return prompt | {"seconds": prompt["seconds"][:runs]}


def tables(record: dict[str, Any]) -> dict[str, str]:
    """All tables by name."""
    found = {"summary": summary_table(record), "speed": table(record)}
    found |= {"first_token": first_token_table(record)} if "prompt_lengths" in record else {}
    found |= {"decode_apart": apart_table(record)} if "apart" in record else {}
    return found | {"spread": spread_table(record), "approximate": approximate_table(record)}


def checks(record: dict[str, Any]) -> list[Check]:
    """The token checks that a report relies on."""
    parts = {**record["categories"], **{f"batch of {size}": part for size, part in record["batches"].items()}}
    for name in ("first_token", "sampling"):
        parts |= {name: record[name]} if name in record else {}
    parts |= {f"prompt of {length} tokens": part for length, part in record.get("prompt_lengths", {}).items()}
    return [check for part, results in parts.items() for check in checks_of_results(part, results, record["dtype"])]
