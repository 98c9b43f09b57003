"""Every option of transformers' GenerationConfig: what TIDE does with it, and that the tokens are the base model's."""

import logging

import pytest
import torch
from drafters import use_drafter
from families import prompt, tiny_model
from transformers import GenerationConfig, LlamaForCausalLM, SynthIDTextWatermarkingConfig

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import UnsupportedModelError, UnsupportedOptionError

NEW = 10
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
SAMPLING = {"do_sample": True, "top_k": 50}
RETURNED = {"return_dict_in_generate": True}
BEAMS = {"num_beams": 2}
ROWS = {"rows": 2}  # of the prompt; no option
WATERMARK = SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)
ASSISTED = {"prompt_lookup_num_tokens": 2}

# What TIDE does with a call that has the option: it drafts; transformers' own loop decodes, for a stated reason; or the
# call runs one of transformers' other loops, of which TIDE knows nothing.
DRAFTS, PLAIN, OTHER_LOOP = "drafts", "plain", "other loop"
# It drafts, and draws random numbers in another order than plain decoding, so that samples differ, and their
# distribution does not (see test_sampling).
DRAWS_OTHERWISE = "draws otherwise"
# What transformers itself refuses, or reads only in models with an encoder, in assistants, or nowhere any more.
REFUSED, NO_EFFECT = "refused", "no effect"

