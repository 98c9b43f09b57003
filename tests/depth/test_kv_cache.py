"""Caches of the caller's and of unusual models: which are supported, and what calls leave in them."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter, use_heads
from families import _COMMON, FAMILIES, VOCAB, longrope, random_model, tiny_model
from interruptions import Stops
from on_steps import ATTACH, attach_compiled
from on_steps import prompts as padded_prompts
from transformers import CONFIG_MAPPING, DynamicCache, EncoderDecoderCache, LogitsProcessor, StaticCache
from transformers.cache_utils import DynamicLayer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError
from tide_hf.depth.kv_cache import CacheSlots
from tide_hf.speculation.rows import RowCriterion

PROMPT = 12
OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SHORT = {**OPTIONS, "max_new_tokens": 12}


def prompts(rows):
    return padded_prompts(rows, length=PROMPT)["input_ids"]


@pytest.mark.parametrize("family", ["mistral", "gemma3_text", "llama4_text"])
def test_a_callers_cache_without_windows_in_a_batch(family):
    """A `DynamicCache()` retains everything; the masks count its slots all the same."""
    model, ids = tiny_model(family), prompts(4)
    expected = model.generate(ids, max_new_tokens=24, **OPTIONS, **{CACHE: DynamicCache()})
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(ids, max_new_tokens=24, **OPTIONS, **{CACHE: DynamicCache()}), expected)


@pytest.mark.parametrize("width", [7, 10, 11])
def test_drafts_end_where_a_static_cache_does(width):
    model, ids = tiny_model("llama"), prompts(1)
    options = {"max_new_tokens": 100, "stopping_criteria": [Stops(lambda ids: ids.shape[1] >= 30)], **OPTIONS}
    expected = model.generate(ids, **options, **{CACHE: StaticCache(config=model.config, max_cache_len=30)})
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", [expected[0, PROMPT:].tolist() + [5] * 20], width)
    found = model.generate(ids, **options, **{CACHE: StaticCache(config=model.config, max_cache_len=30)})
    assert torch.equal(found, expected)


def test_drafts_end_where_learned_positions_of_the_callers_do():
    model, ids, positions = tiny_model("gpt2", n_positions=40), prompts(1), torch.arange(22, 34)[None]
    options = {**OPTIONS, "position_ids": positions, "max_new_tokens": 6}
    expected = model.generate(ids, **options)
    options |= {"max_new_tokens": 30, "eos_token_id": int(expected[0, -1])}
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", [expected[0, PROMPT:].tolist() + [5] * 20], width=7)
    assert torch.equal(model.generate(ids, **options), expected)


class InterruptingCriterion(RowCriterion):
    """Interrupts the call after so many tokens of the last row, when others have other lengths."""

    def __init__(self, rows, after):
        self.rows, self.after = rows, after

    def stops_row(self, index, token):
        self.after -= index == self.rows - 1
        if self.after < 0:
            raise KeyboardInterrupt
        return False


@pytest.mark.parametrize(
    ("engine", "window", "rows", "lengths"),
    [
        *(("eager", window, rows, range(PROMPT + 1, PROMPT + 7)) for window in (None, 64) for rows in (1, 3)),
        ("eager", 8, 1, range(PROMPT + 1, PROMPT + 7)),
        ("eager", 8, 3, [0]),  # slots that left the window are lost
        ("compiled", 8, 1, [PROMPT]),  # the answers were in buffers
        ("compiled", None, 3, [PROMPT]),
    ],
)
def test_an_interrupted_call_leaves_a_cache_to_continue_from(engine, window, rows, lengths):
    model = tiny_model("mistral", sliding_window=window)
    ids, mask = prompts(rows), torch.ones(rows, PROMPT + 18, dtype=torch.long)
    mask[:-1, :3] = 0
    expected = model.generate(ids, attention_mask=mask[:, :PROMPT], max_new_tokens=28, **OPTIONS)
    ATTACH[engine](model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist(), width=5)
    options = {"stopping_criteria": [InterruptingCriterion(rows, after=6)], **OPTIONS}
    cache = DynamicCache(config=model.config)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, attention_mask=mask[:, :PROMPT], max_new_tokens=28, **options, **{CACHE: cache})
    (length,) = {layer.get_seq_length() for layer in cache.layers}
    assert length in lengths
    known = expected[:, : PROMPT + 18]
    use_drafter(model, "wrong", expected[:, PROMPT + 18 :].tolist())
    found = model.generate(known, attention_mask=mask, max_new_tokens=10, **OPTIONS, **{CACHE: cache})
    assert torch.equal(found, expected)


def test_an_interrupted_early_exit_crops_all_layers_to_one_length():
    model = tiny_model("llama")
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]), mode="early_exit")
    cache = DynamicCache(config=model.config)
    options = {**SHORT, "stopping_criteria": [InterruptingCriterion(1, after=4)], CACHE: cache}
    with pytest.raises(KeyboardInterrupt):
        model.generate(prompts(1), exit_threshold=0.0, **options)
    assert [layer.get_seq_length() for layer in cache.layers] == [PROMPT] * len(cache.layers)


def with_indexed_layer(config):
    """A layer of another class may hold more than K/V, as some of transformers do."""
    cache = DynamicCache(config=config)
    cache.layers[1] = type("Indexed", (DynamicLayer,), {})()
    return {CACHE: cache}


def with_recording(config):
    cache = DynamicCache(config=config)
    cache.activate_past_recording()
    return {CACHE: cache}


CROSS = {"add_cross_attention": True}
REFUSED = [  # a first rollback would discard what is recorded
    ("mistral", {}, 1, with_recording, r"DynamicCache that records the past.*activate_past_recording"),
    ("gemma3_text", {}, 1, lambda _: {"cache_implementation": "static"}, "got StaticCache with sliding-window layers"),
    ("llama", {}, 2, with_indexed_layer, r"in a batch cannot use this cache: got .* with a Indexed"),
    ("gpt2", CROSS, 1, lambda _: {CACHE: EncoderDecoderCache(DynamicCache(), DynamicCache())}, "EncoderDecoderCache"),
    ("gpt2", CROSS, 1, lambda _: {"encoder_hidden_states": torch.randn(1, 5, 32)}, "beside an encoder's"),
]


@pytest.mark.parametrize(("family", "settings", "rows", "make_options", "match"), REFUSED)
def test_caches_that_cannot_be_rolled_back_are_refused(family, settings, rows, make_options, match):
    model = TIDEModelForCausalLM.attach(tiny_model(family, **settings), strict=True)
    with pytest.raises(UnsupportedOptionError, match=match):
        model.generate(prompts(rows), **SHORT, **make_options(model.config))


def test_a_single_row_may_have_layers_that_hold_more_than_k_and_v():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"), strict=True)
    found = model.generate(prompts(1), **SHORT, **with_indexed_layer(model.config))
    assert torch.equal(found, model.generate(prompts(1), **SHORT))


@pytest.mark.parametrize("engine", ["eager", "compiled"])
def test_the_last_tokens_of_a_prompt_whose_rest_is_in_a_long_cache(engine):
    """Its tokens count towards none of the lengths that `generate` knows, and need slots all the same."""
    model, ids = tiny_model("llama", max_position_embeddings=2048), torch.randint(3, VOCAB, (1, 700))
    expected = model.generate(ids, max_new_tokens=24, **OPTIONS)
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids[:, :-2], **{CACHE: cache})
    ATTACH[engine](model)
    use_drafter(model, "mixed", expected[:, 700:].tolist())
    mask = torch.ones(1, 700, dtype=torch.long)
    found = model.generate(ids[:, -2:], attention_mask=mask, max_new_tokens=24, **OPTIONS, **{CACHE: cache})
    assert torch.equal(found[:, 2:], expected[:, 700:])
    assert model.last_exit_stats.engine == engine


@pytest.mark.parametrize("settings", [{}, {"rope_parameters": longrope(8)}])
def test_a_model_that_replaces_the_cache_in_prefill(settings):
    """Phi-3 does beyond its original context: the cache that it was passed stays empty."""
    model = tiny_model("phi3", original_max_position_embeddings=8, **settings)
    options = {"return_dict_in_generate": True, **SHORT}
    for some in (prompts(1), prompts(2), prompts(1).repeat(2, 1)):  # equal prompts are read once
        expected = model.generate(some, **options)
        TIDEModelForCausalLM.attach(model, draft_head_for(model))
        use_drafter(model, "mixed", expected.sequences[:, PROMPT:].tolist())
        found = model.generate(some, **options)
        assert torch.equal(found.sequences, expected.sequences)
        assert found[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
        TIDEModelForCausalLM.detach(model)


@pytest.mark.parametrize(("length", "pads"), [(9, (0, 0, 0)), (60, (0, 50, 57))])
def test_rows_stay_level_where_attention_counts_slots(length, pads):
    """Llama 4 scales queries by their slot from some length on."""
    settings = {"attn_temperature_tuning": True, "floor_scale": 8, "attn_scale": 2.0, "attention_chunk_size": 64}
    model = tiny_model("llama4_text", **settings)
    mask = (torch.arange(length) >= torch.tensor(pads)[:, None]).long()
    ids = torch.randint(3, 96, (3, length), generator=torch.Generator().manual_seed(5)) * mask
    inputs = {"input_ids": ids, "attention_mask": mask, **OPTIONS, "max_new_tokens": 24}
    expected = model.generate(**inputs)
    TIDEModelForCausalLM.attach(model)
    for kind in ("mixed", "right"):
        use_drafter(model, kind, expected[:, length:].tolist())
        assert torch.equal(model.generate(**inputs), expected)


class InnerPass(LogitsProcessor):
    """Runs the model over the text once more."""

    def __init__(self, model, use_cache):
        self.model, self.use_cache = model, use_cache

    def __call__(self, input_ids, scores):
        found = self.model.model(input_ids=input_ids, use_cache=self.use_cache).last_hidden_state
        return scores + found[:, -1, :1]


@pytest.mark.parametrize(("rows", "use_cache"), [(1, False), (2, True)])
def test_the_draft_head_ignores_passes_of_a_logits_processor(rows, use_cache):
    model = tiny_model("llama")
    options = {**SHORT, "logits_processor": [InnerPass(model, use_cache)]}
    expected = model.generate(prompts(rows), **options)
    TIDEModelForCausalLM.attach(model, draft_head_for(model))
    use_heads(model, 0)
    assert torch.equal(model.generate(prompts(rows), **options), expected)
    assert model.last_exit_stats.drafted > 0


class Offloaded(DynamicCache):
    """Records which layer was prefetched when another one is read; nothing is offloaded on a CPU."""

    def __init__(self, config):
        super().__init__(config=config)
        self.offloading = self.only_non_sliding = True
        self.prefetched, self.reads = 0, []

    def update(self, keys, values, layer_idx, *args, **kwargs):
        self.reads.append((layer_idx, self.prefetched))
        self.prefetched = (layer_idx + 1) % len(self.layers)
        return self.layers[layer_idx].update(keys, values, *args, **kwargs)

    def prefetch(self, layer_idx, only_non_sliding=True):
        self.prefetched = layer_idx


def test_an_offloaded_cache_prefetches_the_first_layer_after_a_draft():
    model = tiny_model("llama")
    expected = model.generate(prompts(1), **SHORT)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2], exit_strategy="linear"))
    use_heads(model, 2)
    cache = Offloaded(model.config)
    assert torch.equal(model.generate(prompts(1), **SHORT, **{CACHE: cache}), expected)
    assert model.last_exit_stats.drafted > 0
    assert all(layer_idx == prefetched for layer_idx, prefetched in cache.reads)


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
@pytest.mark.parametrize("attach", [TIDEModelForCausalLM.attach, attach_compiled], ids=["eager", "compiled"])
def test_tokens_exit_where_layers_share_kv(attach):
    model = random_model("gemma4_text", SHARED)
    expected = model.generate(prompts(1), **SHORT)
    routers = TIDERouters.for_model(model, exit_layers=[2, 4])
    attach(model, routers, mode="early_exit")
    assert model.generate(prompts(1), exit_threshold=0.0, **SHORT).shape == expected.shape
    assert torch.equal(model.generate(prompts(1), exit_threshold=2.0, **SHORT), expected)


def test_a_model_with_a_recurrent_state_runs_post_hoc_only():
    """MiniMax does not call itself stateful: it has a cache of its own kind."""
    model = random_model("minimax", {**_COMMON, "num_local_experts": 4, "num_experts_per_tok": 2})
    expected = model.generate(prompts(1), **SHORT)
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state, which tide_mode='self_speculative'"):
        TIDEModelForCausalLM.attach(model, strict=True)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    TIDEModelForCausalLM.attach(model, routers, mode="post_hoc", exit_threshold=2.0)
    assert torch.equal(model.generate(prompts(1), **SHORT), expected)


def test_a_cache_is_compacted_where_that_frees_slots_and_not_for_a_row_that_is_short():
    """While one row accepts all of its drafts, the other's rejected slots are in slots that the first one needs."""
    cache, found, new = DynamicCache(), [], torch.zeros(2, 1, 4, 8)
    cache.update(new, new, 0)
    slots = CacheSlots(cache, 4, None, 0.25, torch.device("cpu"))
    for accepted in [[4, 1]] * 10 + [[1, 4]] * 10:
        cache.update(new, new, 0)
        slots.commit(4, [list(range(count)) for count in accepted])
        assert slots.length == cache.get_seq_length()
        found.append(slots.num_compactions)
    assert found == [0] * 15 + [1] * 5  # with 68 slots, of which the longer row needs 50
