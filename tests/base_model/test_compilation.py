"""Models that a user compiled: refused where TIDE would have to decide, whole graphs everywhere else."""

import pytest
import torch
from families import tiny_model
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.base_model.compilation import _warn_unused_compile_config
from tide_hf.common.errors import UnsupportedModelError

IDS = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
OPTIONS = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(IDS)}


@pytest.fixture(autouse=True)
def forget_graphs():
    """Dynamo counts those of a function, whichever model they were for, and gives up."""
    torch.compiler.reset()


def compile_forward(module):
    module.forward = torch.compile(module.forward, backend="eager")


def compile_in_place(module):
    module.compile(backend="eager")


PARTS = {
    "the model": lambda model: model,
    "model.model": lambda model: model.model,
    "model.model.layers.1": lambda model: model.model.layers[1],
    "model.model.layers.2.mlp": lambda model: model.model.layers[2].mlp,
}


@pytest.mark.parametrize("compiled", [compile_forward, compile_in_place])
@pytest.mark.parametrize("part", PARTS)
def test_a_compiled_part_that_tide_decides_about_is_refused(tiny_llama, part, compiled):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    compiled(PARTS[part](model))
    with pytest.raises(UnsupportedModelError, match=f"so TIDE cannot decode with it: got {part}, a .*, compiled"):
        model.generate(IDS, tide_strict=True, **OPTIONS)
    other = tiny_llama()
    compiled(PARTS[part](other))
    with pytest.raises(UnsupportedModelError, match=f"got {part}, a .*, compiled"):
        TIDEModelForCausalLM.attach(other)


@pytest.mark.parametrize("compiled", [compile_forward, compile_in_place])
def test_parts_of_a_layer_may_be_compiled(tiny_llama, compiled):
    model = tiny_llama()
    expected = model.generate(IDS, **OPTIONS)
    for layer in model.model.layers:
        compiled(layer.self_attn)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 2]))
    assert torch.equal(model.generate(IDS, **OPTIONS), expected)
    assert model.last_exit_stats is not None


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_an_attached_model_is_one_graph_where_tide_does_not_decide(family):
    model = tiny_model(family)
    logits = model(IDS, use_cache=False).logits
    beams = model.generate(IDS, **OPTIONS, num_beams=2)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[1, 2]))
    counter = CompileCounter()
    whole = torch.compile(model, fullgraph=True, backend=counter)
    torch.testing.assert_close(whole(IDS, use_cache=False).logits, logits)
    assert counter.frame_count == 1
    model.forward = torch.compile(model.forward, fullgraph=True, backend="eager")
    assert torch.equal(model.generate(IDS, **OPTIONS, num_beams=2), beams)


def test_a_wrapper_of_torch_compile_is_looked_through(tiny_llama):
    model = tiny_llama()
    expected = model.generate(IDS, **OPTIONS)
    wrapper = torch.compile(model, backend="eager")
    assert TIDEModelForCausalLM.attach(wrapper) is wrapper
    assert torch.equal(wrapper.generate(IDS, **OPTIONS), expected)
    assert model.last_exit_stats.mode == "self_speculative"
    TIDEModelForCausalLM.detach(wrapper)
    assert not hasattr(model, "_tide")


@pytest.mark.parametrize("mode", ["self_speculative", "post_hoc"])
def test_what_a_call_asks_to_compile_runs_as_it_is_and_is_told(tiny_llama, mode, caplog):
    """`generate` would compile what reads a prompt in pieces, so that nobody would see or count its layers."""
    model, counter = tiny_llama(), CompileCounter()
    options = {**OPTIONS, "cache_implementation": "static", "prefill_chunk_size": 4}
    expected = model.generate(IDS, **options)
    TIDEModelForCausalLM.attach(model, TIDERouters.for_model(model, exit_layers=[2]), mode=mode, exit_threshold=2.0)
    settings = CompileConfig(backend=counter, fullgraph=False, mode=None)
    settings._compile_all_devices = True  # as on a GPU
    _warn_unused_compile_config.cache_clear()
    for _ in range(2):
        assert torch.equal(model.generate(IDS, compile_config=settings, **options), expected)
    assert counter.frame_count == 0
    assert caplog.text.count("TIDE ignores compile_config") == 1
