"""A calibration's time budget, by a clock that the work itself moves, on machines of several speeds."""

import pytest
from calibrations import OPTIONS, small, texts

from tide_hf import calibration
from tide_hf.calibration import draft_head_training as draft_head
from tide_hf.calibration import fused_writing, heads, pipeline, text, training
from tide_hf.calibration.arguments import Settings
from tide_hf.calibration.states import StateReader
from tide_hf.calibration.work_folder import WorkFolder
from tide_hf.common import progress, timing

OPTIONS = OPTIONS | {"samples": 160, "exit_strategy": "eagle3"}
LOGITS, READING, TRAINING = 0.01, 0.002, 0.05  # seconds a position, a position, and a step of training


class Clock:
    """A clock that moves by what the stages do, `slowness` times as much as on a machine with nothing else to do."""

    def __init__(self):
        self.now, self.slowness = 1000.0, 1.0

    def __call__(self):
        return self.now

    def moved_by(self, function, seconds):
        def moves(*args, **kwargs):
            self.now += self.slowness * seconds(*args, **kwargs)
            return function(*args, **kwargs)

        return moves


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    for module in (calibration, fused_writing, pipeline, text, training, timing, progress):
        monkeypatch.setattr(module, "perf_counter", clock)
    monkeypatch.setattr(heads.time, "perf_counter", clock)

    def moves(owner, name, seconds):
        monkeypatch.setattr(owner, name, clock.moved_by(getattr(owner, name), seconds))

    moves(pipeline, "write_documents", lambda *_: 4.0)
    moves(StateReader, "read", lambda _, documents, rows: READING * sum(len(documents[row].tokens) for row in rows))
    moves(pipeline, "top_tokens", lambda _, states: LOGITS * len(states))
    moves(pipeline, "decide", lambda batch, routers, _: LOGITS * int(batch.counted.sum()) * len(routers.exit_layers))
    moves(pipeline, "fit_router", lambda _, __, splits, *___: LOGITS * sum(map(len, splits)))
    moves(pipeline, "draft_agreement", lambda _, states, *__: LOGITS * len(states))
    moves(heads, "distillation_loss", lambda *_: TRAINING)
    moves(draft_head.DraftHeadTrainer, "_step", lambda *_: TRAINING)
    moves(draft_head.DraftHeadStage, "_drafts", lambda stage, split, _: LOGITS * stage.store.num_counted(split))
    return clock


@pytest.mark.parametrize("slowness", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("dataset", [None, texts(160)], ids=["own text", "data"])
def test_the_budget_is_held_on_machines_of_all_speeds(parts, clock, dataset, slowness):
    clock.slowness, started = slowness, clock.now
    record = small(*parts, dataset, **OPTIONS, max_minutes=1).config.calibration
    assert clock.now - started <= 1.1 * 60
    assert record["seconds"] == pytest.approx(clock.now - started, abs=0.1)
    assert record["num_documents"] >= pipeline.FEWEST_DOCUMENTS
    is_cut = any("of text" in cut or "documents" in cut for cut in record["cut_short"])
    assert (slowness > 1) <= is_cut <= (slowness >= 1)


def test_it_says_at_the_start_how_long_it_takes(parts, clock, capsys):
    options = OPTIONS | {"progress": True, "exit_strategy": "linear"}
    small(*parts, **options, max_minutes=None)
    says = "This will take about 4 minutes: a batch of text takes 4 s, and text 35% of the time."
    assert says in capsys.readouterr().err
    record = small(*parts, **options, max_minutes=1).config.calibration
    assert record["cut_short"][0] == "16 of 21 batches of text"  # no batch begins that would end too late
    says = "This will take about 1 minutes, or 4 minutes without a limit; less text is written within max_minutes"
    assert says in capsys.readouterr().err


@pytest.fixture
def open_options(monkeypatch):
    """Options of a calibration whose number of documents time decides; without a limit it has 32."""
    monkeypatch.setattr(text, "USUAL_SAMPLES", 32)
    return OPTIONS | {"samples": None, "exit_strategy": "linear"}


def test_time_decides_how_much_text_is_written(parts, clock, open_options, capsys):
    whole, limited = (small(*parts, **open_options, max_minutes=minutes).config.calibration for minutes in (None, 2))
    assert whole["num_documents"] <= 32
    assert limited["num_documents"] >= 48
    assert limited["seconds"] <= 1.1 * 120
    assert whole["cut_short"] == limited["cut_short"] == []
    begun = small(*parts, **open_options | {"progress": True}, max_minutes=0.5).config.calibration
    assert begun["cut_short"][0] == "3 of 5 batches of text"
    assert "This will take about 0 minutes: a batch of text takes 4 s, and text 35%" in capsys.readouterr().err


def test_text_that_time_decides_on_is_resumed_with_another_limit(parts, clock, open_options, tmp_path, monkeypatch):
    write, written = pipeline.write_documents, []

    def interrupted(*args):
        if len(written) == 7:
            raise KeyboardInterrupt
        written.append(write(*args))
        return written[-1]

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_documents", interrupted)
        with pytest.raises(KeyboardInterrupt):
            small(*parts, **open_options, max_minutes=2, output_dir=tmp_path)
    record = small(*parts, **open_options, max_minutes=None, output_dir=tmp_path).config.calibration
    assert record["num_documents"] == sum(map(len, written)) > 32
    assert record["resumed_units"] == 5  # of the batches that are written without a limit


def test_an_open_plan_begins_with_the_usual_one(tiny_tokenizer, open_options):
    usual, planned = (
        text.load_documents(None, tiny_tokenizer, Settings(samples=samples, batch_size=8)) for samples in (32, None)
    )
    assert planned.prompts[: planned.num_usual] == usual.prompts
    assert usual.num_usual == len(usual.prompts)
    prompts = [tuple(prompt) for batch in planned.prompts for prompt in batch.prompts]
    assert len(set(prompts)) == len(prompts) == 24 * text.MOST_ROUNDS
    assert sum(batch.num_own for batch in planned.prompts) == 8 * text.MOST_ROUNDS
    assert len({batch.seed for batch in planned.prompts}) == len(planned.prompts)


def test_states_of_text_that_time_decides_on_take_half_the_disk(parts, clock, open_options, monkeypatch):
    free = {"bytes": 2**40}
    monkeypatch.setattr(WorkFolder, "free_bytes", property(lambda _: free["bytes"]))
    monkeypatch.setattr(WorkFolder, "check_space", lambda _, needed: free.update(needed=needed))
    whole = small(*parts, **open_options, max_minutes=2).config.calibration["num_documents"]
    free["bytes"] = free["needed"]
    record = small(*parts, **open_options, max_minutes=2).config.calibration
    assert 10 <= record["num_documents"] < 0.7 * whole
    assert free["needed"] <= free["bytes"] / 2
    given = small(*parts, **open_options | {"samples": 160}, max_minutes=2).config.calibration
    assert given["num_documents"] >= whole  # a user who says how many is told if the disk is full


@pytest.mark.parametrize(("agreement", "is_useless"), [(0.1, True), (0.4, False)])
def test_a_head_that_the_policy_would_not_draft_from_is_called_useless(caplog, agreement, is_useless):
    calibration._warn_if_useless({"agreement": agreement, "parameters": 1e7}, int(1.35e8))
    message = "The draft head is not worth loading: 10% of its first drafts are right"
    assert [message in text for text in caplog.messages] == [True] * is_useless
