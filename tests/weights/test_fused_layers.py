"""Layers that run as kernels: the tokens stay the base model's, and layers of other kinds run as before."""

import pytest
import torch
from draft_heads import draft_head_for, drafts_after
from drafters import use_drafter, use_heads
from families import tiny_model
from on_steps import OPTIONS, linear_heads, new_tokens, prompts
from packed_weights import attach_packed, set_fastest_layouts
from torch.nn.modules.module import register_module_forward_hook
from transformers import DynamicCache

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import CACHE
from tide_hf.engines.steps.step_compiler import FusedRegion
from tide_hf.kernels.cpu import cpp_kernels
from tide_hf.kernels.cpu.cpp_kernels import build_kernels, load_op
from tide_hf.weights.fused_layers import MEASURED_WIDTHS, FusedStack, Probe, fused_layer

FUSED = ("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3")
OTHERS = ("gpt2", "opt", "phi3", "olmo2", "gemma2", "mixtral", "deepseek_v3", "cohere2")


@pytest.fixture(autouse=True)
def _kernels_are_ready_and_faster(monkeypatch, fresh_kernels):
    """Whatever this machine is."""
    build_kernels(torch.float32)
    monkeypatch.setattr(Probe, "_measure", lambda _: [2.0, 1.0] * len(MEASURED_WIDTHS))


@pytest.fixture
def widths(monkeypatch):
    """The widths of the passes that ran fused, once for each layer."""
    found, run = [], FusedStack.__call__

    def counted(self, keys, values, state, *rest, **options):
        found.extend([state.shape[1]] * len(self.layers))
        return run(self, keys, values, state, *rest, **options)

    monkeypatch.setattr(FusedStack, "__call__", counted)
    return found


def test_layers_are_found_again_only_after_a_change(tiny_llama, monkeypatch):
    model, found = TIDEModelForCausalLM.attach(tiny_llama(), remembered_tokens=0), []
    monkeypatch.setattr(
        "tide_hf.weights.fused_layers.fused_layer", lambda layer: found.append(layer) or fused_layer(layer)
    )
    layers, first = list(model.model.layers), model.model.layers[0]

    def changes(change):
        change()
        for number in (len(layers), 0):
            found.clear()
            model.generate(**prompts(), **OPTIONS)
            assert len(found) == number, change

    model.generate(**prompts(), **OPTIONS)
    changes(model._tide.weights.release)
    with torch.no_grad():
        changes(lambda: first.mlp.up_proj.weight.mul_(2.0))
        changes(lambda: first.input_layernorm.weight.mul_(2.0))
        changes(lambda: setattr(first.mlp.up_proj, "weight", torch.nn.Parameter(first.mlp.up_proj.weight * 2.0)))
    changes(lambda: first.mlp.register_forward_hook(lambda *_: None))
    changes(lambda: setattr(first.self_attn, "scaling", 0.5))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FUSED)
def test_tokens_are_the_base_models(family, rows, attention, widths):
    model, batch = tiny_model(family, attention=attention), prompts(rows, pads=2 if rows > 1 else 0)
    expected = model.generate(**batch, **OPTIONS)
    TIDEModelForCausalLM.attach(model, linear_heads(model), remembered_tokens=0)
    widths.clear()
    use_drafter(model, "mixed", new_tokens(expected), width=3)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert {1, 4} <= set(widths)
    fused_passes, stats = len(widths), model.last_exit_stats
    use_heads(model, 3, continuations=new_tokens(expected), kind="mixed")
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert len(widths) > fused_passes
    assert model.last_exit_stats.layers_executed > stats.layers_executed  # drafts run layers as well


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("family", FUSED)
def test_tokens_of_compiled_steps_are_the_base_models(family, rows, widths):
    model, batch = tiny_model(family, attention="sdpa"), prompts(rows, pads=2 if rows > 1 else 0)
    expected = model.generate(**batch, **OPTIONS)
    steps = attach_packed(model, draft_head_for(model))
    widths.clear()
    for drafter in (
        lambda: use_drafter(model, "mixed", new_tokens(expected), width=3),
        lambda: use_heads(model, 0, continuations=new_tokens(expected), kind="mixed"),
    ):
        drafter()
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert steps.refused is None
    assert {1, 4, prompts()["input_ids"].shape[1]} <= set(widths)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("taps", [[1, 2, 4], [0, 3, 6]])
