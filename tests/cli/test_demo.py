"""``tide-hf demo``: both answers to each prompt, one table, and the figures as JSON."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers.utils import logging as transformers_logging

from tide_hf import ExitStats
from tide_hf.cli import demo
from tide_hf.cli.main import main
from tide_hf.cli.prompts import PROMPTS
from tide_hf.evaluation.benchmark import DecodingMethod, PromptResult, Result, Run, compare_with

HEADINGS = "plain TIDE by by tokens tokens/ prompt tokens/s tokens/s speed engine drafts equal pass"
SHORT = ("--max-new-tokens", "8")


@pytest.fixture
def command(tiny_model_folder):
    return ["demo", str(tiny_model_folder), *SHORT]


def test_both_answers_to_each_prompt_then_one_table_and_the_figures_as_json(
    command, routers_folder, monkeypatch, capsys
):
    monkeypatch.setattr(transformers_logging, "_tqdm_active", True)
    monkeypatch.setattr(demo, "MAX_SECONDS", float("inf"))
    options = ["--routers", str(routers_folder), "--json", "--prompt", "abcabcabc", "--prompt", "hello"]
    assert main([*command, *options, "--threads", "1"]) == 0
    captured = capsys.readouterr()
    heads = [line for line in captured.err.splitlines() if line in ("abcabcabc", "hello", *demo.NAMES)]
    assert heads == ["abcabcabc", *demo.NAMES, "hello", *demo.NAMES]
    shown = (
        "Loading",
        "Attaching TIDE",
        "full pass: ",
        "1 thread, device",
        "tokens",
        f"tide-hf benchmark {command[1]}",
    )
    assert [part for part in shown if part not in captured.err] == []
    assert captured.err.rstrip().endswith(f"tide-hf benchmark {command[1]}")
    record = json.loads(captured.out)
    assert (record["prompts"], record["dtype"]) == (["abcabcabc", "hello"], "float32")
    names = ["generate", "self_speculative", "engine alone, no drafts"]
    assert [(row["name"], row["num_equal"]) for row in record["results"]] == [(name, 2) for name in names]
    assert {len(one["seconds"]) for row in record["results"] for one in row["prompts"]} == {demo.REPEATS}
    assert f"median of {demo.REPEATS} interleaved runs" in " ".join(captured.err.split())
    # Standard error is not a terminal, so there are neither progress bars nor colours.
    assert not transformers_logging.is_progress_bar_enabled()
    assert "\x1b" not in captured.err


def test_no_answer_is_drafted_from_one_to_the_same_prompt_that_nobody_saw(command, monkeypatch, capsys):
    remembered = []
    stream = demo.stream_side_by_side

    def see(answers, tokenizer, console):
        model = answers[demo.NAMES[1]].args[0].model
        remembered.append(model._tide.answers.num_tokens)
        return stream(answers, tokenizer, console)

    monkeypatch.setattr(demo, "stream_side_by_side", see)
    assert main([*command, "--prompt", "a", "--prompt", "b"]) == 0
    assert remembered == [0, 0]


def test_a_slow_machine_leaves_built_in_prompts_out_and_no_others(command, monkeypatch, capsys, tiny_model_folder):
    monkeypatch.setattr(demo, "MAX_SECONDS", -1.0)
    assert main(command) == 0
    out = capsys.readouterr().out
    assert (PROMPTS[0] in out, PROMPTS[2] in " ".join(out.split())) == (True, False)
    assert "The other prompts are left out" in out
    assert "one run each, so speeds are unsteady" in " ".join(out.split())
    assert main([*command, "--prompt", "hello", "--prompt", "you"]) == 0
    out = capsys.readouterr().out
    assert out.count(demo.NAMES[0]) == 2
    assert "left out" not in out


def results_of(*answers, dtype="float32"):
    """Results of plain decoding, TIDE and its engine alone.

    For each prompt there are the seconds of all three, the tokens of plain decoding and of TIDE, and TIDE's counts.
    """
    model = SimpleNamespace(dtype=getattr(torch, dtype))
    names = ("generate", "self_speculative", "engine alone, no drafts")
    plain, tide, engine = (Result(DecodingMethod(name, model), []) for name in names)
    for slow, fast, between, tokens, others, rounds, accepted in answers:
        stats = ExitStats("self_speculative", 4, rounds=rounds, drafted=9, accepted=accepted)
        plain.prompts.append(PromptResult([Run(slow, tokens, None)]))
        tide.prompts.append(PromptResult([Run(fast, others, stats)]))
        engine.prompts.append(PromptResult([Run(between, tokens, None)]))
    for result in (plain, tide, engine):
        compare_with(plain, result)
    return [plain, tide, engine]


def table_of(prompts, results, headings=HEADINGS):
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.comparison_table(prompts, results))
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]
    assert max(map(len, lines)) <= 80
    assert " ".join("\n".join(lines[:2]).split()) == headings
    return [line.split() for line in lines if set(line) - set(" \N{BOX DRAWINGS LIGHT HORIZONTAL}")][2:]


def test_a_table_of_speed_what_engine_and_drafts_gain_equality_and_tokens_a_pass():
    tokens = list(range(8))
    same = (4.0, 2.0, 2.0, tokens, tokens, 2, 5), (4.0, 1.0, 2.0, tokens, tokens, 2, 6)
    rows = table_of(["one [b]", "a\n" + "long " * 20], results_of(*same))
    assert rows[0] == ["one", "[b]", "2.0", "4.0", "2.00", "2.00", "1.00", "yes", "3.50"]
    assert rows[1][:5] == ["a", "long", "long", "long", "long"]
    assert rows[1][-7:] == ["2.0", "8.0", "4.00", "2.00", "2.00", "yes", "4.00"]
    assert rows[2] == ["all", "2.0", "5.3", "2.67", "2.00", "1.33", "yes", "3.75"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_speed_is_shown_beside_what_tokens_are_equal_to(dtype):
    tokens = list(range(8))
    answers = (4.0, 2.0, 2.0, tokens, tokens, 7, 0), (4.0, 2.0, 2.0, tokens, tokens[1:], 7, 0)
    results = results_of(*answers, dtype=dtype)
    rows = table_of(["one", "two"], results)
    assert rows[0] == ["one", "2.0", "4.0", "2.00", "2.00", "1.00", "yes", "1.00"]
    assert rows[1] == ["two", "2.0", "3.5", "1.75", "2.00", "0.88", "0", "of", "1", "1.00"]
    assert rows[2][-4:] == ["1", "of", "2", "1.00"]
    for result, equal in zip(results, [(True, False), (True, True), (True, True)], strict=True):
        for prompt, as_float32 in zip(result.prompts, equal, strict=True):
            prompt.as_float32 = as_float32
    found = table_of(
        ["one", "two"], results, HEADINGS.replace("tokens tokens/", "as float32 tokens/").replace("equal", "plain/TIDE")
    )
    assert [row[-2:] for row in found[:2]] == [["yes/yes", "1.00"], ["no/yes", "1.00"]]
    assert found[2][-4:] == ["1/2", "of", "2", "1.00"]
