"""Calls in `self_speculative`: what they start from, where they end and what they return is as in plain decoding."""

import pytest
import torch
from drafters import use_drafter, use_heads
from families import tiny_model
from on_steps import ATTACH, linear_heads, prompts
from transformers import DynamicCache, GenerationConfig
from transformers.cache_utils import DynamicSlidingWindowLayer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.depth import kv_cache
from tide_hf.speculation.loop import SpeculativeDecoder

PROMPT, NEW = 12, 28
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
RETURNED = {**OPTIONS, "return_dict_in_generate": True}
SCORED = {**RETURNED, "output_scores": True, "output_logits": True}


def prompt(seed=0, rows=1):
    return prompts(rows, length=PROMPT, seed=seed)["input_ids"]


def padded(rows):
    """Prompts of which each has another number of pads."""
    mask = (torch.arange(PROMPT) >= torch.arange(rows)[:, None]).long()
    return {"input_ids": prompt(rows=rows) * mask, "attention_mask": mask}


def new_tokens(sequences):
    return sequences[:, PROMPT:].tolist()


@pytest.fixture(scope="module")
def llama_tokens():
    return tiny_model("llama").generate(prompt(), **OPTIONS)


def early_eos(model, inputs):
    """Options with a token that ends some rows early and others not."""
    plain = new_tokens(model.generate(**inputs, **OPTIONS))
    for row in plain:
        for token in row[3:12]:
            if any(token not in other for other in plain):
                return {"eos_token_id": token, "pad_token_id": 0}
    raise LookupError("no such token")


