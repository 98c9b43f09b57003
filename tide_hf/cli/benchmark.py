"""``tide-hf benchmark``: plain ``generate`` against TIDE and what transformers offers, on your model and prompts."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from rich.console import Console

from ..common.chat_prompts import encode_prompt
from ..common.errors import MissingPackageError, describe
from ..evaluation.baselines import assistant_early_exit, prompt_lookup, those_that_run, tide_methods
from .arguments import refuse_unused
from .comparison import measure, print_setting, setting
from .model_arguments import load, modes_to_run, warn_if_busy
from .prompts import PROMPTS, check_room, given_prompts, read_prompts

CLONE = Path(__file__).parent.parent.parent  # of the repository, if installed from one
OF_SUITES = ("config", "output_dir")
PASSED_ON = ("model", "routers", "dtype", "device", "threads", *OF_SUITES)
OF_PROMPTS = ("mode", "exit_threshold", "engine", "max_new_tokens", "prompt", "prompts", "raw", "repeats", "json")


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    if args.suite is not None:
        refuse_unused(args, OF_PROMPTS, "beside --suite")
        _run_suites(args)
        return
    refuse_unused(args, OF_SUITES, "without --suite")
    prompts = given_prompts(args.prompt) + (read_prompts(args.prompts) if args.prompts is not None else [])
    prompts = prompts or list(PROMPTS)
    console = Console(stderr=args.json)
    loaded = load(args)
    inputs = [encode_prompt(loaded.tokenizer, prompt, raw=args.raw) for prompt in prompts]
    for encoded in inputs:
        check_room(loaded.model, encoded["input_ids"].shape[1], args.max_new_tokens)
    modes = modes_to_run(args.mode, loaded.routers)
    plain, *ours = tide_methods(
        loaded.model, loaded.routers, modes, exit_threshold=args.exit_threshold, engine=args.engine
    )
    record = setting(loaded, args.engine)
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


def _run_suites(args: argparse.Namespace) -> None:
    """Run `python -m examples.benchmarks run`, which is part of the repository, not of the package."""
    if not (CLONE / "examples" / "benchmarks" / "__main__.py").is_file():
        raise MissingPackageError(
            describe(
                "the suites are not there",
                got="an installed package without examples/benchmarks",
                expected="a clone of the repository, installed with pip install -e",
                do="Clone it, or leave --suite out.",
            )
        )
    warn_if_busy(args.threads or torch.get_num_threads())
    command = [sys.executable, "-m", "examples.benchmarks", "run"]
    for name in args.suite:
        command += ["--suite", name]
    for name in PASSED_ON:
        if getattr(args, name) is not None:
            command += ["--" + name.replace("_", "-"), str(getattr(args, name))]
    path = os.pathsep.join(filter(None, [str(CLONE), os.environ.get("PYTHONPATH")]))
    status = subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=False).returncode
    if status != 0:
        sys.exit(status)  # it has explained its error itself
