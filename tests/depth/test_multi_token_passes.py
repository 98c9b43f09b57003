"""Families in which a pass over several tokens may attend to other keys than token by token."""

from functools import partial

import on_steps
import pytest
import torch
import transformers
from drafters import use_drafter
from families import _COMMON, SPARSE, prompt, random_model, tiny_model
from on_steps import ATTACH, WINDOWED
from packaging.version import Version
from transformers import CONFIG_MAPPING, DynamicCache, MistralConfig, MistralForCausalLM, StaticCache
from transformers.cache_utils import StaticIndexedLayer

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE, find_structure
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError
from tide_hf.depth import multi_token_passes
from tide_hf.depth.multi_token_passes import check_widths, multi_token_limit

OPTIONS = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
PROMPT, LIMIT = 9, 16
MOSHI = {name: value for name, value in _COMMON.items() if name != "intermediate_size"}
MOSHI |= {"sliding_window": LIMIT, "ffn_dim": 48}
WINDOW = 100  # longer than any that the probe at attach covers
LIMITED = {"moshi": MOSHI, **{family: settings for family, settings in SPARSE.items() if "minimax" not in family}}


def limited_model(family, seed=0):
    if family not in CONFIG_MAPPING or (family == "moshi" and Version(transformers.__version__) < Version("5.21")):
        pytest.skip("this transformers does not have it, or its layers return tuples there")
    return random_model(family, LIMITED[family], seed)


@pytest.mark.parametrize("family", LIMITED)
def test_calls_up_to_the_limit_draft_and_longer_ones_do_not(family):
    model = limited_model(family)
    expected = model.generate(prompt(), max_new_tokens=LIMIT + 1 - PROMPT, **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist(), 5)
    assert torch.equal(model.generate(prompt(), max_new_tokens=LIMIT - PROMPT, **OPTIONS), expected[:, :LIMIT])
    assert model.last_exit_stats.accepted > 0
    options = {"max_new_tokens": LIMIT + 1 - PROMPT, **OPTIONS}
    match = rf"{family} over several .* got {LIMIT + 1} .* at most {LIMIT}, its"
    with pytest.raises(UnsupportedOptionError, match=match):
        model.generate(prompt(), tide_strict=True, **options)
    assert torch.equal(model.generate(prompt(), **options), expected)


@pytest.mark.parametrize(("family", "repeats"), [("doge", True), ("doge", False), ("moshi", False)])
def test_tokens_of_a_cache_count_once_whether_the_prompt_repeats_them_or_not(family, repeats):
    model = limited_model(family)
    TIDEModelForCausalLM.attach(model, strict=True)
    cache, ids = DynamicCache(config=model.config), prompt().repeat(1, 2)[:, : LIMIT - 4]
    with torch.no_grad():
        model(ids[:, :-4], **{CACHE: cache})
    inputs = {"input_ids": ids if repeats else ids[:, -4:], "attention_mask": torch.ones_like(ids), CACHE: cache}
    with pytest.raises(UnsupportedOptionError, match=f"got {LIMIT + 1} tokens of prompt and answer"):
        model.generate(**inputs, **OPTIONS, max_new_tokens=5)
    model.generate(**inputs, **OPTIONS, max_new_tokens=4)


@pytest.mark.parametrize("family", LIMITED)
def test_the_probe_finds_such_families_that_are_not_known(family, monkeypatch):
    model = limited_model(family, seed=1)
    check_widths(model, find_structure(model))
    monkeypatch.setattr(multi_token_passes, "SPARSE_ATTENTION", ())
    monkeypatch.setattr(multi_token_passes, "WINDOWS", {})
    with pytest.raises(UnsupportedModelError, match="has other logits in a pass over several tokens than token by"):
        TIDEModelForCausalLM.attach(model)
    assert type(model).__module__.startswith("transformers")


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("field", ["sliding_window", "attention_chunk_size"])
def test_a_window_that_only_the_cache_has_ends_drafts(field, engine, rows):
    """A Llama's masks have no windows, but transformers makes the cache of what the config names."""
    model = random_model("llama", {**_COMMON, field: WINDOW})
    batch = on_steps.prompts(rows, length=WINDOW - 10)
    expected = model.generate(**batch, max_new_tokens=30, **OPTIONS)
    ATTACH[engine](model)
    for new in (10, 30):
        use_drafter(model, "right", expected[:, WINDOW - 10 :].tolist(), 5)
        assert torch.equal(model.generate(**batch, max_new_tokens=new, **OPTIONS), expected[:, : WINDOW - 10 + new])
        assert (model.last_exit_stats.accepted > 0) == (new == 10)
    assert f"got {WINDOW + 20} tokens of prompt and answer" in model.last_exit_stats.fallback_reason
    with pytest.raises(UnsupportedOptionError, match=f"at most {WINDOW}, its {field}"):
        model.generate(**batch, max_new_tokens=30, tide_strict=True, **OPTIONS)


class OwnMistral(MistralForCausalLM):
    """Without a forward of its own, in a module that makes no masks."""


WITHOUT = {"sliding_window": 8, "layer_types": ["full_attention"] * _COMMON["num_hidden_layers"]}


@pytest.mark.parametrize(
    "make",
    [
        *(partial(tiny_model, family) for family in WINDOWED),
        lambda: OwnMistral(MistralConfig(**_COMMON, sliding_window=8)),
        lambda: random_model("llama", {**_COMMON, **WITHOUT}),
    ],
    ids=[*WINDOWED, "own", "neither"],
)
def test_windows_that_masks_have_too_or_that_no_layer_has_limit_nothing(make):
    assert multi_token_limit(make()) is None


@pytest.mark.parametrize("widths", [{1}, {2, 3, 4}], ids=["one token", "several"])
def test_the_probe_finds_passes_of_some_widths_with_other_logits(widths):
    model = tiny_model("llama")

    def change(_module, _args, given, output):
        if given["input_ids"].shape[1] in widths:
            output.logits = output.logits.flip(-1)
        return output

    model.register_forward_hook(change, with_kwargs=True)
    with pytest.raises(UnsupportedModelError, match="has other logits in a pass over several tokens"):
        check_widths(model, find_structure(model))


@pytest.mark.parametrize(
    ("family", "layers_crop"), [("deepseek_v32", True), ("deepseek_v32", False), ("minimax_m3_vl_text", True)]
)
def test_a_static_cache_rolls_back_an_attention_index(family, layers_crop, monkeypatch):
    if not layers_crop:  # as in transformers 5.17
        for owner in StaticIndexedLayer.__mro__:
            if "crop" in vars(owner):
                monkeypatch.delattr(owner, "crop")
    model = random_model(family, SPARSE[family])
    options = {"max_new_tokens": LIMIT - PROMPT, "disable_compile": True, **OPTIONS}
    expected = model.generate(prompt(), cache_implementation="static", **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "mixed", expected[:, PROMPT:].tolist(), 5)
    cache = StaticCache(config=model.config.get_text_config(), max_cache_len=LIMIT)
    assert torch.equal(model.generate(prompt(), **{CACHE: cache}, **options), expected)
    lengths = [int(value) for name, value in vars(cache.layers[0]).items() if name.endswith("cumulative_length")]
    assert lengths == [LIMIT - 1] * 2
