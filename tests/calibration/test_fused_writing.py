"""Text written in passes that a kernel runs: it is the model's own, and other models write as before."""

import pytest
import torch
from families import tiny_model

from tide_hf import TIDEModelForCausalLM
from tide_hf.base_model.structure import find_structure
from tide_hf.calibration import fused_writing
from tide_hf.calibration.fused_writing import writing_passes
from tide_hf.calibration.text import continue_prompts, find_user_turn, plan_writing, write_documents
from tide_hf.engines import warm_up
from tide_hf.kernels.cpu.cpp_kernels import build_kernels
from tide_hf.weights.fused_layers import MEASURED_WIDTHS, FusedStack, Probe
from tide_hf.weights.fused_passes import SPARE_SLOTS

PROMPTS = [[*range(5, 7 + number % 4), 20 + number] for number in range(16)]
NEW = 12
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def _kernels_are_faster(monkeypatch):
    """Whatever this machine is."""
    monkeypatch.setattr(Probe, "_measure", lambda _: [2.0, 1.0] * len(MEASURED_WIDTHS))


@pytest.fixture
def _kernels_are_ready(fresh_kernels):
    build_kernels(torch.float32)


@pytest.fixture
def fused(monkeypatch):
    """Rows, width and the address of the first layer's keys, of each pass that the kernel ran."""
    found, run = [], FusedStack.__call__

    def noted(self, keys, values, state, *rest, **options):
        found.append((*state.shape[:2], keys[0].data_ptr()))
        return run(self, keys, values, state, *rest, **options)

    monkeypatch.setattr(FusedStack, "__call__", noted)
    return found


def plain_answers(model, ends=()):
    """What `generate` answers to each prompt alone, up to a token of `ends`."""
    answers = []
    for prompt in PROMPTS:
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False, eos_token_id=None)
        answer = whole[0, len(prompt) :].tolist()
        answers.append(answer[: min((idx for idx, token in enumerate(answer) if token in ends), default=NEW)])
    return answers


def written(model, writer, ends=frozenset(), **options):
    return continue_prompts(model, PROMPTS, NEW, **{"temperature": None, "ends": set(ends), **options}, writer=writer)


@pytest.mark.usefixtures("_kernels_are_ready")
@pytest.mark.parametrize("most_tokens", [1024, 16], ids=["prompts by kernel", "prompts by the model"])
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_answers_are_those_of_generate_while_rows_leave_the_batch(family, attached, most_tokens, fused, monkeypatch):
    measured = [seconds for width in MEASURED_WIDTHS for seconds in (2.0, 1.0 if width <= most_tokens else 3.0)]
    monkeypatch.setattr(Probe, "_measure", lambda _: measured)
    model = tiny_model(family)
    whole = plain_answers(model)
    ends = {whole[1][2], whole[4][5], whole[9][8]}
    expected = plain_answers(model, ends)
    assert len(set(map(len, expected))) > 2
    if attached:
        TIDEModelForCausalLM.attach(model)
    before = [dict(vars(module)) for module in model.modules()]
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        fused.clear()
        assert written(model, writer) == whole
        fused.clear()
        assert written(model, writer, ends) == expected
    assert [dict(vars(module)) for module in model.modules()] == before
    decoded = [one for one in fused if one[1] == 1]
    rows = [one[0] for one in decoded]
    assert rows == sorted(rows, reverse=True)
    assert rows[-1] < rows[0]
    assert any(one[1] > 1 for one in fused) == (most_tokens > 16)
    assert len({address for *_, address in decoded}) == 1  # rows leave in place, and no buffer grows


@pytest.mark.usefixtures("_kernels_are_ready")
def test_buffers_of_long_answers_do_not_grow(tiny_llama, fused):
    model = tiny_llama()
    with writing_passes(model, find_structure(model), 1, 2 * SPARE_SLOTS) as writer:
        fused.clear()
        continue_prompts(model, PROMPTS[:1], 2 * SPARE_SLOTS, temperature=None, ends=set(), writer=writer)
    addresses = [address for _, width, address in fused if width == 1]
    assert len(addresses) > SPARE_SLOTS
    assert len(set(addresses)) == 1


@pytest.mark.usefixtures("_kernels_are_ready")
@pytest.mark.parametrize(("rows", "is_fused"), [(1024, True), (1025, False)])
def test_batches_larger_than_the_kernel_is_faster_for_are_written_by_generate(tiny_llama, rows, is_fused):
    model = tiny_llama()
    with writing_passes(model, find_structure(model), rows, NEW) as writer:
        assert (writer is not None) == is_fused


@pytest.mark.usefixtures("_kernels_are_ready")
def test_answers_end_at_the_deadline(tiny_llama, monkeypatch):
    model = tiny_llama()
    clock = iter(range(100))
    monkeypatch.setattr(fused_writing, "perf_counter", lambda: next(clock))
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        assert written(model, writer, deadline=3.5) == [answer[:5] for answer in plain_answers(model)]


@pytest.mark.usefixtures("_kernels_are_ready")
def test_a_batch_of_own_prompts_is_repeatable(tiny_llama, tiny_tokenizer, fused):
    model = tiny_llama()
    turn = find_user_turn(tiny_tokenizer)
    (batch,) = plan_writing([], 16, 0, turn, 16)
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        fused.clear()
        first = write_documents(model, tiny_tokenizer, batch, 8, writer=writer)
        torch.manual_seed(1)
        assert write_documents(model, tiny_tokenizer, batch, 8, writer=writer) == first
    assert len({tuple(document.tokens) for document in first}) > 1
    assert fused[0][:2] == (16, len(turn.before))


@pytest.mark.usefixtures("_kernels_are_ready")
@pytest.mark.parametrize("family", ["gpt2", "gemma3_text", "mistral", "mamba", "qwen2_5_vl"])
def test_other_models_write_by_generate(family, fused):
    model = tiny_model(family)
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        assert writer is None


@pytest.mark.usefixtures("_kernels_are_ready")
def test_a_model_with_a_hook_in_one_layer_writes_by_generate(tiny_llama):
    model = tiny_llama()
    model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        assert writer is None


@pytest.mark.parametrize("worth", [0, 2**30])  # bytes of weights
def test_kernels_are_built_where_they_pay(tiny_llama, fresh_kernels, monkeypatch, worth):
    monkeypatch.setattr("tide_hf.kernels.cpu.cpp_kernels._load_kept", lambda _: False)
    built = []
    monkeypatch.setattr(warm_up, "build_kernels", lambda dtype: built.append(dtype) or False)
    monkeypatch.setattr(warm_up, "obstacle_to_build", lambda _: None)
    monkeypatch.setattr(warm_up, "WORTH_A_BUILD", worth)
    model = tiny_llama()
    with writing_passes(model, find_structure(model), len(PROMPTS), NEW) as writer:
        assert writer is None
    assert built == ([] if worth else [model.dtype])
