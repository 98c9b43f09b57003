"""Unfinished work: a calibration that is killed ends with the same routers, and another's work is refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calibrations import assert_same, small, texts

from tide_hf import TIDERouters
from tide_hf.calibration import work_folder
from tide_hf.calibration.work_folder import Processes
from tide_hf.common import files as folders
from tide_hf.common.errors import CalibrationError
from tide_hf.routers import card as model_card

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch it."""


def kill_at_write(monkeypatch, number):
    """Kill the process just before its `number`-th unit would be in place; return the list of units written."""
    written = []
    replace = os.replace

    def replace_or_die(source, target):
        if Path(target).parent.parent.name == work_folder.NAME:
            if len(written) == number:
                raise Killed
            written.append(Path(target).name)
        replace(source, target)

    monkeypatch.setattr(folders.os, "replace", replace_or_die)
    return written


@pytest.fixture(scope="module")
def whole(parts, tmp_path_factory):
    """Routers of a calibration that nothing stops, and their folder."""
    folder = tmp_path_factory.mktemp("whole")
    return small(*parts, output_dir=folder, exit_layers=None), folder


def test_killed_at_every_unit_it_ends_with_the_same_routers(parts, whole, tmp_path, monkeypatch):
    """Each call gets one unit further than the one before."""
    expected, folder = whole
    assert {path.name for path in folder.iterdir()} == {"README.md", "config.json", "model.safetensors", "plots"}
    kills = 0
    for call in range(100):
        torch.manual_seed(call)  # the state of the caller's generator does not matter
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, 1)
            try:
                routers = small(*parts, output_dir=tmp_path, exit_layers=None)
                break
            except Killed:
                kills += 1
                assert len(written) == 1
    assert kills == 11  # a unit for each batch, shard, head, router, and the list of batches
    assert routers.config.calibration["resumed_units"] >= kills - 1
    assert_same(routers, expected)
    assert_same(TIDERouters.from_pretrained(tmp_path), expected)
    assert not (tmp_path / work_folder.NAME).exists()


def test_killed_while_saving(parts, whole, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_card, "write_model_card", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            small(*parts, output_dir=tmp_path, exit_layers=None)
    written = kill_at_write(monkeypatch, 0)
    assert_same(small(*parts, output_dir=tmp_path, exit_layers=None), whole[0])
    assert not written


@pytest.fixture(scope="module")
def unfinished(parts, tmp_path_factory):
    """The folder of a calibration that was killed after eight units, which only refused calibrations may share."""
    folder = tmp_path_factory.mktemp("unfinished")
    with pytest.MonkeyPatch.context() as patch:
        kill_at_write(patch, 8)
        with pytest.raises(Killed):
            small(*parts, output_dir=folder)
    return folder


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed=0 \(now 1\)"),
        ({"dataset": texts(9)}, r"data_hash="),
        ({"exit_layers": [1, 3]}, r"exit_layers=\[1, 2\] \(now \[1, 3\]\)"),
        ({"draft_vocab_size": 8}, r"draft_vocab_size=8192 \(now 8\)"),
        ({"model": 5}, r"unembed_hash='\w+' \(now '\w+'\)"),
    ],
)
def test_the_unfinished_work_of_another_calibration(parts, tiny_llama, unfinished, changed, message):
    model = tiny_llama(seed=changed.pop("model")) if "model" in changed else parts[0]
    with pytest.raises(CalibrationError, match=message) as caught:
        small(model, parts[1], output_dir=unfinished, **changed)
    folder = unfinished / work_folder.NAME
    assert f"{folder} holds the work of another calibration, or one by other settings" in str(caught.value)
    assert f"or delete {folder}" in str(caught.value)


def test_a_damaged_unit_is_named(parts, unfinished):
    shard = next((unfinished / work_folder.NAME / "states").glob("fit-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=rf"{shard.name} cannot be read.*Delete that file"):
        small(*parts, output_dir=unfinished)


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
    assert_same(routers, whole[0])


def test_busy_processes_get_the_threads_of_idle_ones(monkeypatch):
    four = Processes(0, 4)
    for units, threads in ((1, 4), (2, 2), (3, 1), (8, 1), (0, 4)):
        with four.threads_for(units):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")  # the others are on another machine
    with four.threads_for(1):
        assert torch.get_num_threads() == 2
