"""What `ExitStats` looks like: HTML and plots."""

import re
import sys
from html.parser import HTMLParser

import pytest
import torch

from tide_hf import ExitStats, TIDEModelForCausalLM, TIDERouters
from tide_hf.common.display.depth_colours import EXITS, FULL_DEPTH, NGRAM
from tide_hf.common.errors import ConfigurationError, MissingPackageError


class Page(HTMLParser):
    """Takes down tags, and what each span says.

    Attributes:
        tags: All opened tags in order; every one has to be closed, but for `br`.
        spans: Title, style and text of each.
        text: All text.
    """

    def __init__(self, source):
        super().__init__()
        self.tags, self.spans, self.text, self.open = [], [], "", []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "span":
            self.spans.append([dict(attributes)["title"], dict(attributes)["style"], ""])
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open and self.open[-1] == "span":
            self.spans[-1][-1] += data


def stats_of(*rows, **counts):
    return ExitStats("self_speculative", 4, layers_executed=12, per_token=[list(row) for row in rows], **counts)


def test_tokens_are_coloured_by_depth_and_figures_stand_above():
    stats = stats_of([0, 2, 3, 4], rounds=2, drafted=3, accepted=2)
    page = Page(stats.to_html(["a", " b", "\n", "c"]))
    chips = page.spans[:4]
    assert [text for _, _, text in chips] == ["a", " b", "\n", "c"]
    assert [title for title, _, _ in chips] == [
        "n-gram draft confirmed",
        "exit layer 2",
        "exit layer 3",
        "full depth (4 layers)",
    ]
    for (_, style, _), colour in zip(chips, (NGRAM, *EXITS[:2], FULL_DEPTH), strict=True):
        assert f"background:{colour.css}" in style
    for line in stats.headlines():
        assert line in page.text
    assert "2 of 3 draft tokens accepted (67%)" in page.text
    assert [style for _, style, _ in page.spans[4:]] == [style for _, style, _ in chips]  # the legend
    assert "exit layer 2: 1" in page.text


def test_everything_is_escaped():
    nasty = ["<script>alert(1)</script>", "</div>", "&amp;", "\"'><b>"]
    stats = stats_of([2, 2, 2, 4])
    stats.mode = "<i>mode</i>"
    page = Page(stats.to_html(nasty))
    assert set(page.tags) == {"div", "span"}
    assert [text for _, _, text in page.spans[:4]] == nasty
    assert page.text.strip().startswith("<i>mode</i>: 4 tokens")


def test_nothing_is_fetched():
    assert not re.search("http|src=|url|@import|<style|<link", stats_of([0, 2, 4]).to_html(["a", "b", "c"]))


def test_without_tokens_each_shows_its_layer():
    stats = stats_of([0, 2, 4], [4])
    assert [text.strip() for _, _, text in Page(stats._repr_html_()).spans[:4]] == ["0", "2", "4", "4"]
    assert Page(ExitStats("early_exit", 4).to_html()).spans == []


def test_a_batch_of_token_ids_as_generate_returns_them(tiny_llama, tiny_tokenizer):
    model = tiny_llama()
    routers = TIDERouters.for_model(model, exit_layers=[2])
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=0.5)
    prompt = torch.randint(0, 256, (2, 9), generator=torch.Generator().manual_seed(3))
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None)[:, 9:].tolist()
    eos = next(token for token in tokens[0] if token not in tokens[1])
    output = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=eos, pad_token_id=eos)
    stats, length = model.last_exit_stats, tokens[0].index(eos) + 1
    page = Page(stats.to_html(output[:, 9:], tiny_tokenizer))
    written = [text for _, _, text in page.spans[: length + 12]]
    assert "".join(written[:length]) == tiny_tokenizer.decode(tokens[0][:length])
    assert "".join(written[length:]) == tiny_tokenizer.decode(tokens[1])
    unpadded = [tokens[0][:length], tokens[1]]
    assert stats.to_html(unpadded, tiny_tokenizer) == stats.to_html(output[:, 9:], tiny_tokenizer)
    with pytest.raises(ConfigurationError, match=r"got rows of 21, 21\. Expected rows of .* padded to 12"):
        stats.to_html(output, tiny_tokenizer)


def test_one_row_of_token_ids(tiny_tokenizer):
    tokens = tiny_tokenizer("né")["input_ids"]
    page = Page(stats_of([0, 2, 4]).to_html(torch.tensor(tokens), tiny_tokenizer))
    assert [text for _, _, text in page.spans[:3]] == ["n", "", "é"]


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [
        (["a", "b"], r"not those of this call: got rows of 2\. Expected rows of 3"),
        ([["a", "b", "c"], ["d"]], r"got rows of 3, 1\."),
        ([1, 2, 3], r"the text of the tokens is not known: got tokens of type int, no tokenizer"),
        (["a", 2, "c"], r"got tokens of type int and str"),
        ("abc", r"these are no tokens: got a str\. Expected a list or a tensor"),
    ],
)
def test_other_tokens_are_refused(tokens, problem):
    with pytest.raises(ConfigurationError, match=problem):
        stats_of([0, 2, 4]).to_html(tokens)


def test_the_plot_shows_how_many_and_which():
    figure = stats_of([0, 2, 2, 4], [4]).plot()
    by_depth, by_token = figure.axes
    assert [label.get_text() for label in by_depth.get_xticklabels()] == ["n-grams", "2", "4 (full)"]
    assert [bar.get_height() for bar in by_depth.patches] == [1, 2, 2]
    (points,) = by_token.collections
    assert points.get_offsets().tolist() == [[1, 0], [2, 2], [3, 2], [4, 4], [1, 4]]
    assert points.get_facecolors()[1].tolist() == [*by_depth.patches[1].get_facecolor()[:3], points.get_alpha()]
    assert len({tuple(bar.get_facecolor()) for bar in by_depth.patches}) == 3


def test_a_notebook_shows_the_plot_without_pyplot():
    had_pyplot = "matplotlib.pyplot" in sys.modules
    assert stats_of([0, 2, 4]).plot()._repr_png_().startswith(b"\x89PNG")
    assert ExitStats("early_exit", 4).plot()._repr_png_().startswith(b"\x89PNG")
    assert ("matplotlib.pyplot" in sys.modules) == had_pyplot


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"got no matplotlib\. Expected .*pip install tide-hf\[plots\]"):
        stats_of([2]).plot()
