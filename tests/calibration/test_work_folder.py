"""Unfinished work: a calibration that is killed ends with the same routers, and another's work is refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calibrations import assert_same, small, texts
from interruptions import stop_at

from tide_hf import TIDERouters
from tide_hf.calibration import work_folder
from tide_hf.common import files as folders
from tide_hf.common.errors import CalibrationError

pytestmark = pytest.mark.usefixtures("one_thread")


def is_unit(target):
    return Path(target).parent.parent.name == work_folder.NAME


@pytest.fixture(scope="module")
def whole(parts):
    """Routers of a calibration that nothing stops."""
    return small(*parts, exit_layers=None)


def test_killed_at_every_unit_it_ends_with_the_same_routers(parts, whole, tmp_path, monkeypatch):
    """Each call gets one unit further than the one before."""
    kills = 0
    for call in range(100):
        torch.manual_seed(call)  # the state of the caller's generator does not matter
        with monkeypatch.context() as patch:
            written = stop_at(1, patch, is_unit)
            try:
                routers = small(*parts, output_dir=tmp_path, exit_layers=None)
                break
            except KeyboardInterrupt:
                kills += 1
                assert len(written) == 1
    assert kills == 12  # a unit for each batch, shard, head, router, the list of batches and the number of documents
    assert routers.config.calibration["resumed_units"] >= kills - 2
    assert_same(routers, whole)
    assert_same(TIDERouters.from_pretrained(tmp_path), whole)
    assert {path.name for path in tmp_path.iterdir()} == {"README.md", "config.json", "model.safetensors", "plots"}


def test_unfinished_work_is_refused_if_of_another_calibration_or_damaged(parts, tiny_llama, tmp_path, monkeypatch):
    folder = tmp_path / work_folder.NAME
    with monkeypatch.context() as patch:
        stop_at(8, patch, is_unit)
        with pytest.raises(KeyboardInterrupt):
            small(*parts, output_dir=tmp_path)
    for model, changed, message in (
        (parts[0], {"seed": 1, "exit_layers": [1, 3]}, r"exit_layers=\[1, 2\] \(now \[1, 3\]\).*seed=0 \(now 1\)"),
        (parts[0], {"dataset": texts(9)}, "data_hash="),
        (tiny_llama(seed=5), {}, r"unembed_hash='\w+' \(now '\w+'\)"),
    ):
        with pytest.raises(CalibrationError, match=message) as caught:
            small(model, parts[1], output_dir=tmp_path, **changed)
        assert f"or delete {folder}" in str(caught.value)
    shard = next((folder / "states").glob("fit-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=rf"{shard.name} cannot be read.*Delete that file"):
        small(*parts, output_dir=tmp_path)


def test_a_disk_too_small_is_refused_before_states_are_read(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CalibrationError, match=r"do not fit on the disk: got 1000 bytes free .*Expected \d+ bytes"):
        small(*parts, output_dir=tmp_path)
    assert not list(tmp_path.glob("**/states/*"))


def test_a_disk_that_fills_up(parts, whole, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", full)
        with pytest.raises(CalibrationError, match=r"the disk is full: .*states.* could not be written: got \d+ bytes"):
            small(*parts, output_dir=tmp_path, exit_layers=None)
    assert not list(tmp_path.glob(f"**/*{folders.UNFINISHED}"))
    routers = small(*parts, output_dir=tmp_path, exit_layers=None)
    assert routers.config.calibration["resumed_units"] > 0
    assert_same(routers, whole)
