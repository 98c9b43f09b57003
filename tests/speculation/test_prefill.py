"""Prefill: prompts of a batch in groups of similar length leave what one pass would; a prefix's K/V are reused."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_heads
from families import ATTENTION, LAYERS, VOCAB, longrope, slow_but, tiny_model
from hypothesis import given
from hypothesis import strategies as st
from on_steps import FEW, attach_captured, attach_compiled, attach_eagerly
from transformers import DynamicCache, StaticCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.speculation import prefill
from tide_hf.speculation.drafters import NoDrafter
from tide_hf.speculation.prefill import Group, PrefixCache, _lengths, groups_by_length, groups_of

OPTIONS = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None}
RETURNED = {**OPTIONS, "return_dict_in_generate": True}
LENGTHS = (12, 5, 20, 12, 3)
WITHOUT_POSITIONS = ("bloom",)  # without position ids there is nothing to tell where a row begins
EAGER_FAMILIES = (*FEW, "mistral", "gemma3", "llama4_text", "deepseek_v3", "qwen2_5_vl")


@pytest.fixture
def passes_are_cheap(monkeypatch):
    monkeypatch.setattr(prefill, "PASS_TOKENS", 1)


def batch(lengths=LENGTHS, padding="left", seed=0):
    longest = max(lengths)
    ids = torch.randint(3, VOCAB, (len(lengths), longest), generator=torch.Generator().manual_seed(seed))
    first = torch.tensor([longest - length for length in lengths])[:, None]
    mask = (torch.arange(longest) >= first).long()
    mask = mask.flip(1) if padding == "right" else mask
    return {"input_ids": ids * mask, "attention_mask": mask}


def passes_of(model, call):
    """The shapes of the passes, those of prefill first, and what `call` returns."""
    shapes = []
    with model.get_input_embeddings().register_forward_hook(lambda _m, args, _o: shapes.append(tuple(args[0].shape))):
        return shapes, call()


@given(st.lists(st.integers(1, 400), min_size=1, max_size=7), st.integers(0, 200))
def test_no_other_groups_cost_less_and_the_longest_is_last(lengths, pass_tokens):
    def cost(groups):
        return sum(pass_tokens + len(group) * max(group) for group in groups)

    def partitions(rest):
        if not rest:
            yield []
        for size in range(1, len(rest) + 1):
            yield from ([rest[:size], *others] for others in partitions(rest[size:]))

    groups = groups_by_length(lengths, pass_tokens)
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    sizes = [[lengths[row] for row in group] for group in groups]
    assert [length for group in sizes for length in group] == sorted(lengths)
    assert cost(sizes) == min(map(cost, partitions(sorted(lengths))))


@pytest.mark.usefixtures("passes_are_cheap")
@pytest.mark.parametrize(
    ("attach", "family"),
    [
        *slow_but(EAGER_FAMILIES, ATTENTION, attach_eagerly),
        *((attach_captured, family) for family in ("gemma2", "bloom", "qwen2_5_vl")),
    ],
)
def test_groups_leave_the_tokens_and_the_cache_of_one_pass(family, attach):
    model, inputs = tiny_model(family), batch()
    expected = model.generate(**inputs, **RETURNED)
    attach(model)
    shapes, result = passes_of(model, lambda: model.generate(**inputs, **RETURNED))
    assert torch.equal(result.sequences, expected.sequences)
    if family in WITHOUT_POSITIONS:
        assert shapes[0] == (5, 20)
    else:
        assert shapes[:4] == [(1, 3), (1, 5), (2, 12), (1, 20)]
    assert result[CACHE].get_seq_length() == expected[CACHE].get_seq_length()
    more = torch.cat([expected.sequences, batch((6,) * 5, seed=1)["input_ids"]], dim=1)
    mask = torch.cat([inputs["attention_mask"], torch.ones(5, 26, dtype=torch.long)], dim=1)
    second = model.generate(more, attention_mask=mask, **{CACHE: result[CACHE]}, **OPTIONS)
    TIDEModelForCausalLM.detach(model)
    plain = model.generate(more, attention_mask=mask, **{CACHE: expected[CACHE]}, **OPTIONS)
    assert torch.equal(second, plain)


@pytest.mark.usefixtures("passes_are_cheap")
def test_the_draft_head_drafts_for_each_row_as_for_the_row_alone():
    model = tiny_model("llama")
    routers = draft_head_for(model)

    def drafts(inputs):
        attach_eagerly(model, routers)
        made = use_heads(model, 0)
        model.generate(**inputs, **{**OPTIONS, "max_new_tokens": 5})
        return [drafted for _text, drafted in made[0].drafted[: len(inputs["input_ids"])]]

    together = drafts(batch())
    for row in (0, 4):
        alone = {name: value[row : row + 1, -LENGTHS[row] :] for name, value in batch().items()}
        assert drafts(alone)[0] == together[row]


@pytest.mark.usefixtures("passes_are_cheap")
def test_a_callers_cache_is_filled_and_layers_are_counted_once_per_row():
    model, inputs = tiny_model("llama"), batch()
    expected, with_config = DynamicCache(), DynamicCache(config=model.config)
    model(**inputs, **{CACHE: expected}, position_ids=(inputs["attention_mask"].cumsum(1) - 1).clamp(min=0))
    attach_eagerly(model)
    for cache in (DynamicCache(), with_config):
        model.generate(**inputs, **{CACHE: cache}, **{**OPTIONS, "max_new_tokens": 1})
        assert model.last_exit_stats.layers_executed == len(LENGTHS) * LAYERS
        visible = inputs["attention_mask"].bool()[:, None, :, None]
        for found, wanted in zip(cache.layers, expected.layers, strict=True):
            torch.testing.assert_close(found.keys * visible, wanted.keys * visible, atol=1e-4, rtol=1e-3)
            torch.testing.assert_close(found.values * visible, wanted.values * visible, atol=1e-4, rtol=1e-3)
            assert not (found.keys * ~visible).any()


def kwargs_of(model, inputs):
    """What `generate` prepares."""
    positions = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
    cache = DynamicCache(config=model.config)
    return {"attention_mask": inputs["attention_mask"], "position_ids": positions, CACHE: cache}


ROPE = {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 19}}  # of some layers
ONE_PASS = {
    "padded on the right": lambda model, kwargs: kwargs.update(kwargs_of(model, batch(padding="right"))),
    "nothing is padded": lambda model, kwargs: kwargs.update(kwargs_of(model, batch((20,) * 5))),
    "a row without tokens": lambda model, kwargs: kwargs["attention_mask"][2].zero_(),
    "no mask": lambda model, kwargs: kwargs.pop("attention_mask"),
    "no positions": lambda model, kwargs: kwargs.pop("position_ids"),
    "quantised": lambda model, kwargs: setattr(model, "is_quantized", True),
    "offloaded": lambda model, kwargs: setattr(model, "hf_device_map", {"model.layers.0": "cpu", "lm_head": "disk"}),
    "longest position matters": lambda model, kwargs: model.config.update({"rope_parameters": ROPE}),
}
ALL_ROWS = {  # equal prompts as well
    "the same positions for all": lambda model, kwargs: kwargs.update(position_ids=torch.arange(20)[None]),
    "no cache": lambda model, kwargs: kwargs.update({CACHE: None}),
    "a cache with tokens": lambda model, kwargs: model(batch()["input_ids"], **{CACHE: kwargs[CACHE]}),
    "an offloaded cache": lambda model, kwargs: setattr(kwargs[CACHE], "offloading", True),
    "a static cache": lambda model, kwargs: kwargs.update({CACHE: StaticCache(model.config, 32)}),
    "token types": lambda model, kwargs: kwargs.update(token_type_ids=torch.zeros(5, 20, dtype=torch.long)),
    "a list": lambda model, kwargs: kwargs.update(adapter_names=["a", "b", "a", "b", "a"]),
}


@pytest.mark.usefixtures("passes_are_cheap")
@pytest.mark.parametrize("why", [*ONE_PASS, *ALL_ROWS])
def test_batches_that_are_read_in_one_pass(why):
    model, inputs = TIDEModelForCausalLM.attach(tiny_model("llama")), batch()
    kwargs = {**kwargs_of(model, inputs), "use_cache": True, "logits_to_keep": 1}
    assert [group.distinct for group in groups_of(model, inputs["input_ids"], kwargs)] == [[4], [1], [0, 3], [2]]
    (ONE_PASS | ALL_ROWS)[why](model, kwargs)
    assert groups_of(model, inputs["input_ids"], kwargs) is None
    if kwargs.get("attention_mask") is not None:
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])
    if (positions := kwargs.get("position_ids")) is not None:
        kwargs["position_ids"] = torch.arange(20).expand(len(positions), -1)
    equal = groups_of(model, torch.full((5, 20), 7), kwargs)
    assert equal == (None if why in ALL_ROWS else [Group([0], [0, 1, 2, 3, 4], [0] * 5, 20)])


@pytest.mark.usefixtures("passes_are_cheap")
def test_adapters_by_row_and_other_devices_are_read_in_one_pass(monkeypatch):
    model, inputs = TIDEModelForCausalLM.attach(tiny_model("llama")), batch()
    elsewhere = inputs["input_ids"].to("meta")
    assert _lengths(model, elsewhere, kwargs_of(model, inputs)) == [20] * 5
    monkeypatch.setattr(prefill, "has_adapters_by_row", lambda *_: True)
    assert groups_of(model, inputs["input_ids"], kwargs_of(model, inputs)) is None


@pytest.mark.usefixtures("passes_are_cheap")
def test_groups_are_read_in_chunks():
    model = tiny_model("llama")
    expected = model.generate(**batch(), **OPTIONS)
    attach_eagerly(model)
    shapes, answers = passes_of(model, lambda: model.generate(**batch(), **OPTIONS, prefill_chunk_size=8))
    assert torch.equal(answers, expected)
    assert shapes[:7] == [(1, 3), (1, 5), (2, 8), (2, 4), (1, 8), (1, 8), (1, 4)]


@pytest.mark.parametrize(
    ("family", "attach"), [("bloom", attach_eagerly), ("gemma3_text", attach_captured), ("llama", attach_compiled)]
)
def test_equal_prompts_are_read_once(family, attach):
    model, inputs = tiny_model(family), batch((12, 5))
    sampling = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 12, "eos_token_id": None, "top_k": 0}
    torch.manual_seed(0)
    expected = model.generate(**inputs, **sampling)
    attach(model, draft_head_for(model))
    model._tide.make_drafter = NoDrafter  # drafts would change the order in which rows are sampled
    torch.manual_seed(0)
    shapes, answers = passes_of(model, lambda: model.generate(**inputs, **sampling))
    assert shapes[0] == (2, 12)
    assert torch.equal(answers, expected)
    assert len({tuple(answer) for answer in answers.tolist()}) == 6


@pytest.mark.usefixtures("passes_are_cheap")
def test_prompts_with_unequal_padding_are_not_equal():
    ids, mask = torch.full((5, 6), 9), torch.ones(5, 6, dtype=torch.long)
    ids[3] = torch.arange(6)
    mask[1, :2] = mask[4, :2] = 0  # rows 1 and 4: the same tokens as rows 0 and 2, fewer of which count
    model = tiny_model("llama")
    expected = model.generate(ids, attention_mask=mask, **OPTIONS)
    attach_eagerly(model)
    kwargs = kwargs_of(model, {"input_ids": ids, "attention_mask": mask})
    assert groups_of(model, ids, kwargs) == [Group([1], [1, 4], [0, 0], 4), Group([0, 3], [0, 2, 3], [0, 0, 1], 6)]
    assert torch.equal(model.generate(ids, attention_mask=mask, **OPTIONS), expected)


FIRST = list(range(10, 30))


def answer(model, prefix, prompt):
    """The tokens, after a check that they are the base model's; and the number of those with K/V in the prefix."""
    options, ids, cache = {**OPTIONS, "max_new_tokens": 6}, torch.tensor([prompt]), prefix.take(prompt)
    num_known = cache.get_seq_length()
    tokens = model.generate(ids, **{CACHE: cache}, **options)
    assert torch.equal(tokens, model.generate(ids, **options))
    prefix.store(cache, tokens[0].tolist())
    return tokens[0].tolist(), num_known


