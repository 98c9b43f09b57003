"""Steps that start before the host has read the last pass: a pass without drafts, or the draft head's steps."""

import pytest
import torch
from draft_heads import draft_head_for
from drafters import HeadDrafter, ScriptedDrafter, use_heads
from families import VOCAB, tiny_model
from on_steps import LAYERS, NEW, OPTIONS, PROMPT, attach_captured, linear_heads, new_tokens, prompts

from tide_hf.base_model.structure import CACHE
from tide_hf.common.errors import UnsupportedOptionError
from tide_hf.engines.running_ahead import RunningAhead
from tide_hf.engines.static import StaticEngine
from tide_hf.engines.steps.step_buffers import BUCKET, SPARE_SLOTS, StepBuffers
from tide_hf.engines.steps.step_tensors import WIDEST
from tide_hf.speculation.acceptance import ExactAcceptance
from tide_hf.speculation.drafters import NoDrafter
from tide_hf.speculation.drafts import Draft
from tide_hf.speculation.policy import CostTable

FAMILIES = ("llama", "mistral", "gpt2", "bloom", "opt", "qwen2_5_vl")  # with and without positions, of all kinds


@pytest.fixture
def uploads(monkeypatch):
    """Each upload's tokens; a pass that has run ahead needs none."""
    found, upload = [], StaticEngine.upload
    monkeypatch.setattr(
        StaticEngine,
        "upload",
        lambda self, ids, *args, **kwargs: (found.append(ids), upload(self, ids, *args, **kwargs)),
    )
    return found


def without_drafts(family, routers_of=None):
    """A model on steps as on a GPU that drafts nothing, three rows, plain decoding's tokens, and steps."""
    model, batch = tiny_model(family), prompts(3, pads=2)
    expected = model.generate(**batch, **OPTIONS)
    steps = attach_captured(model, routers_of(model) if routers_of is not None else None)
    model._tide.make_drafter = NoDrafter
    return model, batch, expected, steps


@pytest.mark.parametrize("family", FAMILIES)
def test_after_the_first_pass_nothing_is_uploaded_and_no_pass_is_in_vain(family, uploads):
    model, batch, expected, steps = without_drafts(family)
    assert torch.equal(model.generate(**batch, **OPTIONS), expected)
    assert len(uploads) == 1
    assert steps.replays == steps.reads == NEW - 1
    assert model.last_exit_stats.layers_executed == 3 * LAYERS * NEW


def test_rows_that_end_leave_the_batch_and_only_the_last_ones_pass_is_in_vain(uploads):
    model, batch = tiny_model("llama"), prompts(3, pads=2)
    plain = new_tokens(model.generate(**batch, **OPTIONS))
    options = {**OPTIONS, "eos_token_id": [plain[0][9], plain[1][4], plain[2][6]]}
    expected = model.generate(**batch, **options)
    steps = attach_captured(model)
    model._tide.make_drafter = NoDrafter
    for rows in (1, 2, 3):  # those of fewer rows prepare steps, to which rows could move
        some = {name: values[-rows:] for name, values in batch.items()}
        uploads.clear()
        before, found = steps.replays, model.generate(**some, **options)
    assert torch.equal(found, expected)
    assert steps.replays - before == expected.shape[1] - PROMPT
    assert len(uploads) == 1


@pytest.mark.parametrize("option", ["return_dict_in_generate", "do_sample"])
def test_no_pass_runs_ahead_where_its_results_would_be_in_the_way(option, uploads):
    model, batch, expected, _ = without_drafts("llama", draft_head_for)
    found = model.generate(**batch, **{**OPTIONS, option: True})
    assert len(uploads) == NEW - 1
    made = use_heads(model, 0)
    uploads.clear()
    model.generate(**prompts(), **{**OPTIONS, option: True})
    assert len(uploads) == made[0].rounds
    if option == "return_dict_in_generate":
        assert torch.equal(found.sequences, expected)
        assert found[CACHE].get_seq_length() == expected.shape[1] - 1


