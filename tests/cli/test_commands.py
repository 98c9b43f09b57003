"""The commands and their arguments: what is refused, and that nothing heavy is loaded to say so."""

import inspect
import subprocess
import sys
from importlib import import_module

import pytest

from tide_hf import calibrate, evaluation
from tide_hf.cli.main import main
from tide_hf.cli.parser import CALIBRATE_OPTIONS, COMMANDS, make_parser

HEAVY = ("torch", "transformers", "rich")
PROBE = f"""
import sys
from tide_hf.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
print("loaded:", *[name for name in {HEAVY} if name in sys.modules])
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["generate", "--help"],
        ["serve", "--help"],
        ["completion", "bash"],
        ["generate"],
        ["dance"],
        ["chat", "model", "--exit-threshold", "-1"],
    ],
    ids=" ".join,
)
def test_help_completion_and_refusals_load_no_torch(arguments):
    if arguments[0] == "completion":
        pytest.importorskip("shtab")
    done = subprocess.run([sys.executable, "-c", PROBE, *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"
    assert "Traceback" not in done.stderr


def test_importing_the_package_loads_no_torch():
    code = f"import sys, tide_hf; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_can_be_run_and_has_a_help_text(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    assert callable(import_module(f"tide_hf.cli.{command}").run)
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: tide-hf {command}" in out
    what = COMMANDS[command][1]
    assert what[1:] in out  # names keep their capitals: Hub, HTTP, OpenAI


def test_calibrate_s_help_tells_the_defaults_of_the_function(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    parameters = inspect.signature(calibrate).parameters
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    said = capsys.readouterr().out
    for name, (_, default, text) in CALIBRATE_OPTIONS.items():
        assert parameters[name].default == default
        assert (f"{text} (default: {default})" if default is not None else text) in said


def test_evaluate_has_the_defaults_of_the_function():
    args = make_parser().parse_args(["evaluate", "model", "--text", "x.txt"])
    options = evaluation.QualityOptions(text=None)
    for name in ("samples", "max_length", "confidence", "batch_size", "seed"):
        assert getattr(args, name) == getattr(options, name)
    assert tuple(args.thresholds) == options.thresholds


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "required: COMMAND"),
        (["dance"], "invalid choice: 'dance'"),
        (["generate"], "required: MODEL"),
        (["generate", "m", "--threads", "0"], "'0' is not a number of threads"),
        (["generate", "m", "--threads", "100000000000"], "'100000000000' is not a number of threads"),
        (["calibrate", "m", "--output-dir", "x", "--batch-size", "9999999999"], "'9999999999' is not a whole number"),
        (["generate", "m", "--max-new-tokens", "many"], "'many' is not a whole number of at least 1"),
        (["generate", "m", "--exit-threshold", "nan"], "'nan' is not a threshold"),
        (["serve", "m", "--exit-threshold", "-1"], "'-1' is not a threshold"),
        (["evaluate", "m", "--thresholds", "0.9,x"], "'0.9,x' is not a list of thresholds"),
        (["evaluate", "m", "--thresholds", "0.9,inf"], "'0.9,inf' is not a list of thresholds"),
        (["calibrate", "m"], "required: --output-dir"),
        (["calibrate", "m", "--output-dir", "x", "--tolerance", "7"], "'7' is not a number between 0 and 1"),
        (["calibrate", "m", "--output-dir", "x", "--max-minutes", "-1"], "'-1' is not a number of at least 0"),
        (["completion", "fish"], "invalid choice: 'fish'"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "usage: tide-hf" in err
