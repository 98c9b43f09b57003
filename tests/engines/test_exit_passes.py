"""`early_exit` with exit layers on steps of fixed shape: the eager engine's tokens and depths, from layers that ran."""

import logging

import pytest
import torch
from families import LAYERS, SDPA, slow_but, tiny_model
from on_steps import (
    FEW,
    OPTIONS,
    PROMPT,
    attach_captured,
    attach_compiled,
    new_tokens,
    prompts,
    steps_of,
)

from tide_hf import TIDERouters
from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import ConfigurationError, UnsupportedOptionError
from tide_hf.engines.static import StaticEngine
from tide_hf.engines.steps import step_buffers, step_store
from tide_hf.engines.steps.exit_steps import WINDOW

LONG = {**OPTIONS, "max_new_tokens": 2 * WINDOW + 5}
MODES = ("early_exit", "self_speculative")
ATTACH = {"compiled": attach_compiled, "captured": attach_captured}


def mixed_routers(model):
    """Routers whose scores lie on both sides of 0.5, and exit heads that change the state."""
    routers = TIDERouters.for_model(model, exit_layers=[1, 2, 3], exit_strategy="linear")
    torch.manual_seed(1)
    for parameter in routers.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return routers


def attached(family="llama", attach=attach_compiled, **settings):
    model = tiny_model(family, attention="sdpa" if family in SDPA else "eager")
    attach(model, mixed_routers(model), mode="early_exit", **{"exit_threshold": 0.5, **settings})
    return model