@pytest.fixture
def paused(monkeypatch):
    """Whether drafting counts as paused, in a list; a test may change it, and draft all the same."""
    found = [False]
    monkeypatch.setattr(CostTable, "drafting_paused", property(lambda _: found[0]))
    return found


def test_a_pass_that_has_run_ahead_is_dropped_for_drafts_and_the_head_drafts_as_if_it_had_not(paused):
    model, batch = tiny_model("llama"), prompts()
    expected = model.generate(**batch, **OPTIONS)
    steps = attach_captured(model, draft_head_for(model))
    found = []
    for is_paused in (False, True):
        made, before = use_heads(model, 0, width=2, every=3), steps.replays
        paused[0] = is_paused
        assert torch.equal(model.generate(**batch, **OPTIONS), expected)
        found.append((made[0].drafted, steps.replays - before))
    (drafted, replays), (again, more) = found
    assert len(drafted) > 2
    assert again == drafted
    assert more - replays == len(drafted)  # one in vain before each draft


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt2", "bloom"])
@pytest.mark.parametrize("rows", [1, 3])
def test_any_mix_of_passes_that_run_ahead_and_drafts_gives_the_base_models_tokens(family, rows, paused):
    model, batch = tiny_model(family), prompts(rows, pads=2 if rows > 1 else 0)
    options = {**OPTIONS, "max_new_tokens": 40}
    expected = model.generate(**batch, **options)
    attach_captured(model, draft_head_for(model))
    paused[0] = True
    for every in (1, 2, 4):
        use_heads(model, 0, 3, every, new_tokens(expected), "mixed")
        assert torch.equal(model.generate(**batch, **options), expected)


class OneRowRight(ScriptedDrafter):
    """Right for the first row and wrong for the second; pauses once the first has all of its tokens."""

    def __init__(self, paused, *args):
        super().__init__(*args)
        self.paused = paused

    def draft(self, rows, limits):
        self.paused[0] = limits[0] == 0
        return [self._draft(0, limits[0]), Draft().add([] if self.paused[0] else [0] * (WIDEST - 1), "script")]


@pytest.mark.parametrize("compaction_threshold", [0.25, 1.0])
def test_passes_run_ahead_until_the_cache_is_compacted_for_holes_or_lack_of_slots(
    compaction_threshold, uploads, paused
):
    model, batch = tiny_model("llama", max_position_embeddings=1024), prompts(2)
    options = {**OPTIONS, "max_new_tokens": 2 * BUCKET - SPARE_SLOTS + BUCKET - WIDEST - PROMPT}  # as many as fit
    expected = model.generate(**batch, **options)
    routers = linear_heads(model)
    routers.config.compaction_threshold = compaction_threshold
    attach_captured(model, routers)
    model._tide.make_drafter = lambda *_: OneRowRight(paused, "right", new_tokens(expected), VOCAB, WIDEST - 1)
    assert torch.equal(model.generate(**batch, **options), expected)
    num_drafted = sum(len(ids[0]) > 1 for ids in uploads)
    assert num_drafted > options["max_new_tokens"] // WIDEST - 2
    assert 2 <= len(uploads) - num_drafted <= WIDEST + 2  # the first pass without drafts, and those after a compaction


def test_learned_positions_end_where_they_ended(uploads):
    model, options = tiny_model("gpt2", n_positions=16), {**OPTIONS, "max_new_tokens": 9}
    expected = model.generate(**prompts(), **options)
    attach_captured(model)
    model._tide.make_drafter = NoDrafter
    assert torch.equal(model.generate(**prompts(), **options), expected)
    assert len(uploads) == 1
    with pytest.raises(UnsupportedOptionError, match="learned positions"):
        model.generate(**prompts(), **{**OPTIONS, "max_new_tokens": 10})


def let_the_head_be_right(monkeypatch, answer, how_often):
    """Let the draft head draft the tokens of an answer to one prompt at `how_often` of 5 places, else its own."""
    script, draft = torch.tensor(answer), StepBuffers._draft_with

    def draft_with(self, head):
        top, scores = draft(self, head)
        place = (self.tensors.start + self.tensors.num_drafted - PROMPT + 1).clamp(max=len(script) - 1)
        return torch.where(place % 5 < how_often, script[place], top), scores

    monkeypatch.setattr(StepBuffers, "_draft_with", draft_with)