@pytest.mark.parametrize("family", ["llama", "granite"])
def test_drafts_of_exit_heads_are_tokens_of_the_draft_vocabulary(family):
    model = tiny_model(family)
    expected = model.generate(prompt(), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear", draft_vocab_size=7)
    TIDEModelForCausalLM.attach(model, routers)
    made = use_heads(model, (1, 3))
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    assert max(max(tokens) for _, tokens in made[0].drafted) < 7


@pytest.mark.parametrize("layer_class", [DynamicSlidingWindowLayer, kv_cache._VisibleSlidingLayer])
def test_sliding_window_layers_are_rolled_back_by_any_transformers(layer_class, monkeypatch):
    monkeypatch.setattr(kv_cache, "SLIDING_LAYER", layer_class)
    model = tiny_model("gemma2")
    expected = model.generate(prompt(), **OPTIONS)
    use_drafter(TIDEModelForCausalLM.attach(model), "random", new_tokens(expected))
    result = model.generate(prompt(), **RETURNED)
    assert torch.equal(result.sequences, expected)
    kinds = {type(layer) for layer in result[CACHE].layers}
    assert DynamicSlidingWindowLayer in kinds
    assert kv_cache._VisibleSlidingLayer not in kinds


@pytest.mark.parametrize("family", ["llama", "mistral"])
@pytest.mark.parametrize("threshold", [0.01, 0.9])
def test_after_each_round_the_cache_holds_the_accepted_tokens_of_each_row(family, threshold, monkeypatch):
    """Whatever rejected slots and compactions do, the visible slots hold what a fresh prefill would."""
    model, base = tiny_model(family), tiny_model(family)
    expected = model.generate(prompt(rows=3), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[2], compaction_threshold=threshold)
    TIDEModelForCausalLM.attach(model, routers)
    use_drafter(model, "mixed", new_tokens(expected))
    compactions = []

    def checked(self, engine, *args, original=SpeculativeDecoder._accept):
        original(self, engine, *args)
        slots = engine.slots
        compactions.append(slots.num_compactions)
        for position, row in enumerate(self.batch):
            fresh = DynamicCache(config=base.config)
            with torch.no_grad():
                base(input_ids=row.ids[:, :-1], **{CACHE: fresh})
            for layer, other in zip(slots.cache.layers, fresh.layers, strict=True):
                stored, length = layer.keys.shape[-2], other.keys.shape[-2]
                visible = slice(None) if slots.mask is None else slots.mask[position, -stored:].bool()
                for own, exact in ((layer.keys, other.keys), (layer.values, other.values)):
                    torch.testing.assert_close(own[position][:, visible][:, -length:], exact[0], atol=1e-4, rtol=1e-4)

    monkeypatch.setattr(SpeculativeDecoder, "_accept", checked)
    assert torch.equal(model.generate(prompt(rows=3), **OPTIONS), expected)
    assert len(compactions) > 8
    assert (compactions[-1] > 3) == (threshold == 0.01 or family == "mistral")


@pytest.mark.parametrize(
    ("engine", "family", "rows", "eos"),
    [
        *(("eager", family, 4, eos) for family in ("llama", "mistral", "gemma3_text") for eos in (False, True)),
        *(("captured", family, rows, False) for family, rows in [("mistral", 1), ("gemma2", 1), ("llama", 4)]),
    ],
)
def test_scores_and_a_cache_to_go_on_from_are_returned(engine, family, rows, eos):
    model, inputs = tiny_model(family), padded(rows)
    options = {**SCORED, "repetition_penalty": 1.2 if rows == 1 else 1.0}
    if eos:
        options |= early_eos(model, inputs)

    def two_turns():
        first = model.generate(**inputs, **options)
        ids = torch.cat([first.sequences, prompt(1, rows)], dim=1)
        mask = torch.cat([inputs["attention_mask"], torch.ones_like(ids[:, PROMPT:])], dim=1)
        length = first[CACHE].get_seq_length()
        return first, length, model.generate(ids, attention_mask=mask, **{CACHE: first[CACHE]}, **OPTIONS)

    first, length, second = two_turns()
    ATTACH[engine](model, linear_heads(model))
    use_drafter(model, "mixed", [row + [0] * NEW for row in new_tokens(first.sequences)])
    result, own_length, then = two_turns()
    assert torch.equal(result.sequences, first.sequences)
    assert torch.equal(then, second)
    assert own_length == length == first.sequences.shape[1] - 1
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.stack(result[name]), torch.stack(first[name]), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("shape", [(1, 0), (0, 4)])
@pytest.mark.parametrize("form", ["input_ids", "inputs_embeds"])
def test_a_call_without_a_prompt_is_refused(form, shape):
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    ids = torch.zeros(shape, dtype=torch.long)
    inputs = {form: ids if form == "input_ids" else model.get_input_embeddings()(ids)}
    with pytest.raises(ConfigurationError, match=r"no prompt.*: got a batch of . rows of . tokens\. Expected .* Pass"):
        model.generate(**inputs, **OPTIONS)
    assert model.generate(do_sample=False, max_new_tokens=3).shape == (1, 4)  # after the bos token


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_a_static_cache_is_rolled_back(family):
    model = tiny_model(family)
    options = {**OPTIONS, "cache_implementation": "static"}
    expected = model.generate(prompt(), **options)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]))
    use_drafter(model, "mixed", new_tokens(expected))
    assert torch.equal(model.generate(prompt(), **options), expected)
    with pytest.raises(UnsupportedOptionError, match="'early_exit' cannot use this cache: got StaticCache"):
        model.generate(prompt(), tide_mode="early_exit", **options)


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_a_model_that_training_left_without_a_cache_gets_one(mode, llama_tokens):
    model = tiny_model("llama")
    model.generation_config.use_cache = False
    routers = TIDERouters.for_model(model, exit_layers=[1])
    TIDEModelForCausalLM.attach(model, routers, mode=mode, exit_threshold=1.1)
    assert torch.equal(model.generate(prompt(), **OPTIONS), llama_tokens)
    passed = GenerationConfig.from_dict(model.generation_config.to_dict())  # as pipelines do
    assert torch.equal(model.generate(prompt(), generation_config=passed, **OPTIONS), llama_tokens)
    with pytest.raises(UnsupportedOptionError, match="no cache"):
        model.generate(prompt(), **OPTIONS, use_cache=False, tide_strict=True)
