"""Decode speed against plain ``generate`` and what transformers offers: `python -m examples.benchmarks.decode`.

All contenders share weights, prompts, dtype, threads and process; their runs are interleaved prompt by prompt; tokens
are compared in the runs that are timed. Writes a JSON file with provenance and prints a Markdown table of the means of
per-prompt ratios.
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
from tide_hf.benchmark import Contender, compare, encode_prompt, weight_sharing_copy
from tide_hf.demo import shipped_routers
from tide_hf.demo_model import DEFAULT_MODEL, load_demo_model
from tide_hf.provenance import provenance

FOLDER = Path(__file__).parent
PROMPTS = FOLDER / "prompts.json"


def make_contenders(model: Any, routers: str | None) -> list[Contender]:
    """Plain decoding first, then the alternatives, then ours without and with exit heads."""
    layers = model.config.get_text_config().num_hidden_layers
    ngrams = TIDEModelForCausalLM.attach(weight_sharing_copy(model))
    contenders = [
        Contender("generate", model),
        Contender("prompt_lookup_num_tokens=10", model, {"prompt_lookup_num_tokens": 10}),
        Contender(f"assistant_early_exit={layers // 2}", model, {"assistant_early_exit": layers // 2}),
        Contender("self_speculative, n-grams only", ngrams),
    ]
    if routers is not None:
        heads = TIDEModelForCausalLM.attach(weight_sharing_copy(model), routers)
        contenders.append(Contender("self_speculative", heads))
    return contenders


def run(model: Any, tokenizer: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders on the prompts of each category."""
    prompts = json.loads(PROMPTS.read_text(encoding="utf-8"))
    contenders = make_contenders(model, options.routers or shipped_routers(options.model))
    categories = {}
    for category in track(prompts, description="Measuring", console=Console(stderr=True)):
        inputs = [encode_prompt(tokenizer, prompt) for prompt in prompts[category][: options.prompts]]
        results = compare(contenders, inputs, max_new_tokens=options.max_new_tokens, repeats=options.repeats)
        categories[category] = [result.to_dict() for result in results]
    record = provenance(model)
    record |= {name: getattr(options, name) for name in ("max_new_tokens", "repeats", "prompts")}
    record["prompts_sha256"] = hashlib.sha256(PROMPTS.read_bytes()).hexdigest()
    return record | {"categories": categories}


def table(record: dict[str, Any]) -> str:
    """Render a record as Markdown: means of per-prompt ratios to plain decoding, and how many prompts were equal."""
    categories = record["categories"]
    names = [result["name"] for result in next(iter(categories.values()))]
    rows = [["", *categories, "mean", "equal tokens"], ["---"] * (len(categories) + 3)]
    for position, name in enumerate(names):
        prompts = [results[position]["prompts"] for results in categories.values()]
        ratios = [[prompt["tokens_per_s"] for prompt in part] for part in prompts]
        plain = [[prompt["tokens_per_s"] for prompt in results[0]["prompts"]] for results in categories.values()]
        shares = [
            [own / reference for own, reference in zip(part, base, strict=True)]
            for part, base in zip(ratios, plain, strict=True)
        ]
        equal = [prompt["equal"] for part in prompts for prompt in part]
        everything = [share for part in shares for share in part]
        cells = [f"{mean(part):.2f}" for part in shares] + [f"{mean(everything):.2f}"]
        if record["dtype"] == "float32" and not all(equal):
            cells = ["differs"] * len(cells)  # no speed for other tokens, where rounding does not explain them
        cells.append(f"{sum(equal)}/{len(equal)}")
        rows.append([name, *cells])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


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
    print(table(record))


if __name__ == "__main__":
    main()
