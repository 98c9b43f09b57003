"""Models that do not keep their K/V, or count them, as most do; and passes that are none of a call's own."""

import pytest
import torch
import transformers
from block_heads import routers_for
from drafters import HeadDrafter, use_drafter
from families import _COMMON, FAMILIES, VOCAB, prompt, tiny_model
from on_steps import attach_compiled
from packaging.version import Version
from transformers import CONFIG_MAPPING, DynamicCache, EncoderDecoderCache, LogitsProcessor
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError

OPTIONS = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 8}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


@pytest.mark.parametrize("rope", [None, LONGROPE])
@pytest.mark.parametrize("is_alike", [False, True])
def test_a_prompt_that_the_model_reads_into_a_cache_of_its_own(rope, is_alike):
    """Phi-3 does, behind its original context: nothing is in the cache that it was given."""
    settings = {"rope_parameters": rope} if rope else {}
    model = tiny_model("phi3", original_max_position_embeddings=8, **settings)
    ids = prompt().repeat(2, 1) if is_alike else prompt(2)
    options = {"return_dict_in_generate": True, **OPTIONS}
    for some in (ids, ids[:1]):
        expected = model.generate(some, **options)
        TIDEModelForCausalLM.attach(model, routers_for(model, 1))
        use_drafter(model, "mixed", expected.sequences[:, 9:].tolist())
        found = model.generate(some, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert found[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        assert model.last_exit_stats.layers_executed > 0
        TIDEModelForCausalLM.detach(model)


@pytest.mark.parametrize(("length", "pads"), [(9, (0, 0, 0)), (60, (0, 50, 57))])
def test_attention_that_counts_slots(length, pads):
    """Llama 4 scales queries by it from some length on: rows then stay level, and are read with their padding."""
    model = tiny_model(
        "llama4_text", attn_temperature_tuning=True, floor_scale=8, attn_scale=2.0, attention_chunk_size=64
    )
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    ids = torch.randint(3, 96, (3, length), generator=torch.Generator().manual_seed(5)) * mask
    inputs = {"input_ids": ids, "attention_mask": mask, **OPTIONS, "max_new_tokens": 24}
    expected = model.generate(**inputs)
    TIDEModelForCausalLM.attach(model)
    for kind in ("mixed", "wrong", "right"):
        use_drafter(model, kind, expected[:, length:].tolist())
        assert torch.equal(model.generate(**inputs), expected)


def test_layers_that_hold_more_than_k_and_v_in_a_batch():
    class Indexed(DynamicLayer):
        pass

    model = tiny_model("llama")

    def options():
        cache = DynamicCache(config=model.config)
        cache.layers[1] = Indexed()
        return {**OPTIONS, CACHE: cache}

    expected = model.generate(prompt(), **options())
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(prompt(), **options()), expected)
    with pytest.raises(UnsupportedOptionError, match=r"in a batch cannot use this cache: got .* with a Indexed"):
        model.generate(prompt(2), tide_strict=True, **options())


def test_caches_of_encoders_are_refused():
    model = TIDEModelForCausalLM.attach(tiny_model("gpt2", add_cross_attention=True), strict=True)
    both = EncoderDecoderCache(DynamicCache(config=model.config), DynamicCache(config=model.config))
    with pytest.raises(UnsupportedOptionError, match="got EncoderDecoderCache"):
        model.generate(prompt(), **OPTIONS, **{CACHE: both})
    with pytest.raises(UnsupportedOptionError, match="beside an encoder's"):
        model.generate(prompt(), encoder_hidden_states=torch.randn(1, 5, 32), **OPTIONS)


class Inner(LogitsProcessor):
    """Has the model read the text once more."""

    def __init__(self, model, use_cache):
        self.model, self.use_cache = model, use_cache

    def __call__(self, input_ids, scores):
        found = self.model.model(input_ids=input_ids, use_cache=self.use_cache).last_hidden_state
        return scores + found[:, -1, :1]


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_a_block_takes_no_part_in_passes_of_others(rows, use_cache):
    model = tiny_model("llama")
    options = {**OPTIONS, "logits_processor": [Inner(model, use_cache)]}
    expected = model.generate(prompt(rows), **options)
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    model._tide.make_drafter = lambda _, texts, engine: HeadDrafter(texts, engine, 1, 3)
    assert torch.equal(model.generate(prompt(rows), **options), expected)
    assert model.last_exit_stats.drafted > 0


@pytest.mark.parametrize("strategy", ["recompute", "propagate"])
@pytest.mark.parametrize("threshold", [0.5, 2.0])
def test_nor_do_exits(strategy, threshold):
    model, other = tiny_model("llama"), tiny_model("llama")
    routers = TIDERouters.for_model(model, exit_layers=[1, 2], kv_cache_strategy=strategy)
    for exit_layer in (1, 2):
        torch.nn.init.normal_(routers[exit_layer].router.up.weight)
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=threshold)
    found = [
        model.generate(prompt(2), logits_processor=[Inner(inner, use_cache=True)], **OPTIONS)
        for inner in (model, other)
    ]
    assert torch.equal(*found)
    if threshold > 1:
        processors = [Inner(other, use_cache=True)]
        assert torch.equal(found[0], other.generate(prompt(2), logits_processor=processors, **OPTIONS))


