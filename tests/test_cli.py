"""The command line: what it prints, what it writes, and how it fails."""

import io
import json

import pytest
import torch
from rich.console import Console

import tide_hf
from tide_hf import TIDERouters, demo, streaming
from tide_hf.benchmark import Contender, PromptResult, Result, Run
from tide_hf.cli import main
from tide_hf.errors import DemoModelError
from tide_hf.stats import ExitStats

QUICK = ("--max-new-tokens", "8", "--repeats", "1", "--prompt", "abcabcabc")


@pytest.fixture
def routers_folder(tmp_path, tiny_llama):
    record = {"exit_layers": {"2": {"agreement": 0.6}}}
    routers = TIDERouters.for_model(tiny_llama(), exit_layers=[2], calibration=record)
    routers.save_pretrained(tmp_path / "routers")
    return tmp_path / "routers"


def run_of(depths, num_layers=4):
    """A run whose tokens are 0, 1, 2 ... at these depths."""
    return Run(1.0, list(range(len(depths))), ExitStats("self_speculative", num_layers, per_token=[depths]))


def test_version(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"tide-hf {tide_hf.__version__}\n"


def test_demo_prints_answers_and_table_and_writes_the_figures(tiny_model_folder, routers_folder, tmp_path, capsys):
    figures = tmp_path / "figures.json"
    command = ["demo", "--model", str(tiny_model_folder), "--routers", str(routers_folder), "--json", str(figures)]
    assert main([*command, *QUICK, "--prompt", "hello", "--dtype", "float32"]) == 0
    out = capsys.readouterr().out
    for expected in ("abcabcabc", "hello", "full depth (4 layers)", "generate", "early_exit", "exit_threshold 0.9"):
        assert expected in out
    record = json.loads(figures.read_text())
    assert record["prompts"] == ["abcabcabc", "hello"]
    assert record["dtype"] == "float32"
    assert [row["name"] for row in record["results"]] == ["generate", "self_speculative", "early_exit", "post_hoc"]
    assert record["results"][1]["num_equal"] == 2
    assert all(len(prompt["seconds"]) == 1 for row in record["results"] for prompt in row["prompts"])


def test_demo_without_routers_runs_what_can_run(tiny_model_folder, capsys):
    assert main(["demo", "--model", str(tiny_model_folder), *QUICK]) == 0
    out = capsys.readouterr().out
    assert "routers  none" in out
    assert "self_speculative" in out
    assert "post_hoc: " not in out


def test_demo_of_one_mode_at_a_threshold_and_with_so_many_threads(tiny_model_folder, routers_folder, capsys):
    threads = torch.get_num_threads()
    command = ["demo", "--model", str(tiny_model_folder), "--routers", str(routers_folder), "--mode", "early_exit"]
    try:
        assert main([*command, *QUICK, "--exit-threshold", "0", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    out = capsys.readouterr().out
    assert "exit layer 2: 7" in out
    assert "exit_threshold 0;" in out
    assert "1 threads" in out
    assert "self_speculative" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mode", "early_exit"], "Pass --routers"),
        (["--routers", "no/such/routers"], "no routers at no/such/routers"),
        (["--json", "no/such/folder/figures.json"], "the figures cannot be written there"),
    ],
)
def test_an_error_is_explained_on_standard_error(tiny_model_folder, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert main(["demo", "--model", str(tiny_model_folder), *QUICK, *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Expected" in captured.err
    assert "Traceback" not in captured.err


def test_debug_shows_the_traceback(tmp_path):
    with pytest.raises(DemoModelError):
        main(["demo", "--debug", "--model", str(tmp_path)])


@pytest.mark.parametrize("arguments", [[], ["demo", "--repeats", "0"], ["demo", "--max-new-tokens", "x"], ["dance"]])
def test_a_wrong_command_line_is_refused(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert "usage: tide-hf" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(monkeypatch):
    def interrupt(options, console):
        raise KeyboardInterrupt

    monkeypatch.setattr("tide_hf.cli.run_demo", interrupt)
    assert main(["demo"]) == 130


@pytest.mark.parametrize("inside", [True, False], ids=["installed", "source tree"])
def test_shipped_routers_are_found(tmp_path, monkeypatch, inside):
    package = tmp_path / "tide_hf"
    monkeypatch.setattr(demo, "__file__", str(package / "demo.py"))
    assert demo.shipped_routers("org/name") is None
    folder = (package if inside else tmp_path) / "model_cards" / "org--name"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    assert demo.shipped_routers("org/name") == str(folder)


def test_a_terminal_gets_colours_by_depth(tiny_llama, tiny_tokenizer):
    run = run_of([0, 2, 3, 4])
    styles = [str(span.style) for span in streaming.coloured(["a", "b", "c", "d"], run).spans]
    assert styles == [streaming.NGRAM_STYLE, *streaming.EXIT_STYLES[:2], streaming.FULL_DEPTH_STYLE]

    console = Console(file=io.StringIO(), force_terminal=True, color_system="standard", width=80)
    model = tide_hf.TIDEModelForCausalLM.attach(tiny_llama())
    inputs = tiny_tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False)
    run = streaming.stream_answer(Contender("self_speculative", model), tiny_tokenizer, dict(inputs), 24, console)
    assert len(run.new_tokens) == 24
    assert "\x1b[" in console.file.getvalue()


def test_the_legend_counts_tokens_by_depth():
    legend = streaming.legend(run_of([0, 0, 2, 4])).plain
    assert "n-gram draft confirmed: 2" in legend
    assert "exit layer 2: 1" in legend
    assert "full depth (4 layers): 1" in legend


def test_a_character_of_several_tokens_is_the_last_ones(tiny_tokenizer):
    tokens = tiny_tokenizer("né 🦊!")["input_ids"]
    texts = streaming.token_texts(tiny_tokenizer, tokens)
    assert texts == ["n", "", "é", " ", "", "", "", "🦊", "!"]
    assert streaming.token_texts(tiny_tokenizer, [*tokens[:2], tiny_tokenizer.eos_token_id])[0] == "n"


def test_the_table_says_where_lossless_was_not():
    plain = Result(Contender("generate", None), [PromptResult([run_of([4, 4])])], speedup=1.0)
    other = Result(Contender("self_speculative", None), [PromptResult([run_of([4, 4])], equal=False)], speedup=None)
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.comparison_table([plain, other], num_layers=4))
    row = next(line for line in console.file.getvalue().splitlines() if "self_speculative" in line)
    assert "differs" in row
    assert "0 of 1" in row
    assert any("no speed-up to give" in note for note in demo.notes([plain, other], 2, 1))


def test_every_command_has_a_help_text(capsys):
    for command in ("demo", "calibrate", "inspect", "serve"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"usage: tide-hf {command}" in capsys.readouterr().out
