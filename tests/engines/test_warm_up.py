"""`tide_warm_up`: what answers need is there before the first of them, and nothing else is changed."""

from threading import Thread

import pytest
import torch
from block_heads import routers_for
from families import tiny_model
from on_steps import OPTIONS, as_traced, attach_compiled, linear_heads, prompts, use_steps
from on_steps import attach_captured as attach_graphs

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError, UnsupportedModelError
from tide_hf.common.token_ids import left_padded
from tide_hf.engines.steps.compiled_steps import CompiledSteps
from tide_hf.engines.steps.step_buffers import WIDTHS
from tide_hf.engines.warm_up import PROMPT_LENGTHS, _drafting_by


def with_figures(routers, **agreement):
    """Routers as if a calibration had measured them."""
    record = {"exit_layers": {str(layer): {"agreement": 0.3} for layer in routers.exit_layers}}
    routers.config.calibration = record | {"block": {"agreement": 0.9, **agreement}}
    return routers


@pytest.mark.parametrize("attach", [attach_graphs, attach_compiled])
def test_answers_wait_for_nothing(attach, tiny_llama):
    model, options = tiny_llama(), {**OPTIONS, "max_new_tokens": 60}
    batches = [prompts(rows, pads=3 if rows > 1 else 0) for rows in range(1, 5)]
    expected = [model.generate(**batch, **options) for batch in batches]
    routers = with_figures(routers_for(model, 1))
    routers.config.calibration["exit_layers"].clear()  # a head that the policy turned to would be made ready then
    steps = attach(model, routers)
    assert model.tide_warm_up((rows for rows in (1, 4, 2)), max_length=200) > 0.0
    made = {(buffers.rows, kind, size) for buffers, kind, size in steps._steps}
    verify = {("verify", width) for width in WIDTHS}
    assert made == {(rows, *step) for rows in (1, 2, 4) for step in (*verify, ("draft", 1))}
    assert (
        len({buffers.cache.layers[0].keys.data_ptr() for buffers in steps._buffers.values() if buffers.rows > 1}) == 1
    )
    before = steps.warm_up.num_made
    for _ in range(3):
        for batch, answer in zip(batches, expected, strict=True):
            assert torch.equal(model.generate(**batch, **options), answer)
    assert steps.warm_up.num_made == before
    assert model.last_exit_stats.warm_up_s == 0.0
    assert steps.replays > 0


def test_prompts_of_all_lengths_are_read(tiny_llama):
    model = tiny_llama()
    steps = attach_compiled(model)
    model.tide_warm_up(max_length=1024)
    read = steps.prompts.num_compiled
    before = steps.warm_up.num_made
    for length in (4, 30, 200):
        model.generate(**prompts(1, length=length), **OPTIONS)
    assert steps.prompts.num_compiled > read
    assert steps.warm_up.num_made == before


@pytest.mark.parametrize(("lengths", "passes"), [((100, 99, 20, 20, 50), 3), ((100, 99, 98, 97, 96), 1)])
def test_prompts_of_a_batch_are_read_apart_and_together(tiny_llama, lengths, passes):
    model = tiny_llama()
    steps = attach_compiled(model)
    model.tide_warm_up(5)
    assert steps.refused is None
    read, before = steps.prompts.num_compiled, steps.warm_up.num_made
    model.generate(**left_padded([[token] * length for token, length in enumerate(lengths, start=5)]), **OPTIONS)
    assert steps.prompts.num_compiled == read + passes * 4
    assert steps.warm_up.num_made == before


@pytest.mark.parametrize(
    ("max_length", "positions", "longest"),
    [(1024, 2048, PROMPT_LENGTHS[-1]), (130, 2048, 40), (1024, 130, 40), (64, 64, 8), (5, 2048, 8)],
)
def test_prompts_leave_room_for_the_answer(tiny_llama, max_length, positions, longest):
    model, lengths = tiny_llama(max_position_embeddings=positions), []
    attach_compiled(model)
    generate = model.generate
    model.generate = lambda ids, **options: lengths.append(ids.shape[1]) or generate(ids, **options)
    model.tide_warm_up(max_length=max_length)
    assert max(lengths) == longest


def test_nothing_else_is_changed(tiny_llama):
    model = tiny_llama()
    steps = attach_compiled(model, with_figures(linear_heads(model)))
    model.generate(**prompts(), **OPTIONS)
    stats, drafter, learned = model.last_exit_stats, model._tide.make_drafter, dict(model._tide.acceptances)
    model.generation_config.max_new_tokens, model.generation_config.num_beams = 3, 2
    model.tide_warm_up(2)
    assert {("verify", width) for width in WIDTHS} <= {(k, size) for found, k, size in steps._steps if found.rows == 2}
    assert model.last_exit_stats is stats
    assert model._tide.make_drafter is drafter
    assert model._tide.acceptances == learned


def test_other_threads_draft_as_ever(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    attachment, found = model._tide, []
    attachment.make_drafter = lambda *_: "theirs"
    with _drafting_by(attachment, lambda *_: "ours"):
        thread = Thread(target=lambda: found.append(attachment.make_drafter()))
        thread.start()
        thread.join()
        found.append(attachment.make_drafter())
    assert found == ["theirs", "ours"]
    assert attachment.make_drafter() == "theirs"


def test_the_engine_is_that_of_the_calls(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=False)
    steps = use_steps(model, CompiledSteps(as_traced))
    assert model.tide_warm_up() == 0.0  # eager
    assert model.tide_warm_up(engine="eager") == 0.0
    assert steps.warm_up.num_made == 0
    assert model.tide_warm_up(engine="compiled") > 0.0
    assert {(kind, size) for _, kind, size in steps._steps} == {("verify", width) for width in WIDTHS}
    with pytest.raises(ConfigurationError, match="unknown engine: got 'fast'"):
        model.tide_warm_up(engine="fast")


@pytest.mark.parametrize("rows", [0, -1, True, 1.5, "8", (), (1, 0), (2, "4"), None])
def test_rows_that_are_none(tiny_llama, rows):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    with pytest.raises(ConfigurationError, match=r"rows makes no sense: got .*\. Expected a whole number"):
        model.tide_warm_up(rows)


@pytest.mark.parametrize("max_length", [0, 1.5, "many", None])
def test_lengths_that_are_none(tiny_llama, max_length):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    with pytest.raises(ConfigurationError, match=r"max_length makes no sense: got"):
        model.tide_warm_up(max_length=max_length)


def test_models_that_cannot_be_rolled_back_are_refused():
    model = TIDEModelForCausalLM.attach(tiny_model("mamba"), mode="post_hoc", engine="compiled")
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state"):
        model.tide_warm_up()