def test_an_interrupt_before_a_draft_leaves_the_callers_cache_as_it_was():
    def make_drafter(*_):
        raise KeyboardInterrupt

    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    model._tide.make_drafter = make_drafter
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompt(2), **OPTIONS, **{CACHE: cache})
    assert len(cache.layers) == 4


@pytest.mark.parametrize(("family", "name"), [("gpt2", "n_positions"), ("opt", "max_position_embeddings")])
def test_drafts_end_where_learnt_positions_do(family, name):
    model, ids, positions = tiny_model(family, **{name: 40}), prompt(), torch.arange(25, 34)[None]
    options = {**OPTIONS, "position_ids": positions}
    expected = model.generate(ids, **{**options, "max_new_tokens": 6})
    options |= {"max_new_tokens": 30, "eos_token_id": int(expected[0, -1])}
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", [expected[0, 9:].tolist() + [5] * 20], width=7)
    assert torch.equal(model.generate(ids, **options), expected)


class Offloaded(DynamicCache):
    """Notes which layer is on the way to the device when another one is read; nothing is offloaded on a CPU."""

    def __init__(self, config):
        super().__init__(config=config)
        self.offloading, self.only_non_sliding = True, True
        self.coming, self.found = 0, []

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.found.append((layer_idx, self.coming))
        self.coming = (layer_idx + 1) % len(self.layers)
        self.offloading = False
        try:
            return super().update(keys, values, layer_idx, *args, **kwargs)
        finally:
            self.offloading = True

    def prefetch(self, layer_idx, only_non_sliding=True):
        self.coming = layer_idx


def test_a_draft_leaves_an_offloaded_cache_as_a_pass_finds_it():
    model = tiny_model("llama")
    expected = model.generate(prompt(), **OPTIONS)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 2], exit_strategy="linear"))
    model._tide.make_drafter = lambda _, texts, engine: HeadDrafter(texts, engine, 2, 3)
    cache = Offloaded(model.config)
    assert torch.equal(model.generate(prompt(), **OPTIONS, **{CACHE: cache}), expected)
    assert model.last_exit_stats.drafted > 0
    assert [layer for layer, _ in cache.found] == [coming for _, coming in cache.found]


SHARED = {
    **FAMILIES["gemma3_text"],
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "num_kv_shared_layers": 3,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
    "global_head_dim": 16,
}


@pytest.mark.skipif("gemma4_text" not in CONFIG_MAPPING, reason="this transformers has none")
@pytest.mark.parametrize("strategy", ["propagate", "zero_pad"])
def test_k_and_v_that_layers_share_are_not_filled_in(strategy, monkeypatch):
    monkeypatch.setitem(FAMILIES, "gemma4_text", SHARED)
    model = tiny_model("gemma4_text")
    expected = model.generate(prompt(), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[2, 4], kv_cache_strategy=strategy)
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit")
    with pytest.raises(UnsupportedOptionError, match=rf"got .*{strategy}.*, and 3 layers without .* = 'recompute'"):
        model.generate(prompt(), exit_threshold=0.0, **OPTIONS)
    routers.config.kv_cache_strategy = "recompute"
    assert model.generate(prompt(), exit_threshold=0.0, **OPTIONS).shape == expected.shape
    assert torch.equal(model.generate(prompt(), exit_threshold=2.0, **OPTIONS), expected)


@pytest.mark.skipif(Version(transformers.__version__) < Version("5.21"), reason="its layers return tuples there")
@pytest.mark.parametrize("attach", [TIDEModelForCausalLM.attach, attach_compiled])
def test_a_window_that_the_cache_alone_keeps_to(attach, monkeypatch):
    """Moshi's masks let a pass over several tokens see more than its window."""
    settings = {**_COMMON, "sliding_window": 24, "ffn_dim": 48}
    monkeypatch.setitem(FAMILIES, "moshi", {n: v for n, v in settings.items() if n != "intermediate_size"})
    model = tiny_model("moshi")
    options = {**OPTIONS, "max_new_tokens": 24 - 9}
    expected = model.generate(prompt(), **options)
    attach(model)
    use_drafter(model, "mixed", expected[:, 9:].tolist(), 5)
    assert torch.equal(model.generate(prompt(), **options), expected)
    options["max_new_tokens"] += 1
    with pytest.raises(UnsupportedOptionError, match=r"moshi over several .* got 25 tokens .* at most 24, its sliding"):
        model.generate(prompt(), tide_strict=True, **options)
    more, cache = expected[:, -4:], DynamicCache(config=model.config)
    with torch.no_grad():
        model(expected[:, :-4], **{CACHE: cache})
    mask = torch.ones(1, 24, dtype=torch.long)
    with pytest.raises(UnsupportedOptionError, match="moshi over several tokens attends"):
        model.generate(
            more, tide_strict=True, attention_mask=mask, **{CACHE: cache}, **{**OPTIONS, "max_new_tokens": 1}
        )


def test_a_recurrent_state_in_a_cache_of_its_own_kind(monkeypatch):
    """MiniMax does not call itself stateful."""
    monkeypatch.setitem(FAMILIES, "minimax", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2})
    model = tiny_model("minimax")
    expected = model.generate(prompt(), **OPTIONS)
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state, which tide_mode='self_speculative'"):
        TIDEModelForCausalLM.attach(model, strict=True)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc", exit_threshold=2.0)
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
