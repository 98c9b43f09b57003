"""Batches in `self_speculative`: every row keeps its own accepted length, and plain decoding's own tokens."""

import pytest
import torch
from drafters import KINDS, use_drafter
from families import ATTENTION, VOCAB, tiny_model
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.speculation.loop import SpeculativeDecoder

PROMPT, NEW = 10, 24
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}


def prompts(rows: int, padding: str = "left", seed: int = 0) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded to one."""
    ids = torch.randint(3, VOCAB, (rows, PROMPT), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    for row in range(rows if padding != "none" else 0):
        pads = row % 4
        span = slice(0, pads) if padding == "left" else slice(PROMPT - pads, PROMPT)
        mask[row, span] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def check(model, inputs, kind="mixed", width=3, **options):
    """Compare with plain decoding and return the statistics."""
    options = {**OPTIONS, **options}
    expected = model.generate(**inputs, **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, expected[:, PROMPT:].tolist(), width)
    assert torch.equal(model.generate(**inputs, **options), expected)
    return model.last_exit_stats


@pytest.mark.parametrize("padding", ["none", "left", "right"])
@pytest.mark.parametrize("family", ATTENTION)
def test_every_family_in_a_batch(family, padding):
    stats = check(tiny_model(family), prompts(4, padding))
    assert [len(row) for row in stats.per_token] == [NEW] * 4
    assert 0 < stats.accepted < stats.drafted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [2, 8])
def test_rows_and_drafters(rows, kind):
    stats = check(tiny_model("llama"), prompts(rows), kind)
    if kind == "right":
        assert stats.acceptance_rate == 1.0
        assert stats.layers_executed == rows * 4 * (1 + -(-(NEW - 1) // 4))


def early_eos(model, inputs, rows):
    """A token that ends some rows early and others not."""
    plain = model.generate(**inputs, **OPTIONS)[:, PROMPT:].tolist()
    for row in range(rows):
        for token in plain[row][3:12]:
            if any(token not in other for other in plain):
                return token
    raise LookupError("no such token")


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "falcon"])
@pytest.mark.parametrize("kind", [*KINDS, "mixed"])
def test_rows_that_finish_early_stop_costing(family, kind):
    model, inputs = tiny_model(family), prompts(4)
    eos = early_eos(model, inputs, 4)
    stats = check(model, inputs, kind, eos_token_id=eos, pad_token_id=0)
    lengths = [len(row) for row in stats.per_token]
    assert min(lengths) < max(lengths)
    if kind == "wrong":  # one pass over the rows that still decode for each token
        assert stats.layers_executed == 4 * sum(lengths)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
@pytest.mark.parametrize("eos", [False, True])
def test_a_returned_cache_goes_on_as_plain_decoding_would(family, eos):
    model, inputs = tiny_model(family), prompts(4)
    options = {**OPTIONS, "return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    if eos:
        options |= {"eos_token_id": early_eos(model, inputs, 4), "pad_token_id": 0}

    def two_turns():
        first = model.generate(**inputs, **options)
        more = prompts(4, "none", seed=1)["input_ids"]
        ids = torch.cat([first.sequences, more], dim=1)
        added = ids.shape[1] - PROMPT
        mask = torch.cat([inputs["attention_mask"], torch.ones(4, added, dtype=torch.long)], dim=1)
        second = model.generate(ids, attention_mask=mask, **{CACHE: first[CACHE]}, **OPTIONS)
        return first, second

    first, second = two_turns()
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", first.sequences[:, PROMPT:].tolist())
    result = model.generate(**inputs, **options)
    assert torch.equal(result.sequences, first.sequences)
    torch.testing.assert_close(torch.stack(result.scores), torch.stack(first.scores), atol=1e-3, rtol=1e-3)
    torch.testing.assert_close(torch.stack(result.logits), torch.stack(first.logits), atol=1e-3, rtol=1e-3)
    assert result[CACHE].get_seq_length() == first.sequences.shape[1] - 1
    use_drafter(model, "random", [[0] * 99] * 4, width=2)
    assert torch.equal(two_turns()[1], second)


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("threshold", [0.01, 0.9])
def test_the_cache_after_each_round_is_that_of_the_accepted_tokens(family, threshold, monkeypatch):
    """Whatever holes and compactions do, the visible slots hold what a fresh prefill would."""
    model, inputs = tiny_model(family), prompts(3, "none")
    expected = model.generate(**inputs, **OPTIONS)
    base = tiny_model(family)
    routers = TIDERouters.for_model(model, exit_layers=[2], compaction_threshold=threshold)
    TIDEModelForCausalLM.attach(model, routers)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    rounds = []

    def checked(self, drafter, original=SpeculativeDecoder._round):
        original(self, drafter)
        slots = self.engine.slots
        rounds.append(slots.num_compactions)
        for position, row in enumerate(self.batch):
            fed = row.ids[:, :-1]
            fresh = DynamicCache(config=base.config)
            with torch.no_grad():
                base(input_ids=fed, **{CACHE: fresh})
            mask = slots.mask
            for layer, other in zip(slots.cache.layers, fresh.layers, strict=True):
                stored = layer.keys.shape[-2]
                visible = slice(None) if mask is None else mask[position, -stored:].bool()
                keys, values = layer.keys[position][:, visible], layer.values[position][:, visible]
                length = other.keys.shape[-2]
                torch.testing.assert_close(keys[:, -length:], other.keys[0], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(values[:, -length:], other.values[0], atol=1e-4, rtol=1e-4)

    monkeypatch.setattr(SpeculativeDecoder, "_round", checked)
    assert torch.equal(model.generate(**inputs, **OPTIONS), expected)
    assert len(rounds) > 8
    assert (rounds[-1] > 3) == (threshold == 0.01 or family == "mistral")


def test_num_return_sequences_and_sampling_in_a_batch():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    result = model.generate(**prompts(2), max_new_tokens=12, do_sample=True, num_return_sequences=3, eos_token_id=None)
    assert result.shape == (6, PROMPT + 12)
    assert torch.equal(result[0, :PROMPT], result[2, :PROMPT])
    assert not torch.equal(result[0], result[1])


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_the_real_drafter_in_a_batch(family):
    """N-grams of a repeating prompt, and exit heads, row by row."""
    model = tiny_model(family)
    ids = torch.tensor([[5, 6, 7, 8] * 5, [9, 10, 11, 12] * 5, list(range(20, 40))])
    expected = model.generate(ids, **OPTIONS)
    calibration = {"exit_layers": {"1": {"agreement": 0.9}, "3": {"agreement": 0.95}}}
    routers = TIDERouters.for_model(model, exit_layers=[1, 3], calibration=calibration)
    TIDEModelForCausalLM.attach(model, routers)
    for _ in range(3):
        assert torch.equal(model.generate(ids, **OPTIONS), expected)
