"""``tide-hf demo``: shows how deep each token of an answer ran, then measures every mode against plain ``generate``."""

from __future__ import annotations

import argparse
import json
from functools import partial

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from ..common.chat_prompts import encode_prompt
from ..evaluation.baselines import tide_methods
from ..evaluation.benchmark import timed_run
from .comparison import measure, print_setting, setting
from .demo_model import load_demo_model
from .model_arguments import load, modes_to_run
from .prompts import PROMPTS, check_room, given_prompts
from .streaming import legend, stream_answer


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    prompts = given_prompts(args.prompt) or PROMPTS
    console = Console(stderr=args.json)
    loaded = load(args, partial(load_demo_model, console=console))
    modes = modes_to_run(args.mode, loaded.routers)
    methods = tide_methods(loaded.model, loaded.routers, modes, exit_threshold=args.exit_threshold, engine=args.engine)
    record = setting(loaded, args.engine)
    print_setting(record, console)
    inputs = [encode_prompt(loaded.tokenizer, prompt) for prompt in prompts]
    for encoded in inputs:
        check_room(loaded.model, encoded["input_ids"].shape[1], args.max_new_tokens)
    for prompt, encoded in zip(prompts, inputs, strict=True):
        console.print()
        console.print(Padding(Text(prompt, style="italic"), (0, 0, 0, 2)))
        answer = partial(timed_run, methods[1], encoded, args.max_new_tokens)
        run = stream_answer(answer, loaded.tokenizer, console)
        console.print(legend(run))
    console.print()
    record = measure(methods, inputs, record, args, console) | {"prompts": list(prompts)}
    if args.json:
        print(json.dumps(record, indent=2))