FATES = [
    # Length and end
    ("max_length", {"max_length": 15, "max_new_tokens": None}, DRAFTS),
    ("max_new_tokens", {"max_new_tokens": 4}, DRAFTS),
    ("min_length", {"min_length": 14, "eos_token_id": 7}, DRAFTS),
    ("min_new_tokens", {"min_new_tokens": 6, "eos_token_id": 7}, DRAFTS),
    ("early_stopping", {**BEAMS, "early_stopping": True}, OTHER_LOOP),
    ("max_time", {"max_time": 1000.0}, DRAFTS),
    ("stop_strings", {"stop_strings": ["Q"]}, DRAFTS),
    # Strategy
    ("do_sample", SAMPLING, DRAFTS),
    ("num_beams", BEAMS, OTHER_LOOP),
    ("use_mtp", {"use_mtp": True}, REFUSED),
    # Cache
    ("use_cache", {"use_cache": False}, PLAIN),
    ("cache_implementation", {"cache_implementation": "static"}, DRAFTS),
    ("cache_implementation", {"cache_implementation": "static", **ROWS}, PLAIN),
    ("cache_config", {"cache_implementation": "static", "cache_config": {"max_cache_len": 40}}, DRAFTS),
    ("max_cache_len", {"cache_implementation": "static", "max_cache_len": 40}, DRAFTS),
    # Scores
    ("temperature", {**SAMPLING, "temperature": 0.7}, DRAFTS),
    ("top_k", {**SAMPLING, "top_k": 5}, DRAFTS),
    ("top_p", {**SAMPLING, "top_p": 0.8}, DRAFTS),
    ("min_p", {**SAMPLING, "min_p": 0.1}, DRAFTS),
    ("top_h", {**SAMPLING, "top_h": 0.5}, DRAFTS),
    ("typical_p", {**SAMPLING, "typical_p": 0.8}, DRAFTS),
    ("epsilon_cutoff", {**SAMPLING, "epsilon_cutoff": 1e-3}, DRAFTS),
    ("eta_cutoff", {**SAMPLING, "eta_cutoff": 1e-3}, DRAFTS),
    ("repetition_penalty", {"repetition_penalty": 1.5}, DRAFTS),
    ("encoder_repetition_penalty", {"encoder_repetition_penalty": 1.5}, DRAFTS),
    ("length_penalty", {**BEAMS, "length_penalty": 0.5}, OTHER_LOOP),
    ("no_repeat_ngram_size", {"no_repeat_ngram_size": 2}, DRAFTS),
    ("bad_words_ids", {"bad_words_ids": [[5], [6, 7]]}, DRAFTS),
    ("renormalize_logits", {**SAMPLING, "renormalize_logits": True}, DRAFTS),
    ("forced_bos_token_id", {"forced_bos_token_id": 3}, DRAFTS),
    ("forced_eos_token_id", {"forced_eos_token_id": 3}, DRAFTS),
    ("remove_invalid_values", {"remove_invalid_values": True}, DRAFTS),
    ("exponential_decay_length_penalty", {"exponential_decay_length_penalty": (3, 1.5), "eos_token_id": 7}, DRAFTS),
    ("suppress_tokens", {"suppress_tokens": [5, 6, 7]}, DRAFTS),
    ("begin_suppress_tokens", {"begin_suppress_tokens": [5, 6, 7]}, DRAFTS),
    ("sequence_bias", {"sequence_bias": [[[5], 10.0]]}, DRAFTS),
    ("token_healing", {"token_healing": True}, REFUSED),  # this tokenizer is no BPE with merges
    ("guidance_scale", {"guidance_scale": 1.5}, DRAFTS),
    ("watermarking_config", {**SAMPLING, "watermarking_config": WATERMARK}, DRAFTS),
    # Output
    ("num_return_sequences", {**SAMPLING, "num_return_sequences": 2}, DRAWS_OTHERWISE),
    ("output_attentions", {**RETURNED, "output_attentions": True}, PLAIN),
    ("output_hidden_states", {**RETURNED, "output_hidden_states": True}, PLAIN),
    ("output_scores", {**RETURNED, "output_scores": True}, DRAFTS),
    ("output_logits", {**RETURNED, "output_logits": True}, DRAFTS),
    ("return_dict_in_generate", RETURNED, DRAFTS),
    # Special tokens
    ("pad_token_id", {"pad_token_id": 1, "eos_token_id": 7, **ROWS}, DRAFTS),
    ("bos_token_id", {"bos_token_id": 4}, DRAFTS),
    ("eos_token_id", {"eos_token_id": [7, 8, 9]}, DRAFTS),
    ("encoder_no_repeat_ngram_size", {"encoder_no_repeat_ngram_size": 2}, DRAFTS),
    ("decoder_start_token_id", {"decoder_start_token_id": 3}, NO_EFFECT),
    # Assistants
    ("is_assistant", {"is_assistant": True}, REFUSED),  # but by the loop of assisted decoding, which hands in a cache
    ("num_assistant_tokens", {**ASSISTED, "num_assistant_tokens": 3}, OTHER_LOOP),
    ("num_assistant_tokens_schedule", {**ASSISTED, "num_assistant_tokens_schedule": "constant"}, OTHER_LOOP),
    ("assistant_confidence_threshold", {**ASSISTED, "assistant_confidence_threshold": 0.5}, OTHER_LOOP),
    ("prompt_lookup_num_tokens", ASSISTED, OTHER_LOOP),
    ("max_matching_ngram_size", {**ASSISTED, "max_matching_ngram_size": 3}, OTHER_LOOP),
    ("assistant_early_exit", {"assistant_early_exit": 2}, OTHER_LOOP),
    ("assistant_lookbehind", {**ASSISTED, "assistant_lookbehind": 5}, OTHER_LOOP),
    ("target_lookbehind", {**ASSISTED, "target_lookbehind": 5}, OTHER_LOOP),
    ("assistant_ensemble_weight", {**ASSISTED, "assistant_ensemble_weight": 0.5}, REFUSED),  # but with an assistant
    ("speculation_type", {"speculation_type": "dflash"}, NO_EFFECT),
    # Performance
    ("compile_config", {"compile_config": None}, DRAFTS),
    ("disable_compile", {"disable_compile": True}, DRAFTS),
    ("prefill_chunk_size", {"prefill_chunk_size": 4}, DRAFTS),
    ("low_memory", {"low_memory": True}, NO_EFFECT),
]
ELSEWHERE = {
    "continuous_batching_config": "deprecated: for generate_batch, which TIDE has no part in",
    "transformers_version": "no option",
    **dict.fromkeys(
        ("constraints", "force_words_ids", "penalty_alpha", "dola_layers", "diversity_penalty", "num_beam_groups"),
        "moved to a Hub repository of its own",
    ),
}


def test_every_option_of_generation_config_is_listed():
    known = {name for name, _, _ in FATES} | set(ELSEWHERE)
    assert {name for name in vars(GenerationConfig()) if not name.startswith("_")} <= known


def sequences(result):
    return result if isinstance(result, torch.Tensor) else result.sequences


def generated(model, tokens, options):
    """What `generate` returns, or the error that it raises."""
    torch.manual_seed(7)
    try:
        return model.generate(tokens, **options)
    except (ValueError, TypeError, AttributeError, ImportError, NotImplementedError, OSError) as error:
        return error


