"""Unfinished work: a calibration that is killed ends with the same routers, and another's work is refused."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from calibrations import OPTIONS, assert_same, texts

from tide_hf import TIDERouters, calibrate
from tide_hf.calibration import work_folder
from tide_hf.common import files as folders
from tide_hf.common.errors import CalibrationError
from tide_hf.routers import card as model_card

pytestmark = pytest.mark.usefixtures("one_thread")


class Killed(BaseException):
    """Stands for a signal: nothing in the library may catch it."""


def kill_at_write(monkeypatch, number):
    """Kill the process just before its `number`-th unit would be in place; return what counts the writes."""
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


@pytest.mark.parametrize("exit_layers", [[1, 2], None])
def test_killed_at_every_unit_it_ends_with_the_same_routers(parts, tmp_path, monkeypatch, exit_layers):
    """Each call gets one unit further than the one before."""
    options = OPTIONS | {"exit_layers": exit_layers}
    expected = calibrate(*parts, output_dir=tmp_path / "whole", **options)
    assert sorted(path.name for path in (tmp_path / "whole").iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
        "plots",
    ]
    folder, kills = tmp_path / "killed", 0
    for call in range(100):
        torch.manual_seed(call)  # what the caller drew before is of no account
        with monkeypatch.context() as patch:
            written = kill_at_write(patch, 1)
            try:
                routers = calibrate(*parts, output_dir=folder, **options)
                break
            except Killed:
                kills += 1
                assert len(written) == 1
    assert kills == (12 if exit_layers else 11)  # a unit for each batch, shard, head, router, and the list of batches
    assert routers.config.calibration["resumed_units"] >= kills - 1
    assert_same(routers, expected)
    assert_same(TIDERouters.from_pretrained(folder), expected)
    assert not (folder / work_folder.NAME).exists()


def test_killed_while_saving(parts, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(model_card, "write_model_card", lambda *_: (_ for _ in ()).throw(Killed))
        with pytest.raises(Killed):
            calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    written = kill_at_write(monkeypatch, 0)
    assert_same(calibrate(*parts, output_dir=tmp_path, **OPTIONS), calibrate(*parts, **OPTIONS | {}))
    assert not written


def killed_in(parts, folder, monkeypatch, number=3, **options):
    with monkeypatch.context() as patch:
        kill_at_write(patch, number)
        with pytest.raises(Killed):
            calibrate(*parts, output_dir=folder, **OPTIONS | options)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"seed": 1}, r"seed=0 \(now 1\)"),
        ({"max_length": 9}, r"max_length=8 \(now 9\)"),
        ({"dataset": texts(9)}, r"data_hash="),
        ({"exit_layers": [1, 3]}, r"exit_layers=\[1, 2\] \(now \[1, 3\]\)"),
        ({"draft_vocab_size": 8}, r"draft_vocab_size=8192 \(now 8\)"),
    ],
)
def test_the_unfinished_work_of_another_calibration(parts, tmp_path, monkeypatch, changed, message):
    killed_in(parts, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match=message) as caught:
        calibrate(*parts, output_dir=tmp_path, **OPTIONS | changed)
    assert f"{tmp_path / work_folder.NAME} holds the work of another calibration, or one by other settings" in str(
        caught.value
    )
    assert f"or delete {tmp_path / work_folder.NAME}" in str(caught.value)


def test_the_unfinished_work_on_another_model(parts, tiny_llama, tmp_path, monkeypatch):
    killed_in(parts, tmp_path, monkeypatch)
    with pytest.raises(CalibrationError, match=r"unembed_hash='\w+' \(now '\w+'\)"):
        calibrate(tiny_llama(seed=5), parts[1], output_dir=tmp_path, **OPTIONS)


def test_a_damaged_unit_is_named(parts, tmp_path, monkeypatch):
    killed_in(parts, tmp_path, monkeypatch, number=8)
    shard = next((tmp_path / work_folder.NAME / "states").glob("fit-*"))
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(CalibrationError, match=rf"{shard.name} cannot be read.*Delete that file"):
        calibrate(*parts, output_dir=tmp_path, **OPTIONS)


def test_a_disk_too_small_is_refused_before_states_are_read(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(work_folder.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CalibrationError, match=r"do not fit on the disk: got 1000 bytes free .*Expected \d+ bytes"):
        calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob("**/states/*"))


def test_a_disk_that_fills_up(parts, tmp_path, monkeypatch):
    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) == 8:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(folders.os, "fsync", full)
        with pytest.raises(CalibrationError, match=r"the disk is full: .*states.* could not be written: got \d+ bytes"):
            calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert not list(tmp_path.glob(f"**/*{folders.UNFINISHED}"))
    routers = calibrate(*parts, output_dir=tmp_path, **OPTIONS)
    assert routers.config.calibration["resumed_units"] > 0
    assert_same(routers, calibrate(*parts, **OPTIONS))