def both(model, batch, **options):
    """What the eager engine and the steps give: answers, and statistics."""
    found = []
    for engine in ("eager", "compiled"):
        answer = model.generate(**batch, **options, tide_engine=engine)
        assert model.last_exit_stats.engine == engine
        found.append((answer, model.last_exit_stats))
    return found


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize(("rows", "family"), [*slow_but(FEW, SDPA, 1), *slow_but(("llama", "gpt2"), SDPA, 3)])
def test_every_family_exits_as_in_the_eager_engine(family, rows, engine):
    model = attached(family, ATTACH[engine])
    (expected, eager), (found, stats) = both(model, prompts(rows, pads=rows - 1), **LONG)
    assert torch.equal(found, expected)
    assert stats.per_token == eager.per_token
    assert stats.sources == eager.sources
    assert len({depth for row in stats.per_token for depth in row}) > 1
    full_windows = len(expected) * LAYERS * (LONG["max_new_tokens"] // WINDOW)
    assert stats.layers_executed <= eager.layers_executed + full_windows  # the eager engine's windows have no end
    assert (stats.rounds, stats.drafted) == (0, 0)


def test_the_tokens_are_those_of_post_hoc():
    model = attached()
    expected = model.generate(**prompts(), **LONG, tide_mode="post_hoc", exit_threshold=0.5)
    assert torch.equal(model.generate(**prompts(), **LONG), expected)


@pytest.mark.parametrize("criterion", ["router", "confidence", "fixed"])
@pytest.mark.parametrize("min_layers", [1, 2])
def test_options_of_exits_hold_on_steps(criterion, min_layers):
    model = attached(exit_threshold=0.05 if criterion == "confidence" else 0.5)
    (expected, eager), (found, stats) = both(model, prompts(), **LONG, exit_criterion=criterion, min_layers=min_layers)
    assert torch.equal(found, expected)
    assert stats.per_token == eager.per_token
    assert min(map(min, stats.per_token)) >= min_layers
    if criterion == "fixed":
        assert stats.exits_per_layer == {min_layers: LONG["max_new_tokens"] - 1}


def test_layers_behind_an_exit_do_not_run():
    model = attached(exit_threshold=0.0)
    model.generate(**prompts(), **OPTIONS)
    passes = OPTIONS["max_new_tokens"] - 1
    assert model.last_exit_stats.layers_executed == LAYERS + passes  # the others were owed to a token that never came
    model.generate(**prompts(), **LONG)
    full = (LONG["max_new_tokens"] - 1) // (WINDOW - 1)  # windows, which catch up for all of their tokens at once
    assert model.last_exit_stats.layers_executed == LAYERS + LONG["max_new_tokens"] - 1 + full * (LAYERS - 1)


def test_without_exits_a_pass_is_one_segment_and_the_host_decides_nothing():
    model = attached(attach=attach_captured, exit_threshold=2.0)
    expected = model.generate(**prompts(), **OPTIONS, tide_engine="eager")
    steps, passes = steps_of(model), OPTIONS["max_new_tokens"] - 1
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert (steps.replays, steps.reads) == (passes, passes)


def test_the_host_waits_once_for_each_segment():
    model = attached(attach=attach_captured, exit_threshold=0.0)
    model.generate(**prompts(), **OPTIONS)
    steps, passes = steps_of(model), OPTIONS["max_new_tokens"] - 1
    assert steps.reads == 2 * passes  # whether the token exits, and which one it is
    assert steps.replays == 3 * passes  # the segment, the exit head, the logits


@pytest.mark.parametrize("threshold", [0.0, 0.5])
def test_a_returned_cache_is_as_the_eager_engine_leaves_it(threshold):
    model, options = attached(exit_threshold=threshold), {**OPTIONS, "return_dict_in_generate": True}
    (expected, _), (found, _) = both(model, prompts(2, pads=1), **options, output_logits=True)
    for ours, theirs in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(found[CACHE].layers, expected[CACHE].layers, strict=True):
        torch.testing.assert_close(ours.keys, theirs.keys, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(ours.values, theirs.values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("engine", ATTACH)
@pytest.mark.parametrize("has_smaller", [False, True])
def test_rows_that_end_leave_the_batch(engine, has_smaller, monkeypatch):
    model, move_to, moves = attached(attach=ATTACH[engine]), StaticEngine._move_to, []
    monkeypatch.setattr(StaticEngine, "_move_to", lambda *given: moves.append(given) or move_to(*given))
    for rows in (1, 2) if has_smaller else ():  # whose buffers a batch can move to, if they have its steps
        for threshold in (0.0, 0.5, 1.0):
            model.generate(**prompts(rows, pads=rows - 1), **LONG, exit_threshold=threshold)
    batch = prompts(3, pads=1)
    (expected, _), _ = both(model, batch, **LONG)
    moves.clear()
    for ends in new_tokens(expected)[1][2 : WINDOW // 2]:  # within windows of several lengths
        (expected, eager), (found, stats) = both(model, batch, **{**LONG, "eos_token_id": ends})
        assert torch.equal(found, expected)
        assert stats.per_token == eager.per_token
        assert len({len(row) for row in stats.per_token}) > 1
    assert bool(moves) == has_smaller


def test_what_passes_cost_that_end_early_is_not_taken_for_the_cost_of_full_ones():
    model = attached()
    for _ in range(2):  # steps are prepared in the first
        model.generate(**prompts(), **OPTIONS)
    assert not any(table.ready for table in model._tide.costs.values())


def test_sampling_and_processors_choose_as_in_the_eager_engine():
    model, options = attached(), {"do_sample": True, "temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3}
    answers = []
    for engine in ("eager", "compiled"):
        torch.manual_seed(3)
        answers.append(model.generate(**prompts(2), **{**LONG, **options}, tide_engine=engine))
    assert torch.equal(*answers)


def test_long_answers_move_to_larger_buffers(monkeypatch):
    for name, slots in {"BUCKET": 8, "FIRST_SLOTS": 32, "SPARE_SLOTS": 8}.items():
        monkeypatch.setattr(step_buffers, name, slots)
    model = attached()
    (expected, eager), (found, stats) = both(model, prompts(), **{**OPTIONS, "max_new_tokens": 90})
    assert torch.equal(found, expected)
    assert stats.per_token == eager.per_token
    assert len(steps_of(model)._buffers) > 1


def one_token():
    return {"input_ids": prompts()["input_ids"][:, :1]}


@pytest.mark.parametrize(
    ("batch", "options", "reason"),
    [
        (prompts(), {"tide_mode": "post_hoc"}, "post_hoc runs all layers"),
        (one_token(), {}, "tokens may exit in the prompt"),
        (prompts(2), {"eos_token_id": 5, "return_dict_in_generate": True}, "rows that have ended stay in the batch"),
        (prompts(), {"output_hidden_states": True}, "early_exit' cannot give what this call asks for"),
    ],
    ids=["post_hoc", "one token", "rows stay", "hidden states"],
)
def test_what_steps_cannot_run_is_run_eagerly_and_the_log_says_why(batch, options, reason, caplog):
    model = attached()
    with caplog.at_level(logging.WARNING, logger="tide_hf"):
        model.generate(**batch, **{**OPTIONS, **options})
    assert reason in caplog.text
    assert model.last_exit_stats.engine == "eager"
    assert steps_of(model).replays == 0


def test_a_call_runs_eagerly_while_another_call_holds_the_steps(caplog):
    model = attached()
    expected = model.generate(**prompts(), **OPTIONS)
    with steps_of(model).lock, caplog.at_level(logging.WARNING, logger="tide_hf"):
        assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert model.last_exit_stats.engine == "eager"
    assert "engine='compiled' runs eagerly: another call holds the steps" in caplog.text


def test_a_call_whose_buffers_do_not_fit_is_refused(monkeypatch):
    model = attached()
    monkeypatch.setattr(step_store, "free_memory", lambda _: 0)
    message = r"early_exit cannot run on steps of fixed shape here: got no memory .* Pass tide_engine='eager'"
    with pytest.raises(UnsupportedOptionError, match=message):
        model.generate(**prompts(), **OPTIONS)
    assert model.generate(**prompts(), **OPTIONS, tide_engine="eager").shape[1] == PROMPT + OPTIONS["max_new_tokens"]


def test_a_batch_without_rows_is_refused_before_anything_is_made_for_it():
    with pytest.raises(ConfigurationError, match="there is no prompt to continue: got a batch of 0 rows"):
        attached().generate(torch.zeros((0, PROMPT), dtype=torch.long), **OPTIONS)


def test_drafts_and_exits_have_buffers_of_their_own():
    model = attached()
    expected = [model.generate(**prompts(), **OPTIONS, tide_engine="eager", tide_mode=mode) for mode in MODES]
    for _ in range(2):
        found = [model.generate(**prompts(), **OPTIONS, tide_mode=mode) for mode in MODES]
        assert all(map(torch.equal, found, expected))
