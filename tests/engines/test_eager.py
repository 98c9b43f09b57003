"""The eager engine on a CPU: it uses kernels that are compiled, waits for no compiler, and keeps the tokens."""

import logging

import pytest
import torch
from draft_heads import draft_head_for
from drafters import use_drafter
from families import ATTENTION, SDPA, slow_but, tiny_model
from on_steps import FEW, OPTIONS, linear_heads, prompts
from packed_weights import converted, set_fastest_layouts
from repository import SHIPPED

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines import gqa_attention, warm_up
from tide_hf.engines.eager import LONG_PROMPT
from tide_hf.kernels.cpu import attention
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.cpu.cpp_kernels import are_ready, build_kernels
from tide_hf.weights import layouts as weight_layouts
from tide_hf.weights.layouts import PlainWeight

pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.fixture(autouse=True)
def _kernels_are_fastest(monkeypatch):
    """On any machine."""
    set_fastest_layouts(monkeypatch, kernels.CPU_DTYPES, order=(PlainWeight, None, *weight_layouts.WEIGHT_LAYOUTS[:2]))
    monkeypatch.setattr(attention, "_is_faster", {(torch.float32, torch.get_num_threads()): True})


@pytest.fixture
def compiled_kernels(fresh_kernels):
    """Kernels that an earlier process has built."""
    build_kernels(torch.float32)


@pytest.fixture
def attended(monkeypatch):
    """The number of queries of each call of `gqa_attention.attend`."""
    widths, attend = [], gqa_attention.attend

    def counted(module, query, *args, **kwargs):
        widths.append(query.shape[2])
        return attend(module, query, *args, **kwargs)

    monkeypatch.setitem(gqa_attention.AttentionInterface._global_mapping, gqa_attention.NAME, counted)
    return widths


@pytest.mark.usefixtures("compiled_kernels")
@pytest.mark.parametrize(("rows", "family"), [(1, "llama"), *slow_but(FEW, ATTENTION, 3)])
def test_with_kernels_every_family_generates_the_base_models_tokens(family, rows):
    model = tiny_model(family, attention="sdpa" if family in SDPA else "eager")
    batch = prompts(rows, pads=2, length=LONG_PROMPT)
    expected = model.generate(**batch, **OPTIONS)
    TIDEModelForCausalLM.attach(model, linear_heads(model))
    use_drafter(model, "wrong at the last position", expected[:, LONG_PROMPT:].tolist(), width=4)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    has_linears = any(type(gate.module) is torch.nn.Linear for gate in model._tide.weights.gates())
    assert converted(model) == ({PlainWeight} if has_linears else set())


def test_early_exit_uses_kernels(tiny_llama, compiled_kernels):
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, linear_heads(model), mode="early_exit")
    model.generate(**prompts(), **OPTIONS)
    assert converted(model) == {PlainWeight}


@pytest.mark.parametrize("settings", [{}, {"use_kernels": False}, {"pack_weights": False}])
def test_calls_build_no_kernels_and_use_none_that_are_switched_off(tiny_llama, request, monkeypatch, settings):
    if settings:
        request.getfixturevalue("compiled_kernels")
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    model = TIDEModelForCausalLM.attach(tiny_llama(), **settings)
    if settings:
        assert model.tide_warm_up() == 0.0
    for batch in (prompts(), prompts(2, pads=1), prompts(length=LONG_PROMPT)):
        model.generate(**batch, **OPTIONS)
    assert PlainWeight not in converted(model)


@pytest.mark.usefixtures("no_fused_layers")
@pytest.mark.parametrize(
    ("rows", "length", "is_compiled", "use_kernels", "attends", "may_use_kernel"),
    [
        (1, LONG_PROMPT, True, "auto", True, True),
        (1, LONG_PROMPT, False, "auto", False, False),
        (1, LONG_PROMPT - 1, True, "auto", False, False),
        (2, LONG_PROMPT, True, False, True, False),
        (2, 8, False, "auto", True, True),
    ],
)
def test_batches_and_long_prompts_use_gqa_attention(
    tiny_llama, request, monkeypatch, attended, rows, length, is_compiled, use_kernels, attends, may_use_kernel
):
    if is_compiled:
        request.getfixturevalue("compiled_kernels")
    kernel_calls = []
    monkeypatch.setattr(gqa_attention, "prefill_sdpa", lambda *given: kernel_calls.append(given))
    model = tiny_llama()
    batch = prompts(rows, pads=rows - 1, length=length)
    expected = model.generate(**batch, **OPTIONS)
    TIDEModelForCausalLM.attach(model, draft_head_for(model), use_kernels=use_kernels)
    use_drafter(model, "right", expected[:, length:].tolist())
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert (length in attended) == attends
    assert bool(kernel_calls) == may_use_kernel
    assert model.config._attn_implementation == "sdpa"


