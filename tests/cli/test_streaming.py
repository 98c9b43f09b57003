"""Answers in a terminal and elsewhere: streamed, coloured by source, side by side, without control characters."""

import io
from functools import partial

import pytest
import torch
from rich.console import Console

import tide_hf
from tide_hf.cli import streaming
from tide_hf.common.display import COLOURS, OTHERS
from tide_hf.common.stats import ExitStats
from tide_hf.common.token_sources import DRAFT_HEAD, FULL_PASS, NGRAM
from tide_hf.evaluation.benchmark import DecodingMethod, Run, timed_run


def run_of(*sources, **counts):
    stats = ExitStats("self_speculative", 4, per_token=[[4] * len(sources)], sources=[list(sources)], **counts)
    return Run(2.0, list(range(len(sources))), stats)


def terminal(color_system=None, width=80, **options):
    return Console(file=io.StringIO(), force_terminal=True, color_system=color_system, width=width, **options)


def answer_of(tokens, rounds=(), run=None):
    """A function that streams an answer of these tokens, in rounds of (length, sources, rejected tokens) if any."""

    def answer(streamer):
        streamer.put(torch.zeros(1, 3))
        position = 0
        for length, sources, rejected in rounds or [(len(tokens), None, [])]:
            for token in tokens[position : position + length]:
                streamer.put(torch.as_tensor([token]))
            position += length
            if sources is not None:
                streamer.end_round(sources, rejected)
        streamer.end()
        return run or run_of(*[FULL_PASS] * len(tokens))

    return answer


def stream(tokens, tokenizer, console):
    """Stream an answer of these tokens, from full passes; return what is written."""
    streaming.stream_answer(answer_of(tokens), tokenizer, console)
    return console.file.getvalue()


def test_a_terminal_gets_colours_by_source_and_a_legend(tiny_llama, tiny_tokenizer):
    sources = ["3-gram", "exit layer 2", "draft head", "full pass", "5-gram"]
    text = streaming.coloured(zip("abcde", sources, strict=True), rejected="xy")
    colours = (COLOURS[NGRAM], OTHERS[0], COLOURS[DRAFT_HEAD], COLOURS[FULL_PASS], COLOURS[NGRAM])
    assert text.plain == "abcdexy"
    assert [str(span.style) for span in text.spans] == [*(colour.terminal for colour in colours), streaming.REJECTED]
    shown = (
        streaming.legend(run_of(*sources, drafted=9, accepted=4)).plain.replace("\N{BLACK SQUARE} ", "").split("   ")
    )
    assert shown == ["n-gram: 2", "draft head: 1", "exit layer 2: 1", "full pass: 1", "rejected: 5"]
    assert "rejected" not in streaming.legend(run_of(*sources, drafted=4, accepted=4)).plain
    console = terminal(color_system="standard")
    method = DecodingMethod("self_speculative", tide_hf.TIDEModelForCausalLM.attach(tiny_llama()))
    inputs = dict(tiny_tokenizer("abcabcabc", return_tensors="pt", return_token_type_ids=False))
    run = streaming.stream_answer(partial(timed_run, method, inputs, 24), tiny_tokenizer, console)
    assert len(run.new_tokens) == 24
    assert "\x1b[" in console.file.getvalue()


def test_a_growing_answer_shows_the_drafts_that_the_last_round_rejected(tiny_tokenizer):
    view = streaming.AnswerView(tiny_tokenizer, height=9, name="TIDE")
    tokens, rejected = tiny_tokenizer("abcd")["input_ids"], tiny_tokenizer("xy")["input_ids"]
    seen = []

    def answer(streamer):
        streamer._on_change = lambda _: seen.append(drawn(view))
        return answer_of(tokens, [(1, ["full pass"], []), (3, ["2-gram", "2-gram", "full pass"], rejected)])(streamer)

    view.fill(answer)
    assert [text.splitlines()[:2] for text in (seen[0], seen[-2])] == [["TIDE", "a"], ["TIDE", "abcdxy"]]
    assert not [text for text in (*seen[:-2], seen[-1]) if "xy" in text]
    assert drawn(view).splitlines() == ["TIDE", "abcd", "", "4 tokens, 2.0 tokens/s", "\N{BLACK SQUARE} full pass: 4"]


def drawn(view):
    console = Console(file=io.StringIO(), width=60)
    console.print(view)
    return "\n".join(line.rstrip() for line in console.file.getvalue().rstrip().splitlines())