def test_one_call_runs_all_layers_of_a_step_and_gives_the_states_that_a_head_reads(taps, rows, tiny_llama, monkeypatch):
    model, batch, calls, run = tiny_llama(num_hidden_layers=6), prompts(rows), [], FusedRegion._run
    monkeypatch.setattr(FusedRegion, "_run", lambda self, *inputs: calls.append(len(self.layers)) or run(self, *inputs))
    expected = model.generate(**batch, **OPTIONS)
    attach_packed(model, draft_head_for(model, tap_layers=taps))
    made = use_heads(model, 0, every=2)
    model.generate(**batch, **OPTIONS)
    calls.clear()
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert calls == [6] * (model.last_exit_stats.rounds // rows)
    assert made[-1].drafted
    for text, tokens in made[-1].drafted:
        assert drafts_after(model, text, len(tokens)) == tokens


@pytest.mark.parametrize("family", OTHERS)
def test_layers_of_other_kinds_run_by_their_own_forward(family, widths):
    model = tiny_model(family)
    expected = model.generate(**prompts(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert not widths


def test_layers_that_look_alike_but_compute_otherwise_run_by_their_own_forward(widths, caplog):
    model = tiny_model("granite", residual_multiplier=0.5)
    expected = model.generate(**prompts(), **OPTIONS)
    with caplog.at_level("INFO", logger="tide_hf"):
        TIDEModelForCausalLM.attach(model)
    widths.clear()
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert not widths
    assert "runs without fused kernels, which give other results" in caplog.text


def test_attaching_copies_no_weights(tiny_llama, monkeypatch):
    set_fastest_layouts(monkeypatch)  # copies
    model = TIDEModelForCausalLM.attach(tiny_llama())
    assert model._tide.weights.execute_layer() is not None
    assert not any(layout.is_copy for gate in model._tide.weights.gates() for layout in gate.converted)


@pytest.mark.parametrize("options", [{"use_kernels": False}, {"pack_weights": False}])
def test_options_without_kernels_or_other_layouts(tiny_llama, options, widths):
    model = TIDEModelForCausalLM.attach(tiny_llama(), **options)
    model.generate(**prompts(), **OPTIONS)
    assert not widths


@pytest.mark.parametrize(("seconds", "ran"), [([2.0, 1.0] * 2 + [1.0, 2.0] * 5, {1, 2, 4}), ([1.0, 2.0] * 7, set())])
def test_prompts_of_more_tokens_than_were_faster_run_by_their_own_forward(
    tiny_llama, monkeypatch, widths, seconds, ran
):
    """Verify passes do not, since a token's logits may not depend on their width."""
    monkeypatch.setattr(Probe, "_measure", lambda _: seconds)
    model = tiny_llama()
    expected = model.generate(**prompts(), **OPTIONS)
    TIDEModelForCausalLM.attach(model)
    widths.clear()
    for width in (1, 3):
        use_drafter(model, "wrong at the last position", new_tokens(expected), width=width)
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert set(widths) == ran


def test_nothing_is_built_for_them(tiny_llama, monkeypatch, fresh_kernels, widths):
    monkeypatch.setattr(cpp_kernels, "_loaded", {})
    monkeypatch.setattr(cpp_kernels, "_built", lambda _: pytest.fail("a build"))
    load_op.cache_clear()
    model = TIDEModelForCausalLM.attach(tiny_llama())
    model.generate(**prompts(), **OPTIONS)
    assert not widths


def test_what_acts_on_a_module_inside_is_not_bypassed(tiny_llama, widths):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    layer, seen = model.model.layers[1], []
    assert fused_layer(layer) is not None
    hook = layer.mlp.down_proj.register_forward_hook(lambda *_: seen.append(1))
    widths.clear()
    model.generate(**prompts(), **OPTIONS)
    assert len(seen) == model.last_exit_stats.rounds + 1
    hook.remove()
    assert fused_layer(layer) is not None
    with register_module_forward_hook(lambda *_: None):  # of all modules
        assert fused_layer(layer) is None
    layer.self_attn.q_proj.forward.replaced = torch.nn.functional.linear  # as accelerate sets its own
    assert fused_layer(layer) is None
    assert fused_layer(layer.train()) is None


def test_weights_that_change_between_calls_are_read_anew(tiny_llama, widths):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    model.generate(**prompts(), **OPTIONS)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(-1.0)
    model.model.layers[2].mlp.up_proj.weight.data = torch.randn(64, 32)
    model.model.layers[3].self_attn.v_proj.weight = torch.nn.Parameter(torch.randn(16, 32))
    plain = tiny_llama()
    plain.load_state_dict(model.state_dict())
    assert torch.equal(model.generate(**prompts(), **OPTIONS), plain.generate(**prompts(), **OPTIONS))
    assert widths


def test_a_cache_that_keeps_less_than_all_goes_to_the_layers_own_forward(tiny_llama, widths):
    model = tiny_llama()
    options = {**OPTIONS, "cache_implementation": "static"}
    expected = model.generate(**prompts(), **options)
    TIDEModelForCausalLM.attach(model)
    widths.clear()
    assert torch.equal(model.generate(**prompts(), **options), expected)
    assert not widths


def test_a_returned_cache_continues_in_plain_decoding(tiny_llama):
    model, plain = tiny_llama(), tiny_llama()
    TIDEModelForCausalLM.attach(model)
    options = {**OPTIONS, "return_dict_in_generate": True}
    first = model.generate(**prompts(), **options)
    assert type(first[CACHE]) is DynamicCache
    longer = torch.cat([first.sequences, prompts()["input_ids"]], dim=1)
    assert torch.equal(plain.generate(longer, **{CACHE: first[CACHE]}, **OPTIONS), plain.generate(longer, **OPTIONS))


def test_a_probe_notices_every_part(tiny_llama):
    """Each part of a layer is changed behind the kernels' back."""
    model = TIDEModelForCausalLM.attach(tiny_llama())
    layer = model.model.layers[0]
    probe = Probe(model._tide.structure, 0, layer, fused_layer(layer))
    assert probe.is_equal()
    for module in [module for module in layer.modules() if "weight" in module._parameters]:
        before = module.weight
        by_row = torch.linspace(0.5, 1.5, before.shape[0]).view(-1, *[1] * (before.dim() - 1))
        module.weight = torch.nn.Parameter(before.detach() * by_row)
        assert not probe.is_equal(), module
        module.weight = before
    layer.self_attn.scaling *= 1.5
    assert not probe.is_equal()
    layer.self_attn.scaling /= 1.5
    assert probe.is_equal()
    probe.attention = "flash_attention_2"
    assert not probe.is_equal()
