"""`ExitStats`: figures derived from its counts; and how an answer is shown, as text, HTML and plots."""

import json
import re
import sys
from html.parser import HTMLParser

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from tide_hf import ExitStats
from tide_hf.common.display import COLOURS, OTHERS, TokenTexts, source_colours, token_texts
from tide_hf.common.errors import ConfigurationError, MissingPackageError
from tide_hf.common.token_sources import DRAFT_HEAD, EARLIER_ANSWER, FULL_PASS, NGRAM, SUCCESSOR, sources_of_depths


def test_every_kind_of_source_has_its_colour_the_full_pass_last():
    sources = ["full pass", "exit layer 16", "3-gram", "exit layer 8", "remembered 12-gram", "draft head", "5-gram"]
    sources.append("successor")
    colours = source_colours(sources)
    kinds = [NGRAM, EARLIER_ANSWER, SUCCESSOR, DRAFT_HEAD, "exit layer 8", "exit layer 16", FULL_PASS]
    assert list(colours) == kinds
    assert [colours[kind] for kind in kinds[4:]] == [*OTHERS[:2], COLOURS[FULL_PASS]]
    repeated = source_colours(f"exit layer {layer}" for layer in range(1, 8))
    assert [repeated[f"exit layer {layer}"] for layer in (6, 7)] == list(OTHERS[:2])
    assert len({colour.css for colour in colours.values()}) == len(kinds)


def texts_of(tokens, tokenizer):
    """Of a whole answer, and the same of one that grows."""
    texts = TokenTexts(tokenizer)
    added = "".join(texts.add(token) for token in tokens) + texts.finish()
    assert added == "".join(texts.shown)
    assert token_texts(tokens, tokenizer) == texts.shown
    return texts.shown


def test_a_character_of_several_tokens_is_the_last_ones(tiny_tokenizer):
    tokens = tiny_tokenizer("né 🦊!")["input_ids"]
    assert texts_of(tokens, tiny_tokenizer) == ["n", "", "é", " ", "", "", "", "🦊", "!"]
    assert texts_of([*tokens[:2], tiny_tokenizer.eos_token_id], tiny_tokenizer)[0] == "n"
    assert texts_of(tokens[:2], tiny_tokenizer) == ["n", "\N{REPLACEMENT CHARACTER}"]


def test_only_the_last_tokens_are_decoded_again(tiny_tokenizer, monkeypatch):
    lengths, decode = [], tiny_tokenizer.decode
    monkeypatch.setattr(tiny_tokenizer, "decode", lambda ids, **kw: lengths.append(len(ids)) or decode(ids, **kw))
    text = "The quick brown fox, né 🦊! " * 20
    assert "".join(token_texts(tiny_tokenizer(text)["input_ids"], tiny_tokenizer)) == text
    assert max(lengths) <= 8


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([3, 1, 4, 5], ["a", "", " b", "c"]),
        ([3, 1, 1, 4], ["a", "", "", " b"]),
        ([2, 4, 1, 3], ["", " b", "", " a"]),
        ([5, *[6] * 8, 4], ["c", *[""] * 7, "\N{REPLACEMENT CHARACTER}" * 8, " b"]),
    ],
)
def test_a_word_after_tokens_without_text_keeps_its_space(tokens, expected):
    """The decoder strips the space before the first word, as those of Llama 2 and Mistral do."""
    vocab = {token: i for i, token in enumerate(["<unk>", "</s>", "\u2581", "\u2581a", "\u2581b", "c", "<0xFF>"])}
    tokenizer = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    steps = decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence(list(steps))
    tokenizer.add_special_tokens(["<unk>", "</s>"])
    sentencepiece = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")
    assert texts_of(tokens, sentencepiece) == expected
    assert sentencepiece.decode(tokens, skip_special_tokens=True) == "".join(expected)


class Page(HTMLParser):
    """Tags, `span`s (title, style, text) and text of a page; every tag is closed, except `br`."""

    def __init__(self, source):
        super().__init__()
        self.tags, self.spans, self.text, self.open = set(), [], "", []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.open += [tag] if tag != "br" else []
        if tag == "span":
            self.spans.append([dict(attributes)["title"], dict(attributes)["style"], ""])

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "span":
            self.spans[-1][-1] += data


def stats_of(*rows, **counts):
    sources = sources_of_depths(rows, 4)
    return ExitStats("self_speculative", 4, 12, [list(row) for row in rows], sources, **counts)


def test_html_has_tokens_coloured_by_source_figures_and_a_legend():
    stats = stats_of([0, 2, 3, 4], rounds=2, drafted=3, accepted=2)
    page = Page(stats.to_html(["a", " b", "\n", "c"]))
    titles, styles, texts = zip(*page.spans, strict=True)
    assert texts[:4] == ("a", " b", "\n", "c")
    assert titles[:4] == ("draft head", "exit layer 2", "exit layer 3", "full pass")
    colours = (COLOURS[DRAFT_HEAD], *OTHERS[:2], COLOURS[FULL_PASS])
    assert all(f"background:{colour.css}" in style for style, colour in zip(styles[:4], colours, strict=True))
    assert styles[4:] == styles[:4]  # the legend
    shown = (*stats.headlines(), "2 of 3 draft tokens accepted (67%)", "exit layer 2: 1")
    assert [line for line in shown if line not in page.text] == []


