"""Families in which a pass over several tokens may attend to other keys than token by token."""

import pytest
import torch
import transformers
from drafters import use_drafter
from families import _COMMON, SPARSE, prompt, random_model, tiny_model
from packaging.version import Version
from transformers import CONFIG_MAPPING, StaticCache
from transformers.cache_utils import StaticIndexedLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError
from tide_hf.depth import kv_cache, multi_token_passes
from tide_hf.depth.multi_token_passes import check_widths

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
MOSHI = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
MOSHI |= {"sliding_window": 16, "ffn_dim": 48}
LIMITED = {"moshi": MOSHI, **{family: settings for family, settings in SPARSE.items() if "minimax" not in family}}


def limited_model(family, seed=0):
    if family not in CONFIG_MAPPING or (family == "moshi" and Version(transformers.__version__) < Version("5.21")):
        pytest.skip("this transformers does not have it, or its layers return tuples there")
    return random_model(family, LIMITED[family], seed)


@pytest.mark.parametrize("family", LIMITED)
def test_tokens_up_to_the_limit_are_plain_decodings_and_beyond_it_nothing_drafts(family):
    model = limited_model(family)
    expected = model.generate(prompt(), max_new_tokens=32, **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, 9:].tolist(), 5)
    assert torch.equal(model.generate(prompt(), max_new_tokens=16 - 9, **OPTIONS), expected[:, :16])
    assert model.last_exit_stats.accepted > 0
    for new in (17 - 9, 32):
        options = {"max_new_tokens": new, **OPTIONS}
        with pytest.raises(UnsupportedOptionError, match=rf"{family} over several .* got {9 + new} .* at most 16, its"):
            model.generate(prompt(), tide_strict=True, **options)
        assert torch.equal(model.generate(prompt(), **options), expected[:, : 9 + new])
        assert model.last_exit_stats.fallback_reason is not None


@pytest.mark.parametrize("family", LIMITED)
def test_the_probe_finds_such_a_family_that_is_not_known(family, monkeypatch):
    model = limited_model(family, seed=1)
    check_widths(model, find_structure(model))
    monkeypatch.setattr(multi_token_passes, "SPARSE_ATTENTION", ())
    monkeypatch.setattr(multi_token_passes, "WINDOW_IN_CACHE_ALONE", frozenset())
    with pytest.raises(UnsupportedModelError, match="has other logits in a pass over several tokens than token by"):
        TIDEModelForCausalLM.attach(model)
    assert type(model).__module__.startswith("transformers")


@pytest.mark.parametrize("widths", [{1}, {2, 3, 4}], ids=["one token", "several"])
def test_the_probe_finds_passes_of_some_widths_that_are_not_like_the_others(widths):
    model = tiny_model("llama")

    def change(_module, _args, given, output):
        if given["input_ids"].shape[1] in widths:
            output.logits = output.logits.flip(-1)
        return output

    model.register_forward_hook(change, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="has other logits in a pass over several tokens"):
        check_widths(model, find_structure(model))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "expected"), [("llama", [8, 4, 1]), ("gemma3_text", [16, 4, 1]), ("jamba", [4])])
def test_the_probe_takes_a_few_short_passes(family, expected, dtype):
    """One where drafts are never verified; beyond a small window."""
    model = tiny_model(family).to(dtype)
    widths = []
    model.register_forward_pre_hook(lambda _m, _a, given: widths.append(given["input_ids"].shape[1]), with_kwargs=True)
    check_widths(model, find_structure(model))
    assert widths == expected


@pytest.mark.parametrize("family", ["deepseek_v32", "minimax_m3_vl_text"])
def test_a_static_cache_rolls_back_what_an_index_holds(family):
    model = random_model(family, SPARSE[family])
    options = {"max_new_tokens": 16 - 9, "disable_compile": True, **OPTIONS}
    expected = model.generate(prompt(), cache_implementation="static", **options)
    TIDEModelForCausalLM.attach(model)
    for kind in ("mixed", "wrong", "right"):
        use_drafter(model, kind, expected[:, 9:].tolist(), 5)
        cache = StaticCache(config=model.config.get_text_config(), max_cache_len=16)
        assert torch.equal(model.generate(prompt(), **{CACHE: cache}, **options), expected)
        lengths = [value for name, value in vars(cache.layers[0]).items() if name.endswith("cumulative_length")]
        assert len(lengths) == 2
        assert lengths[0] == lengths[1] == 15


def test_an_index_is_rolled_back_where_a_static_layer_cannot_crop(monkeypatch):
    """As in transformers 5.17."""
    layer = StaticIndexedLayer(max_cache_len=8)
    layer.update(torch.ones(1, 1, 5, 2), torch.ones(1, 1, 5, 2))
    layer.update_indexer(torch.ones(1, 5, 2))
    for owner in StaticIndexedLayer.__mro__:
        if "crop" in vars(owner):
            monkeypatch.delattr(owner, "crop")
    kv_cache.crop(layer, 2)
    assert layer.cumulative_length == layer.indexer_cumulative_length == 3
