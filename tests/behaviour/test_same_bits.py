"""Drafts change no logits: a token's have the same bits whatever width, tree or batch the pass had that verified it."""

import pytest
import torch
from drafters import use_drafter
from families import slow_but, tiny_model
from on_steps import OPTIONS, as_traced, new_tokens, prompts, use_steps
from quantized_weights import quantize

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines.steps.step_store import CompiledSteps
from tide_hf.kernels.cpu.cpp_kernels import CPU_DTYPES, build_kernels
from tide_hf.weights.fused_layers import Probe

LLAMA = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 6, "num_key_value_heads": 2}
LLAMA |= {"num_hidden_layers": 2, "vocab_size": 300, "attention_bias": True}
LOGITS = {**OPTIONS, "return_dict_in_generate": True, "output_logits": True}
KINDS = (
    "float32",
    "bfloat16",
    "float16",
    "bfloat16 in float32",
    "float16 in float32",
    "rows",
    "int4",
    "int4 in float32",
)


@pytest.fixture(autouse=True)
def _kernels_are_built():
    for dtype in CPU_DTYPES:
        build_kernels(dtype)


def attached(model, kind, engine="eager"):
    stored, _, compute = kind.partition(" in ")
    if stored in ("rows", "int4"):
        model = quantize(model.to(torch.bfloat16 if compute else torch.float32), stored)
        stored = str(model.dtype).removeprefix("torch.")
    model.to(getattr(torch, stored))
    TIDEModelForCausalLM.attach(
        model, engine=engine, remembered_tokens=0, successors=0, compute_dtype=compute or stored
    )
    model._tide.weights.copies_at_once = True
    use_steps(model, CompiledSteps(as_traced))
    return model


def undrafted(model, batch):
    use_drafter(model, "right", [[]] * len(batch["input_ids"]))
    return model.generate(**batch, **LOGITS)


def check_logits(model, batch, widths=range(2, 17)):
    """The logits of a call in which nothing is drafted, with which those of drafted calls are compared."""
    plain = undrafted(model, batch)
    tokens, logits = new_tokens(plain.sequences), torch.stack(plain.logits)
    for kind, width in [("right", width - 1) for width in widths] + [("trees", 6), ("trees", 15), ("mixed", 4)]:
        use_drafter(model, kind, tokens, width)
        found = model.generate(**batch, **LOGITS)
        assert model.last_exit_stats.drafted > 0
        assert torch.equal(torch.stack(found.logits), logits), (kind, width)
    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("engine", ["eager", "compiled"])
@pytest.mark.parametrize("most_tokens", [4, 0], ids=["layers as kernels", "single products"])
def test_of_passes_of_any_width_of_trees_and_of_batches(tiny_llama, monkeypatch, kind, engine, most_tokens):
    monkeypatch.setattr(Probe, "most_tokens", lambda _: most_tokens)  # which decides nothing, once prompts are read
    model = attached(tiny_llama(**LLAMA), kind, engine)
    check_logits(model, prompts())
    check_logits(model, prompts(rows=3, pads=3), widths=(2, 3, 5, 16))


DENSE = (
    "qwen2",
    "qwen3",
    "mistral",
    "phi3",
    "olmo2",
    "smollm3",
    "starcoder2",
    "phi",
    "gemma3_text",
    "granite",
    "cohere2",
)
DENSE += ("stablelm", "gpt_neox")


@pytest.mark.parametrize(("kind", "family"), slow_but(("gemma3_text", "olmo2"), DENSE, "bfloat16 in float32"))
def test_of_dense_families_whose_layers_run_by_their_own_forward(kind, family):
    """With inner sizes that registers divide, as those of all models that people use."""
    model = attached(tiny_model(family, attention="sdpa", intermediate_size=64), kind)
    check_logits(model, prompts(), widths=(2, 3, 5, 16))
