"""Decode speed against plain ``generate`` and what transformers offers: `python -m examples.benchmarks.decode`.

All contenders share weights, prompts, dtype, threads and process; their runs are interleaved prompt by prompt; tokens
are compared in the runs that are timed. Three parts: one prompt at a time by category, a batch of eight, and sampling
at temperature 1.5, where nothing can be drafted and only the overhead shows. Writes a JSON file with provenance and a
Markdown file with the means of per-prompt ratios.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from rich.console import Console
from rich.progress import track

from tide_hf import TIDEModelForCausalLM
from tide_hf.alternatives import assistant_early_exit, prompt_lookup
from tide_hf.benchmark import Contender, Result, compare, encode_prompt, weight_sharing_copy
from tide_hf.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.loading import shipped_routers
from tide_hf.provenance import provenance

FOLDER = Path(__file__).parent
PROMPTS = FOLDER / "prompts.json"
BATCH = 8
SAMPLING_REPEATS = 3
NGRAMS, HEADS, BOTH = "self_speculative, n-grams only", "self_speculative, heads only", "self_speculative"


def make_contenders(model: Any, routers: str | None) -> list[Contender]:
    """Plain decoding first, then prompt lookup, then ours with one kind of draft or all."""
    ngrams = TIDEModelForCausalLM.attach(weight_sharing_copy(model))
    contenders = [
        Contender("generate", model),
        prompt_lookup(model),
        Contender(NGRAMS, ngrams),
    ]
    if routers is not None:
        heads = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers)
        make = heads._tide.make_drafter
        heads._tide.make_drafter = lambda *args: _without_ngrams(make(*args))
        both = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers)
        contenders += [Contender(HEADS, heads), Contender(BOTH, both)]
    return contenders


def _without_ngrams(drafter: Any) -> Any:
    for index in drafter.indexes:
        index.match = lambda drafted=(): (0, 0)
    return drafter


def by_category(contenders: list[Contender], prompts: dict[str, list[Any]], options: argparse.Namespace) -> dict:
    """One prompt at a time. `assistant_early_exit` is so slow that it gets the first prompt of each category only."""
    plain = contenders[0]
    slow = assistant_early_exit(plain.model)
    categories = {}
    for category in track(prompts, description="Measuring", console=Console(stderr=True)):
        inputs = prompts[category][: options.prompts]
        results = compare(contenders, inputs, max_new_tokens=options.max_new_tokens, repeats=options.repeats)
        results += compare([plain, slow], inputs[:1], max_new_tokens=options.max_new_tokens, repeats=1)[1:]
        categories[category] = _records(results)
    return categories


def in_a_batch(contenders: list[Contender], tokenizer: Any, texts: list[str], options: argparse.Namespace) -> Any:
    """Eight prompts of different lengths at once, which transformers' assisted decoding cannot do."""
    ours = [one for one in contenders if "prompt_lookup" not in one.name]
    chats = [[{"role": "user", "content": text}] for text in texts]
    templated = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    batch = tokenizer(templated, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    return _records(compare(ours, [inputs], max_new_tokens=options.max_new_tokens, repeats=options.repeats))


def without_drafts(contenders: list[Contender], inputs: list[Any], options: argparse.Namespace) -> Any:
    """Random text: what the loop costs when it never drafts."""
    sampling = {"do_sample": True, "temperature": 1.5, "top_k": 0}
    chosen = [Contender(one.name, one.model, sampling) for one in (contenders[0], contenders[-1])]
    repeats = SAMPLING_REPEATS * options.repeats  # a few percent are looked for
    return _records(compare(chosen, inputs, max_new_tokens=options.max_new_tokens, repeats=repeats))


def _records(results: list[Result]) -> list[dict[str, Any]]:
    return [result.to_dict() for result in results]


def run(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts."""
    texts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    prompts = {category: [encode_prompt(tokenizer, text) for text in texts[category]] for category in texts}
    contenders = make_contenders(model, options.routers or shipped_routers(options.model))
    record = provenance(model)
    record |= {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "prompts")}
    record["prompts_sha256"] = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
    record["categories"] = by_category(contenders, prompts, options)
    mixed = [text for column in zip(*texts.values(), strict=False) for text in column]
    record["batch"] = in_a_batch(contenders, tokenizer, mixed[:BATCH], options)
    record["sampling"] = without_drafts(contenders, [inputs[0] for inputs in prompts.values()], options)
    return record


def table(record: dict[str, Any]) -> str:
    """Render a record as Markdown: means of per-prompt ratios to plain decoding, and how many answers were equal."""
    parts = record["categories"] | {f"batch of {BATCH}": record["batch"], "temperature 1.5": record["sampling"]}
    names = list(dict.fromkeys(result["name"] for results in parts.values() for result in results))
    rows = [["", *record["categories"], "mean", "equal", *list(parts)[-2:]]]
    rows.append(["---"] * len(rows[0]))
    for name in names:
        cells, everything = {}, []
        for part, results in parts.items():
            prompts = next((result["prompts"] for result in results if result["name"] == name), [])
            cells[part] = _mean(prompts, record["dtype"])
            everything += prompts if part in record["categories"] else []
        equal = f"{sum(prompt['equal'] for prompt in everything)}/{len(everything)}"
        own = [cells[part] for part in record["categories"]]
        rows.append([name, *own, _mean(everything, record["dtype"]), equal, *list(cells.values())[-2:]])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _mean(prompts: list[dict[str, Any]], dtype: str) -> str:
    if not prompts:
        return "-"
    if dtype == "float32" and not all(prompt["equal"] for prompt in prompts):
        return "differs"  # no speed for other tokens, where rounding does not explain them
    return f"{mean(prompt['speedup'] for prompt in prompts):.2f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the command line, measure, write and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--routers", help="folder or Hub repository; default: those shipped for the model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-new-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=6, help="of each category")
    parser.add_argument("--output", type=Path, default=FOLDER / "results" / "decode.json")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    model, tokenizer = load_demo_model(options.model, dtype=options.dtype)
    record = run(model, tokenizer, options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    options.output.with_suffix(".md").write_text(table(record) + "\n", encoding="utf-8")
    print(table(record))


if __name__ == "__main__":
    main()
