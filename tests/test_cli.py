"""The command line: what it prints, what it writes, and how it fails."""

import dataclasses
import inspect
import io
import json
from pathlib import Path

import pytest
import torch
from families import tiny_model
from rich.console import Console
from test_report import made_up_record
from transformers import AutoModelForCausalLM, AutoTokenizer

import tide_hf
from tide_hf import TIDERouters, calibrate_command, demo, streaming
from tide_hf.benchmark import Contender, PromptResult, Result, Run
from tide_hf.calibration.convergence import convergence_by_layer
from tide_hf.cli import main
from tide_hf.errors import DemoModelError
from tide_hf.stats import ExitStats

SETTINGS = {"data": "texts", "labels": "kl", "max_length": 16, "seed": 0, "dtype": "torch.float32", "seconds": 1.0}
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


@pytest.fixture
def calibrated(monkeypatch, tiny_llama):
    """Stands in for `calibrate`; holds what it was called with."""
    calls = []

    def calibrate(model, tokenizer, **options):
        calls.append(options)
        return TIDERouters.for_model(model, exit_layers=[2], calibration=made_up_record() | SETTINGS)

    monkeypatch.setattr("tide_hf.calibrate_command.calibrate", calibrate)
    return calls


def test_calibrate_hands_on_what_is_given_and_nothing_else(tiny_model_folder, tmp_path, calibrated, capsys):
    command = ["calibrate", str(tiny_model_folder), "--output-dir", str(tmp_path / "new" / "routers")]
    assert main(command) == 0
    assert calibrated == [{}]
    threads = torch.get_num_threads()
    given = {
        "dataset": "some/texts",
        "samples": 12,
        "max_length": 16,
        "labels": "kl",
        "exit_strategy": "identity",
        "exit_layers": [1, 3],
        "tolerance": 0.05,
        "confidence": 0.9,
        "draft_vocab_size": 64,
        "max_minutes": 1.5,
        "batch_size": 4,
        "seed": 7,
    }
    for name, value in given.items():
        text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
        command += ["--" + name.replace("_", "-"), text]
    try:
        assert main([*command, "--dtype", "bfloat16", "--threads", "1", "--no-progress"]) == 0
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(threads)
    assert calibrated[1] == given | {"progress": False}
    assert "routers are in" in capsys.readouterr().out
    card = (tmp_path / "new" / "routers" / "README.md").read_text()
    assert f"Command: `tide-hf calibrate {tiny_model_folder} --output-dir" in card
    assert "--exit-layers 1,3" in card


def test_calibrate_passes_the_output_folder_to_a_calibrate_that_takes_it(tiny_model_folder, tmp_path, monkeypatch):
    def calibrate(model, tokenizer, *, output_dir):
        assert output_dir == tmp_path
        return TIDERouters.for_model(model, exit_layers=[2], calibration=made_up_record() | SETTINGS)

    monkeypatch.setattr("tide_hf.calibrate_command.calibrate", calibrate)
    assert main(["calibrate", str(tiny_model_folder), "--output-dir", str(tmp_path)]) == 0


def test_calibrate_makes_routers_that_inspect_shows(tiny_model_folder, tmp_path, capsys):
    routers = tmp_path / "routers"
    options = ["--samples", "24", "--max-length", "10", "--exit-layers", "1,3", "--batch-size", "8", "--labels", "kl"]
    assert main(["calibrate", str(tiny_model_folder), "--output-dir", str(routers), *options]) == 0
    err = capsys.readouterr().err
    for expected in ("1 of 4", "99%", "none", "No threshold could be certified"):
        assert expected in err
    loaded = TIDERouters.from_pretrained(routers)
    assert loaded.exit_layers == [1, 3]
    assert loaded.config.calibration["labels"] == "kl"
    assert loaded.config.calibration["weights"] == "a local folder"
    assert sorted(file.name for file in routers.iterdir()) == ["README.md", "config.json", "model.safetensors", "plots"]
    assert main(["inspect", str(tiny_model_folder), "--routers", str(routers)]) == 0
    out = capsys.readouterr().out
    for expected in (
        "family       llama",
        "layers       4",
        "parameters   53,792",
        "self_speculative yes",
        "packed weights: ",
        "linear, after layers 1, 3",
        "exit threshold   none, so that",
        "draft vocabulary all tokens",
        "1 of 4",
        "within cosine",
    ):
        assert expected in out


