"""Random combinations of options, batches, drafters and caches: always plain decoding's own tokens."""

import gc
import random
import resource

import pytest
import torch
from drafters import KINDS, use_drafter
from families import VOCAB, tiny_model
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from random_calls import inputs_of, sequences_of
from transformers import StoppingCriteria

from tide_hf import TIDEModelForCausalLM, TIDERouters

FAMILIES = ("llama", "mistral", "gemma3_text", "gpt2", "falcon", "bloom", "llama4_text", "phi3")
MODELS = {family: tiny_model(family) for family in FAMILIES}


class AnyRowEndsAll(StoppingCriteria):
    """Answers for all rows at once."""

    def __call__(self, input_ids, scores, **kwargs):
        return bool((input_ids[:, -1] % 9 == 0).any())


options = st.fixed_dictionaries(
    {"max_new_tokens": st.integers(1, 18), "do_sample": st.just(False), "pad_token_id": st.just(0)},
    optional={
        "repetition_penalty": st.sampled_from([1.2, 0.8]),
        "no_repeat_ngram_size": st.integers(1, 3),
        "min_new_tokens": st.integers(1, 6),
        "bad_words_ids": st.just([[7], [9, 10]]),
        "suppress_tokens": st.just([11, 12]),
        "forced_eos_token_id": st.just(5),
        "return_dict_in_generate": st.booleans(),
        "num_return_sequences": st.just(1),
        "exponential_decay_length_penalty": st.just((2, 1.3)),
        "prefill_chunk_size": st.just(4),
        "prefix_allowed_tokens_fn": st.just(lambda row, ids: list(range(3 + row, VOCAB, 1 + ids.shape[0] % 3))),
        "encoder_repetition_penalty": st.sampled_from([1.5, 0.7]),
        "sequence_bias": st.just([[[5, 6], 2.0], [[7], 1.5]]),
        "renormalize_logits": st.booleans(),
        "stopping_criteria": st.just([AnyRowEndsAll()]),
    },
)


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    family=st.sampled_from(FAMILIES),
    rows=st.sampled_from([1, 1, 3, 8]),
    length=st.integers(1, 14),
    padding=st.sampled_from(["none", "left", "right"]),
    kind=st.sampled_from([*KINDS, "mixed"]),
    width=st.integers(0, 9),
    num_eos=st.integers(0, 30),
    options=options,
    seed=st.integers(0, 10**6),
)
def test_self_speculative_equals_plain(family, rows, length, padding, kind, width, num_eos, options, seed):
    model = MODELS[family]
    inputs = inputs_of(rows, length, padding, seed)
    if num_eos:
        options["eos_token_id"] = random.Random(seed).sample(range(3, VOCAB), num_eos)
    else:
        options["eos_token_id"] = None
        options.pop("exponential_decay_length_penalty", None)
        options.pop("min_new_tokens", None)
    if padding == "right" or family in ("bloom", "mistral", "gemma3_text", "llama4_text"):
        options.pop("prefill_chunk_size", None)
    expected = sequences_of(model.generate(**inputs, **options))
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2], compaction_threshold=0.1))
    try:
        continuation = expected[:, length:].tolist()
        padded = [row + [3] * 20 for row in continuation]
        use_drafter(model, kind, padded, width)
        assert torch.equal(sequences_of(model.generate(**inputs, **options)), expected)
    finally:
        TIDEModelForCausalLM.detach(model)


def random_generation(model, position: int) -> None:
    chance = random.Random(position)
    rows = chance.choice([1, 1, 2])
    model.generate(
        **inputs_of(rows, chance.randint(2, 9), chance.choice(["none", "left"]), position),
        max_new_tokens=chance.randint(1, 8),
        do_sample=chance.random() < 0.5,
        tide_mode=chance.choice(["self_speculative", "early_exit", "post_hoc"]),
        exit_threshold=chance.choice([0.0, 0.5, 1.5]),
        return_dict_in_generate=chance.random() < 0.5,
    )


@pytest.mark.parametrize("count", [120, pytest.param(2000, marks=pytest.mark.slow)])
def test_many_generations_leave_nothing_behind(count):
    model = tiny_model("llama")
    before = sorted(model.__dict__)
    routers = TIDERouters.for_model(model, exit_layers=[1, 3])
    TIDEModelForCausalLM.attach(model, routers)
    for position in range(count // 4):
        random_generation(model, position)
    gc.collect()
    tensors = sum(type(item) is torch.Tensor for item in gc.get_objects())
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for position in range(count // 4, count):
        random_generation(model, position)
    gc.collect()
    assert sum(type(item) is torch.Tensor for item in gc.get_objects()) <= tensors
    if count > 1000:  # kibibytes; a cache left behind per call would be more
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - resident < 20_000
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    TIDEModelForCausalLM.detach(model)
    assert sorted(model.__dict__) == before
