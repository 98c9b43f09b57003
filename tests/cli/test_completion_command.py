"""``tide-hf completion``: the script works in the shell that it is for."""

import shutil
import subprocess
import sys

import pytest

from tide_hf.cli.main import main


@pytest.fixture
def script(tmp_path, capsys):
    """A function that writes the script of a shell to a file and returns its path."""
    pytest.importorskip("shtab")

    def make(shell):
        assert main(["completion", shell]) == 0
        path = tmp_path / f"completion.{shell}"
        path.write_text(capsys.readouterr().out)
        return path

    return make


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["tide-hf", "gene"], ["generate"]),
        (["tide-hf", "chat", "--max"], ["--max-new-tokens"]),
        (["tide-hf", "benchmark", "--mode", ""], ["all", "self_speculative", "early_exit", "post_hoc"]),
        (["tide-hf", "generate", "--prompt-file", "que"], ["questions.txt"]),
    ],
)
def test_bash_completes(script, tmp_path, words, expected):
    (tmp_path / "questions.txt").write_text("")
    complete = (
        'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMP_LINE="$*"; COMP_POINT=${#COMP_LINE}; '
        'function="$(complete -p tide-hf | grep -o "_shtab[a-z_]*")"; '
        '"$function" tide-hf "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"; '
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    command = ["bash", "-c", complete, str(script("bash")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert [line.strip() for line in done.stdout.splitlines()] == expected


def test_zsh_reads_the_script(script):
    path = script("zsh")
    assert path.read_text().startswith("#compdef tide-hf")
    if shutil.which("zsh"):
        subprocess.run(["zsh", "-n", str(path)], check=True)


def test_without_shtab_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "pip install tide-hf[completion]" in capsys.readouterr().err