def test_inspect_without_routers_and_with_a_text_prints_json(tiny_model_folder, tmp_path, capsys):
    (tmp_path / "text").write_text("the river\nruns\n\n\n to the sea\n", encoding="utf-8")
    assert main(["inspect", str(tiny_model_folder), "--text", str(tmp_path / "text"), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["structure"]["vocab_size"] == 260
    assert facts["routers"] is None
    assert {mode: fact["note"] for mode, fact in facts["modes"].items()} == {
        "self_speculative": None,
        "early_exit": "needs routers, and there are none",
        "post_hoc": "needs routers, and there are none",
    }
    assert set(facts["packed_weights"]) == {"packed", "linear_layers", "size_mb"}
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    rows = convergence_by_layer(model, tokenizer, ["the river\nruns", "to the sea"])
    assert facts["convergence"] == [dataclasses.asdict(row) for row in rows]


def test_inspect_says_what_a_recurrent_model_cannot_do_and_why(tiny_tokenizer, tmp_path, capsys):
    tiny_model("mamba", vocab_size=260).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert main(["inspect", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "self_speculative no: MambaForCausalLM keeps a recurrent state" in out
    assert "early_exit       no: MambaForCausalLM keeps a recurrent state" in out
    assert "post_hoc         yes" in out
    assert "routers: none" in out


def test_inspect_copes_with_older_records(tiny_model_folder, routers_folder, capsys):
    assert main(["inspect", str(tiny_model_folder), "--routers", str(routers_folder)]) == 0
    assert "60.0%" in capsys.readouterr().out
    shipped = json.loads((Path(demo.shipped_routers(demo.DEFAULT_MODEL)) / "config.json").read_text())["calibration"]
    for row in shipped["exit_layers"].values():
        row.pop("coverage", None)
    model = AutoModelForCausalLM.from_pretrained(tiny_model_folder)
    routers = TIDERouters.for_model(model, exit_layers=[4 - 1], exit_threshold=0.94, calibration=shipped)
    routers.save_pretrained(routers_folder)
    assert main(["inspect", str(tiny_model_folder), "--routers", str(routers_folder)]) == 0
    assert "0.94 (disagreement below 2.0% with 95% confidence)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "MODEL", "--output-dir", "FILE"], "the output folder cannot be made"),
        (["calibrate", "no/such/model", "--output-dir", "OUT"], "no/such/model cannot be loaded"),
        (["calibrate", "MODEL", "--output-dir", "OUT", "--tolerance", "7"], "tolerance makes no sense"),
        (["calibrate", "MODEL", "--output-dir", "OUT", "--exit-layers", "9"], "exit layer out of range"),
        (["inspect", "MODEL", "--text", "no/such/file"], "the text cannot be read"),
        (["inspect", "MODEL", "--text", "EMPTY"], "convergence cannot be measured"),
        (["inspect", "MODEL", "--routers", "no/such/routers"], "no routers at no/such/routers"),
        (["inspect", "MODEL", "--routers", "OTHER"], "belong to another base model"),
    ],
)
def test_calibrate_and_inspect_explain_their_errors(
    tiny_model_folder, tiny_llama, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "file").write_text("")
    TIDERouters.for_model(tiny_llama(num_hidden_layers=5), exit_layers=[2]).save_pretrained(tmp_path / "other")
    places = {
        "MODEL": tiny_model_folder,
        "EMPTY": tmp_path / "file",
        "FILE": tmp_path / "file",
        "OUT": tmp_path / "out",
    }
    places["OTHER"] = tmp_path / "other"
    assert main([str(places.get(argument, argument)) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert "Expected" in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["calibrate", "model"], "--output-dir"),
        (["calibrate", "model", "--output-dir", "x", "--labels", "euclid"], "invalid choice: 'euclid'"),
        (["calibrate", "model", "--output-dir", "x", "--exit-layers", "8,deep"], "'8,deep' is not a list of layers"),
        (["calibrate", "model", "--output-dir", "x", "--samples", "0"], "0 is not a whole number of at least 1"),
        (["inspect"], "MODEL"),
    ],
)
def test_wrong_options_of_calibrate_and_inspect(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_every_command_has_a_help_text(capsys):
    for command in ("demo", "calibrate", "inspect"):
        with pytest.raises(SystemExit) as caught:
            main([command, "--help"])
        assert caught.value.code == 0
        assert f"usage: tide-hf {command}" in capsys.readouterr().out


def test_the_options_have_the_names_of_the_function_s():
    parameters = set(inspect.signature(tide_hf.calibrate).parameters)
    assert set(calibrate_command.OPTIONS) - {"draft_vocab_size", "max_minutes"} <= parameters
