"""``tide-hf completion``: the script works in the shell that it is for."""

import subprocess
import sys

import pytest

from tide_hf.cli.main import main

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
