"""Eager calls on a CPU: kernels are used where they are there, nobody waits for a compiler, the tokens stay."""

import threading

import pytest
import torch
from block_heads import routers_for
from drafters import use_drafter
from families import ATTENTION, SDPA, tiny_model
from on_steps import OPTIONS, linear_heads, prompts
from packed_weights import set_fastest_layouts
from repository import SHIPPED

from tide_hf import TIDEModelForCausalLM
from tide_hf.engines import gqa_attention
from tide_hf.engines.eager import LONG_PROMPT
from tide_hf.kernels.cpu import attention, weight_layouts
from tide_hf.kernels.cpu import cpp_kernels as kernels
from tide_hf.kernels.cpu.cpp_kernels import EAGER_KERNELS, compile_kernel, is_loaded
from tide_hf.kernels.cpu.weight_layouts import PlainWeight

pytestmark = pytest.mark.usefixtures("fresh_kernels")


@pytest.fixture(autouse=True)
def _they_pay(monkeypatch):
    """Whatever this machine is, the kernels are the faster ones."""
    set_fastest_layouts(monkeypatch, kernels.CPP_TYPES, order=(PlainWeight, None, *weight_layouts.WEIGHT_LAYOUTS[:2]))
    monkeypatch.setattr(attention, "_is_faster", {(torch.float32, torch.get_num_threads()): True})


@pytest.fixture
def there(fresh_kernels):
    """The kernels are there already."""
    for name in EAGER_KERNELS:
        compile_kernel(name, torch.float32)


@pytest.fixture
def attended(monkeypatch):
    """How many queries attention by `gqa_attention` was given, call by call."""
    widths, attend = [], gqa_attention.attend

    def noting(module, query, *args, **kwargs):
        widths.append(query.shape[2])
        return attend(module, query, *args, **kwargs)

    monkeypatch.setitem(gqa_attention.AttentionInterface._global_mapping, gqa_attention.NAME, noting)
    return widths


def kept_forms(model):
    return {layout for gate in model._tide.gates() for layout in gate.converted}


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", ATTENTION)
def test_every_familys_tokens_are_the_base_models(family, rows):
    model = tiny_model(family, attention="sdpa" if family in SDPA else "eager")
    batch = prompts(rows, pads=2, length=LONG_PROMPT)
    sequences = model.generate(**batch, **OPTIONS)
    expected = sequences[:, LONG_PROMPT:]
    TIDEModelForCausalLM.attach(model, linear_heads(model))
    for kind in ("right", "wrong at the last position"):
        use_drafter(model, kind, expected.tolist(), width=4)
        assert torch.equal(model.generate(**batch, **OPTIONS), sequences)
    assert kept_forms(model) <= {PlainWeight}
    gates = model._tide.gates()
    assert bool(kept_forms(model)) == any(type(gate.module) is torch.nn.Linear for gate in gates)


@pytest.mark.parametrize("mode", ["early_exit", "post_hoc"])
def test_the_other_modes_use_them_as_well(tiny_llama, there, mode):
    model = tiny_llama()
    TIDEModelForCausalLM.attach(model, linear_heads(model), mode=mode)
    model.generate(**prompts(), **OPTIONS)
    assert kept_forms(model) == {PlainWeight}


@pytest.mark.parametrize("settings", [{}, {"use_kernels": False}, {"pack_weights": False}])
def test_nothing_is_compiled_and_nothing_is_used_that_is_not_wanted(tiny_llama, monkeypatch, settings):
    monkeypatch.setattr(kernels, "_compile", pytest.fail)
    if settings:
        monkeypatch.setattr(kernels, "_loaded", {("skinny_gemm", torch.float32): True})
    model = TIDEModelForCausalLM.attach(tiny_llama(), **settings)
    for batch in (prompts(), prompts(2, pads=1), prompts(length=LONG_PROMPT)):
        model.generate(**batch, **OPTIONS)
    assert PlainWeight not in kept_forms(model)


