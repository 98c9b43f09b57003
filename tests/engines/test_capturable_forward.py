"""What a forward does otherwise while it is captured, and that it comes to the same."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from families import tiny_model
from on_steps import OPTIONS, prompts
from on_steps import attach_captured as attach
from recorded import Recording
from transformers import masking_utils

from tide_hf.engines.steps import capturable_forward
from tide_hf.engines.steps.capturable_forward import eager_mask


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("padded", [False, True])
def test_masks_are_transformers_own_and_made_on_the_device(dtype, window, padded):
    mask = torch.ones((2, 9), dtype=torch.bool)
    mask[0, :2] = not padded
    function = masking_utils.causal_mask_function
    if window is not None:
        function = masking_utils.sliding_window_causal_mask_function(window)
    options = {"batch_size": 2, "q_length": 4, "kv_length": 9, "q_offset": torch.tensor(3), "mask_function": function}
    options |= {"attention_mask": mask, "dtype": dtype, "device": mask.device}
    expected = masking_utils.eager_mask(**options)
    with Recording() as recording:
        found = eager_mask(**options)
    assert found.dtype == dtype
    assert torch.equal(found, expected)
    assert not recording.copies_from_host


@pytest.mark.parametrize("is_old", [False, True])
def test_masks_are_replaced_while_an_old_transformers_is_captured(monkeypatch, is_old):
    monkeypatch.setattr(capturable_forward, "HAS_CAPTURABLE_MASKS", not is_old)
    used, functions = [], masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    model = tiny_model("llama")
    model.model.register_forward_pre_hook(lambda *_: used.append(functions["eager"] is eager_mask))
    expected = model.generate(**prompts(), **OPTIONS)
    attach(model)
    used.clear()
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert used[0] is False  # the prompt is not captured
    assert set(used[1:]) == {is_old}
    assert functions["eager"] is masking_utils.eager_mask


@pytest.mark.parametrize(
    ("tokens", "dtype", "is_entered"),
    [
        (1, torch.bfloat16, True),
        (16, torch.bfloat16, True),
        (17, torch.bfloat16, False),
        (64, torch.float16, True),
        (64, torch.float32, True),
    ],
)
def test_experts_weights_are_copied_for_few_tokens_or_where_their_other_way_needs_the_host(tokens, dtype, is_entered):
    entered = []

    @contextmanager
    def decoding():
        entered.append(True)
        yield

    config = SimpleNamespace(_attn_implementation="eager")
    model = SimpleNamespace(dtype=dtype, config=config, _optimize_model_for_decode=decoding)
    with capturable_forward.capturable_forward(model, tokens):
        assert entered == [True] * is_entered
    assert entered == [True] * is_entered


@pytest.mark.parametrize(("rows", "engine"), [(1, "eager"), (3, "eager"), (1, "compiled"), (3, "compiled")])
def test_experts_run_as_generate_runs_them(monkeypatch, rows, engine):
    """The prompt's pass in their own way, and on a GPU, which is played here, those behind it in another."""
    model = tiny_model("qwen3_moe")
    model.set_experts_implementation("grouped_mm")

    @contextmanager
    def decoding():
        model.set_experts_implementation("batched_mm")
        yield
        model.set_experts_implementation("grouped_mm")

    monkeypatch.setattr(model, "_optimize_model_for_decode", decoding)
    used = []
    model.model.register_forward_pre_hook(lambda *_: used.append(model.config._experts_implementation))
    expected = model.generate(**prompts(rows), **OPTIONS)
    assert used == ["grouped_mm"] + (OPTIONS["max_new_tokens"] - 1) * ["batched_mm"]
    steps = attach(model)
    used.clear()
    assert torch.equal(model.generate(**prompts(rows), **OPTIONS, tide_engine=engine), expected)
    assert used[0] == "grouped_mm"
    behind = "grouped_mm" if (rows, engine) == (3, "eager") else "batched_mm"
    assert set(used[1:]) == {behind}
    assert steps.refused is None
    assert model.config._experts_implementation == "grouped_mm"


@pytest.mark.parametrize(("family", "is_joined"), [("llama", True), ("gemma3_text", True), ("gpt2", False)])
def test_heads_that_share_k_and_v_read_them_where_they_are(monkeypatch, family, is_joined):
    """Under a mask `sdpa` would copy all slots for each of them, in every layer of every step."""
    found, join = [], capturable_forward.attend_grouped
    monkeypatch.setattr(capturable_forward, "attend_grouped", lambda *args: found.append(join(*args)) or found[-1])
    model = tiny_model(family, attention="sdpa")
    expected = model.generate(**prompts(), **OPTIONS)
    steps = attach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert steps.refused is None
    assert {one is not None for one in found} == {is_joined}
    assert model.config._attn_implementation == "sdpa"
