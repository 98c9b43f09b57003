"""``tide-hf benchmark``: who is compared, on which prompts, and what is left out."""

import json

import pytest
from families import tiny_model
from on_steps import attach_without_compiler

from tide_hf import TIDEModelForCausalLM
from tide_hf.cli.main import main

QUICK = ("--max-new-tokens", "8", "--repeats", "1")


def test_a_table_of_plain_decoding_transformers_and_ours(tiny_model_folder, routers_folder, capsys):
    command = ["benchmark", str(tiny_model_folder), "--routers", str(routers_folder), "--mode", "all", *QUICK]
    assert main([*command, "--prompt", "abcabcabc", "--prompt", "hello"]) == 0
    captured = capsys.readouterr()
    assert "2 prompts, 4 layers, greedy" in captured.out
    table = captured.out.partition("\u2500\n")[2].splitlines()
    names = ["generate", "prompt_lookup_num_tokens=10", "assistant_early_exit=2", "self_speculative"]
    assert [line.split()[0] for line in table[:6]] == [*names, "early_exit", "post_hoc"]
    assert [line.rstrip().endswith("yes") for line in table[:4]] == [False, True, True, True]
    assert "\u2026" not in captured.out
    assert "left out" not in captured.out


def test_json_holds_all_figures_of_prompts_from_a_file(tiny_model_folder, tmp_path, capsys):
    (tmp_path / "prompts.jsonl").write_text('{"text": "abcabc"}\n{"prompt": "hello"}\n')
    command = ["benchmark", str(tiny_model_folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--json", "--raw"]
    assert main([*command, *QUICK, "--dtype", "float32"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["prompts"] == ["abcabc", "hello"]
    names = ["generate", "prompt_lookup_num_tokens=10", "assistant_early_exit=2", "self_speculative"]
    assert [result["name"] for result in record["results"]] == names
    assert all(result["num_equal"] == 2 for result in record["results"])
    assert (record["raw"], record["dtype"], record["repeats"], record["left_out"]) == (True, "float32", 1, {})
    assert "2 prompts" in captured.err


def test_what_a_model_cannot_do_is_left_out_and_named(tiny_tokenizer, tmp_path, capsys):
    tiny_model("gpt2", vocab_size=260).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    assert main(["benchmark", str(tmp_path), *QUICK, "--prompt", "abcabc"]) == 0
    out = capsys.readouterr().out
    assert "assistant_early_exit=2: left out, since this model cannot decode so (IndexError: " in out
    assert "self_speculative" in out
    assert out.count("yes") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "no/such/file"], "the prompts cannot be read"),
        (["--prompts", "EMPTY.txt"], "there are no prompts"),
        (["--prompts", "ROWS.jsonl"], "holds no prompt: got {'question': 'a'}"),
        (["--prompts", "BROKEN.jsonl"], "BROKEN.jsonl: got"),
        (["--prompt", "", "--raw"], "the prompt is empty"),
        (["--prompt", "a", "--prompt", "\udcff"], "--prompt is no text"),
        (["--config", "full"], "without --suite: got --config"),
        (["--output-dir", "x"], "without --suite: got --output-dir"),
        (["--suite", "decode", "--mode", "all"], "beside --suite: got --mode, --max-new-tokens, --repeats"),
        (["--suite", "decode", "--json", "--raw", "--prompt", "a"], ", --prompt, --raw, --repeats, --json"),
        (["--suite", "decode", "--engine", "compiled", "--exit-threshold", "1"], "--exit-threshold, --engine, --max"),
        (["--mode", "early_exit"], "there are no routers for the model"),
        (["--prompt", "a" * 2048], "the text is too long for the model"),
    ],
)
def test_errors_are_explained(tiny_model_folder, tmp_path, monkeypatch, refused, arguments, message):
    monkeypatch.setattr("tide_hf.cli.benchmark.CLONE", tmp_path)  # so that no suite can begin
    for name, content in {"EMPTY.txt": "", "ROWS.jsonl": '{"question": "a"}', "BROKEN.jsonl": "{"}.items():
        (tmp_path / name).write_text(content)
    files = [str(tmp_path / one) if one.split(".")[0].isupper() and "." in one else one for one in arguments]
    refused(["benchmark", str(tiny_model_folder), *QUICK, *files], message)


def test_the_engine_is_that_of_all_modes(tiny_model_folder, routers_folder, capsys, monkeypatch):
    """Layers run as they were traced, which takes no compiler."""
    monkeypatch.setattr(TIDEModelForCausalLM, "attach", attach_without_compiler)
    command = ["benchmark", str(tiny_model_folder), "--routers", str(routers_folder), "--prompt", "abcabc", "--json"]
    assert main([*command, *QUICK, "--engine", "compiled", "--mode", "self_speculative"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["engine"] == "compiled"
    assert "engine   compiled" in captured.err
    ours = next(result for result in record["results"] if result["name"] == "self_speculative")
    assert ours["num_equal"] == 1
    assert ours["warm_up_s"] > 0
