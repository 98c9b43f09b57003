"""The commands of ``tide-hf`` and their arguments.

Nothing here imports torch or transformers, which take seconds, so that help, completion and errors come at once.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from math import isfinite
from pathlib import Path
from typing import Any

from ..common.choices import AUTO, DEFAULT_MODEL, DTYPES, ENGINES, LABELS, MODES, STRATEGIES
from ..common.errors import ConfigurationError
from ..common.version import __version__
from .prompts import given_prompts, read_prompt

ALL = "all"

CHAT_HELP = (
    "/reset starts a new conversation, /quit (or Ctrl-D) ends the chat, Ctrl-C stops an answer, /help shows this. "
    "Everything else is sent to the model."
)
DATA = "a .txt, .jsonl, .json, .csv or .parquet file, a folder of them, or a Hub data set (org/name:config[split])"


class CommandParser(argparse.ArgumentParser):
    """A parser that accepts an optional positional argument after options, as argparse does since Python 3.12.7."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse as argparse does, then assign the first remaining argument to an optional positional."""
        found, rest = super().parse_known_args(args, namespace)
        for action in self._get_positional_actions():
            missing = action.nargs == argparse.OPTIONAL and getattr(found, action.dest) is action.default
            if missing and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        return found, rest


def _number(kind: type, accepts: Callable[[Any], bool], what: str) -> Callable[[str], Any]:
    """An argparse type for numbers; `what` describes the accepted numbers in error messages."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            number = None
        if number is None or not accepts(number):
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return number

    return read


def _list_of(read: Callable[[str], Any], what: str) -> Callable[[str], list[Any]]:
    """An argparse type for numbers separated by commas."""

    def read_all(text: str) -> list[Any]:
        try:
            return [read(part) for part in text.split(",")]
        except argparse.ArgumentTypeError as error:
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {what}") from error

    return read_all


def _is_amount(number: float) -> bool:
    return isfinite(number) and number >= 0


whole = _number(int, lambda number: number >= 0, "a whole number of at least 0")
positive = _number(int, lambda number: 1 <= number < 2**31, "a whole number of at least 1, and below 2^31")
threads = _number(int, lambda number: 1 <= number <= 4096, "a number of threads, from 1 to 4096")
share = _number(float, lambda number: 0 < number < 1, "a number between 0 and 1")
amount = _number(float, _is_amount, "a number of at least 0")
threshold = _number(float, _is_amount, "a threshold: at 0 every token exits, above 1 none does")
layer_list = _list_of(positive, "layers such as 8,16")
threshold_list = _list_of(threshold, "thresholds such as 0.9,0.8")

# Options that are passed on to a function if the user gives them: type or choices, the function's default, and help.
CALIBRATE_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "dataset": (str, None, "what to calibrate on (default: text that the model itself writes)"),
    "samples": (
        positive,
        None,
        "number of documents (default: 2000; of self-written ones, as many as the time limit allows)",
    ),
    "max_length": (positive, 128, "tokens after which a document, or a self-written answer, is cut"),
    "labels": (LABELS, "agreement", "what a router predicts"),
    "exit_strategy": (STRATEGIES, "eagle3", "eagle3: linear exit heads and a draft head; or exit heads alone"),
    "exit_layers": (
        layer_list,
        None,
        "numbers of executed layers after which a token may exit, such as 8,16 (default: every fourth layer is tried, "
        "and the useful ones are kept)",
    ),
    "start_from": (str, None, "routers whose draft head is trained further, instead of a new one"),
    "tolerance": (share, 0.02, "largest share of tokens that may differ from the full model's in early_exit"),
    "confidence": (share, 0.95, "probability with which the tolerance is met"),
    "draft_vocab_size": (positive, 8192, "number of most frequent tokens that heads draft from"),
    "draft_intermediate_size": (positive, None, "width of the draft head's MLP (default: that of the model's layers)"),
    "max_minutes": (amount, 15, "time limit in minutes"),
    "batch_size": (positive, 128, "documents per forward pass"),
    "seed": (int, 0, "random seed"),
}
EVALUATE_OPTIONS: dict[str, tuple[Any, Any, str]] = {
    "thresholds": (threshold_list, (0.99, 0.95, 0.9, 0.8, 0.7, 0.6, 0.5), "thresholds; the calibrated one is added"),
    "samples": (positive, 200, "maximum number of texts"),
    "max_length": (positive, 512, "tokens after which a text is cut"),
    "batch_size": (positive, 8, "texts per forward pass"),
    "seed": (int, 0, "random seed for drawing texts"),
    "confidence": (share, 0.95, "confidence of all intervals"),
}


def make_parser() -> CommandParser:
    """Make the parser of the whole command line; parsed arguments include the `command` and its `command_parser`.

    A command may set `prepare`, a function called with the arguments before the command's module is imported.
    """
    common = CommandParser(add_help=False)
    common.add_argument("--debug", action="store_true", help="show the library's log, and the traceback of an error")
    parser = CommandParser(prog="tide-hf", description="Token-informed depth for Hugging Face causal language models.")
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", required=True)
    for name, (add_arguments, what, *more) in COMMANDS.items():
        description = " ".join([f"{what[0].upper()}{what[1:]}.", *more])  # capitalize() would turn "Hub" into "hub"
        command = commands.add_parser(name, parents=[common], help=what, description=description)
        add_arguments(command)
        command.set_defaults(command_parser=command)
    return parser


def add_model_arguments(
    parser: argparse.ArgumentParser,
    *,
    model: str | None = None,
    dtype: str | None = None,
    routers: bool = True,
    device: bool = True,
) -> None:
    """Add MODEL, which is required unless `model` gives a default, and other arguments for `model_arguments.load`."""
    what = "Hub name, folder or GGUF file of the base model"
    if model is None:
        parser.add_argument("model", metavar="MODEL", help=what)
    else:
        parser.add_argument("model", metavar="MODEL", nargs="?", default=model, help=f"{what} (default: %(default)s)")
    if routers:
        parser.add_argument(
            "--routers",
            metavar="ROUTERS",
            help="folder or Hub repository, 'default' for those shipped for the model, or 'none' (default: the shipped "
            "ones, or none)",
        )
    shown = "%(default)s" if dtype is not None else "that of the saved weights"
    parser.add_argument("--dtype", choices=DTYPES, default=dtype, help=f"dtype to load the model in (default: {shown})")
    if device:
        parser.add_argument("--device", help="device, such as cpu or cuda:1 (default: the GPU if there is one)")
    parser.add_argument("--threads", type=threads, help="CPU threads (default: PyTorch's choice)")


def _add_decoding_arguments(
    parser: argparse.ArgumentParser,
    *,
    max_new_tokens: int,
    modes: tuple[str, ...] = MODES,
    default_threshold: str = "the calibrated one, or 0.9 if that never exits",
) -> None:
    """Add --mode, --exit-threshold, --engine, --compute-dtype and --max-new-tokens."""
    parser.add_argument("--mode", default=MODES[0], choices=modes, help="how to decode (default: %(default)s)")
    parser.add_argument(
        "--exit-threshold", type=threshold, help=f"for early_exit and post_hoc (default: {default_threshold})"
    )
    parser.add_argument(
        "--engine",
        choices=ENGINES,
        default=ENGINES[0],
        help="what runs the layers; warming up 'compiled' takes about a minute on 2 cores, minutes for larger "
        "batches: chat and serve do so before the first answer, other commands during it (default: %(default)s)",
    )
    parser.add_argument(
        "--compute-dtype",
        choices=(AUTO, *DTYPES),
        default=AUTO,
        help="dtype of activations, K/V and sums: float32 gives float32's own answer from weights of any dtype; auto "
        "takes it on CPUs where it is measured as fast (default: %(default)s)",
    )
    _add_limit(parser, max_new_tokens)


def _add_limit(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    parser.add_argument(
        "--max-new-tokens", type=positive, default=max_new_tokens, help="limit per answer (default: %(default)s)"
    )


def _add_options(parser: argparse.ArgumentParser, options: dict[str, tuple[Any, Any, str]]) -> None:
    """Add options of a function; options that the user does not give are absent from the parsed arguments."""
    for name, (kind, default, text) in options.items():
        settings = {"choices": kind} if isinstance(kind, tuple) else {"type": kind}
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        help_text = text if default is None else f"{text} (default: {shown})"
        parser.add_argument(_flag(name), default=argparse.SUPPRESS, help=help_text, **settings)


def given_options(args: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Values of those options in `names` that the user gave, by name."""
    return {name: getattr(args, name) for name in names if hasattr(args, name)}


