"""What commands that run a model do before they load it: they warn on a busy machine."""

from types import SimpleNamespace

import pytest
import torch

from tide_hf.cli.main import main
from tide_hf.cli.model_arguments import warn_if_busy
from tide_hf.common.errors import DemoModelError


@pytest.fixture
def load_average(monkeypatch):
    """A function that sets the load average of a machine with two cores."""
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    return lambda load: monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0), raising=False)


@pytest.mark.parametrize(("load", "threads", "warned"), [(2.1, 2, 1), (2.0, 2, 0), (9.0, 1, 0), (0.1, 4, 0)])
def test_a_load_above_the_number_of_cores_causes_a_warning(load_average, caplog, load, threads, warned):
    load_average(load)
    warn_if_busy(threads)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert ["load average is 2.1 on 2 cores" in message for message in caplog.messages] == [True] * warned


def test_a_system_without_load_averages_is_not_busy(monkeypatch, caplog):
    monkeypatch.delattr("os.getloadavg", raising=False)
    warn_if_busy(2)
    assert caplog.messages == []


@pytest.mark.parametrize(
    "line",
    ["generate MODEL hello", "chat MODEL", "benchmark MODEL", "demo MODEL", "calibrate MODEL --output-dir FOLDER"],
)
def test_every_command_that_runs_a_model_warns(load_average, monkeypatch, tmp_path, caplog, line):
    def stop(*_args, **_options):
        raise DemoModelError("as far as this test goes")

    monkeypatch.setattr("tide_hf.hub.load.hub_options", stop)
    load_average(3.0)
    threads = torch.get_num_threads()
    try:
        assert main([*line.replace("FOLDER", str(tmp_path)).split(), "--device", "cpu", "--threads", "2"]) == 2
    finally:
        torch.set_num_threads(threads)
    assert ["--threads 1" in message for message in caplog.messages] == [True]


def test_suites_warn_as_well(load_average, monkeypatch, caplog):
    monkeypatch.setattr("tide_hf.cli.benchmark.subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0))
    load_average(3.0)
    assert main(["benchmark", "MODEL", "--suite", "decode", "--threads", "2"]) == 0
    assert ["--threads 1" in message for message in caplog.messages] == [True]
