"""Which calls run on captured steps, and which eagerly: it is said why."""

import copy
import logging

import pytest
import torch
from drafters import use_drafter
from families import VOCAB, tiny_model
from on_steps import OPTIONS, linear_heads, prompts
from on_steps import attach_captured as attach
from recorded import COPIES, Recorder
from transformers import LlamaConfig, LlamaForCausalLM

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.engines.capturable import CallFacts, why_not_captured


def test_what_needs_the_host_is_refused_and_says_so_once(caplog):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(vocab_size=VOCAB, rope_parameters=rope, max_position_embeddings=512, **sizes)
    model = LlamaForCausalLM(config).eval()
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for _ in range(2):
            assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert "aten._local_scalar_dense" in steps.refused
    said = [record.message for record in caplog.records if record.name.startswith("tide_hf")]
    assert said == [
        f"LlamaForCausalLM runs without CUDA graphs: {steps.refused}",
        f"engine='compiled' runs eagerly: {steps.refused}",
    ]


def test_copies_from_the_host_are_refused_and_the_tokens_are_right():
    model = tiny_model("falcon")
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model, make_replay=Recorder())
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.refused == COPIES


FACTS = {
    "rows": 1,
    "devices": frozenset({"cuda:0"}),
    "attention": "sdpa",
    "cache": "DynamicCache",
    "layer_kinds": frozenset({"DynamicLayer"}),
    "arguments": frozenset({"attention_mask", CACHE}),
    "has_windows": False,
    "is_sharded": False,
    "has_adapters": False,
    "training": False,
    "autocast": False,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"layer_kinds": frozenset({"DynamicLayer", "DynamicSlidingWindowLayer"}), "has_windows": True}, None),
        ({"rows": 2, "has_windows": True}, "a batch leaves holes"),
        ({"devices": frozenset({"cuda:0", "cuda:1"})}, "spread over cuda:0, cuda:1"),
        ({"attention": "flash_attention_2"}, "'flash_attention_2' attention does not support"),
        ({"cache": "StaticCache"}, "the cache is a StaticCache"),
        ({"layer_kinds": frozenset({"LinearAttentionLayer"})}, "layers of LinearAttentionLayer"),
        ({"arguments": frozenset({"token_type_ids"})}, "is passed token_type_ids"),
        ({"is_sharded": True}, "processes share the model"),
        ({"has_adapters": True}, "adapters"),
        ({"training": True}, "training mode"),
        ({"autocast": True}, "autocast is enabled"),
        ({"refused": "it needs the host"}, "it needs the host"),
    ],
)
def test_why_a_call_runs_eagerly(change, reason):
    found = why_not_captured(CallFacts(**{**FACTS, **change}))
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_calls_that_cannot_be_captured_run_eagerly(tiny_llama, caplog):
    model = tiny_model("mistral")
    expected = model.generate(**prompts(2), **OPTIONS)
    steps = attach(model)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for _ in range(2):
            assert torch.equal(model.generate(**prompts(2), **OPTIONS), expected)
    assert [record.message for record in caplog.records if "compiled" in record.message] == [
        "engine='compiled' runs eagerly: a batch leaves holes in the cache, which sliding windows would count"
    ]
    plain = TIDEModelForCausalLM.detach(copy.deepcopy(model)).generate(**prompts(), **OPTIONS)
    with steps.lock:  # as another thread's call would hold it
        assert torch.equal(model.generate(**prompts(), **OPTIONS), plain)
    assert steps.replays == 0


def test_steps_are_kept_from_what_autocast_casts(tiny_llama):
    """Neither are they made of its copies, nor do they run where a call wants them."""
    model = tiny_llama()
    options = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}

    def logits(cast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            return torch.stack(model.generate(**prompts(), **options).logits)

    plain = [logits(cast=True), logits(cast=False)]
    steps = attach(model)
    use_drafter(model, "wrong", [[0] * 99], width=0)  # passes of one token, as plain decoding has them
    for cast in (True, False, True):
        before = steps.replays
        torch.testing.assert_close(logits(cast), plain[not cast], atol=1e-5, rtol=1e-5)
        assert (steps.replays > before) == (not cast)


def test_modes_that_decide_layer_by_layer_run_eagerly(tiny_llama, caplog):
    model = tiny_llama()
    steps = attach(model, linear_heads(model), mode="early_exit", exit_threshold=0.0)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        tokens = [model.generate(**prompts(), **OPTIONS) for _ in range(2)]
    assert caplog.text.count("tide_mode='early_exit' decides layer by layer") == 1
    assert torch.equal(tokens[0], model.generate(**prompts(), **OPTIONS, tide_engine="eager"))
    assert steps.replays == 0


def test_buffers_that_would_fill_the_memory_are_not_made(tiny_llama, monkeypatch, caplog):
    model = tiny_llama()
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model, linear_heads(model))
    monkeypatch.setattr("tide_hf.engines.static.MEMORY_SHARE", 0.0)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert "the call runs eagerly: K/V buffers of 21 slots would take" in caplog.text
    assert steps.replays == 0