class InTurn(HeadDrafter):
    """Drafts with the head and by script, some tokens or none, in turn."""

    ROUNDS = (3, 3, 3, "script", 3, 3, 2, 2, 2, 0, 2, 2, 2, 0, 0, 0)

    def __init__(self, answer, *args):
        super().__init__(*args)
        self.script = ScriptedDrafter("mixed", [answer], VOCAB)

    def draft(self, rows, limits):
        turn = self.ROUNDS[self.rounds % len(self.ROUNDS)]
        self.rounds += 1
        if turn == "script":
            return self.script.draft(rows, limits)
        return [Draft().add(tokens, "head", 0) for tokens in self._draft_unread(0, [min(turn, limits[0])])]

    def observe(self, row, draft, accepted):
        super().observe(row, draft, accepted)
        self.script.generated[row] += len(accepted.tokens)


@pytest.mark.parametrize("in_turn", [False, True])
@pytest.mark.parametrize("how_often", [0, 3, 5])
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])  # whose embeddings are narrower
def test_draft_steps_run_ahead_and_draft_what_they_would_have_drafted(family, how_often, in_turn, paused, monkeypatch):
    model, options = tiny_model(family), {**OPTIONS, "max_new_tokens": 60}
    expected = model.generate(**prompts(), **options)
    answer = expected[0, PROMPT:].tolist()
    attach_captured(model, draft_head_for(model))
    let_the_head_be_right(monkeypatch, answer, how_often)
    may_start, found, started = RunningAhead.may_start, [], []
    for runs_ahead in (False, True):
        monkeypatch.setattr(
            RunningAhead,
            "may_start",
            lambda *args, may=runs_ahead: started.append(may and may_start(*args)) or started[-1],
        )
        made = use_heads(model, 0, width=3)
        if in_turn:
            model._tide.make_drafter = lambda _, call, engine, made=made: (
                made.append(InTurn(answer, call.prompts, engine, 0, 3)) or made[-1]
            )
        assert torch.equal(model.generate(**prompts(), **options), expected)
        found.append(made[0].drafted)
    assert found[0]
    assert found[1] == found[0]
    assert sum(started) >= len(found[0]) // 4


def test_padding_that_happens_to_be_right_is_not_accepted(uploads, monkeypatch):
    model = tiny_model("llama")
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens of the answer are equal, and so is the padding of a pass
    options = {**OPTIONS, "max_new_tokens": 60}
    expected = model.generate(**prompts(), **options)
    attach_captured(model, draft_head_for(model))
    let_the_head_be_right(monkeypatch, expected[0, PROMPT:].tolist(), 5)
    made = use_heads(model, 0, width=2)
    assert torch.equal(model.generate(**prompts(), **options), expected)
    assert len(made[0].drafted) >= 19
    assert len(uploads) <= 4  # in the first two rounds, and the last ones


class OneToken(ExactAcceptance):
    """Takes one token a round, whatever is right."""

    def limit(self, row):
        return min(1, super().limit(row))


class Unlimited(HeadDrafter):
    """Drafts as much in each round."""

    def draft(self, rows, limits):
        return super().draft(rows, [self.width])


def test_draft_steps_are_dropped_that_went_on_after_other_tokens_than_were_accepted(uploads, monkeypatch):
    model = tiny_model("llama")
    expected = model.generate(**prompts(), **OPTIONS)
    attach_captured(model, draft_head_for(model))
    let_the_head_be_right(monkeypatch, expected[0, PROMPT:].tolist(), 5)
    model._tide.make_drafter = lambda _, call, engine: Unlimited(call.prompts, engine, 0, 2)
    model._tide.make_rule = OneToken
    assert torch.equal(model.generate(**prompts(), **OPTIONS), expected)
    assert len(uploads) == NEW - 1
