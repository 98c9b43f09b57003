"""`generate` of an attached model: its options in every mode, pipelines, streamers, and what it refuses."""

import copy

import pytest
import torch
from families import prompt, tiny_model
from interruptions import Stops
from skipping_calls import OPTIONS, attached
from transformers import pipeline

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.common.choices import MODES
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_inside_generate_leaves_the_model_at_full_depth(mode):
    def bomb(ids):
        if ids.shape[1] == 12:
            raise KeyError("boom")
        return False

    model = attached(exit_threshold=0.0)
    tokens = prompt()
    expected = model(input_ids=tokens).logits
    with pytest.raises(KeyError, match="boom"):
        model.generate(tokens, tide_mode=mode, stopping_criteria=[Stops(bomb)], **OPTIONS)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    plain = tiny_model("llama").generate(tokens, **OPTIONS)
    assert torch.equal(model.generate(tokens, tide_mode="self_speculative", **OPTIONS), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_batches_in_half_precision_run_in_every_mode(dtype):
    model = tiny_model("llama").to(dtype)
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_strategy="linear", exit_threshold=0.0)
    TIDEModelForCausalLM.attach(model, routers)
    for mode in MODES:
        assert model.generate(prompt(3), tide_mode=mode, **OPTIONS).shape == (3, 19)


def test_options_come_from_the_call_the_generation_config_or_the_attachment():
    model = attached(mode="early_exit", exit_threshold=0.0)
    model.generate(prompt(), **OPTIONS)
    assert model.last_exit_stats.mode == "early_exit"
    config = copy.deepcopy(model.generation_config)
    config.update(**OPTIONS)
    config.tide_mode, config.exit_threshold = "post_hoc", 1.5
    model.generate(prompt(), generation_config=config)
    assert model.last_exit_stats.mode == "post_hoc"
    assert model.last_exit_stats.exit_rate == 0.0
    model.generate(prompt(), tide_mode="post_hoc", exit_threshold=0.0, **OPTIONS)
    assert model.last_exit_stats.exit_rate == 0.9


def test_modes_that_exit_need_routers():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    for mode in ("early_exit", "post_hoc"):
        with pytest.raises(UnsupportedOptionError, match=r"needs routers: got routers=None\. Expected"):
            model.generate(prompt(), tide_mode=mode, **OPTIONS)


def test_beam_search_and_assisted_decoding_stay_at_full_depth():
    plain, model = tiny_model("llama"), attached(mode="early_exit", exit_threshold=0.0)
    expected = plain.generate(prompt(), **OPTIONS)
    assert torch.equal(plain.generate(prompt(), assistant_model=model, **OPTIONS), expected)
    assert torch.equal(model.generate(prompt(), prompt_lookup_num_tokens=2, **OPTIONS), expected)
    beams = {**OPTIONS, "num_beams": 3, "num_return_sequences": 3}
    assert torch.equal(model.generate(prompt(2), **beams), plain.generate(prompt(2), **beams))


@pytest.mark.parametrize("threshold", ["high", float("nan"), float("inf"), -0.1, True, [0.5]])
def test_a_threshold_has_to_be_a_number(threshold):
    model = attached()
    message = "invalid exit_threshold: got .* Expected a number from 0"
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.attach(model, model._tide.routers, exit_threshold=threshold)
    for mode in (None, *MODES):
        with pytest.raises(ConfigurationError, match=message):
            model.generate(prompt(), tide_mode=mode, exit_threshold=threshold, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        TIDEModelForCausalLM.from_pretrained("nowhere", exit_threshold=threshold)


@pytest.mark.parametrize(
    ("name", "choices"), [("mode", "'self_speculative', 'early_exit', 'post_hoc'"), ("engine", "'eager', 'compiled'")]
)
def test_an_unknown_mode_or_engine_is_refused_by_the_name_that_the_user_wrote(name, choices):
    model = tiny_model("llama")
    message = rf"unknown {{0}}: got 'fast'\. Expected one of {choices}\. Choose another {{0}}\."
    with pytest.raises(ConfigurationError, match=message.format(name)):
        TIDEModelForCausalLM.attach(model, **{name: "fast"})
    with pytest.raises(ConfigurationError, match=message.format(name)):
        TIDEModelForCausalLM.from_pretrained("nowhere", **{name: "fast"})
    with pytest.raises(ConfigurationError, match=message.format(f"tide_{name}")):
        TIDEModelForCausalLM.attach(model).generate(prompt(), **{f"tide_{name}": "fast"}, **OPTIONS)


@pytest.mark.parametrize("mode", MODES)
def test_a_pipeline_gives_what_generate_gives(mode, tiny_llama, tiny_tokenizer, caplog):
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1]), exit_threshold=0.5)
    tokens = model.generate(**tiny_tokenizer("tide", return_tensors="pt"), tide_mode=mode, **OPTIONS)[0]
    generator = pipeline("text-generation", model=model, tokenizer=tiny_tokenizer)
    text = generator("tide", tide_mode=mode, **OPTIONS)[0]["generated_text"]
    assert text == tiny_tokenizer.decode(tokens, skip_special_tokens=True)
    assert "not supported" not in caplog.text


class Recorder(list):
    """A streamer that is its tokens, as they come, and then an "end"."""

    def put(self, value):
        self.append(value.flatten().tolist())

    def end(self):
        self.append("end")


@pytest.mark.parametrize("mode", MODES)
def test_a_streamer_gets_the_prompt_and_one_token_at_a_time(mode):
    model, streamer = attached(exit_threshold=0.5), Recorder()
    (tokens,) = model.generate(prompt(), tide_mode=mode, streamer=streamer, **OPTIONS).tolist()
    assert streamer == [tokens[:9], *([token] for token in tokens[9:]), "end"]


def test_a_streamer_for_batches_gets_the_steps_of_plain_decoding():
    model, plain, ours = tiny_model("llama"), Recorder(), Recorder()
    model.generate(prompt(2), streamer=plain, **OPTIONS)
    TIDEModelForCausalLM.attach(model).generate(prompt(2), streamer=ours, **OPTIONS)
    assert ours == plain
    assert "streamer with a batch of 2" in model.last_exit_stats.fallback_reason