def test_no_call_waits_while_another_thread_compiles():
    with kernels._loading:
        assert not are_ready(torch.float32)


def test_layouts_are_measured_while_attaching_and_by_no_call(tiny_llama, monkeypatch):
    measured, measure = [], weight_layouts._measure
    monkeypatch.setattr(weight_layouts, "_measured", {})
    monkeypatch.setattr(weight_layouts, "_measure", lambda *given: measured.append(given) or measure(*given))
    weight_layouts._fastest_layout.cache_clear()
    model = tiny_llama()
    expected = model.generate(**prompts(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    assert measured
    monkeypatch.setattr(weight_layouts, "_measure", pytest.fail)
    use_drafter(model, "right", expected[:, prompts()["input_ids"].shape[1] :].tolist(), width=4)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=False)


@pytest.fixture
def worth_a_build(monkeypatch):
    """Even tiny models, whose builds can be kept."""
    monkeypatch.setattr(warm_up, "WORTH_A_BUILD", 1)
    monkeypatch.setattr(warm_up, "obstacle_to_build", lambda _: None)


def test_kernels_are_built_while_attaching(tiny_llama, worth_a_build, monkeypatch):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    assert are_ready(torch.float32)
    assert model.tide_warm_up() > 0.0  # converts weights
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    model.generate(**prompts(), **OPTIONS)
    assert converted(model) == {PlainWeight}


@pytest.mark.parametrize("settings", [{"use_kernels": False}, {"pack_weights": False}])
def test_attaching_builds_no_kernels_that_are_switched_off(tiny_llama, worth_a_build, monkeypatch, settings):
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    TIDEModelForCausalLM.attach(tiny_llama(), **settings)


def test_attaching_builds_no_kernels_for_a_small_model(tiny_llama, worth_a_build, monkeypatch):
    model = tiny_llama()
    monkeypatch.setattr(warm_up, "WORTH_A_BUILD", 1 + sum(weight.nbytes for weight in model.parameters()))
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    TIDEModelForCausalLM.attach(model)


def test_where_kernels_cannot_be_built_attaching_says_so_and_goes_on(tiny_llama, worth_a_build, monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "obstacle_to_build", lambda dtype: f"no compiler for {dtype}")
    monkeypatch.setattr(kernels, "_built", pytest.fail)
    with caplog.at_level(logging.INFO, logger="tide_hf.engines"):
        TIDEModelForCausalLM.attach(tiny_llama())
    assert "kernels for torch.float32 are not built: no compiler for torch.float32" in caplog.text


def test_warm_up_builds_the_kernels_once(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    assert model.tide_warm_up() > 0.0
    assert are_ready(torch.float32)
    model.generate(**prompts(), **OPTIONS)
    assert converted(model) == {PlainWeight}
    assert model.tide_warm_up() == 0.0


@pytest.mark.real_model
@pytest.mark.xdist_group("real_model")
@pytest.mark.usefixtures("compiled_kernels")
def test_a_real_models_tokens_stay(smollm2):
    model, tokenizer = smollm2
    inputs = tokenizer("def area(width, height):\n    return " * 12, return_tensors="pt")
    options = {"max_new_tokens": 24, "do_sample": False}
    expected = model.generate(**inputs, **options)
    TIDEModelForCausalLM.attach(model, SHIPPED)
    try:
        assert torch.equal(model.generate(**inputs, **options), expected)
        assert converted(model) == {PlainWeight}
    finally:
        TIDEModelForCausalLM.detach(model)


def test_the_log_says_once_why_drafts_are_chains(caplog):
    model, options = tiny_model("bloom"), {**OPTIONS, "max_new_tokens": 4}
    TIDEModelForCausalLM.attach(model)
    with caplog.at_level(logging.INFO, logger="tide_hf.speculation"):
        for _ in range(2):
            model.generate(**prompts(), **options)
    expected = "drafts of BloomForCausalLM are chains, and not trees: its positions, or masks of its own"
    assert caplog.messages.count(expected) == 1
