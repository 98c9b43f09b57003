"""Caches that the caller hands in: what they may be, and how they are left."""

import pytest
import torch
from drafters import use_drafter
from families import VOCAB, tiny_model
from stopping_calls import ATTACH, OPTIONS, PROMPT, prompts
from transformers import DynamicCache, StaticCache, StoppingCriteria

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError
from tide_hf.speculation.rows import RowCriterion


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text"])
def test_layers_that_know_of_no_window_in_a_batch(family):
    """A `DynamicCache()` keeps everything; the masks count its slots all the same."""
    model, ids = tiny_model(family), prompts(4)
    expected = model.generate(ids, max_new_tokens=24, **OPTIONS, **{CACHE: DynamicCache()})
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(ids, max_new_tokens=24, **OPTIONS, **{CACHE: DynamicCache()}), expected)


def test_drafts_end_where_a_static_cache_does():
    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return input_ids.shape[1] >= 30

    model, ids = tiny_model("llama"), prompts(1)

    def options():
        cache = StaticCache(config=model.config, max_cache_len=30)
        return {"max_new_tokens": 100, "stopping_criteria": [Stop()], **OPTIONS, CACHE: cache}

    expected = model.generate(ids, **options())
    TIDEModelForCausalLM.attach(model)
    for width in (7, 10, 11):
        use_drafter(model, "right", [expected[0, PROMPT:].tolist() + [5] * 20], width)
        assert torch.equal(model.generate(ids, **options()), expected)


class Breaks:
    """A streamer that breaks the call off behind so many tokens."""

    def __init__(self, after):
        self.after, self.heard = after, []

    def put(self, tokens):
        self.heard.append(tokens.view(1, -1))
        if len(self.heard) > self.after:
            raise KeyboardInterrupt

    def end(self):
        pass


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("after", [0, 7])
def test_a_call_that_breaks_off_leaves_a_cache_to_go_on_with(family, engine, after):
    model, ids = tiny_model(family), prompts(1)
    expected = model.generate(ids, max_new_tokens=40, **OPTIONS)
    ATTACH[engine](model)
    use_drafter(model, "wrong at the last position", expected[:, PROMPT:].tolist(), width=5)
    cache, streamer = DynamicCache(config=model.config), Breaks(after + 1)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, max_new_tokens=28, streamer=streamer, **OPTIONS, **{CACHE: cache})
    known = torch.cat(streamer.heard, dim=1)
    assert known.shape[1] == PROMPT + after + 1
    assert PROMPT <= cache.get_seq_length() < known.shape[1]
    use_drafter(model, "wrong", expected[:, known.shape[1] :].tolist())
    found = model.generate(known, max_new_tokens=10, **OPTIONS, **{CACHE: cache})
    assert torch.equal(found, expected[:, : known.shape[1] + 10])


class BreaksOff(RowCriterion):
    """Breaks the call off behind so many tokens of one row; the others are as far as their drafts took them."""

    def __init__(self, after):
        self.after = after

    def stops_row(self, index, token):
        self.after -= index == 2
        if self.after < 0:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize(("window", "keeps_answers"), [(None, True), (64, True), (8, False)])
def test_so_does_a_batch_whose_rows_stand_at_unequal_lengths(engine, window, keeps_answers):
    model = tiny_model("mistral", sliding_window=window)
    ids, mask = prompts(3), torch.ones(3, PROMPT + 18, dtype=torch.long)
    mask[1, :3] = 0
    expected = model.generate(ids, attention_mask=mask[:, :PROMPT], max_new_tokens=40, **OPTIONS)
    ATTACH[engine](model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist(), width=5)
    options = {"stopping_criteria": [BreaksOff(after=6)], **OPTIONS}
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, attention_mask=mask[:, :PROMPT], max_new_tokens=28, **options, **{CACHE: cache})
    (kept,) = {layer.get_seq_length() for layer in cache.layers}
    if engine == "compiled" and window is None:
        assert kept == PROMPT  # the answers were in buffers
    else:
        assert (PROMPT < kept <= PROMPT + 6) if keeps_answers else kept == 0
    known = expected[:, : PROMPT + 18]
    use_drafter(model, "wrong", expected[:, PROMPT + 18 :].tolist())
    found = model.generate(known, attention_mask=mask, max_new_tokens=10, **OPTIONS, **{CACHE: cache})
    assert torch.equal(found, expected[:, : PROMPT + 28])


def test_so_does_one_that_exits_early():
    """Deeper layers, which are behind, are as long as the others are then."""
    model, ids = tiny_model("llama"), prompts(1)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]), mode="early_exit")
    cache, streamer = DynamicCache(config=model.config), Breaks(5)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, max_new_tokens=9, streamer=streamer, exit_threshold=0.0, **OPTIONS, **{CACHE: cache})
    assert [layer.get_seq_length() for layer in cache.layers] == [PROMPT] * len(cache.layers)


def test_what_a_cache_records_would_be_lost():
    model = TIDEModelForCausalLM.attach(tiny_model("mistral"))
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    with pytest.raises(UnsupportedOptionError, match=r"DynamicCache that records the past.*activate_past_recording"):
        model.generate(prompts(1), tide_strict=True, max_new_tokens=4, **OPTIONS, **{CACHE: cache})


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_only_the_new_tokens_behind_a_long_cache(engine):
    """Its tokens count towards none of the lengths that `generate` knows, and need room all the same."""
    model, ids = tiny_model("llama", max_position_embeddings=2048), torch.randint(3, VOCAB, (1, 700))
    expected = model.generate(ids, max_new_tokens=24, **OPTIONS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-2], **{CACHE: cache})
    ATTACH[engine](model)
    use_drafter(model, "mixed", expected[:, 700:].tolist())
    found = model.generate(
        ids[:, -2:], attention_mask=torch.ones(1, 700, dtype=torch.long), max_new_tokens=24, **OPTIONS, **{CACHE: cache}
    )
    assert torch.equal(found[:, 2:], expected[:, 700:])
    assert model.last_exit_stats.engine == engine
