"""The commands of ``tide-hf`` and their arguments. What a command does is `run` in the module of its name.

Nothing here needs torch or transformers, which take seconds to import: help, completion and errors come at once.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from .. import __version__
from ..common.choices import DEFAULT_MODEL, LABELS, STRATEGIES
from .arguments import (
    ALL,
    CommandParser,
    add_decoding_arguments,
    add_mode_arguments,
    add_model_arguments,
    amount,
    layer_list,
    positive,
    share,
    threshold_list,
)
from .prompts import given_prompts, read_prompt

SHELLS = ("bash", "zsh")
CHAT_HELP = "/reset starts anew, /quit (or Ctrl-D) ends, Ctrl-C stops an answer, /help says this. All else is sent."
DATA = "a .txt, .jsonl, .json, .csv or .parquet file, a folder of them, or a Hub data set (org/name:config[split])"

# Name, type or choices, default (that of `calibrate()`) and help of what is handed on to it, where it is given.
CALIBRATE_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "dataset": (str, None, "what to calibrate on (default: text that the model itself writes)"),
    "samples": (positive, 600, "documents to use"),
    "max_length": (positive, 64, "longest document in tokens; of self-written ones, longest answer"),
    "labels": (LABELS, "agreement", "what a router predicts"),
    "exit_strategy": (STRATEGIES, "linear", "kind of exit head"),
    "exit_layers": (
        layer_list,
        None,
        "numbers of executed layers after which a token may leave, such as 8,16 (default: every fourth is tried, and "
        "those are kept that can be of use)",
    ),
    "start_from": (str, None, "routers whose block head is trained further, instead of a new one"),
    "tolerance": (share, 0.02, "largest share of tokens that may differ in early_exit"),
    "confidence": (share, 0.95, "probability with which the tolerance is kept"),
    "draft_vocab_size": (positive, 8192, "heads draft only among so many of the most frequent tokens"),
    "max_minutes": (amount, None, "most minutes to take (default: as many as it needs)"),
    "batch_size": (positive, 64, "documents a forward pass"),
    "seed": (int, 0, "of everything random"),
}

# Name, type, default (that of `evaluation.QualityOptions`) and help of what is handed on to `measure_quality()`.
EVALUATE_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "thresholds": (threshold_list, [0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5], "to measure; the calibrated one is added"),
    "samples": (positive, 200, "most texts"),
    "max_length": (positive, 512, "tokens after which a text is cut"),
    "batch_size": (positive, 8, "texts at once"),
    "seed": (int, 0, "of the draw from the data"),
    "confidence": (share, 0.95, "of all intervals"),
}


def make_parser() -> CommandParser:
    """The parser of the whole command line.

    It sets `command`, the command's name, and `command_parser`; and `prepare`, what is to be done with the arguments
    before the command is loaded.
    """
    common = CommandParser(add_help=False)
    common.add_argument(
        "--debug", action="store_true", help="log what goes on inside, and show the traceback of an error"
    )
    parser = CommandParser(prog="tide-hf", description="Token-informed depth for Hugging Face causal language models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (add_arguments, what, more) in COMMANDS.items():
        description = f"{what[0].upper()}{what[1:]}. {more}".strip()  # capitalize() would write "the hub"
        command = commands.add_parser(name, parents=[common], help=what, description=description)
        add_arguments(command)
        command.set_defaults(command_parser=command)
    return parser


def _demo(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, model=DEFAULT_MODEL, dtype="float32")
    add_decoding_arguments(parser, mode=ALL, several=True, max_new_tokens=64)
    _add_measuring(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="(default: what is piped into standard input)")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from FILE")
    parser.add_argument("--raw", action="store_true", help="go on from the prompt as it is, without the chat template")
    add_decoding_arguments(parser, max_new_tokens=256)
    parser.add_argument("--json", action="store_true", help="print text, tokens and counts as JSON")
    parser.set_defaults(prepare=_read_prompt)


def _chat(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_decoding_arguments(parser, max_new_tokens=256)
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each answer")


def _serve(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, device=False)
    add_mode_arguments(parser, threshold_default="the calibrated one")
    parser.epilog = "All other options, such as --host, --port and --device, are those of `transformers serve`."


def _calibrate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, routers=False)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help="where the routers go")
    for name, (kind, default, text) in CALIBRATE_OPTIONS.items():
        settings = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": name.upper()}
        shown = text if default is None else f"{text} (default: {default})"
        parser.add_argument(_flag(name), default=argparse.SUPPRESS, help=shown, **settings)
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        default=argparse.SUPPRESS,
        help="show neither progress bars nor the tables at the end",
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON")


def _inspect(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--text",
        type=Path,
        metavar="FILE",
        help="measure convergence on the paragraphs of FILE (default: a few built-in prompts)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _benchmark(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    add_decoding_arguments(parser, several=True, max_new_tokens=64)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="more of them, in a .txt, .jsonl, .json, .csv or .parquet file"
    )
    parser.add_argument("--raw", action="store_true", help="leave the chat template out")
    _add_measuring(parser)
    suites = parser.add_argument_group("suites", "all that is claimed, measured by the examples of a clone")
    suites.add_argument("--suite", action="append", metavar="NAME", help="decode, published, quality ... or all")
    suites.add_argument("--config", help="with --suite: quick (the default), full or a JSON file")
    suites.add_argument("--output-dir", type=Path, help="with --suite: where the results go")


def _add_measuring(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="may be repeated (default: a few built-in prompts)")
    parser.set_defaults(prepare=_check_prompts)
    parser.add_argument("--repeats", type=positive, default=3, help="timed runs (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, and all else to standard error")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--text", metavar="DATA", required=True, help=f"measure perplexity on {DATA}")
    for name, (kind, default, text) in EVALUATE_OPTIONS.items():
        shown = ",".join(map(str, default)) if isinstance(default, list) else default
        parser.add_argument(_flag(name), type=kind, default=default, help=f"{text} (default: {shown})")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write quality against depth as a PNG to FILE")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what tide-hf calibrate wrote")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="Hub repository; made where it does not exist")
    parser.add_argument("--license", metavar="NAME", help="what the card says, such as apache-2.0 (default: nothing)")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--revision", help="branch to commit to; made where it does not exist (default: main)")
    parser.add_argument(
        "--commit-message", default=argparse.SUPPRESS, metavar="TEXT", help="(default: what is uploaded)"
    )
    parser.add_argument(
        "--custom-generate",
        action="store_true",
        help="FOLDER holds no routers but generate.py, README.md and requirements.txt for "
        "generate(custom_generate='ORG/NAME'), as examples/custom_generate does",
    )


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS)


def _read_prompt(args: argparse.Namespace) -> None:
    args.prompt = read_prompt(args.prompt, args.prompt_file)


def _check_prompts(args: argparse.Namespace) -> None:
    given_prompts(args.prompt)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


# By name: what adds the arguments, what the command does, and what else there is to say of it.
COMMANDS = {
    "demo": (_demo, "show how deep each token runs, and measure every mode against plain generate", ""),
    "generate": (_generate, "answer a prompt, coloured by the depth that each token was read from", ""),
    "chat": (
        _chat,
        "talk with a model, each answer coloured by the depth that its tokens were read from",
        f"{CHAT_HELP} Where standard input is a pipe, each line is a message.",
    ),
    "serve": (_serve, "run the HTTP server of transformers, OpenAI's API, with TIDE attached to its model", ""),
    "calibrate": (
        _calibrate,
        "make routers for a model and write them, with their card, to a folder",
        "As tide_hf.calibrate() does.",
    ),
    "inspect": (
        _inspect,
        "show a model's structure, the modes that it can run in, its routers, and how soon its states converge",
        "",
    ),
    "benchmark": (
        _benchmark,
        "measure plain generate, early exits and what transformers offers, on your own model and prompts",
        "",
    ),
    "evaluate": (_evaluate, "measure what early exits cost in quality and save in depth, over thresholds", ""),
    "push": (
        _push,
        "upload routers and their card to the Hub",
        "The card is written afresh from the calibration's record. Log in first (hf auth login), or set HF_TOKEN.",
    ),
    "completion": (_completion, "print a script that completes this program's commands and options in a shell", ""),
}
