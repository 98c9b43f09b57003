"""Which calls of `engine="compiled"` run on steps; others run eagerly, and the log says why."""

import logging

import pytest
import torch
from drafters import use_drafter
from families import VOCAB, tiny_model
from on_steps import OPTIONS, attach_captured, linear_heads, prompts
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

from tide_hf.base_model.structure import CACHE
from tide_hf.engines.kinds import why_eager


def test_a_forward_that_needs_the_host_is_refused_and_logged_once(caplog):
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    config = LlamaConfig(vocab_size=VOCAB, rope_parameters=rope, max_position_embeddings=512, **sizes)
    model = LlamaForCausalLM(config).eval()
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach_captured(model)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        for _ in range(2):
            assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert "aten._local_scalar_dense" in steps.refused
    assert [record.message for record in caplog.records if record.name.startswith("tide_hf")] == [
        f"LlamaForCausalLM runs without CUDA graphs: {steps.refused}",
        f"engine='compiled' runs eagerly: {steps.refused}",
    ]


@pytest.mark.parametrize(
    ("attributes", "call", "reason"),
    [
        ({}, {}, None),
        ({"attention": "flash_attention_2"}, {}, "'flash_attention_2' attention does not support"),
        ({}, {"cache": StaticCache(LlamaConfig(), 8)}, "the cache is a StaticCache"),
        ({}, {"cache": DynamicCache(offloading=True)}, "the cache is offloaded"),
        ({}, {"token_type_ids": torch.ones(1, 4)}, "is passed token_type_ids"),
        ({"hf_device_map": {"": "cpu"}}, {}, None),
        ({"hf_device_map": {"model": "disk", "lm_head": 0}}, {}, "spread over cpu, disk"),
        ({"peft_config": {}}, {}, "adapters"),
        ({"training": True}, {}, "training mode"),
    ],
)
def test_why_a_call_runs_eagerly(tiny_llama, attributes, call, reason):
    model = tiny_llama()
    for name, value in attributes.items():
        if name == "attention":
            model.config._attn_implementation = {"": value}
        else:
            setattr(model, name, value)
    call = {"attention_mask": torch.ones(1, 4), **call}
    found = why_eager(model, {CACHE: call.pop("cache", DynamicCache()), **call})
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_a_call_runs_eagerly_while_another_holds_the_steps():
    model = tiny_model("mistral")
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach_captured(model)
    with steps.lock:  # as another thread's call would hold it
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.replays == 0


def test_calls_under_autocast_neither_prepare_nor_run_steps(tiny_llama):
    model = tiny_llama()
    options = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}

    def logits(cast):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            return torch.stack(model.generate(**prompts(), **options).logits)

    plain = [logits(cast=True), logits(cast=False)]
    steps = attach_captured(model)
    use_drafter(model, "wrong", [[0] * 99], width=0)  # passes of one token, as in plain decoding
    for cast in (True, False, True):
        before = steps.replays
        torch.testing.assert_close(logits(cast), plain[not cast], atol=1e-5, rtol=1e-5)
        assert (steps.replays > before) == (not cast)


def test_a_mode_that_runs_all_layers_runs_eagerly(tiny_llama, caplog):
    model = tiny_llama()
    steps = attach_captured(model, linear_heads(model), mode="post_hoc", exit_threshold=0.0)
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        tokens = model.generate(**prompts(), **OPTIONS)
    assert "engine='compiled' runs eagerly: post_hoc runs all layers" in caplog.text
    assert torch.equal(tokens, model.generate(**prompts(), **OPTIONS, tide_engine="eager"))
    assert steps.replays == 0
    assert model.last_exit_stats.engine == "eager"
