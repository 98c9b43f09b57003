"""What making an engine ready took, and the line that shows it."""

import copy
import io
from functools import partial

import pytest
from transformers.utils import logging

from tide_hf.engines.steps.progress import WarmUp


class Terminal(io.StringIO):
    """What a terminal shows."""

    def isatty(self):
        return True


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(logging, "tqdm", partial(logging.tqdm, file=terminal))
    monkeypatch.setattr(logging, "_tqdm_active", True)
    return terminal


def test_the_line_counts_and_ends_with_the_call(terminal):
    warm_up = WarmUp("Capturing steps", "steps")
    with warm_up.shown():
        assert terminal.getvalue() == ""
        warm_up.add(0, 0.0, 10_000_000)
        assert terminal.getvalue() == ""  # memory alone is nothing to wait for
        warm_up.add(2, 1.25, 30_000_000)
        assert terminal.getvalue().endswith("\rCapturing steps: 2 steps, 1.2 s, 40 MB")
    assert terminal.getvalue().endswith("\rCapturing steps: 2 steps, 1.2 s, 40 MB\n")
    assert (warm_up.num_made, warm_up.seconds, warm_up.bytes) == (2, 1.25, 40_000_000)
    shown = terminal.getvalue()
    with warm_up.shown():
        pass
    assert terminal.getvalue() == shown


def test_calls_in_turn_share_a_line(terminal):
    warm_up = WarmUp("Capturing steps", "steps")
    with warm_up.shown():
        for _ in range(2):
            with warm_up.shown():
                warm_up.add(1, 1.0)
        assert "\n" not in terminal.getvalue()
    assert terminal.getvalue().endswith("\rCapturing steps: 2 steps, 2.0 s\n")


def test_what_takes_long_is_announced(terminal):
    with WarmUp("Compiling decoder layers", "graphs").shown(is_due=True):
        assert "\rCompiling decoder layers: 0 graphs" in terminal.getvalue()


def test_the_line_ends_where_the_call_fails(terminal):
    with pytest.raises(KeyError), WarmUp("Capturing steps", "steps").shown(is_due=True):
        raise KeyError
    assert terminal.getvalue().endswith("\n")


@pytest.mark.parametrize("reason", ["no terminal", "not wanted"])
def test_the_line_is_drawn_where_somebody_looks_and_wants_it(terminal, monkeypatch, reason):
    if reason == "no terminal":
        monkeypatch.setattr(terminal, "isatty", lambda: False)
    else:
        monkeypatch.setattr(logging, "_tqdm_active", False)
    with WarmUp("Capturing steps", "steps").shown(is_due=True):
        pass
    assert terminal.getvalue() == ""


def test_a_copy_counts_for_itself():
    warm_up = WarmUp("Capturing steps", "steps")
    warm_up.add(1, 1.0)
    twin = copy.deepcopy(warm_up)
    assert (twin.num_made, twin.description, twin.unit) == (0, "Capturing steps", "steps")