def test_a_prompt_reuses_the_k_v_of_the_last_text_that_it_shares():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    prefix = PrefixCache(model.config)
    text, num_known = answer(model, prefix, FIRST)
    assert num_known == 0
    longer, num_known = answer(model, prefix, [*text, 5, 6, 7])
    assert num_known == len(text) - 1  # the last token of an answer has no K/V
    assert answer(model, prefix, longer[:-1])[1] == len(longer) - 2  # at least one token is left to process
    assert answer(model, prefix, [*FIRST[:18], 90, 91])[1] == 18
    assert answer(model, prefix, [3, *FIRST])[1] == 0
    prefix.take(FIRST)  # whose call fails
    assert answer(model, prefix, FIRST)[1] == 0
    prefix.store(PrefixCache(model.config).take(FIRST), FIRST)  # which no call has filled
    assert answer(model, prefix, FIRST)[1] == 0


@pytest.mark.parametrize(
    ("family", "settings", "other"),
    [("mistral", {}, [*FIRST[:10], 90]), ("llama", {"rope_parameters": longrope(30)}, [*FIRST[:10], *FIRST, 90])],
    ids=["a sliding window", "rotary embeddings that change"],
)
def test_a_prefix_whose_k_v_would_be_others_is_read_again(family, settings, other):
    model = TIDEModelForCausalLM.attach(tiny_model(family, **settings))
    prefix = PrefixCache(model.config)
    text, _ = answer(model, prefix, FIRST[:10])
    assert answer(model, prefix, [*text, 5])[1] == 15
    assert answer(model, prefix, other)[1] == 0
