"""Engines without a compiler or a GPU: attached models with traced or recorded steps, and small prompts."""

import torch
from drafters import use_drafter, use_heads
from families import VOCAB
from recorded import Recorder

from tide_hf import TIDEModelForCausalLM, TIDERouters
from tide_hf.engines.steps.step_store import CapturedSteps, CompiledSteps

LAYERS, PROMPT, NEW = 4, 8, 14
WINDOWED = ("mistral", "gemma2", "gemma3", "gemma3_text", "cohere2", "gpt_oss", "llama4_text")
FEW = ("llama", "gpt2", "falcon", "bloom", "opt", "qwen3_moe", "gemma2")  # with all kinds of layers of all families
COPYING = ("falcon",)  # uncompiled layers index with a list, which is copied from the host
OPTIONS = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def prompts(rows=1, pads=0, length=PROMPT, seed=0):
    ids = torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[-1, :pads] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def new_tokens(sequences):
    return sequences[:, PROMPT:].tolist()


def linear_heads(model):
    return TIDERouters.for_model(model, exit_layers=[1, 3], exit_strategy="linear")


def steps_of(model):
    """The steps of an attached model, for the device that it is on."""
    return model._tide.engines["compiled"].steps[model.device.type]


def use_steps(model, steps):
    """Let an attached model run on other steps; return them."""
    model._tide.engines["compiled"].steps[model.device.type] = steps
    return steps


def attach_captured(model, routers=None, make_replay=None, compile_graph=None, **settings):
    """Attach with steps as on a GPU, with a recorder in place of CUDA graphs; return the steps."""
    TIDEModelForCausalLM.attach(model, routers, engine="compiled", pack_weights=False, **settings)
    may_copy = model.config.model_type in COPYING
    return use_steps(model, CapturedSteps(make_replay or Recorder(may_copy), compile_graph))


def as_traced(graph, _inputs):
    """Stand in for Inductor: return the traced graph as it is."""
    return graph


def attach_compiled(model, routers=None, compile_graph=as_traced, **settings):
    """Attach with steps as on a CPU, but traced and not compiled; return the steps."""
    attach_without_compiler(model, routers, engine="compiled", **settings)
    return use_steps(model, CompiledSteps(compile_graph))


_attach = TIDEModelForCausalLM.attach  # the original, since some tests replace this attribute


def attach_without_compiler(model, *args, **settings):
    """A replacement for `TIDEModelForCausalLM.attach` that needs no compiler."""
    _attach(model, *args, **{"pack_weights": False, **settings})
    use_steps(model, CompiledSteps(as_traced))
    return model


def check_drafts(model, batch, attach_to, kinds, width=3):
    """Attach, draft by scripts and with heads, and compare with the base model's tokens; return the steps."""
    expected = model.generate(**batch, **OPTIONS)
    steps = attach_to(model, linear_heads(model))
    for kind in kinds:
        use_drafter(model, kind, new_tokens(expected), width=width)
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    use_heads(model, (1, 3))
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    return steps


def attach_eagerly(model, routers=None):
    TIDEModelForCausalLM.attach(model, routers)


ATTACH = {"eager": attach_eagerly, "compiled": attach_compiled, "captured": attach_captured}
