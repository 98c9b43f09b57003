"""Measured times are kept between processes, and taken again where they might be wrong."""

import json
import os
import time

import pytest
import torch

from tide_hf.common import measurements
from tide_hf.common.files import is_private_folder
from tide_hf.common.measurements import KEPT_DAYS, measured

FILE = "measurements.json"
NAME = "products"


@pytest.fixture
def file(monkeypatch, tmp_path):
    """The file of an empty cache."""
    monkeypatch.setattr(measurements, "FILE", FILE)
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path))
    return tmp_path / FILE


def takes(*seconds):
    return lambda: list(seconds)


def test_a_measurement_is_taken_once_for_each_name_machine_and_number_of_threads(file, monkeypatch, threads_restored):
    assert measured(NAME, 2, takes(1.0, 2.0)) == [1.0, 2.0]
    assert measured(NAME, 2, pytest.fail) == [1.0, 2.0]
    assert measured("others", 1, takes(3.0)) == [3.0]
    torch.set_num_threads(torch.get_num_threads() + 1)
    assert measured(NAME, 1, takes(4.0)) == [4.0]
    monkeypatch.setattr(measurements, "_machine", lambda: "another machine")
    assert measured(NAME, 1, takes(5.0)) == [5.0]
    assert measured(NAME, 1, pytest.fail) == [5.0]
    assert len(json.loads(file.read_text())) == 2


def test_what_other_processes_kept_meanwhile_stays(file):
    assert measured(NAME, 1, lambda: measured("others", 1, takes(2.0)) and [1.0]) == [1.0]
    assert measured("others", 1, pytest.fail) == [2.0]


def test_others_cannot_write_to_the_folder_whatever_the_umask(file, monkeypatch, tmp_path):
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "new"))
    umask = os.umask(0)
    try:
        measured(NAME, 1, takes(1.0))
    finally:
        os.umask(umask)
    assert is_private_folder(tmp_path / "new")


def test_nothing_is_kept_of_a_busy_machine(file, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0), raising=False)
    assert measured(NAME, 1, takes(1.0)) == [1.0]
    assert not file.exists()


@pytest.mark.parametrize("days", [-1, KEPT_DAYS + 1])
def test_a_measurement_expires(file, monkeypatch, days):
    measured(NAME, 1, takes(1.0))
    now = time.time() + days * 86_400
    monkeypatch.setattr("time.time", lambda: now)
    assert measured(NAME, 1, takes(2.0)) == [2.0]


@pytest.mark.parametrize(
    "found",
    ["1.0", [], [1.0, 1.0], [None], [-1.0], [float("nan")], None],
    ids=["text", "empty", "two", "null", "negative", "nan", "missing"],
)
def test_what_was_not_written_by_us_is_measured_again(file, found):
    measured(NAME, 1, takes(1.0))
    content = json.loads(file.read_text())
    (known,) = content.values()
    (entry,) = known.values()
    entry["found"] = found
    file.write_text(json.dumps(content))
    assert measured(NAME, 1, takes(2.0)) == [2.0]
    assert measured(NAME, 1, pytest.fail) == [2.0]


@pytest.mark.parametrize("content", ["", "[]", '{"machine": 1}', "\x00", "[" * 10**5])
def test_another_files_content_is_replaced(file, content):
    file.write_text(content)
    measured(NAME, 1, takes(1.0))
    assert measured(NAME, 1, pytest.fail) == [1.0]


def test_where_nothing_can_be_written_each_process_measures(file, monkeypatch):
    monkeypatch.setattr(measurements, "FILE", f"{FILE}/not/a/folder")
    file.touch()
    assert measured(NAME, 1, takes(1.0)) == [1.0]
    assert measured(NAME, 1, takes(2.0)) == [2.0]
