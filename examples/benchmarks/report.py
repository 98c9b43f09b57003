"""Render results as tables and plots, in the README and other pages: `python -m examples.benchmarks report`.

A table stands in a page between `<!-- report: NAME -->` and `<!-- end of NAME -->`; what is between them is written
here and nowhere else. The names of results of a config that does not have all suites begin with their folder's. Results
whose token check failed are refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tide_hf.common.errors import ConfigurationError

from . import gpu_report
from .checks import failures
from .common import FOLDER, RESULTS, precision
from .report_plots import save_plots
from .suites import SUITES

README = FOLDER.parent.parent / "README.md"
PAGES = (README, FOLDER.parent / "guides" / "measuring.md", FOLDER / "MEASURED.md")
WHOLE_CONFIGS = ("quick", "full")
SECTION = re.compile(r"(<!-- report: (?P<name>[\w-]+) -->\n).*?(<!-- end of (?P=name) -->)", re.DOTALL)


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `report`."""
    parser.add_argument("--results", type=Path, default=RESULTS / "quick", help="folder of results (default: quick)")
    parser.add_argument(
        "--page",
        type=Path,
        action="append",
        help="file with markers, repeatable (default: README, guides/measuring.md and MEASURED.md)",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; fail where a page says something else")


def report(args: argparse.Namespace) -> None:
    """Render the results into the pages, the whole report beside the results, and the plots.

    Raises:
        ConfigurationError: Results are missing, cannot be read, or failed their token check; or `--check` found other
            tables.
    """
    if (args.results / gpu_report.SPEED).is_file():
        _fill_pages(gpu_report.sections(args.results), args)
        return
    records = read_results(args.results)
    sections = sections_of(records)
    _fill_pages({f"{prefix_of(args.results, records)}{name}": content for name, content in sections.items()}, args)
    if args.check:
        return
    (args.results / "REPORT.md").write_text(whole(sections), encoding="utf-8")
    save_plots(records, args.results / "plots", digest(args.results))


def _fill_pages(marked: dict[str, str], args: argparse.Namespace) -> None:
    """Put the sections into the pages; with `--check`, raise where a page shows something else."""
    for page in args.page or PAGES:
        text = page.read_text(encoding="utf-8")
        rendered = fill(text, marked)
        if not args.check:
            page.write_text(rendered, encoding="utf-8")
        elif rendered != text:
            raise ConfigurationError(
                f"{page.name} does not show the results",
                got="other tables",
                expected=f"those of {args.results.name}",
                do="Run: python -m examples.benchmarks report",
            )


def read_results(folder: Path) -> dict[str, dict[str, Any]]:
    """The records of a folder by suite, all of whose token checks hold.

    Raises:
        ConfigurationError: There are none, one cannot be read, or one failed its token check.
    """
    records: dict[str, dict[str, Any]] = {}
    for name in SUITES:
        file = folder / f"{name}.json"
        if file.is_file():
            records[name] = read_result(file, name)
    if not records:
        raise ConfigurationError(
            "there is nothing to report",
            got=f"no results in {folder.name}",
            expected=f"files such as {next(iter(SUITES))}.json",
            do="Run: python -m examples.benchmarks run --suite all",
        )
    return records


def read_result(file: Path, suite: str) -> dict[str, Any]:
    """One record whose token checks hold.

    Raises:
        ConfigurationError: It cannot be read, or failed its token check.
    """
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
        failed = failures(SUITES[suite].checks(record))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigurationError(
            f"{file.name} cannot be read",
            got=f"'{error}'",
            expected=f"what the suite {suite} writes",
            do="Measure it again.",
        ) from error
    if failed:
        raise ConfigurationError(
            f"the token check of {file.name} failed, so its speeds are not shown",
            got="; ".join(failed),
            expected="the tokens of generate wherever they are claimed",
            do="Find out why before measuring again.",
        )
    return record


def sections_of(records: dict[str, dict[str, Any]]) -> dict[str, str]:
    """What stands between the markers, by name: tables, and what they come from."""
    found = {}
    for suite, record in records.items():
        found[f"{suite}-origin"] = origin(record)
        for name, table in SUITES[suite].tables(record).items():
            found[name.replace("_", "-")] = table
    return found


def prefix_of(folder: Path, records: dict[str, dict[str, Any]]) -> str:
    """What the pages' names for the sections begin with: nothing for the configs that have all suites."""
    config = next(iter(records.values())).get("config")
    return "" if config in (None, *WHOLE_CONFIGS) else f"{folder.resolve().name}-"


def origin(record: dict[str, Any]) -> str:
    """Model, machine and commit that figures come from, in a sentence."""
    where = record["cpu"] if record["device"] == "cpu" else record["device"]
    number = record["torch_threads"]
    threads = f" on {number} thread{'s' if number > 1 else ''}" if record["device"] == "cpu" else ""
    return (
        f"{record['model']} in {precision(record)}{threads}, {where}, {record['date'][:10]}, "
        f"commit {(record['commit'] or 'unknown')[:7]}, torch {record['versions']['torch']}, "
        f"transformers {record['versions']['transformers']}; config `{record['config']}`, "
        f"{record['seconds'] / 60:.0f} minutes."
    )


def fill(text: str, sections: dict[str, str]) -> str:
    """Put the sections between their markers; markers of what was not measured are left as they are."""
    return SECTION.sub(
        lambda found: f"{found[1]}\n{sections[found['name']]}\n\n{found[3]}" if found["name"] in sections else found[0],
        text,
    )


def whole(sections: dict[str, str]) -> str:
    """All sections, one after another, with plots."""
    parts = ["# Report", "Written by `python -m examples.benchmarks report`. `published` figures have their sources in"]
    parts[-1] += " `examples/benchmarks/published.json`."
    for name, content in sections.items():
        heading = name.removesuffix("-origin").capitalize() if name.endswith("-origin") else name.replace("-", " ")
        parts += [f"{'##' if name.endswith('-origin') else '###'} {heading}", content]
    return "\n\n".join(parts) + "\n"


def digest(folder: Path) -> str:
    """A fingerprint of the results that tables and plots are made from."""
    return hash_of(folder / f"{name}.json" for name in SUITES)


def hash_of(files: Iterable[Path]) -> str:
    """SHA-256 over the contents of those of the files that are there."""
    known = hashlib.sha256()
    for file in files:
        if file.is_file():
            known.update(file.read_bytes())
    return known.hexdigest()