def test_html_is_escaped_and_loads_nothing():
    nasty = ["<script>alert(1)</script>", "</div>", "&amp;", "\"'><b>"]
    stats = stats_of([2, 2, 2, 4])
    stats.mode = "<i>mode</i>"
    page = Page(stats.to_html(nasty))
    assert page.tags == {"div", "span"}
    assert [text for _, _, text in page.spans[:4]] == nasty
    assert page.text.strip().startswith("<i>mode</i>: 4 tokens")
    assert not re.search("http|src=|url|@import|<style|<link", stats_of([0, 2, 4]).to_html(["a", "b", "c"]))


def test_html_of_token_ids_as_generate_returns_them_or_without_tokens(tiny_tokenizer):
    tokens, batch = tiny_tokenizer("né")["input_ids"], stats_of([2], [0, 2, 4])
    page = Page(stats_of([0, 2, 4]).to_html(torch.tensor(tokens), tiny_tokenizer))
    assert [text for _, _, text in page.spans[:3]] == ["n", "", "é"]
    html = batch.to_html(torch.tensor([[tokens[0], 257, 257], tokens]), tiny_tokenizer)
    assert [text for _, _, text in Page(html).spans[:4]] == ["n", "n", "", "é"]
    assert batch.to_html([tokens[:1], tokens], tiny_tokenizer) == html
    assert [text.strip() for _, _, text in Page(batch._repr_html_()).spans[:4]] == ["2", "0", "2", "4"]
    assert Page(ExitStats("early_exit", 4).to_html()).spans == []
    with pytest.raises(ConfigurationError, match=r"got rows of 4, 4\. Expected rows of 1, 3, padded to 3"):
        batch.to_html(torch.zeros(2, 4, dtype=torch.int64), tiny_tokenizer)


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (["a", "b"], r"not those of this call: got rows of 2\. Expected rows of 3"),
        ([["a", "b", "c"], ["d"]], r"got rows of 3, 1\."),
        ([1, 2, 3], r"the text of the tokens is not known: got tokens of type int, no tokenizer"),
        (["a", 2, "c"], r"got tokens of type int and str"),
        ("abc", r"these are not tokens: got a str\. Expected a list or a tensor"),
    ],
)
def test_other_tokens_are_refused(tokens, problem):
    with pytest.raises(ConfigurationError, match=problem):
        stats_of([0, 2, 4]).to_html(tokens)


def test_the_plot_shows_sources_and_depths_and_a_notebook_shows_it_without_pyplot(monkeypatch):
    had_pyplot = "matplotlib.pyplot" in sys.modules
    figure = stats_of([0, 2, 2, 4], [4]).plot()
    by_source, by_token = figure.axes
    assert [label.get_text() for label in by_source.get_yticklabels()] == ["draft head", "exit layer 2", "full pass"]
    assert [bar.get_width() for bar in by_source.patches] == [1, 2, 2]
    (points,) = by_token.collections
    assert points.get_offsets().tolist() == [[1, 0], [2, 2], [3, 2], [4, 4], [1, 4]]
    assert points.get_facecolors()[1].tolist() == [*by_source.patches[1].get_facecolor()[:3], points.get_alpha()]
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert ExitStats("early_exit", 4).plot()._repr_png_().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"got no matplotlib\. Expected .*pip install tide-hf\[plots\]"):
        stats_of([2]).plot()


def test_figures_are_derived_from_the_counts():
    stats = ExitStats("self_speculative", 10, layers_executed=45, per_token=[[10, 4, 0, 10, 10]])
    stats.rounds, stats.drafted, stats.accepted, stats.dtype = 3, 4, 2, "float32"
    assert stats.total_tokens == 5
    assert stats.exits_per_layer == {0: 1, 4: 1}
    assert stats.exit_rate == 0.4
    assert stats.depth_fraction == 0.9
    assert stats.acceptance_rate == 0.5
    assert stats.mean_acceptance_length == 5 / 3
    derived = {"total_tokens", "exits_per_layer", "exit_rate", "depth_fraction", "acceptance_rate"}
    found = json.loads(json.dumps(stats.to_dict()))
    assert found.keys() == vars(stats).keys() | derived | {"mean_acceptance_length"}
    assert found["acceptance_rate"] == 0.5
    assert stats.summary().splitlines() == [
        "self_speculative: 5 tokens, 9.0 of 10 layers per token (90%), engine 'eager', float32",
        "2 of 4 draft tokens accepted (50%), 1.67 tokens a pass",
        "drafted before any layer ran: 1 tokens (20%)",
        "exit layer 4: 1 tokens (20%)",
    ]
    empty = ExitStats("early_exit", 10)
    assert empty.exit_rate == empty.depth_fraction == empty.acceptance_rate == empty.mean_acceptance_length == 0.0
    assert "0 tokens" in empty.summary()
