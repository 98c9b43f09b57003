"""`self_speculative` gives the base model's own tokens, whatever the drafts are worth."""

import pytest
import torch
from calls import NEW, OPTIONS, PROCESSED, PROMPT, prompt
from drafters import KINDS, use_drafter
from families import ATTENTION, tiny_model
from transformers import DynamicCache, GenerationConfig, LogitsProcessor, StoppingCriteria
from transformers.cache_utils import DynamicSlidingWindowLayer

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError
from tide_hf.depth import kv_cache
from tide_hf.speculation.drafters import Draft


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ATTENTION)
def test_greedy_output_equals_the_base_model(family, kind):
    model = tiny_model(family)
    expected = model.generate(prompt(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    stats = model.last_exit_stats
    assert stats.total_tokens == NEW
    if kind == "right":
        assert stats.acceptance_rate == 1.0
        assert stats.rounds == pytest.approx((NEW - 1) / 4, abs=1)
    if kind == "wrong":
        assert stats.accepted == 0
        assert stats.rounds == NEW - 1


@pytest.mark.parametrize("draft_vocab_size", [None, 7])
@pytest.mark.parametrize("family", ATTENTION)
def test_drafts_from_exit_heads_leave_no_trace(family, draft_vocab_size):
    """Shallow draft steps write K/V of the shallow layers only; after the rollback nothing of it is left."""
    model = tiny_model(family)
    expected = model.generate(prompt(), **OPTIONS)
    routers = TIDERouters.for_model(
        model, exit_layers=[1, 3], exit_strategy="linear", draft_vocab_size=draft_vocab_size
    )
    TIDEModelForCausalLM.attach(model, routers)

    class HeadDrafter:
        def __init__(self, _attachment, _prompts, shallow):
            self.shallow, self.rounds = shallow, 0

        def draft(self, rows, limits):
            self.rounds += 1
            exit_layer = 1 if self.rounds % 2 else 3
            drafted = [[] for _ in rows]
            for _ in range(min(3, *limits)):
                tokens, scores = self.shallow.draft(exit_layer, drafted)
                assert draft_vocab_size is None or max(tokens) < draft_vocab_size
                assert all(0.0 <= score <= 1.0 for score in scores)
                drafted = [[*before, token] for before, token in zip(drafted, tokens, strict=True)]
            self.shallow.rollback()
            return [Draft().add(tokens, "head", exit_layer) for tokens in drafted]

        def observe(self, row, draft, new_tokens, n_matches):
            pass

    model._tide.make_drafter = HeadDrafter
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)


@pytest.mark.parametrize("layer_class", [DynamicSlidingWindowLayer, kv_cache._VisibleSlidingLayer])
def test_layers_with_a_window_are_rolled_back_by_any_transformers(layer_class, monkeypatch):
    monkeypatch.setattr(kv_cache, "SLIDING_LAYER", layer_class)
    model = tiny_model("gemma2")
    expected = model.generate(prompt(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "random", [expected[0, prompt().shape[1] :].tolist()])
    result = model.generate(prompt(), **OPTIONS, return_dict_in_generate=True)
    assert torch.equal(result.sequences, expected)
    kinds = {type(layer) for layer in result[CACHE].layers}
    assert DynamicSlidingWindowLayer in kinds
    assert kv_cache._VisibleSlidingLayer not in kinds


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "gpt2"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_returned_cache_is_that_of_the_accepted_tokens(family, kind):
    model = tiny_model(family)
    expected = model.generate(prompt(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, expected[:, PROMPT:].tolist())
    cache = model.generate(prompt(), return_dict_in_generate=True, **OPTIONS)[CACHE]
    fresh = DynamicCache(config=model.config)
    fresh.activate_past_recording()
    with torch.no_grad():
        TIDEModelForCausalLM.detach(model)(input_ids=expected[:, :-1], **{CACHE: fresh})
    fresh.crop(0)
    for layer, other in zip(cache.layers, fresh.layers, strict=True):
        assert layer.get_seq_length() == other.get_seq_length()
        torch.testing.assert_close(layer.keys, other.keys, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(layer.values, other.values, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        *PROCESSED,
        {"do_sample": True, "temperature": 0.9, "top_k": 20},
        {"do_sample": True, "top_p": 0.8},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_generate(kind, options):
    """The same seed gives the same sample, since random numbers are drawn for output tokens alone."""
    model = tiny_model("llama")
    options = {**OPTIONS, **options}
    torch.manual_seed(7)
    expected = model.generate(prompt(), **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, kind, expected[:, PROMPT:].tolist())
    torch.manual_seed(7)
    assert torch.equal(model.generate(prompt(), **options), expected)


def test_eos_inside_a_draft_ends_the_output_there():
    model = tiny_model("llama")
    expected = model.generate(prompt(), **OPTIONS)[0, PROMPT:].tolist()
    eos = next(token for position, token in enumerate(expected) if position > 4 and token not in expected[:position])
    options = {**OPTIONS, "eos_token_id": eos}
    plain = model.generate(prompt(), **options)
    assert plain.shape[1] < PROMPT + NEW
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", [expected], width=7)
    result = model.generate(prompt(), return_dict_in_generate=True, **options)
    assert torch.equal(result.sequences, plain)
    assert result[CACHE].get_seq_length() == plain.shape[1] - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 3, 5])
def test_a_draft_never_passes_max_length(new_tokens):
    model = tiny_model("llama")
    options = {**OPTIONS, "max_new_tokens": new_tokens}
    expected = model.generate(prompt(), **options)
    continuation = model.generate(prompt(), **OPTIONS)[:, PROMPT:].tolist()
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "right", continuation, width=9)
    assert torch.equal(model.generate(prompt(), **options), expected)


@pytest.mark.parametrize("asked", [("scores", "logits"), ("scores",), ("logits",)])
@pytest.mark.parametrize("repetition_penalty", [1.0, 1.2])  # without a processor the top tokens might do
def test_scores_and_logits_of_each_token_are_returned(asked, repetition_penalty):
    model = tiny_model("llama")
    options = {**OPTIONS, "return_dict_in_generate": True, "repetition_penalty": repetition_penalty}
    options |= {f"output_{name}": True for name in asked}
    expected = model.generate(prompt(), **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "wrong at the last position", expected.sequences[:, PROMPT:].tolist())
    result = model.generate(prompt(), **options)
    for name in asked:
        ours, theirs = torch.stack(result[name]), torch.stack(expected[name])
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_stateful_criteria_and_processors_see_every_prefix_once():
    class Processor(LogitsProcessor):
        def __init__(self):
            self.prefixes = []

        def __call__(self, input_ids, scores):
            self.prefixes.append(input_ids[0].tolist())
            return scores

    class Criterion(Processor, StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            super().__call__(input_ids, scores)
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    model = tiny_model("llama")
    seen: list[tuple[list, list]] = []
    continuation: list[list[int]] = []
    for kind in (None, *KINDS):
        processor, criterion = Processor(), Criterion()
        if kind is not None:
            TIDEModelForCausalLM.attach(model)
            use_drafter(model, kind, continuation)
        out = model.generate(prompt(), logits_processor=[processor], stopping_criteria=[criterion], **OPTIONS)
        continuation = out[:, PROMPT:].tolist()
        seen.append((processor.prefixes, criterion.prefixes))
    assert all(other == seen[0] for other in seen[1:])


def test_left_padding_of_a_single_sequence():
    model = tiny_model("llama")
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), prompt()], dim=1)
    mask = (torch.arange(padded.shape[1]) >= 4).long()[None]
    expected = model.generate(padded, attention_mask=mask, **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "wrong at the last position", expected[:, PROMPT + 4 :].tolist())
    assert torch.equal(model.generate(padded, attention_mask=mask, **OPTIONS), expected)


