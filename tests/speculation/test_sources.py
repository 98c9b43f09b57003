"""Where each token came from: recorded for every row in every mode, and told to a `DraftStreamer` as it happens."""

import pytest
import torch
from drafters import use_drafter, use_heads
from families import LAYERS, VOCAB, tiny_model
from on_steps import ATTACH, linear_heads, prompts
from transformers import TextStreamer
from transformers.generation.stopping_criteria import MaxTimeCriteria

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common.draft_streamer import DraftStreamer
from tide_hf.common.token_sources import DRAFT_HEAD, FULL_PASS, kind_of
from tide_hf.speculation.drafts import Draft

NEW, PROMPT = 14, 8
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


class TwoSources:
    """For row r one right token of "3-gram", r of "draft head", then a wrong one of "rejected source"."""

    def __init__(self, continuations):
        self.continuations, self.generated = continuations, [0] * len(continuations)

    def draft(self, rows, limits):
        return [self._draft(row, limit) for row, limit in zip(rows, limits, strict=True)]

    def _draft(self, row, limit):
        start = self.generated[row]
        right = self.continuations[row][start : start + min(row + 1, limit)]
        draft = Draft().add(right[:1], "3-gram").add(right[1:], DRAFT_HEAD)
        if len(right) < limit:
            draft.add([(self.continuations[row][start + len(right)] + 1) % VOCAB], "rejected source")
        return draft

    def observe(self, row, draft, accepted):
        self.generated[row] += len(accepted.tokens)


def new_tokens(model, batch, **options):
    return model.generate(**batch, **OPTIONS, **options)[:, PROMPT:].tolist()


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_each_row_has_the_source_of_each_token(rows, together, engine):
    model, batch = tiny_model("llama"), prompts(rows)
    plain = new_tokens(model, batch)
    ATTACH[engine](model)
    model._tide.make_drafter = lambda *_: TwoSources(plain)
    options = {"stopping_criteria": [MaxTimeCriteria(10**6)]} if together else {}  # rows then advance together
    assert new_tokens(model, batch, **options) == plain
    expected = []
    for row in range(rows):
        a_round = ["3-gram", *[DRAFT_HEAD] * row, FULL_PASS]
        expected.append(([FULL_PASS] + (a_round[:2] if together else a_round) * NEW)[:NEW])
    sources = model.last_exit_stats.sources
    last = [row.pop() for row in sources]  # the last round has no room for all of its draft
    assert sources == [row[:-1] for row in expected]
    assert set(last) <= {FULL_PASS, DRAFT_HEAD}
    if not together:
        in_drafts = [[depth == 0 for depth in row[:-1]] for row in model.last_exit_stats.per_token]
        assert in_drafts == [[source != FULL_PASS for source in row] for row in sources]


@pytest.mark.parametrize("engine", sorted(ATTACH))
def test_a_draft_that_the_host_reads_late_has_its_sources_too(engine):
    model = tiny_model("llama")
    plain = new_tokens(model, prompts())
    ATTACH[engine](model, linear_heads(model))
    use_heads(model, (1, 3), continuations=plain)
    new_tokens(model, prompts())
    stats = model.last_exit_stats
    written = [source != FULL_PASS for source in stats.sources[0]]
    assert sum(written) == stats.accepted > 0
    assert {"script"} <= set(stats.sources[0]) <= {"script", "head", FULL_PASS}


@pytest.mark.parametrize("criteria", [[], [MaxTimeCriteria(10**6)]])  # by which ended rows stay, padded
def test_a_row_that_ended_has_as_many_sources_as_tokens(criteria):
    model, batch = tiny_model("llama"), prompts(2)
    plain = new_tokens(model, batch)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", plain)
    end = plain[0][5]
    model.generate(**batch, **OPTIONS | {"eos_token_id": end}, stopping_criteria=criteria)
    lengths = [row.index(end) + 1 if end in row else NEW for row in plain]
    assert [len(row) for row in model.last_exit_stats.sources] == lengths
    assert min(lengths) < NEW


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_tokens_of_exit_layers_name_their_layer(mode):
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), mode=mode)
    new_tokens(model, prompts(2), exit_threshold=0.5)
    stats = model.last_exit_stats
    names = {2: "exit layer 2", LAYERS: FULL_PASS}
    assert stats.sources == [[names[depth] for depth in row] for row in stats.per_token]
    assert "exit layer 2" in stats.sources[0]


def test_a_call_that_falls_back_is_of_full_passes_and_a_streamer_gets_its_tokens(tiny_tokenizer):
    model, streamer = tiny_model("llama", vocab_size=260), DraftStreamer(tiny_tokenizer)
    TIDEModelForCausalLM.attach(model)
    model.generate(**prompts(), **OPTIONS, streamer=streamer, use_cache=False)
    assert model.last_exit_stats.fallback_reason is not None
    assert model.last_exit_stats.sources == [[FULL_PASS] * NEW]
    assert [source for _, source in streamer.pieces()] == [FULL_PASS] * NEW
    assert streamer.sources == []


def test_a_streamer_learns_of_each_round_when_it_ends(tiny_tokenizer, capsys):
    model, batch = tiny_model("llama", vocab_size=260), prompts()
    plain = new_tokens(model, batch)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "wrong at the last position", plain)
    seen = []
    streamer = DraftStreamer(tiny_tokenizer, lambda one: seen.append((len(one.texts), len(one.sources), one.rejected)))
    new_tokens(model, batch, streamer=streamer)
    assert streamer.sources == model.last_exit_stats.sources[0]
    assert "".join(streamer.texts) == tiny_tokenizer.decode(plain[0], skip_special_tokens=True)
    # The first token, then rounds of two accepted tokens and one in place of the rejected one.
    wrong = (plain[0][3] + 1) % model.config.vocab_size
    assert seen[:6] == [(1, 0, []), (1, 1, []), (2, 1, []), (3, 1, []), (4, 1, []), (4, 4, [wrong])]
    assert seen[6] == (5, 4, [])
    assert seen[-1] == (NEW, NEW, [])
    new_tokens(model, batch, streamer=TextStreamer(tiny_tokenizer))  # any other streamer is only given tokens


def test_a_streamer_shows_rejected_drafts_struck_through(tiny_tokenizer):
    streamer = DraftStreamer(tiny_tokenizer)
    streamer.put(torch.zeros(1, 3))
    for token in tiny_tokenizer("a<")["input_ids"]:
        streamer.put(torch.tensor([token]))
    streamer.end_round(["2-gram", FULL_PASS], tiny_tokenizer("<b>")["input_ids"])
    html = streamer.to_html()
    assert "<b>" not in html
    assert html.count("&lt;b&gt;</s>") == 1
    assert [part in html for part in ('title="2-gram"', "n-gram: 1", "full pass: 1")] == [True] * 3
    streamer.end()
    assert "<s" not in streamer.to_html().replace("<span", "")


def test_n_grams_of_all_lengths_are_of_one_kind():
    sources = ["1-gram", "5-gram", "remembered 12-gram", "draft head", "exit layer 8", "full pass", "my own"]
    kinds = ["n-gram", "n-gram", "earlier answer", "draft head", "exit layer 8", "full pass", "my own"]
    assert [kind_of(source) for source in sources] == kinds
