"""GGUF files are converted once: the copy is known by the file's content, and private."""

import shutil

import pytest
import torch

from tide_hf import TIDEModelForCausalLM
from tide_hf.common.errors import MissingPackageError
from tide_hf.hub import gguf
from tide_hf.hub.load import load_model


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("TIDE_HF_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def file(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "tiny.gguf").write_bytes(b"not really weights")
    return tmp_path / "models" / "tiny.gguf"


@pytest.fixture
def converted(tiny_model_folder, monkeypatch):
    """The contents of the files that were converted, each to the tiny model."""
    contents = []

    def convert(gguf_file, folder):
        contents.append(gguf_file.read_bytes())
        for one in tiny_model_folder.iterdir():
            shutil.copy(one, folder)

    monkeypatch.setattr(gguf, "is_gguf_available", lambda: True)
    monkeypatch.setattr(gguf, "convert_gguf", convert)
    return contents


def test_a_file_is_converted_once_by_its_content(home, file, converted):
    for _ in range(2):
        model = TIDEModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
        assert (model.dtype, model.name_or_path) == (torch.bfloat16, str(file.parent))
    model, tokenizer = load_model(file)
    assert (model.name_or_path, model.weights_origin) == (str(file), "a GGUF file, dequantised")
    assert tokenizer("a").input_ids
    assert converted == [b"not really weights"]
    (copy,) = home.glob("gguf-*")
    assert copy.stat().st_mode & 0o077 == 0
    file.write_bytes(b"weights, really")  # of another content, and perhaps of the same time
    load_model(file)
    assert converted[1:] == [b"weights, really"]
    assert not list(home.glob(".converting-*"))


def test_what_is_not_kept_is_left_to_transformers(home, file, converted, monkeypatch, caplog):
    caplog.set_level("INFO", logger="tide_hf")
    options = {"gguf_file": file.name, "revision": "main", "dtype": "float32"}
    copy, others = gguf.use_copy(file.parent, options)
    assert others == {"dtype": "float32"}
    copy.chmod(0o777)
    assert gguf.use_copy(file.parent, options) == (file.parent, options)
    assert "others can write" in caplog.messages[-1]
    shutil.rmtree(copy)
    monkeypatch.setattr(gguf, "made_once", lambda *_: (_ for _ in ()).throw(OSError("the disk is full")))
    assert gguf.use_copy(file.parent, options) == (file.parent, options)
    assert caplog.messages[-1] == "no copy of tiny.gguf is kept: the disk is full"
    monkeypatch.setattr(gguf, "LARGEST", 9)
    assert gguf.use_copy(file.parent, options) == (file.parent, options)
    assert "it has over" in caplog.messages[-1]
    monkeypatch.setattr(gguf, "is_gguf_available", lambda: False)
    with pytest.raises(MissingPackageError, match=r"GGUF files cannot be read: got no package gguf.*pip install gguf"):
        load_model(file)