def refuse_unused(args: argparse.Namespace, names: Iterable[str], where: str) -> None:
    """Raise [`ConfigurationError`] if an option in `names` was given; it has no effect `where`, e.g. "with --suite"."""
    unused = [name for name in names if getattr(args, name) != args.command_parser.get_default(name)]
    if unused:
        raise ConfigurationError(
            f"an option has no effect {where}",
            got=", ".join(map(_flag, unused)),
            expected="options that change what the command does",
            do="Leave it out.",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _demo(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, model=DEFAULT_MODEL, dtype="float32")
    _add_limit(parser, max_new_tokens=64)
    _add_prompts(parser)


def _generate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", nargs="?", help="the prompt (default: piped standard input)")
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="read the prompt from FILE")
    parser.add_argument("--raw", action="store_true", help="continue the prompt as it is, without the chat template")
    _add_decoding_arguments(parser, max_new_tokens=256)
    parser.add_argument("--json", action="store_true", help="print text, tokens and counts as JSON")
    parser.set_defaults(prepare=_read_prompt)


def _chat(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    _add_decoding_arguments(parser, max_new_tokens=256)
    parser.add_argument("--json", action="store_true", help="print each answer as a JSON object on one line")


def _serve(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, device=False)
    _add_decoding_arguments(parser, max_new_tokens=4096, default_threshold="the calibrated one")
    parser.add_argument(
        "--remembered-tokens",
        type=whole,
        default=0,
        metavar="N",
        help="draft from so many tokens of earlier answers, which stay in RAM; an answer's time then tells one client "
        "what others have asked (default: %(default)s)",
    )
    parser.epilog = "All other options, such as --host, --port and --device, are those of `transformers serve`."


def _calibrate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser, routers=False)
    parser.add_argument("--output-dir", type=Path, required=True, metavar="FOLDER", help="where to write the routers")
    _add_options(parser, CALIBRATE_OPTIONS)
    parser.add_argument(
        "--no-progress",
        dest="progress",
        action="store_false",
        default=argparse.SUPPRESS,
        help="show neither progress bars nor the tables at the end",
    )
    parser.add_argument("--json", action="store_true", help="print the calibration record as JSON")


