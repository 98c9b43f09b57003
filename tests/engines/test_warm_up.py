"""`tide_warm_up`: it prepares all that answers need and changes nothing else; and its progress line."""

import io
from functools import partial

import pytest
import torch
from draft_heads import draft_head_for
from families import longrope, tiny_model
from on_steps import OPTIONS, attach_captured, attach_compiled, linear_heads, prompts, use_steps
from recorded import as_it_is
from transformers.utils import logging

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import ConfigurationError, UnsupportedModelError
from tide_hf.common.token_ids import left_padded
from tide_hf.engines.steps.step_store import CapturedSteps
from tide_hf.engines.steps.step_tensors import WIDTHS
from tide_hf.engines.warm_up import PROMPT_LENGTHS, WarmUp


def as_calibrated(routers, **agreement):
    """Routers with the record of a calibration."""
    record = {"exit_layers": {str(layer): {"agreement": 0.3} for layer in routers.exit_layers}}
    routers.config.calibration = record | {"draft_head": {"agreement": 0.9, **agreement}}
    return routers


@pytest.mark.parametrize("attach", [attach_captured, attach_compiled])
def test_answers_prepare_no_steps_after_it(attach, tiny_llama):
    model, options = tiny_llama(), {**OPTIONS, "max_new_tokens": 60}
    batches = [prompts(rows, pads=3 if rows > 1 else 0) for rows in range(1, 5)]
    expected = [model.generate(**batch, **options) for batch in batches]
    routers = as_calibrated(draft_head_for(model))
    # The policy drafts with no other head, whose steps would not be prepared.
    routers.config.calibration["exit_layers"].clear()
    steps = attach(model, routers)
    assert model.tide_warm_up((rows for rows in (1, 4, 2)), max_length=200) > 0.0
    made = {(buffers.rows, kind, size) for buffers, kind, size in steps._steps}
    drafting = (1, 2, 4) if attach is attach_captured else (2, 4)  # for a single row, a head runs apart from steps
    assert made == {
        *((rows, "verify", width) for rows in (1, 2, 4) for width in WIDTHS),
        *((rows, "draft", 0) for rows in drafting),
    }
    before = steps.warm_up.num_prepared
    for batch, answer in zip(batches, expected, strict=True):
        assert torch.equal(model.generate(**batch, **options), answer)
    assert steps.warm_up.num_prepared == before
    assert model.last_exit_stats.warm_up_s == 0.0
    assert steps.replays > 0


@pytest.mark.parametrize("rows", [1, 2])
def test_exits_at_exit_layers_prepare_hardly_a_step_after_it(tiny_llama, rows):
    model = tiny_llama()
    steps = attach_compiled(model, linear_heads(model), mode="early_exit")
    model.tide_warm_up(rows, max_length=200)
    before = steps.warm_up.num_prepared
    for exit_threshold in (0.0, 1.0):
        model.generate(**prompts(rows), **OPTIONS, exit_threshold=exit_threshold)
        assert model.last_exit_stats.engine == "compiled"
    assert steps.warm_up.num_prepared == before


@pytest.mark.parametrize(
    ("lengths", "passes"), [((30,), 1), ((200,), 1), ((100, 99, 20, 20, 50), 3), ((100, 99, 98, 97, 96), 1)]
)
def test_prefill_is_compiled_for_prompts_and_for_batches_in_one_pass_and_in_groups(tiny_llama, lengths, passes):
    model = tiny_llama()
    steps = attach_compiled(model)
    model.tide_warm_up(len(lengths), max_length=1024)
    assert steps.refused is None
    read, before = steps.prompts.num_compiled, steps.warm_up.num_prepared
    model.generate(**left_padded([[token] * length for token, length in enumerate(lengths, start=5)]), **OPTIONS)
    assert steps.prompts.num_compiled == read + passes * 4
    assert steps.warm_up.num_prepared == before


@pytest.mark.parametrize(
    ("max_length", "positions", "longest"),
    [(1024, 2048, PROMPT_LENGTHS[-1]), (130, 2048, 40), (1024, 130, 40), (5, 2048, 8)],
)
def test_its_prompts_leave_room_for_the_answer(tiny_llama, max_length, positions, longest):
    model, lengths = tiny_llama(max_position_embeddings=positions), []
    attach_captured(model)
    generate = model.generate
    model.generate = lambda ids, **options: lengths.append(ids.shape[1]) or generate(ids, **options)
    model.tide_warm_up(max_length=max_length)
    assert max(lengths) == longest


