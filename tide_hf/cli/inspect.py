"""``tide-hf inspect``: shows a model, its routers, the modes it can run in, and how soon its states converge."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from rich.console import Console

from ..calibration.router_training import CONVERGENCE_THRESHOLD
from ..common.errors import ConfigurationError
from ..evaluation.inspection import inspect_model
from ..routers.tables import TextTable, describe_bound, rich_table, tables_of
from .model_arguments import load
from .prompts import PROMPTS


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    texts = list(PROMPTS) if args.text is None else _paragraphs(args.text)
    loaded = load(args)
    facts = {"model": args.model} | inspect_model(loaded.model, loaded.tokenizer, loaded.routers, texts)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        _print(facts, Console())


def _print(facts: dict[str, Any], console: Console) -> None:
    structure, routers = facts["structure"], facts["routers"]
    lines = [f"{facts['model']} ({structure['class']})"]
    lines += [f"  {name.replace('_', ' '):<12} {_text(value)}" for name, value in structure.items() if name != "class"]
    lines += ["", "modes"]
    lines += [f"  {mode:<16} {_support(fact)}" for mode, fact in facts["modes"].items()]
    lines += ["", f"packed weights: {_packing(facts['packed_weights'])}"]
    lines += ["", *_kernel_lines(facts["kernels"]), "", *_router_lines(routers)]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if routers is not None:
        for title, table, note in tables_of(routers, structure["layers"]):
            console.print()
            console.print(rich_table(title, table))
            console.print(note, highlight=False)
    console.print()
    console.print(rich_table(f"States within cosine {CONVERGENCE_THRESHOLD} of the final one", _convergence(facts)))


def _text(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def _support(fact: dict[str, Any]) -> str:
    answer = "yes" if fact["supported"] else "no"
    return answer if fact["note"] is None else f"{answer}: {fact['note']}"


def _packing(fact: dict[str, Any]) -> str:
    if fact["packed"]:
        return f"yes, {fact['linear_layers']} linear layers, {fact['size_mb']:g} MB from their first use on"
    return "no; they need float32 weights on a CPU (or bfloat16 if oneDNN supports it) and four times their memory"


def _kernel_lines(fact: dict[str, Any]) -> list[str]:
    where = f"{fact['gpu'] or 'CPU'}, {fact['dtype']}"
    if fact["variant"] is None:
        return [f"fused kernels: none, plain PyTorch runs ({where}): {fact['reason']}"]
    ops = [f"  {name:<16} {written_in}" for name, written_in in fact["ops"].items()]
    return [f"fused kernels: build {fact['variant']} ({where})", *ops]


def _router_lines(routers: dict[str, Any] | None) -> list[str]:
    if routers is None:
        return ["routers: none; tide-hf calibrate makes them"]
    return [
        "routers",
        f"  exit heads       {routers['exit_strategy']}, after layers {', '.join(routers['exit_layers'])}",
        f"  exit threshold   {_threshold(routers['exit_threshold'], routers['threshold'])}",
        f"  draft vocabulary {_text(routers['draft_vocab_size'] or 'all tokens')}",
        f"  size             {routers['parameters']:,} parameters, {routers['size_mb']:g} MB",
    ]


def _threshold(threshold: float, choice: dict[str, Any] | None) -> str:
    if threshold > 1:
        return "none: in early_exit no token exits unless a call sets one"
    bound = describe_bound(choice) if choice is not None and choice["chosen"] == threshold else "not certified"
    return f"{threshold:g} ({bound})"


def _convergence(facts: dict[str, Any]) -> TextTable:
    rows = [[str(row["layer"]), f"{row['converged']:.1%}", f"{row['mean_cosine']:.3f}"] for row in facts["convergence"]]
    return TextTable(["layer", "tokens", "mean cosine"], rows)


def _paragraphs(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            "the text cannot be read", got=f"'{error}'", expected="a text file in UTF-8", do="Check --text."
        ) from error
    return [part.strip() for part in re.split(r"\n\s*\n", text) if part.strip()]