def _inspect(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    text_help = "measure convergence on the paragraphs of FILE (default: a few built-in prompts)"
    parser.add_argument("--text", type=Path, metavar="FILE", help=text_help)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _benchmark(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    _add_decoding_arguments(parser, modes=(ALL, *MODES), max_new_tokens=64)
    parser.add_argument(
        "--prompts", type=Path, metavar="FILE", help="more prompts, in a .txt, .jsonl, .json, .csv or .parquet file"
    )
    parser.add_argument("--raw", action="store_true", help="do not apply the chat template")
    _add_prompts(parser)
    parser.add_argument("--repeats", type=positive, default=3, help="timed runs (default: %(default)s)")
    suites = parser.add_argument_group("suites", "the published benchmarks; they need a clone of the repository")
    suites.add_argument("--suite", action="append", metavar="NAME", help="decode, published, quality ... or all")
    suites.add_argument("--config", help="with --suite: quick (the default), full or a JSON file")
    suites.add_argument("--output-dir", type=Path, help="with --suite: where to write the results")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt", action="append", help="a prompt; may be repeated (default: a few built-in prompts)")
    parser.set_defaults(prepare=lambda args: given_prompts(args.prompt))
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, all else to standard error")


def _evaluate(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--text", metavar="DATA", required=True, help=f"measure perplexity on {DATA}")
    _add_options(parser, EVALUATE_OPTIONS)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="plot quality against depth to FILE, a PNG")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _push(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what tide-hf calibrate wrote")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="Hub repository; created if it does not exist")
    parser.add_argument("--license", metavar="NAME", help="license on the card, such as apache-2.0 (default: none)")
    parser.add_argument("--private", action="store_true", default=None, help="make a new repository private")
    parser.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    parser.add_argument("--revision", help="branch to commit to; created if it does not exist (default: main)")
    parser.add_argument(
        "--commit-message", default=argparse.SUPPRESS, metavar="TEXT", help="(default: what is uploaded)"
    )
    parser.add_argument(
        "--format",
        choices=("tide", "speculators"),
        default="tide",
        help="'speculators' uploads the draft head alone, as the speculators package writes one; 'tide' (the default) "
        "uploads all parts, and vLLM loads the draft head from there as well",
    )
    parser.add_argument(
        "--custom-generate",
        action="store_true",
        help="FOLDER holds, instead of routers, the generate.py, README.md and requirements.txt of a repository for "
        "generate(custom_generate='ORG/NAME'), as examples/custom_generate does",
    )


def _completion(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh"))


def _read_prompt(args: argparse.Namespace) -> None:
    args.prompt = read_prompt(args.prompt, args.prompt_file)


# For each command: the function that adds its arguments, its one-line help, and further text for its description.
COMMANDS: dict[str, tuple[Any, ...]] = {
    "demo": (_demo, "answer three prompts with plain generate and with TIDE, side by side, and compare their speed"),
    "generate": (_generate, "answer a prompt, each token in the colour of its source"),
    "chat": (
        _chat,
        "chat with a model, each token in the colour of its source",
        f"{CHAT_HELP} If standard input is a pipe, each line is a message.",
    ),
    "serve": (_serve, "run the HTTP server of transformers (OpenAI API) with TIDE attached to the model"),
    "calibrate": (_calibrate, "make routers for a model and write them, with their card, to a folder"),
    "inspect": (_inspect, "show a model, its routers, the modes it can run in, and how soon its states converge"),
    "benchmark": (_benchmark, "compare plain generate, TIDE and transformers' own methods on your model and prompts"),
    "evaluate": (_evaluate, "measure the quality and depth of early exits over thresholds"),
    "push": (
        _push,
        "upload routers and their card to the Hub",
        "The card is written from the calibration record. Log in first (hf auth login), or set HF_TOKEN.",
    ),
    "completion": (_completion, "print a shell script that completes commands and options"),
}
