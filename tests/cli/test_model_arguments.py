"""What commands that run a model do before they load it: they warn on a busy machine."""

from types import SimpleNamespace

import pytest
import torch

from tide_hf.cli.main import main


@pytest.mark.parametrize(("load", "threads", "warned"), [(2.1, 2, 1), (2.0, 2, 0), (9.0, 1, 0), (None, 2, 0)])
@pytest.mark.parametrize("line", ["generate no/model hello --device cpu", "benchmark MODEL --suite decode"])
def test_a_load_above_the_number_of_cores_causes_a_warning(monkeypatch, caplog, line, load, threads, warned):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tide_hf.cli.benchmark.subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    if load is None:  # as on Windows
        monkeypatch.delattr("os.getloadavg")
    else:
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    threads_before = torch.get_num_threads()
    try:
        main([*line.split(), "--threads", str(threads)])
    finally:
        torch.set_num_threads(threads_before)
    assert ["load average is 2.1 on 2 cores" in message for message in caplog.messages] == [True] * warned
