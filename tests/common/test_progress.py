"""Progress of a calibration's steps in a log, of a wait, and timing of short functions."""

import io

import pytest
from rich.console import Console

from tide_hf.common import timing
from tide_hf.common.progress import Steps, waiting


def test_a_log_gets_the_beginning_of_a_step_and_its_progress_once_a_minute(capsys, monkeypatch):
    clock = iter([0, 40, 70, 80, 130])
    monkeypatch.setattr("tide_hf.common.progress.perf_counter", lambda: next(clock))
    with Steps(enabled=True) as steps:
        assert list(steps.track("Writing text", "abcd", 4)) == list("abcd")
    assert capsys.readouterr().err.splitlines() == [
        "Writing text: 0 of 4",
        "Writing text: 2 of 4",
        "Writing text: 4 of 4",
    ]
    with Steps(enabled=False) as steps:
        list(steps.track("Writing text", "abcd", 4))
    assert capsys.readouterr().err == ""


def test_the_shortest_repeat_is_timed_and_the_first_call_is_not(monkeypatch):
    calls, clock = [], iter([10.0, 15.0, 20.0, 23.0, 30.0, 34.0])
    monkeypatch.setattr(timing, "perf_counter", lambda: next(clock))
    assert timing.least_seconds(lambda: calls.append(1), 3) == 3.0
    assert len(calls) == 4


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_wait_is_shown_while_it_lasts_and_leaves_only_a_line_elsewhere(is_terminal):
    console = Console(file=io.StringIO(), force_terminal=is_terminal, width=80)
    with waiting(console, "Downloading [it]"):
        pass
    written = console.file.getvalue()
    if is_terminal:
        assert "Downloading [it]" in written
        assert "0:00:00" in written
        assert written.endswith("\x1b[2K")  # erased
    else:
        assert written == "Downloading [it] ...\n"