@pytest.mark.parametrize("use_kernels", ["auto", False])
def test_rows_that_share_heads_use_kernels_only_where_they_may(tiny_llama, there, monkeypatch, attended, use_kernels):
    asked = []
    monkeypatch.setattr(gqa_attention, "prefill_sdpa", lambda *given: asked.append(given))
    model = TIDEModelForCausalLM.attach(tiny_llama(), use_kernels=use_kernels)
    model.generate(**prompts(2, pads=1, length=LONG_PROMPT), **OPTIONS)
    assert LONG_PROMPT in attended
    assert bool(asked) == (use_kernels == "auto")


@pytest.mark.parametrize(
    ("rows", "length", "is_there", "attends"),
    [
        (1, LONG_PROMPT, True, True),
        (1, LONG_PROMPT, False, False),
        (1, LONG_PROMPT - 1, True, False),
        (2, 8, False, True),
    ],
)
def test_rows_under_a_mask_and_long_prompts_share_heads(tiny_llama, request, attended, rows, length, is_there, attends):
    if is_there:
        request.getfixturevalue("there")
    model = tiny_llama()
    batch = prompts(rows, pads=rows - 1, length=length)
    expected = model.generate(**batch, **OPTIONS)
    TIDEModelForCausalLM.attach(model, routers_for(model, 1))
    use_drafter(model, "right", expected[:, length:].tolist())
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert bool(attended) == attends
    assert model.config._attn_implementation == "sdpa"
    layer = model._tide.block_head.layer
    assert {m.config._attn_implementation for m in layer.modules() if "config" in vars(m)} == {"sdpa"}


def test_a_call_in_another_thread_does_not_take_the_attention_away(tiny_llama):
    model, inside, other_is_done = tiny_llama(), threading.Event(), threading.Event()
    found = []

    def slow():
        with gqa_attention.gqa_attention(model):
            inside.set()
            other_is_done.wait(30)
            found.append(model.config._attn_implementation)

    thread = threading.Thread(target=slow)
    thread.start()
    inside.wait(30)
    with gqa_attention.gqa_attention(model):
        pass
    other_is_done.set()
    thread.join()
    assert found == [gqa_attention.NAME]
    assert model.config._attn_implementation == "sdpa"


def test_no_call_waits_while_another_thread_compiles(tiny_llama):
    with kernels._loading:
        assert not is_loaded("skinny_gemm", torch.float32)


def test_warm_up_compiles_what_eager_calls_use(tiny_llama, monkeypatch):
    together, compile_all = [], kernels._compile_missing
    monkeypatch.setattr(
        kernels, "_compile_missing", lambda names, dtype: together.append(names) or compile_all(names, dtype)
    )
    model = TIDEModelForCausalLM.attach(tiny_llama())
    assert model.tide_warm_up() > 0.0
    assert all(names == set(EAGER_KERNELS) for names in together)
    assert all(is_loaded(name, torch.float32) for name in EAGER_KERNELS)
    model.generate(**prompts(), **OPTIONS)
    assert kept_forms(model) == {PlainWeight}
    assert model.tide_warm_up() == 0.0


def test_warm_up_compiles_nothing_that_is_not_wanted(tiny_llama, monkeypatch):
    monkeypatch.setattr(kernels, "_compile", pytest.fail)
    assert TIDEModelForCausalLM.attach(tiny_llama(), use_kernels=False).tide_warm_up() == 0.0
    assert TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=False).tide_warm_up() == 0.0
    assert TIDEModelForCausalLM.attach(tiny_llama()).double().tide_warm_up() == 0.0


@pytest.mark.real_model
@pytest.mark.xdist_group("real_model")
@pytest.mark.usefixtures("there")
def test_the_real_models_tokens_stay(smollm2):
    model, tokenizer = smollm2
    texts = ["The history of Rome begins with", "def area(width, height):\n    return " * 12]
    options = {"max_new_tokens": 24, "do_sample": False}
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt")
        expected = model.generate(**inputs, **options)
        TIDEModelForCausalLM.attach(model, SHIPPED)
        try:
            assert torch.equal(model.generate(**inputs, **options), expected)
            assert kept_forms(model) == {PlainWeight}
        finally:
            TIDEModelForCausalLM.detach(model)
