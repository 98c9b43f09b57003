"""The commands and their arguments: help, completion, what is refused, and that no heavy package is loaded for it."""

import inspect
import json
import subprocess
import sys
from collections import ChainMap
from importlib import import_module

import pytest
from repository import ROOT

import tide_hf
from tide_hf import calibrate
from tide_hf.calibration.arguments import Settings
from tide_hf.cli.main import main
from tide_hf.cli.parser import CALIBRATE_OPTIONS, COMMANDS, EVALUATE_OPTIONS
from tide_hf.evaluation.quality import QualityOptions

LIGHT = [(line.split(), 0) for line in ("--help", "--version", "generate --help", "completion bash")]
LIGHT += [(line.split(), 2) for line in ("generate", "chat model --exit-threshold -1")]
# The prompt is empty, in the second line as one from the pipe.
LIGHT += [(["generate", "MODEL", " "], 2), (["generate", "MODEL"], 2)]
LIGHT += [(["demo", "--prompt", ""], 2), (["benchmark", "MODEL", "--prompt", ""], 2)]
PROBE = """
import json, sys
from tide_hf.cli.main import main
for line, expected in json.loads(sys.argv[1]):
    try:
        status = main(line)
    except SystemExit as error:
        status = error.code
    loaded = [name for name in ("torch", "transformers", "rich") if name in sys.modules]
    assert (status, loaded) == (expected, []), (line, status, loaded)
"""


def test_help_completion_and_refusals_load_no_torch():
    pytest.importorskip("shtab")
    command = [sys.executable, "-c", PROBE, json.dumps(LIGHT)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT, input="\n")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("tide-hf: the prompt is empty: got '") == 4
    assert "INFO:" not in done.stderr  # without --debug nothing is logged
    assert f"tide-hf {tide_hf.__version__}\n" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_a_module_and_a_help_text(command, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    assert callable(import_module(f"tide_hf.cli.{command}").run)
    with pytest.raises(SystemExit) as caught:
        main([command, "--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert f"usage: tide-hf {command}" in out
    assert COMMANDS[command][1][1:] in out  # names keep their capitals: Hub, HTTP, OpenAI


@pytest.mark.parametrize(
    ("command", "functions", "options"),
    [("calibrate", [calibrate, Settings], CALIBRATE_OPTIONS), ("evaluate", [QualityOptions], EVALUATE_OPTIONS)],
)
def test_options_have_the_names_and_defaults_of_the_function(command, functions, options, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1000")
    parameters = dict(ChainMap(*(inspect.signature(one).parameters for one in functions)))
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    for name, (_, default, text) in options.items():
        assert parameters[name].default == default
        shown = ",".join(map(str, default)) if isinstance(default, tuple) else default
        assert (f"{text} (default: {shown})" if default is not None else text) in out


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("dance", "invalid choice: 'dance'"),
        ("generate", "required: MODEL"),
        ("generate m --raw a b", "unrecognized arguments: b"),
        ("generate m --port 8001", "unrecognized arguments: --port 8001"),
        ("serve m --remembered-tokens -1", "'-1' is not a whole number of at least 0"),
        ("generate m --threads 100000000000", "'100000000000' is not a number of threads"),
        ("generate m --max-new-tokens many", "'many' is not a whole number of at least 1"),
        ("generate m --exit-threshold nan", "'nan' is not a threshold"),
        ("evaluate m --thresholds 0.9,inf", "'0.9,inf' is not a list of thresholds"),
        ("calibrate m", "required: --output-dir"),
        ("calibrate m --output-dir x --labels euclid", "invalid choice: 'euclid'"),
        ("calibrate m --output-dir x --exit-layers 8,deep", "'8,deep' is not a list of layers"),
        ("calibrate m --output-dir x --tolerance 7", "'7' is not a number between 0 and 1"),
        ("calibrate m --output-dir x --max-minutes -1", "'-1' is not a number of at least 0"),
    ],
)
def test_a_wrong_command_line_is_refused(line, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(line.split())
    assert caught.value.code == 2
    err = capsys.readouterr().err
    assert message in err
    assert "usage: tide-hf" in err


COMPLETE = (
    'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
    'function="$(complete -p tide-hf | grep -o "_shtab[a-z_]*")"; '
    '"$function" tide-hf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; '
    'printf "%s\\n" "${COMPREPLY[@]}"'
)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tide-hf", "chat", "--max"], ["--max-new-tokens"]),
        (["tide-hf", "generate", "--prompt-file", "que"], ["questions.txt"]),
    ],
)
def test_bash_completes(tmp_path, capsys, words, expected):
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "script").write_text(capsys.readouterr().out)
    (tmp_path / "questions.txt").write_text("")
    command = ["bash", "-c", COMPLETE, str(tmp_path / "script"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [line.strip() for line in done.stdout.splitlines()] == expected


def test_a_missing_shtab_is_named(monkeypatch, refused):
    monkeypatch.setitem(sys.modules, "shtab", None)
    refused(["completion", "bash"], "pip install tide-hf[completion]")
