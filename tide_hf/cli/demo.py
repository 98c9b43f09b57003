"""``tide-hf demo``: shows how deep each token of an answer ran, then compares every mode with plain ``generate``."""

from __future__ import annotations

import argparse
import json
from functools import partial

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..evaluation.benchmark import timed_run
from .benchmark import encode_prompts, measure, methods_of, setting
from .demo_model import load_demo_model
from .model_arguments import load
from .prompts import PROMPTS, given_prompts
from .streaming import legend, stream_answer


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = given_prompts(args.prompt) or list(PROMPTS)
    console = Console(stderr=args.json)
    loaded = load(args, partial(load_demo_model, console=console))
    inputs = encode_prompts(loaded, prompts, args)
    methods = methods_of(loaded, args)
    record = setting(loaded, args.engine, console)
    for prompt, encoded in zip(prompts, inputs, strict=True):
        console.print()
        console.print(Padding(Text(prompt, style="italic"), (0, 0, 0, 2)))
        answer = partial(timed_run, methods[1], encoded, args.max_new_tokens)
        run = stream_answer(answer, loaded.tokenizer, console)
        console.print(legend(run))
    console.print()
    record = measure(methods, inputs, record, args, console) | {"prompts": prompts}
    if args.json:
        print(json.dumps(record, indent=2))