@pytest.mark.parametrize(("width", "is_beside"), [(100, True), (50, False)])
def test_answers_are_side_by_side_in_a_wide_terminal_and_below_each_other_in_a_narrow_one(
    tiny_tokenizer, width, is_beside
):
    tokens = tiny_tokenizer("abcd")["input_ids"]
    plain = Run(1.0, tokens, None)  # the plain model's own, which has no statistics
    answers = {"plain": answer_of(tokens, run=plain), "TIDE": answer_of(tokens)}
    console = terminal(width=width)
    runs = streaming.stream_side_by_side(answers, tiny_tokenizer, console)
    assert [run.stats is None for run in runs] == [True, False]
    last = console.file.getvalue().rpartition("plain")[2]
    (line, *_) = last.splitlines()
    assert ("TIDE" in line) is is_beside
    assert last.count("abcd") == 2
    assert "4 tokens, 4.0 tokens/s" in last
    assert last.count("full pass: 4") == 1


def test_elsewhere_one_plain_answer_follows_the_other(tiny_tokenizer):
    console = Console(file=io.StringIO(), width=80)
    tokens = tiny_tokenizer("n\xe9!")["input_ids"]
    plain = Run(1.0, tokens, None)
    answers = {"[plain]": answer_of(tokens, run=plain), "TIDE": answer_of(tokens)}
    streaming.stream_side_by_side(answers, tiny_tokenizer, console)
    lines = [line.strip() for line in console.file.getvalue().splitlines() if line.strip()]
    figures = ["4 tokens, 4.0 tokens/s", "4 tokens, 2.0 tokens/s", "\N{BLACK SQUARE} full pass: 4"]
    assert lines == ["[plain]", "n\xe9!", figures[0], "TIDE", "n\xe9!", *figures[1:]]


def test_control_characters_do_not_reach_a_terminal(tiny_tokenizer):
    text = "a\x1b[2Jb\x07\tc\n:smile: [red]d"
    tokens = tiny_tokenizer(text)["input_ids"]
    written = stream(tokens, tiny_tokenizer, terminal())
    assert [text for text in ("\x1b[2J", "\x07") if text in written] == []
    assert [text for text in ("\N{REPLACEMENT CHARACTER}[2Jb", ":smile: [red]d") if text not in written] == []
    assert stream(tokens, tiny_tokenizer, Console(file=io.StringIO(), width=80)) == text + "\n"


def growing(tokenizer, text, height):
    view = streaming.AnswerView(tokenizer, height)
    answer_of(tokenizer(text)["input_ids"])(view.streamer)
    return view


def test_an_answer_that_is_complete_leaves_room_for_the_one_beside_it(tiny_tokenizer, monkeypatch):
    tokens = tiny_tokenizer("\n".join(f"line {number}" for number in range(30)))["input_ids"]
    console, shown = terminal(width=100, height=12), []

    class Live(streaming.Live):
        def __init__(self, renderable, **options):
            super().__init__(renderable, **options)
            shown.append(renderable)

    def second(streamer):
        run = answer_of(tokens)(streamer)
        other = terminal(width=100, height=12)
        other.print(shown[0])
        shown.append(other.file.getvalue())
        return run

    monkeypatch.setattr(streaming, "Live", Live)
    answers = {"plain": answer_of(tokens, run=Run(1.0, tokens, None)), "TIDE": second}
    streaming.stream_side_by_side(answers, tiny_tokenizer, console)
    assert shown[1].count("line 29") == 2
    assert shown[1].count("line 22") == 0
    assert shown[1].count("\n") <= 12
    last = console.file.getvalue().rpartition("plain")[2]
    assert last.count("line 22") == 2  # all of both in the end


def test_a_long_answer_scrolls_and_is_complete_in_the_end(tiny_tokenizer):
    text = "\n".join(f"line {number}" for number in range(30))
    console = terminal(width=40, height=5)
    with console.capture() as capture:
        console.print(growing(tiny_tokenizer, text, console.height))
    assert capture.get().split("\n")[:5] == [f"line {number}" for number in range(25, 30)]
    last = stream(tiny_tokenizer(text)["input_ids"], tiny_tokenizer, console).rpartition("line 0\n")[2]
    assert [f"line {number}" in last for number in range(1, 30)] == [True] * 29
