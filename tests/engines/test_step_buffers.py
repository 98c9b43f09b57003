"""Steps on fake CUDA tensors: shapes and devices of all operations fit, and none needs a value on the host."""

import math

import pytest
import torch
from block_heads import WITH_BLOCK, block_layer_of, routers_for
from families import ATTENTION, MIXTURES, tiny_model
from on_steps import linear_heads
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.depth.block_drafting import block_run
from tide_hf.engines.steps.step_buffers import WIDTHS, ModelParts, StepBuffers

# Not MIXTURES, for which transformers asks which GPU there is.
GPU, FILLED, SLOTS = torch.device("cuda:0"), 6, 64
pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="a PyTorch without CUDA")


def moved(tensor):
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=GPU)


def move(*roots):
    """Replace parameters and buffers by fake ones, which `.to()` refuses."""
    for module in (module for root in roots for module in root.modules()):
        for name, tensor in module._parameters.items():
            module._parameters[name] = nn.Parameter(moved(tensor), requires_grad=False) if tensor is not None else None
        module._buffers.update({name: moved(tensor) for name, tensor in module._buffers.items() if tensor is not None})


def run_every_step(model, routers, rows, has_block):
    """Prefill on the CPU, then every step on fake CUDA tensors."""
    attachment = TIDEModelForCausalLM.attach(model, routers, pack_weights=False)._tide
    cache = DynamicCache(config=model.config)
    config = model.config.get_text_config()
    kinds = (4,) if config is not model.config and "mrope_section" in config.rope_parameters else ()  # of positions
    block = block_run(config, attachment.structure, cache, attachment.unembed, routers, lazy=False)
    assert (block is not None) == has_block
    with torch.no_grad():
        model(input_ids=torch.zeros((rows, FILLED), dtype=torch.long), **{CACHE: cache}, use_cache=True)
        if has_block:
            cache.layers[-1].update(cache.layers[0].keys, cache.layers[0].values)
    with FakeTensorMode(), torch.no_grad():
        move(model, routers)
        for layer in cache.layers:
            layer.keys, layer.values = moved(layer.keys), moved(layer.values)
        draft_unembed = attachment.draft_unembed()
        parts = ModelParts(model, attachment.structure, attachment.unembed, draft_unembed, routers)
        buffers = StepBuffers(parts, cache, rows, SLOTS, position_shape=kinds, has_block=has_block)
        buffers.load(cache, FILLED, torch.ones((rows, FILLED), dtype=torch.long), None)
        for kept in (None, [1] * rows):
            buffers.write(FILLED, [[FILLED] * math.prod(kinds)] * rows, [[5]] * rows, kept)
            for exit_layer in [routers.config.block_layer] if has_block else routers.exit_layers:
                buffers.draft(exit_layer)
            logits = [buffers.verify(width)[1] for width in WIDTHS]
    assert {tensor.device for tensor in (*logits, buffers._results, buffers.ids)} == {GPU}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", [family for family in ATTENTION if family not in MIXTURES])
def test_heads_draft_and_the_model_verifies_on_the_device(family, rows):
    model = tiny_model(family)
    run_every_step(model, linear_heads(model), rows, has_block=False)


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", [family for family in WITH_BLOCK if family not in MIXTURES])
def test_a_block_head_drafts_on_the_device(family, rows):
    model = tiny_model(family)
    run_every_step(model, routers_for(model, block_layer_of(family)), rows, has_block=True)


def test_a_tensor_that_stays_on_the_cpu_raises(monkeypatch):
    monkeypatch.setattr("tide_hf.engines.steps.static_cache.CachePosition.move_to", stay_behind)
    model = tiny_model("llama")
    with pytest.raises(RuntimeError, match="device"):
        run_every_step(model, linear_heads(model), 1, has_block=False)


def stay_behind(self, start, width):
    self.start, self.slots = start, start + torch.arange(width)
