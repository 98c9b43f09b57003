"""``tide-hf benchmark``: which methods are compared, on which prompts, and what the table and its notes say."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from rich.console import Console

from tide_hf import ExitStats, TIDEModelForCausalLM
from tide_hf.cli.benchmark import comparison_table, notes
from tide_hf.cli.main import main
from tide_hf.evaluation.benchmark import DecodingMethod, PromptResult, Result, Run

QUICK = ("--max-new-tokens", "6", "--repeats", "1")


def test_a_table_of_plain_decoding_transformers_and_ours(tiny_model_folder, routers_folder, capsys):
    command = ["benchmark", str(tiny_model_folder), "--routers", str(routers_folder), "--mode", "all", *QUICK]
    assert main([*command, "--prompt", "abcabcabc", "--prompt", "hello"]) == 0
    captured = capsys.readouterr()
    assert "2 prompts, 4 layers, greedy" in captured.out
    table = captured.out.partition("\u2500\n")[2].splitlines()
    names = ["generate", "prompt_lookup_num_tokens=10", "assistant_early_exit=2", "engine", "self_speculative"]
    assert [line.split()[0] for line in table[:7]] == [*names, "early_exit", "post_hoc"]
    assert [line.rstrip().endswith("yes") for line in table[:5]] == [False, True, True, True, True]
    assert table[3].startswith("engine alone, no drafts")
    assert "one run each, so speeds are unsteady, after an untimed one" in " ".join(captured.out.split())
    assert "\u2026" not in captured.out
    assert "left out" not in captured.out


def test_json_has_the_figures_of_prompts_from_a_file(tiny_model_folder, tmp_path, capsys, monkeypatch):
    engines, attach = [], TIDEModelForCausalLM.attach

    def spied(*args, engine, **options):
        engines.append(engine)
        return attach(*args, **options)

    monkeypatch.setattr(TIDEModelForCausalLM, "attach", spied)
    (tmp_path / "prompts.jsonl").write_text('{"text": "abcabc"}\n{"prompt": "hello"}\n')
    command = ["benchmark", str(tiny_model_folder), "--prompts", str(tmp_path / "prompts.jsonl"), "--json", "--raw"]
    assert main([*command, *QUICK, "--dtype", "float32", "--engine", "compiled"]) == 0
    captured = capsys.readouterr()
    record = json.loads(captured.out)
    assert record["prompts"] == ["abcabc", "hello"]
    assert all(result["num_equal"] == 2 for result in record["results"])
    assert (record["raw"], record["dtype"], record["repeats"], record["left_out"]) == (True, "float32", 1, {})
    assert record["engine"] == "compiled"
    assert engines == ["compiled"]
    assert "2 prompts" in captured.err


def test_a_method_that_the_model_does_not_support_is_left_out_and_named(tiny_tokenizer, tmp_path, capsys):
    for part in (tiny_model("gpt2", vocab_size=260), tiny_tokenizer):
        part.save_pretrained(tmp_path)
    assert main(["benchmark", str(tmp_path), *QUICK, "--prompt", "abcabc"]) == 0
    out = capsys.readouterr().out
    assert "assistant_early_exit=2: left out, since this model does not support it (IndexError: " in out
    assert "self_speculative" in out
    assert out.count("yes") == 3


@pytest.mark.parametrize(
    ("dtype", "note"),
    [
        ("float32", "tokens differ from generate's, which in float32 is an error"),
        ("bfloat16", "0 of 1 answers are generate's own. Below float32 one may differ after a near-tie"),
    ],
)
@pytest.mark.parametrize("as_float32", [None, True, False])
def test_a_lossless_mode_whose_tokens_differ_gets_a_speed_up_beside_what_they_equal(dtype, note, as_float32):
    run = Run(1.0, [0, 1], ExitStats("self_speculative", 4, per_token=[[4, 4]]))
    model = SimpleNamespace(dtype=getattr(torch, dtype))
    plain = Result(DecodingMethod("generate", model), [PromptResult([run])], speedup=1.0)
    plain.prompts[0].as_float32 = None if as_float32 is None else not as_float32
    other = Result(DecodingMethod("self_speculative", model), [PromptResult([run], equal=False)], speedup=1.5)
    other.prompts[0].as_float32 = as_float32
    console = Console(file=io.StringIO(), width=80)
    console.print(comparison_table([plain, other], num_layers=4))
    first, row = (line for line in console.file.getvalue().splitlines() if "1.50" in line or "generate" in line)
    assert row.split()[2] == "1.50"
    assert ("yes" in first, "yes" in row) == (as_float32 is False, as_float32 is True)
    assert ("0 of 1" in first, "0 of 1" in row) == (as_float32 is True, not as_float32)
    assert ("float32" in console.file.getvalue()) == (as_float32 is not None)
    found = notes([plain, other], 2)
    assert note in found[-1]
    assert [("weights loaded in float32" in line) for line in found[1:-1]] == ([] if as_float32 is None else [True])


def test_suites_are_run_by_the_examples_of_a_clone(monkeypatch):
    lines = []
    monkeypatch.setattr("subprocess.run", lambda line, **_: lines.append(line) or type("Done", (), {"returncode": 0}))
    assert main(["benchmark", "MODEL", "--suite", "decode", "--suite", "quality", "--threads", "1"]) == 0
    suites = ["--suite", "decode", "--suite", "quality"]
    assert lines[0][2:] == ["examples.benchmarks", "run", *suites, "--model", "MODEL", "--threads", "1"]