def test_inputs_embeds():
    model = tiny_model("llama")
    embeds = model.get_input_embeddings()(prompt())
    expected = model.generate(inputs_embeds=embeds, **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "wrong at the last position", expected.tolist())
    assert torch.equal(model.generate(inputs_embeds=embeds, **OPTIONS), expected)


def test_going_on_from_a_returned_cache():
    model = tiny_model("mistral")
    options = {**OPTIONS, "return_dict_in_generate": True}

    def two_turns():
        first = model.generate(prompt(), **options)
        second_prompt = torch.cat([first.sequences, prompt(1)], dim=1)
        return model.generate(second_prompt, **{CACHE: first[CACHE]}, **options).sequences

    expected = two_turns()
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(two_turns(), expected)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "opt", "granite", "qwen3", "phi"])
def test_a_static_cache(family, kind):
    model = tiny_model(family)
    options = {**OPTIONS, "cache_implementation": "static"}
    expected = model.generate(prompt(), **options)
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_threshold=0.0, kv_cache_strategy="propagate")
    TIDEModelForCausalLM.attach(model, routers)
    use_drafter(model, kind, expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(prompt(), **options), expected)
    early = [model.generate(prompt(), tide_mode="early_exit", **one) for one in (OPTIONS, options)]
    assert torch.equal(*early)


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_a_model_that_training_left_without_a_cache(mode):
    model = tiny_model("llama")
    model.generation_config.use_cache = False
    expected = model.generate(prompt(), **OPTIONS)
    routers = TIDERouters.for_model(model, exit_layers=[1])
    TIDEModelForCausalLM.attach(model, routers, mode=mode, exit_threshold=1.1)
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    passed = GenerationConfig.from_dict(model.generation_config.to_dict())  # as pipelines do
    assert torch.equal(model.generate(prompt(), generation_config=passed, **OPTIONS), expected)
    with pytest.raises(UnsupportedOptionError, match="no cache"):
        model.generate(prompt(), **OPTIONS, use_cache=False, tide_strict=True)


@pytest.mark.parametrize(
    ("family", "rows", "options", "got"),
    [
        ("llama", 2, {"cache_implementation": "static"}, "StaticCache"),
        ("gemma3_text", 1, {"cache_implementation": "static"}, "StaticCache with sliding-window layers"),
        ("llama", 1, {"use_cache": False}, "no cache"),
    ],
)
def test_caches_that_cannot_be_rolled_back(family, rows, options, got):
    model = TIDEModelForCausalLM.attach(tiny_model(family), strict=True)
    with pytest.raises(UnsupportedOptionError, match=f"self_speculative.*got {got}.*Expected a DynamicCache"):
        model.generate(prompt().expand(rows, -1), **OPTIONS, **options)


def test_classifier_free_guidance():
    model = tiny_model("llama")
    options = {**OPTIONS, "guidance_scale": 1.5, "negative_prompt_ids": prompt(2)[:, :5]}
    expected = model.generate(prompt(), **options)
    TIDEModelForCausalLM.attach(model)
    use_drafter(model, "wrong at the last position", expected[:, PROMPT:].tolist())
    assert torch.equal(model.generate(prompt(), **options), expected)
    assert model.last_exit_stats.layers_executed == 4 * (1 + model.last_exit_stats.rounds)
