"""``tide-hf push``: uploads routers and their card, a draft head alone, or the code of a custom_generate repository."""

from __future__ import annotations

import argparse

from ..routers.publish import push_custom_generate, push_routers, push_speculators
from ..routers.routers import TIDERouters
from .parser import given_options, refuse_unused


def run(args: argparse.Namespace) -> None:
    """Run the command."""
    options = given_options(args, ("private", "create_pr", "revision", "commit_message"))
    if args.custom_generate:
        refuse_unused(args, ["license", "format"], "with --custom-generate")
        commit = push_custom_generate(args.folder, args.repo_id, **options)
    else:
        routers = TIDERouters.from_pretrained(args.folder)
        push = push_speculators if args.format == "speculators" else push_routers
        commit = push(routers, args.repo_id, license=args.license, **options)
    print(commit.pr_url or commit.commit_url)
