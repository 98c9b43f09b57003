"""`engine="auto"`: warm up where it pays, as measured; pure functions, a small file, and the choice in `generate`."""

import json

import pytest
import torch
from drafters import use_drafter

from tide_hf import TIDEModelForCausalLM
from tide_hf.decoding.engine_choice import (
    GUESSED_SHARE,
    GUESSED_WARM_UP,
    MOST_RECORDS,
    EngineChooser,
    EngineRecords,
    EngineTimes,
    choose_engine,
    key_of,
)
from tide_hf.engines.dispatch import call_key, candidate_for
from tide_hf.steps.compiled_steps import CompiledSteps

KNOWN = EngineTimes(eager_ms=20.0, warmed_ms=10.0, warm_up_s=5.0)  # pays after 500 tokens


def chosen(times=KNOWN, candidate="compiled", ahead=0, before=0, is_warm=False):
    return choose_engine(candidate, times, tokens_ahead=ahead, tokens_before=before, is_warm=is_warm)


def test_a_warm_up_is_paid_for_by_the_answer_ahead_or_by_those_before():
    assert chosen(ahead=499, before=499) == "eager"
    assert chosen(ahead=500) == "compiled"
    assert chosen(before=500) == "compiled"
    assert chosen(is_warm=True) == "compiled"


def test_what_is_no_faster_is_not_chosen_however_long_the_answer_is():
    slower = EngineTimes(eager_ms=20.0, warmed_ms=19.5, warm_up_s=0.1)
    assert chosen(slower, ahead=10**6) == "eager"
    assert chosen(slower, is_warm=True) == "eager"
    assert chosen(candidate=None, is_warm=True) == "eager"


@pytest.mark.parametrize("candidate", ["compiled", "cuda_graph"])
def test_what_is_not_measured_is_guessed(candidate):
    assert chosen(EngineTimes(), candidate, ahead=10**6) == "eager"  # nothing to compare with
    pays = GUESSED_WARM_UP[candidate] / (0.020 * (1 - GUESSED_SHARE[candidate]))
    assert chosen(EngineTimes(eager_ms=20.0), candidate, ahead=0.99 * pays) == "eager"
    assert chosen(EngineTimes(eager_ms=20.0), candidate, ahead=1.01 * pays) == candidate


def test_a_chooser_starts_eagerly_changes_and_comes_back(tmp_path):
    chooser = EngineChooser(EngineRecords(tmp_path / "engines.json"))
    engines = []
    for _ in range(30):
        engine = chooser.choose("compiled", "key", 1000, is_warm="compiled" in engines)
        engines.append(engine)
        plain_ms, warm_up = (10.0, 0.0) if engine == "eager" else (11.0, 3.0)  # no faster after all
        chooser.observe(engine, "key", 2000, plain_ms, warm_up)
    assert engines.count("compiled") == 1  # tried once
    assert engines[0] == engines[-1] == "eager"
    assert EngineRecords(tmp_path / "engines.json").read("key") == EngineTimes(10.0, 11.0, 3.0)
    assert EngineChooser(EngineRecords(tmp_path / "engines.json")).choose("compiled", "key", 10**6, False) == "eager"


def test_short_answers_are_expected_to_be_short(tmp_path):
    chooser = EngineChooser(EngineRecords(tmp_path / "engines.json"))
    chooser.observe("eager", "key", 10, 20.0, 0.0)
    chooser.times["key"] = KNOWN
    assert chooser.choose("compiled", "key", 5000, is_warm=False) == "eager"


def test_what_hardly_differs_is_not_written_again(tmp_path):
    records = EngineRecords(tmp_path / "engines.json")
    chooser = EngineChooser(records)
    for eager_ms, kept in ((20.0, 20.0), (21.0, 20.0), (24.0, 24.0), (None, 24.0), (20.0, 20.0)):
        chooser.observe("eager", "key", 1, eager_ms, 0.0)
        assert records.read("key") == EngineTimes(eager_ms=kept)


