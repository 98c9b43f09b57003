"""Attach and detach: the same object, its own class, and nothing left behind."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from families import ATTENTION, FAMILIES, RECURRENT, VOCAB, tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    PreTrainedTokenizerFast,
    TextIteratorStreamer,
    TextStreamer,
    pipeline,
)

from tide_hf import TIDEModelForCausalLM, TIDERouters, UnsupportedModelError
from tide_hf.errors import BaseModelMismatchError, ConfigurationError, UnsupportedOptionError
from tide_hf.structure import find_structure

MODES = ("self_speculative", "early_exit", "post_hoc")
OPTIONS = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None}


def prompt(rows: int = 1) -> torch.Tensor:
    return torch.randint(3, VOCAB, (rows, 9), generator=torch.Generator().manual_seed(3))


def attached(family: str = "llama", **options):
    model = tiny_model(family)
    return TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 3]), **options)


def traces(model) -> dict:
    """All that attaching could leave on a model."""
    return {
        "class": type(model),
        "attributes": sorted(model.__dict__),
        "generation config": model.generation_config.to_dict(),
        "hooks": [
            (name, len(module._forward_hooks), len(module._forward_pre_hooks)) for name, module in model.named_modules()
        ],
        "forwards": [name for name, module in model.named_modules() if "forward" in module.__dict__],
        "weights": sorted(model.state_dict()),
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_detach_leaves_an_untouched_model(family):
    model = tiny_model(family)
    expected, before = model.generate(prompt(), **OPTIONS), traces(model)
    mode = "post_hoc" if family in RECURRENT else "early_exit"
    routers = TIDERouters.for_model(model, exit_layers=[2], exit_threshold=0.0)
    base_class, base_name = type(model), str(type(model))
    assert TIDEModelForCausalLM.attach(model, routers, mode=mode) is model
    assert isinstance(model, TIDEModelForCausalLM)
    assert isinstance(model, base_class)
    assert str(type(model)) == base_name  # transformers keys its registry of outputs on it
    model.generate(prompt(), **OPTIONS)
    assert TIDEModelForCausalLM.detach(model) is model
    assert not isinstance(model, TIDEModelForCausalLM)
    assert traces(model) == before
    assert torch.equal(model.generate(prompt(), **OPTIONS), expected)
    assert TIDEModelForCausalLM.detach(model) is model  # a second time does nothing


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_inside_generate_leaves_the_model_at_full_depth(mode):
    class Bomb(LogitsProcessor):
        calls = 0

        def __call__(self, input_ids, scores):
            Bomb.calls += 1
            if Bomb.calls == 3:
                raise KeyError("boom")
            return scores

    model = attached(exit_threshold=0.0)
    tokens = prompt()
    expected = model(input_ids=tokens).logits
    with pytest.raises(KeyError, match="boom"):
        model.generate(tokens, tide_mode=mode, logits_processor=[Bomb()], **OPTIONS)
    torch.testing.assert_close(model(input_ids=tokens).logits, expected)
    plain = tiny_model("llama").generate(tokens, **OPTIONS)
    assert torch.equal(model.generate(tokens, tide_mode="self_speculative", **OPTIONS), plain)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_are_attached_and_independent(clone):
    model = attached("gpt2", exit_threshold=0.0)  # some other families cannot be pickled without TIDE either
    twin = clone(model)
    assert isinstance(twin, TIDEModelForCausalLM)
    own = {id(module) for module in twin.modules()}
    assert all(id(layer.forward.module) in own for layer in twin._tide.structure.layers)
    for mode in MODES:
        expected = model.generate(prompt(), tide_mode=mode, **OPTIONS)
        assert torch.equal(twin.generate(prompt(), tide_mode=mode, **OPTIONS), expected)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    TIDEModelForCausalLM.detach(model)
    assert twin.generate(prompt(), tide_mode="early_exit", **OPTIONS).unique().numel() > 9
    assert twin.last_exit_stats.exits_per_layer == {1: 9}
    TIDEModelForCausalLM.detach(twin)
    assert not hasattr(twin, "_tide")


def test_save_pretrained_writes_the_base_model_alone(tmp_path):
    model = attached()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(tiny_model("llama"))
    assert loaded.config.architectures == ["LlamaForCausalLM"]
    assert not any("tide" in name or "router" in name for name in loaded.state_dict())
    assert "tide_mode" not in (tmp_path / "generation_config.json").read_text()


def test_routers_follow_the_model():
    model = attached(exit_threshold=0.0)
    model.to(torch.float64)
    assert {parameter.dtype for parameter in model._tide.routers.parameters()} == {torch.float64}
    for mode in MODES:
        model.generate(prompt(), tide_mode=mode, **OPTIONS)
    model.to("meta")
    assert model._tide.routers.device.type == "meta"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_every_mode(dtype):
    model = tiny_model("llama").to(dtype)
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_strategy="linear", exit_threshold=0.0)
    TIDEModelForCausalLM.attach(model, routers)
    for mode in MODES:
        assert model.generate(prompt(), tide_mode=mode, **OPTIONS).shape == (1, 19)


def test_from_pretrained_loads_both_parts(tmp_path):
    base = tiny_model("llama")
    base.save_pretrained(tmp_path / "base")
    base.config._name_or_path = str(tmp_path / "base")
    TIDERouters.for_model(base, exit_layers=[2]).save_pretrained(tmp_path / "routers")
    model = TIDEModelForCausalLM.from_pretrained(
        tmp_path / "base", routers=tmp_path / "routers", mode="early_exit", exit_threshold=0.0, dtype="float32"
    )
    model.generate(prompt(), **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {2: 9}


def test_without_routers_n_grams_draft():
    model = TIDEModelForCausalLM.attach(tiny_model("llama"))
    tokens = torch.tensor([[5, 6, 7, 8] * 6])
    expected = tiny_model("llama").generate(tokens, **OPTIONS)
    assert torch.equal(model.generate(tokens, **OPTIONS), expected)
    for mode in ("early_exit", "post_hoc"):
        with pytest.raises(UnsupportedOptionError, match=r"needs routers: got routers=None\. Expected"):
            model.generate(tokens, tide_mode=mode, **OPTIONS)


def test_attaching_again_replaces_the_settings():
    model = attached(mode="early_exit", exit_threshold=0.0)
    routers = TIDERouters.for_model(model, exit_layers=[2])
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit", exit_threshold=0.0)
    model.generate(prompt(), **OPTIONS)
    assert model.last_exit_stats.exits_per_layer == {2: 9}
    TIDEModelForCausalLM.detach(model)
    assert type(model) is type(tiny_model("llama"))


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


@pytest.mark.parametrize("mode", MODES)
def test_sampling_runs_in_every_mode(mode):
    model = attached(exit_threshold=0.4)
    torch.manual_seed(0)
    first = model.generate(prompt(), tide_mode=mode, max_new_tokens=12, do_sample=True)
    torch.manual_seed(0)
    assert torch.equal(model.generate(prompt(), tide_mode=mode, max_new_tokens=12, do_sample=True), first)


@pytest.mark.parametrize("num_beams", [1, 3])
def test_beam_search_stays_at_full_depth(num_beams):
    options = {**OPTIONS, "num_beams": 3, "num_return_sequences": num_beams}
    expected = tiny_model("llama").generate(prompt(2), **options)
    model = attached(mode="early_exit", exit_threshold=0.0)
    assert torch.equal(model.generate(prompt(2), **options), expected)


def test_as_an_assistant_and_with_an_assistant_the_output_is_plain():
    model = attached(mode="early_exit", exit_threshold=0.0)
    expected = tiny_model("llama").generate(prompt(), **OPTIONS)
    assert torch.equal(tiny_model("llama").generate(prompt(), assistant_model=model, **OPTIONS), expected)
    assert torch.equal(model.generate(prompt(), prompt_lookup_num_tokens=2, **OPTIONS), expected)


@pytest.mark.parametrize(
    ("options", "got"),
    [
        ({"use_cache": False}, "no cache"),
        ({"output_hidden_states": True, "return_dict_in_generate": True}, "output_hidden_states=True"),
        ({"output_attentions": True, "return_dict_in_generate": True}, "output_attentions=True"),
    ],
)
def test_what_is_not_there_yet_is_said(options, got):
    model = attached()
    with pytest.raises(UnsupportedOptionError, match=rf"(?s)self_speculative.*got {got}.*Expected"):
        model.generate(prompt(), **OPTIONS, **options)


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_runs_in_every_mode(mode):
    assert attached(exit_threshold=0.0).generate(prompt(3), tide_mode=mode, **OPTIONS).shape == (3, 19)


@pytest.mark.parametrize("threshold", ["high", float("nan"), float("inf"), -0.1, True, [0.5]])
def test_a_threshold_that_is_no_number(threshold):
    model = attached()
    message = "exit_threshold is no usable number: got .* Expected a number from 0"
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.attach(model, model._tide.routers, exit_threshold=threshold)
    with pytest.raises(ConfigurationError, match=message):
        model.generate(prompt(), tide_mode="early_exit", exit_threshold=threshold, **OPTIONS)
    with pytest.raises(ValueError, match=message):
        TIDEModelForCausalLM.from_pretrained("nowhere", exit_threshold=threshold)


def test_an_unknown_mode():
    model = tiny_model("llama")
    message = "unknown tide_mode: got 'fast'. Expected one of 'self_speculative', 'early_exit', 'post_hoc'"
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.attach(model, mode="fast")
    with pytest.raises(ConfigurationError, match=message):
        TIDEModelForCausalLM.attach(model).generate(prompt(), tide_mode="fast", **OPTIONS)


def test_routers_of_another_base_model():
    routers = TIDERouters.for_model(tiny_model("llama", seed=1), exit_layers=[2])
    model = tiny_model("llama", seed=2)
    with pytest.raises(BaseModelMismatchError, match=r"another base model.*fingerprint.*ignore_base_mismatch=True"):
        TIDEModelForCausalLM.attach(model, routers)
    assert "forward" not in model.model.layers[0].__dict__
    TIDEModelForCausalLM.attach(model, routers, ignore_base_mismatch=True)
    other_shape = tiny_model("llama", num_hidden_layers=6)
    with pytest.raises(BaseModelMismatchError, match=r"\(6, 32, 96\)\. Expected \(4, 32, 96\)"):
        TIDEModelForCausalLM.attach(other_shape, routers, ignore_base_mismatch=True)


def test_what_is_no_language_model():
    for model in (nn.Linear(2, 2), object()):
        with pytest.raises(UnsupportedModelError, match=r"it is no transformers model\. Expected a list of config"):
            TIDEModelForCausalLM.attach(model)
    bare = tiny_model("llama").model
    with pytest.raises(UnsupportedModelError, match="no decoder layers"):
        TIDEModelForCausalLM.attach(bare)
    with pytest.raises(ConfigurationError, match="from_pretrained"):
        TIDEModelForCausalLM()


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "falcon"])
def test_an_accelerate_hook_stays_in_place(family):
    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Counting.calls += 1
            return args, kwargs

    Counting.calls = 0
    model = tiny_model(family)
    last = find_structure(model).layers[-1]
    add_hook_to_module(last, Counting())
    hooked = last.__dict__["forward"]
    routers = TIDERouters.for_model(model, exit_layers=[1], exit_threshold=0.0)
    TIDEModelForCausalLM.attach(model, routers, mode="early_exit")
    Counting.calls = 0
    model.generate(prompt(), **OPTIONS)
    assert Counting.calls == 1  # for the prompt; later tokens leave before it
    TIDEModelForCausalLM.detach(model)
    assert last.__dict__["forward"] is hooked


def word_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w0", eos_token="w2", unk_token="w0")


@pytest.mark.parametrize("mode", MODES)
def test_pipeline_and_streamers(mode, caplog):
    tokenizer, model = word_tokenizer(), attached(exit_threshold=0.5)
    expected = tokenizer.decode(
        model.generate(tokenizer("w5 w6 w7", return_tensors="pt").input_ids, tide_mode=mode, **OPTIONS)[0]
    )
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    text = generator("w5 w6 w7", tide_mode=mode, **OPTIONS)[0]["generated_text"]
    assert "not supported" not in caplog.text
    assert text.replace(" ", "") == expected.replace(" ", "")
    streamer = TextIteratorStreamer(tokenizer, timeout=60)
    ids = tokenizer("w5 w6 w7", return_tensors="pt").input_ids
    thread = threading.Thread(
        target=model.generate, args=(ids,), kwargs={"tide_mode": mode, "streamer": streamer, **OPTIONS}
    )
    thread.start()
    streamed = "".join(streamer)
    thread.join()
    assert streamed.replace(" ", "") == expected.replace(" ", "")


@pytest.mark.parametrize("mode", MODES)
def test_a_streamer_gets_one_token_at_a_time(mode):
    class Recorder(TextStreamer):
        def __init__(self):
            self.sizes, self.ended = [], False

        def put(self, value):
            self.sizes.append(value.numel())

        def end(self):
            self.ended = True

    model, streamer = attached(exit_threshold=0.5), Recorder()
    model.generate(prompt(), tide_mode=mode, streamer=streamer, **OPTIONS)
    assert streamer.sizes == [9] + [1] * 10
    assert streamer.ended


def test_every_attention_family_is_listed_once():
    assert len(FAMILIES) == 28
    assert len(ATTENTION) + len(RECURRENT) == 28


def test_models_load_in_several_threads_at_once(tmp_path, tiny_llama):
    """transformers alone would leave the process unable to tie a head to its embeddings."""
    tiny_llama(tie_word_embeddings=True, num_hidden_layers=2).save_pretrained(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        models = list(pool.map(lambda _: TIDEModelForCausalLM.from_pretrained(tmp_path), range(12)))
    models.append(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert all(model.lm_head.weight is model.model.embed_tokens.weight for model in models)