def test_its_answers_end_before_the_rotary_embedding_changes():
    """Beyond, the eager loop of transformers decodes, for which there is nothing to warm up."""
    model = tiny_model("llama", rope_parameters=longrope(40))
    steps = attach_captured(model)
    assert model.tide_warm_up() > 0.0
    assert {("verify", width) for width in WIDTHS} <= {(kind, size) for _, kind, size in steps._steps}


@pytest.mark.parametrize(
    "settings",
    [
        {"max_time": 1e-9},
        {"stop_strings": ["a"]},
        {"exponential_decay_length_penalty": (3, 1.2)},
        {"cache_implementation": "static"},
        {"output_attentions": True, "output_hidden_states": True},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_it_does_not_depend_on_the_model_s_generation_config(tiny_llama, settings):
    model = tiny_llama()
    steps = attach_captured(model)
    model.generation_config.update(**settings)
    model.tide_warm_up(2, max_length=100)
    assert {("verify", width) for width in WIDTHS} <= {(kind, size) for _, kind, size in steps._steps}
    assert all(getattr(model.generation_config, name) == value for name, value in settings.items())


def test_it_changes_neither_statistics_nor_drafter_nor_acceptance(tiny_llama):
    model = tiny_llama()
    attach_captured(model, as_calibrated(linear_heads(model)))
    model.generate(**prompts(), **OPTIONS)
    stats, drafter, learned = model.last_exit_stats, model._tide.make_drafter, dict(model._tide.acceptances)
    model.generation_config.max_new_tokens, model.generation_config.num_beams = 3, 2
    model.tide_warm_up(2)
    assert model.last_exit_stats is stats
    assert model._tide.make_drafter is drafter
    assert model._tide.acceptances == learned


def test_it_warms_up_the_engine_of_the_calls(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama(), pack_weights=False)
    steps = use_steps(model, CapturedSteps(as_it_is, None))
    assert model.tide_warm_up() == 0.0  # eager
    assert model.tide_warm_up(engine="compiled") > 0.0
    assert {(kind, size) for _, kind, size in steps._steps} == {("verify", width) for width in WIDTHS}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *(({"rows": rows}, r"rows makes no sense: got .*\. Expected a whole number") for rows in (0, True, "8", ())),
        *(({"rows": rows}, r"rows makes no sense: got .*, or several of them") for rows in (1.5, (1, 0))),
        ({"max_length": "many"}, r"max_length makes no sense: got"),
        ({"engine": "fast"}, "unknown engine: got 'fast'"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(tiny_llama, arguments, message):
    model = TIDEModelForCausalLM.attach(tiny_llama(), engine="compiled")
    with pytest.raises(ConfigurationError, match=message):
        model.tide_warm_up(**arguments)


def test_models_with_a_recurrent_state_are_refused():
    model = TIDEModelForCausalLM.attach(tiny_model("mamba"), mode="post_hoc", engine="compiled")
    with pytest.raises(UnsupportedModelError, match="keeps a recurrent state"):
        model.tide_warm_up()


@pytest.fixture
def terminal(monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(logging, "tqdm", partial(logging.tqdm, file=terminal))
    monkeypatch.setattr(logging, "_tqdm_active", True)
    return terminal


def test_the_progress_line_counts_and_ends_with_the_outer_call(terminal):
    warm_up = WarmUp("Capturing steps", "steps")
    with warm_up.shown():
        warm_up.add(0, 0.0, 10_000_000)
        assert terminal.getvalue() == ""  # memory alone is nothing to wait for
        for _ in range(2):
            with warm_up.shown():
                warm_up.add(1, 0.625, 15_000_000)
    shown = terminal.getvalue()
    assert shown.endswith("\rCapturing steps: 2 steps, 1.2 s, 40 MB\n")
    assert shown.count("\n") == 1
    with warm_up.shown():
        pass
    assert terminal.getvalue() == shown


@pytest.mark.parametrize(
    ("is_terminal", "is_enabled", "line"),
    [(True, True, "\rCompiling kernels ..."), (False, True, ""), (True, False, "")],
)
def test_a_line_that_is_due_is_drawn_at_once_on_a_terminal_unless_disabled(
    terminal, monkeypatch, is_terminal, is_enabled, line
):
    terminal.isatty = lambda: is_terminal
    monkeypatch.setattr(logging, "_tqdm_active", is_enabled)
    with pytest.raises(KeyError), WarmUp("Compiling kernels", "kernels").shown(is_due=True):
        raise KeyError(shown := terminal.getvalue())
    assert shown.startswith(line)
    assert "0" not in shown
    assert terminal.getvalue().endswith("\r") == bool(line)  # erased
    assert "\n" not in terminal.getvalue()
    assert bool(shown) == bool(line)