def test_a_call_without_warm_up_leaves_what_one_took(tmp_path):
    chooser = EngineChooser(EngineRecords(tmp_path / "engines.json"))
    chooser.observe("compiled", "key", 1, 11.0, 3.0)
    chooser.observe("compiled", "key", 1, 12.0, 0.0)
    chooser.observe("compiled", "key", 1, None, 0.0)
    assert chooser.times["key"] == EngineTimes(warmed_ms=12.0, warm_up_s=3.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2]",
        "{" * 10000,
        '{"key": 3}',
        '{"key": {"eager_ms": "20", "warmed_ms": -1, "warm_up_s": true}}',
        '{"key": {"eager_ms": NaN, "warmed_ms": Infinity, "warm_up_s": 1e300}}',
        '{"key": {"eager_ms": 0, "warmed_ms": 0.0, "warm_up_s": 1e7}}',
        '{"key": {"eager_ms": 20}}' + " " * 2**20,
    ],
    ids=lambda text: text[:40],
)
def test_odd_records_are_ignored_and_written_over(tmp_path, text):
    path = tmp_path / "engines.json"
    path.write_text(text)
    records = EngineRecords(path)
    assert records.read("key") == EngineTimes()
    records.write("key", KNOWN)
    assert records.read("key") == KNOWN


def test_records_are_bounded_and_a_closed_folder_is_no_error(tmp_path):
    records = EngineRecords(tmp_path / "engines.json")
    (tmp_path / "engines.json").write_text(json.dumps({str(i): {"eager_ms": 1.0} for i in range(MOST_RECORDS)}))
    records.write("new", KNOWN)
    kept = json.loads((tmp_path / "engines.json").read_text())
    assert len(kept) == MOST_RECORDS
    assert records.read("new") == KNOWN
    assert records.read("0") == EngineTimes()
    assert {path.name for path in tmp_path.iterdir()} <= {"engines.json", "engines.json.lock"}
    (tmp_path / "file").write_text("")
    EngineRecords(tmp_path / "file" / "engines.json").write("key", KNOWN)


def test_generate_changes_engine_where_it_pays(tiny_llama, tmp_path):
    model = tiny_llama()
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    ids = torch.arange(5, 13)[None]
    expected = model.generate(ids, **options)
    TIDEModelForCausalLM.attach(model, engine="auto", pack_weights=False)
    attachment = model._tide
    steps = attachment.compiled_steps = CompiledSteps(lambda graph, _inputs: graph)
    chooser = attachment.chooser = EngineChooser(EngineRecords(tmp_path / "engines.json"))
    key = call_key(model, attachment, 1, candidate_for(model))
    use_drafter(model, "right", [expected[0, 8:].tolist()], width=0)
    assert torch.equal(model.generate(ids, **options), expected)
    assert chooser.tokens_before == 16
    assert chooser.times[key].eager_ms == attachment.costs_of(1, "eager").plain
    assert chooser.times[key].eager_ms is not None
    assert steps.replays == 0
    chooser.times[key] = EngineTimes(eager_ms=1e6, warmed_ms=1.0, warm_up_s=1.0)
    assert torch.equal(model.generate(ids, **options), expected)
    assert steps.replays > 0
    assert chooser.times[key].warmed_ms == attachment.costs_of(1, "compiled", steps.widths).plain
    assert chooser.times[key].warmed_ms is not None


def test_the_key_tells_apart_what_takes_another_time(tiny_llama):
    model = TIDEModelForCausalLM.attach(tiny_llama())
    keys = {call_key(model, model._tide, rows, candidate) for rows in (1, 2) for candidate in ("compiled", None)}
    model.to(torch.bfloat16)
    keys.add(call_key(model, model._tide, 1, "compiled"))
    assert len(keys) == 5
    assert key_of(a=1) != key_of(a=2)