@pytest.mark.parametrize(("name", "options", "fate"), FATES, ids=lambda value: value if isinstance(value, str) else "")
def test_an_option_is_honoured_and_decodes_as_listed(name, options, fate, tiny_tokenizer):
    if name not in vars(GenerationConfig()):
        pytest.skip("this transformers does not have it")
    options = dict(options)
    tokens = prompt(options.pop("rows", 1))
    options = {**GREEDY, **options}
    if name in ("stop_strings", "token_healing"):
        options["tokenizer"] = tiny_tokenizer
    plain = generated(tiny_model("llama"), tokens, options)
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    if fate == REFUSED:
        assert isinstance(plain, Exception)
        found = generated(model, tokens, options)
        assert (type(found), str(found)) == (type(plain), str(plain))
        return
    expected = sequences(plain)
    script = expected[:, tokens.shape[1] :].tolist()
    use_drafter(model, "wrong at the last position", [row + [5] * NEW for row in script])
    found = generated(model, tokens, options)
    assert sequences(found).shape == expected.shape
    if fate != DRAWS_OTHERWISE:
        assert torch.equal(sequences(found), expected)
    assert type(found) is type(plain)
    for returned in ("scores", "logits"):
        if options.get(f"output_{returned}"):
            torch.testing.assert_close(found[returned], plain[returned], atol=1e-4, rtol=1e-4)
    stats = model.last_exit_stats
    if fate == OTHER_LOOP:
        assert stats is None
    elif fate == PLAIN:
        assert stats.fallback_reason is not None
        with pytest.raises(UnsupportedOptionError, match=r"^tide_mode='self_speculative'.*: got .*\. Expected "):
            model.generate(tokens, tide_strict=True, **options)
        assert model.last_exit_stats is None
    else:
        assert stats.fallback_reason is None
        assert stats.drafted > 0


def test_a_fallback_is_warned_of_once_and_stands_in_the_statistics(caplog):
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    caplog.set_level(logging.INFO, logger="tide_hf")
    eos = int(model.generate(prompt(), **GREEDY)[0, 12])
    for tokens in (prompt(2), prompt(3)):
        model.generate(tokens, **{**GREEDY, "eos_token_id": eos}, cache_implementation="static")
    levels = [record.levelname for record in caplog.records if "plain decoding" in record.message]
    assert levels == ["WARNING", "INFO"]
    stats = model.last_exit_stats
    assert stats.fallback_reason.endswith("in a batch cannot use this cache: got StaticCache")
    new = max(map(len, stats.per_token))
    assert len(stats.per_token[0]) == 4  # the end token among them, and no padding behind it
    assert {depth for row in stats.per_token for depth in row} == {4}
    assert stats.layers_executed == 4 * 3 * new
    assert "decoded plainly, without TIDE: " in stats.summary()
    assert stats.summary().endswith("engine 'eager', float32")


def test_failed_calls_and_other_decoding_loops_leave_no_statistics():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    model.generate(prompt(), **GREEDY)
    assert model.last_exit_stats is not None
    model.generate(prompt(), **GREEDY, **BEAMS)
    assert model.last_exit_stats is None
    model.generate(prompt(), **GREEDY)
    with pytest.raises(ValueError, match="strictly positive"):
        model.generate(prompt(), **{**GREEDY, "do_sample": True}, temperature=-1.0)
    assert model.last_exit_stats is None


class OwnLoop(LlamaForCausalLM):
    """A model with a decoding loop of its own."""

    def _sample(self, input_ids, *args, **kwargs):
        return torch.cat([super()._sample(input_ids, *args, **kwargs), input_ids[:, :1]], dim=-1)


class OwnState(LlamaForCausalLM):
    """A model that keeps state between the tokens."""

    def _update_model_kwargs_for_generation(self, outputs, model_kwargs, *args, **kwargs):
        self.updates = getattr(self, "updates", 0) + 1
        return super()._update_model_kwargs_for_generation(outputs, model_kwargs, *args, **kwargs)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: OwnLoop(tiny_model("llama").config).eval(), "got OwnLoop with its own _sample"),
        (lambda: OwnState(tiny_model("llama").config).eval(), "its own _update_model_kwargs_for_generation"),
        (lambda: tiny_model("mamba"), "recurrent state"),
    ],
    ids=["own loop", "own state", "recurrent"],
)
def test_models_that_cannot_draft_decode_plainly(make, reason, caplog):
    plain = make()
    expected = plain.generate(prompt(), **GREEDY)
    model, updates = TIDEModelForCausalLM.attach(plain), getattr(plain, "updates", 0)
    for _ in range(2):
        assert torch.equal(model.generate(prompt(), **GREEDY), expected)
    assert reason in model.last_exit_stats.fallback_reason
    assert [record.levelname for record in caplog.records if "plain decoding" in record.message] == ["WARNING"]
    assert getattr(model, "updates", 0) == 3 * updates
    with pytest.raises(UnsupportedModelError, match=reason):
        model.generate(prompt(), tide_strict=True, **GREEDY)
