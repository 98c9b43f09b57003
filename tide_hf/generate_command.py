"""``tide-hf generate``: answers one prompt, token by token, coloured by the depth that each token was read from."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path

from rich.console import Console

from .benchmark import encode_prompt, timed_run
from .model_arguments import add_decoding_arguments, add_model_arguments, attached_contender, load
from .prompts import check_room, read_prompt
from .streaming import answer_record, print_figures, stream_answer


def add_generate(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    what = "answer a prompt, coloured by the depth that each token was read from"
    parser = commands.add_parser("generate", parents=[common], help=what, description=what.capitalize() + ".")
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="(default: what is piped into standard input)")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from FILE")
    parser.add_argument("--raw", action="store_true", help="go on from the prompt as it is, without the chat template")
    add_decoding_arguments(parser, max_new_tokens=256)
    parser.add_argument("--json", action="store_true", help="print text, tokens and counts as JSON")
    parser.set_defaults(run=_generate)


def _generate(args: argparse.Namespace) -> None:
    prompt = read_prompt(args.prompt, args.prompt_file)
    notices = Console(stderr=True)
    loaded = load(args, notices)
    inputs = encode_prompt(loaded.tokenizer, prompt, raw=args.raw)
    check_room(loaded.model, inputs["input_ids"].shape[1], args.max_new_tokens)
    contender = attached_contender(loaded, args)
    if args.json:
        run = timed_run(contender, inputs, args.max_new_tokens)
        facts = {"model": args.model, "routers": loaded.routers_origin, "prompt": prompt, "raw": args.raw}
        print(json.dumps(facts | answer_record(contender, loaded.tokenizer, run), indent=2))
        return
    answer = partial(timed_run, contender, inputs, args.max_new_tokens)
    print_figures(stream_answer(answer, loaded.tokenizer, Console()), notices)
