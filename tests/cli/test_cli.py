"""The command line: what it prints, what it writes, and how it fails."""

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from repository import ROOT
from rich.console import Console
from rich.text import Text
from transformers.utils import logging as transformers_logging

import tide_hf
from tide_hf.cli import comparison, streaming
from tide_hf.cli.main import main
from tide_hf.common.display.depth_colours import EXITS, FULL_DEPTH, NGRAM
from tide_hf.common.stats import ExitStats
from tide_hf.evaluation.benchmark import DecodingMethod, PromptResult, Result, Run, timed_run
from tide_hf.hub import load as loading

QUICK = ("--max-new-tokens", "8", "--repeats", "1", "--prompt", "abcabcabc")


def run_of(depths, num_layers=4):
    """A run whose tokens are 0, 1, 2 ... at these depths."""
    return Run(1.0, list(range(len(depths))), ExitStats("self_speculative", num_layers, per_token=[depths]))


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tide-hf {tide_hf.__version__}\n"


def test_demo_prints_answers_and_table_and_the_figures_as_json(tiny_model_folder, routers_folder, capsys):
    command = ["demo", str(tiny_model_folder), "--routers", str(routers_folder), "--json"]
    assert main([*command, *QUICK, "--prompt", "hello", "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    for expected in ("abcabcabc", "hello", "full depth (4 layers)", "generate", "early_exit", "exit_threshold 0.9"):
        assert expected in captured.err
    record = json.loads(captured.out)
    assert record["prompts"] == ["abcabcabc", "hello"]
    assert record["dtype"] == "float32"
    assert [row["name"] for row in record["results"]] == ["generate", "self_speculative", "early_exit", "post_hoc"]
    assert record["results"][1]["num_equal"] == 2
    assert all(len(prompt["seconds"]) == 1 for row in record["results"] for prompt in row["prompts"])


def test_demo_without_routers_runs_what_can_run(tiny_model_folder, capsys):
    assert main(["demo", str(tiny_model_folder), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "routers  none" in out
    assert "self_speculative" in out
    assert "post_hoc: " not in out


def test_demo_of_one_mode_at_a_threshold_and_with_so_many_threads(tiny_model_folder, routers_folder, capsys):
    threads = torch.get_num_threads()
    command = ["demo", str(tiny_model_folder), "--routers", str(routers_folder), "--mode", "early_exit"]
    try:
        assert main([*command, *QUICK, "--exit-threshold", "0", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "exit layer 2: 7" in out
    assert "exit_threshold 0;" in out
    assert "1 thread, device" in out
    assert "self_speculative" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", " "], "the prompt is empty"),
        (["--mode", "early_exit"], "Pass --routers"),
        (["--routers", "no/such/routers"], "no routers at no/such/routers"),
        (["--device", "meta"], "there is no such device"),
        (["--device", "x"], "there is no such device"),
        (["--max-new-tokens", "3000"], "the text is too long for the model"),
    ],
)
def test_an_error_is_explained_on_standard_error(tiny_model_folder, monkeypatch, refused, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(["demo", str(tiny_model_folder), *QUICK, *arguments], message)


@pytest.mark.parametrize(
    "arguments",
    [["generate", "MODEL", " "], ["generate", "MODEL"], ["demo", "--prompt", ""], ["benchmark", "M", "--prompt", ""]],
    ids=["argument", "pipe", "demo", "benchmark"],
)
def test_an_empty_prompt_is_refused_before_anything_is_loaded(arguments):
    code = "import sys; from tide_hf.cli import main as cli; print(cli.main(sys.argv[1:]), 'torch' in sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, input="\n")
    assert done.stdout == "2 False\n"
    assert done.stderr.startswith("tide-hf: the prompt is empty: got '")


@pytest.mark.parametrize(
    ("repeats", "said"), [(1, "one run after one that is not"), (3, "median of 3 interleaved runs after one that is")]
)
def test_the_notes_say_how_many_runs_were_timed(repeats, said):
    assert said in comparison.notes([], max_new_tokens=8, repeats=repeats)[0]


def test_debug_shows_the_traceback(tmp_path, capsys, caplog):
    caplog.set_level("INFO", logger="tide_hf")  # which puts back what it was
    assert main(["demo", "--debug", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert f"tide-hf: no base model at {tmp_path}" in err


@pytest.mark.parametrize(("options", "said"), [([], False), (["--debug"], True)])
def test_debug_logs_what_goes_on_inside(tmp_path, options, said):
    code = (
        "import logging, sys; from tide_hf.cli import main as cli; "
        "cli._run = lambda args: logging.getLogger('tide_hf.some.where').info('begun'); cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert ("INFO:tide_hf.some.where:begun" in done.stderr, done.stdout) == (said, "")


def test_an_interrupt_ends_quietly(monkeypatch):
    def interrupt(args, console):
        raise KeyboardInterrupt

    monkeypatch.setattr("tide_hf.cli.demo.load", interrupt)
    assert main(["demo"]) == 130


def test_an_interrupt_while_a_command_loads_ends_quietly(monkeypatch, capsys):
    def interrupt(name, package):
        raise KeyboardInterrupt

    monkeypatch.setattr("tide_hf.cli.main.import_module", interrupt)
    assert main(["demo"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_output_that_cannot_be_written_is_explained():
    command = f"'{sys.executable}' -m tide_hf.cli completion bash > /dev/full"
    pytest.importorskip("shtab")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 2
    assert "the system refused to read or write: got '[Errno 28]" in done.stderr
    assert "Traceback" not in done.stderr


def test_streams_that_are_closed_count_as_empty():
    command = f"'{sys.executable}' -m tide_hf.cli generate no/such/model <&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, "the prompt is empty" in done.stderr) == (2, True)
    command = f"'{sys.executable}' -m tide_hf.cli completion bash >&-"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Traceback" not in done.stderr


def test_characters_that_the_output_does_not_know_are_replaced():
    code = "from tide_hf.cli import main as cli; cli._run = lambda args: print('a\u65e5\xe9'); cli.main(['demo'])"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONIOENCODING": "cp1252"}
    done = subprocess.run(command, capture_output=True, check=True, cwd=ROOT, env=environment)
    assert (done.stdout.split(), done.stderr) == ([b"a?\xe9"], b"")


def test_a_reader_that_leaves_ends_it_quietly(tiny_model_folder):
    command = f"'{sys.executable}' -m tide_hf.cli inspect '{tiny_model_folder}' --json | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "141"
    assert "Error" not in done.stderr


def test_progress_bars_vanish_where_there_is_no_terminal(tiny_model_folder, monkeypatch, capsys):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    assert main(["demo", str(tiny_model_folder), *QUICK]) == 0
    assert not transformers_logging.is_progress_bar_enabled()
    captured = capsys.readouterr()
    assert "Measuring" not in captured.out + captured.err
    assert "\x1b" not in captured.out + captured.err


@pytest.mark.parametrize("inside", [True, False], ids=["installed", "source tree"])
def test_shipped_routers_are_found(tmp_path, monkeypatch, inside):
    package = tmp_path / "tide_hf"
    monkeypatch.setattr(loading, "__file__", str(package / "hub" / "load.py"))
    assert loading.shipped_routers("org/name") is None
    folder = (package if inside else tmp_path) / "model_cards" / "org--name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert loading.shipped_routers("org/name") == str(folder)


def test_a_terminal_gets_colours_by_depth(tiny_llama, tiny_tokenizer):
    run = run_of([0, 2, 3, 4])
    styles = [str(span.style) for span in streaming.coloured(["a", "b", "c", "d"], run).spans]
    assert styles == [colour.terminal for colour in (NGRAM, *EXITS[:2], FULL_DEPTH)]

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    method = DecodingMethod("self_speculative", tide_hf.TIDEModelForCausalLM.attach(tiny_llama()))
    inputs = dict(tiny_tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False))
    run = streaming.stream_answer(partial(timed_run, method, inputs, 24), tiny_tokenizer, console)
    assert len(run.new_tokens) == 24
    assert "\x1b[" in console.file.getvalue()


def stream(tokens, tokenizer, console):
    """Stream an answer of these tokens, at full depth."""

    def answer(streamer):
        for put in (torch.zeros(1, 3), *([token] for token in tokens)):
            streamer.put(torch.as_tensor(put))
        streamer.end()
        return Run(1.0, tokens, ExitStats("self_speculative", 4, per_token=[[4] * len(tokens)]))

    return streaming.stream_answer(answer, tokenizer, console)


def test_a_terminal_does_not_obey_what_a_model_writes(tiny_tokenizer):
    text = "a\x1b[2Jb\x07\tc\n:smile: [red]d"
    tokens = tiny_tokenizer(text)["input_ids"]
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=80)
    stream(tokens, tiny_tokenizer, terminal)
    written = terminal.file.getvalue()
    assert "\x1b[2J" not in written
    assert "\x07" not in written
    assert "\N{REPLACEMENT CHARACTER}[2Jb" in written
    assert ":smile: [red]d" in written
    plain = Console(file=io.StringIO(), width=80)
    stream(tokens, tiny_tokenizer, plain)
    assert plain.file.getvalue() == text + "\n"


def test_an_answer_longer_than_the_terminal_is_followed_and_complete(tiny_tokenizer):
    text = "\n".join(f"line {number}" for number in range(30))
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=40, height=5)
    tail = streaming._Tail(Text(text))
    with console.capture() as capture:
        console.print(tail)
    assert capture.get().split("\n")[:5] == [f"line {number}" for number in range(25, 30)]
    stream(tiny_tokenizer(text)["input_ids"], tiny_tokenizer, console)
    last = console.file.getvalue().rpartition("line 0\n")[2]
    assert [f"line {number}" in last for number in range(1, 30)] == [True] * 29


def test_the_legend_counts_tokens_by_depth():
    legend = streaming.legend(run_of([0, 0, 2, 4])).plain
    assert "n-gram draft confirmed: 2" in legend
    assert "exit layer 2: 1" in legend
    assert "full depth (4 layers): 1" in legend


def test_the_table_says_where_lossless_was_not():
    plain = Result(DecodingMethod("generate", None), [PromptResult([run_of([4, 4])])], speedup=1.0)
    other = Result(
        DecodingMethod("self_speculative", None), [PromptResult([run_of([4, 4])], equal=False)], speedup=None
    )
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison.comparison_table([plain, other], num_layers=4))
    row = next(line for line in console.file.getvalue().splitlines() if "self_speculative" in line)
    assert "differs" in row
    assert "0 of 1" in row
    assert any("no speed-up to give" in note for note in comparison.notes([plain, other], 2, 1))
