"""``tide-hf benchmark``: plain ``generate`` against TIDE and what transformers offers, on your model and prompts."""

from __future__ import annotations

import argparse
import json

from rich.console import Console

from .alternatives import assistant_early_exit, prompt_lookup, those_that_run
from .benchmark import encode_prompt, tide_contenders
from .comparison import measure, print_setting, setting
from .model_arguments import load, modes_to_run
from .prompts import PROMPTS, check_room, read_prompts


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = list(args.prompt or []) + (read_prompts(args.prompts) if args.prompts is not None else [])
    prompts = prompts or list(PROMPTS)
    console = Console(stderr=args.json)
    loaded = load(args, Console(stderr=True))
    inputs = [encode_prompt(loaded.tokenizer, prompt, raw=args.raw) for prompt in prompts]
    for encoded in inputs:
        check_room(loaded.model, encoded["input_ids"].shape[1], args.max_new_tokens)
    modes = modes_to_run(args.mode, loaded.routers)
    plain, *ours = tide_contenders(loaded.model, loaded.routers, modes, exit_threshold=args.exit_threshold)
    record = setting(loaded)
    print_setting(record, console)
    theirs, left_out = those_that_run([prompt_lookup(loaded.model), assistant_early_exit(loaded.model)], inputs[0])
    record = measure([plain, *theirs, *ours], inputs, record, args, console)
    for name, reason in left_out.items():
        console.print(
            f"{name}: left out, since this model cannot decode so ({reason}).",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    if args.json:
        print(json.dumps(record | {"prompts": prompts, "raw": args.raw, "left_out": left_out}, indent=2))
