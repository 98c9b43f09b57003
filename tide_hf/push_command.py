"""``tide-hf push``: uploads routers and their card to the Hub, or the code of a custom_generate repository."""

from __future__ import annotations

import argparse
from pathlib import Path

from .modeling_tide import TIDERouters
from .publishing import push_custom_generate, push_routers


def add_push(commands: argparse._SubParsersAction, common: argparse.ArgumentParser) -> None:
    """Add the command to the parser."""
    what = "upload routers and their card to the Hub"
    parser = commands.add_parser(
        "push",
        parents=[common],
        help=what,
        description=f"{what.capitalize()}. The card is written afresh from the calibration's record. Log in first "
        "(hf auth login), or set HF_TOKEN.",
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="what tide-hf calibrate wrote")
    parser.add_argument("repo_id", metavar="ORG/NAME", help="Hub repository; made where it does not exist")
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
    parser.set_defaults(run=_push)


def _push(args: argparse.Namespace) -> None:
    options = {name: getattr(args, name) for name in ("private", "create_pr", "revision")}
    if hasattr(args, "commit_message"):
        options["commit_message"] = args.commit_message
    if args.custom_generate:
        commit = push_custom_generate(args.folder, args.repo_id, **options)
    else:
        commit = push_routers(TIDERouters.from_pretrained(args.folder), args.repo_id, **options)
    print(commit.pr_url or commit.commit_url)
