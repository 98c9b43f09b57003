"""Answers in a terminal and elsewhere: streamed, coloured by depth, without control characters."""

import io
from functools import partial

import torch
from rich.console import Console
from rich.text import Text

import tide_hf
from tide_hf.cli import streaming
from tide_hf.common.display import EXITS, FULL_DEPTH, NGRAM
from tide_hf.common.stats import ExitStats
from tide_hf.evaluation.benchmark import DecodingMethod, Run, timed_run


def run_of(depths):
    return Run(1.0, list(range(len(depths))), ExitStats("self_speculative", 4, per_token=[depths]))


def terminal(color_system=None, width=80, **options):
    return Console(file=io.StringIO(), force_terminal=True, color_system=color_system, width=width, **options)


def stream(tokens, tokenizer, console):
    """Stream an answer of these tokens, at full depth; return what is written."""

    def answer(streamer):
        for put in (torch.zeros(1, 3), *([token] for token in tokens)):
            streamer.put(torch.as_tensor(put))
        streamer.end()
        return run_of([4] * len(tokens))

    streaming.stream_answer(answer, tokenizer, console)
    return console.file.getvalue()


def test_a_terminal_gets_colours_by_depth_and_a_legend(tiny_llama, tiny_tokenizer):
    run = run_of([0, 2, 3, 4, 0])
    styles = [str(span.style) for span in streaming.coloured("abcde", run).spans]
    assert styles == [colour.terminal for colour in (NGRAM, *EXITS[:2], FULL_DEPTH, NGRAM)]
    counts = [part.strip() for part in streaming.legend(run).plain.split("\N{BLACK SQUARE}")[1:]]
    assert counts == ["no layer: 2", "exit layer 2: 1", "exit layer 3: 1", "full depth (4 layers): 1"]
    console = terminal(color_system="standard")
    method = DecodingMethod("self_speculative", tide_hf.TIDEModelForCausalLM.attach(tiny_llama()))
    inputs = dict(tiny_tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False))
    run = streaming.stream_answer(partial(timed_run, method, inputs, 24), tiny_tokenizer, console)
    assert len(run.new_tokens) == 24
    assert "\x1b[" in console.file.getvalue()


def test_control_characters_do_not_reach_a_terminal(tiny_tokenizer):
    text = "a\x1b[2Jb\x07\tc\n:smile: [red]d"
    tokens = tiny_tokenizer(text)["input_ids"]
    written = stream(tokens, tiny_tokenizer, terminal())
    assert [text for text in ("\x1b[2J", "\x07") if text in written] == []
    assert [text for text in ("\N{REPLACEMENT CHARACTER}[2Jb", ":smile: [red]d") if text not in written] == []
    assert stream(tokens, tiny_tokenizer, Console(file=io.StringIO(), width=80)) == text + "\n"


def test_a_long_answer_scrolls_and_is_complete_in_the_end(tiny_tokenizer):
    text = "\n".join(f"line {number}" for number in range(30))
    console = terminal(width=40, height=5)
    with console.capture() as capture:
        console.print(streaming._Tail(Text(text)))
    assert capture.get().split("\n")[:5] == [f"line {number}" for number in range(25, 30)]
    last = stream(tiny_tokenizer(text)["input_ids"], tiny_tokenizer, console).rpartition("line 0\n")[2]
    assert [f"line {number}" in last for number in range(1, 30)] == [True] * 29
