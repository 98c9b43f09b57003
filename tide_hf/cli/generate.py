"""``tide-hf generate``: answers one prompt, token by token, each in the colour of its source."""

from __future__ import annotations

import argparse
import json
from functools import partial

from rich.console import Console

from ..common.token_ids import encode_prompt
from ..evaluation.benchmark import timed_run
from .model_arguments import NO_ROUTERS, attached_method, load
from .prompts import check_room
from .streaming import answer_record, print_figures, stream_answer


def run(args: argparse.Namespace) -> None:
    """Run the command; the parser has already read the prompt into `args.prompt`."""
    loaded = load(args)
    inputs = encode_prompt(loaded.tokenizer, args.prompt, raw=args.raw)
    check_room(loaded.model, inputs["input_ids"].shape[1], args.max_new_tokens)
    method = attached_method(loaded, args)
    answer = partial(timed_run, method, inputs, args.max_new_tokens)
    if args.json:
        facts = {"model": args.model, "routers": loaded.routers_origin, "prompt": args.prompt, "raw": args.raw}
        print(json.dumps(facts | answer_record(method, loaded.tokenizer, answer()), indent=2))
        return
    console = Console(stderr=True)
    print_figures(stream_answer(answer, loaded.tokenizer, Console()), console)
    console.print(f"  routers: {loaded.routers_origin or NO_ROUTERS}", style="dim", markup=False, highlight=False)
