"""What results say of where they were measured: model, machine, versions, command."""

import json
import subprocess

import torch
from accelerate import cpu_offload

from tide_hf.hub import provenance


def test_the_record_names_model_dtype_device_threads_and_versions(tiny_llama, tmp_path):
    model = tiny_llama().to(torch.bfloat16)
    for name, recorded in {"/home/me/secret/some-model": "some-model", "org/model": "org/model"}.items():
        model.config._name_or_path = name
        record = provenance.provenance(model)
        assert (record["model"], record["dtype"]) == (recorded, "bfloat16")
    assert record["torch_threads"] == torch.get_num_threads()
    assert record["versions"]["torch"] == torch.__version__
    json.dumps(record)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert provenance.provenance(offloaded)["device"] == "cpu"  # that of its inputs
    (tmp_path / "cpuinfo").write_text("processor : 0\nmodel name\t: Some CPU @ 2 GHz\n")
    assert provenance.cpu_name(tmp_path / "cpuinfo") == "Some CPU @ 2 GHz"
    assert provenance.cpu_name(tmp_path / "none")


def test_a_commit_is_recorded_for_files_that_git_tracks_alone(tmp_path):
    def git(*arguments):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.run(["git", "-C", tmp_path, *who, *arguments], check=True, capture_output=True, text=True)

    tracked, ignored = tmp_path / "app.py", tmp_path / "venv" / "provenance.py"
    ignored.parent.mkdir()
    for file in (tracked, ignored):
        file.write_text("")
    assert provenance.commit(tracked) is None  # no repository
    git("init", "-q")
    git("add", "app.py")
    assert provenance.commit(tracked) is None  # no commit
    git("commit", "-q", "-m", "somebody else's")
    assert provenance.commit(ignored) is None
    assert provenance.commit(tracked) == git("rev-parse", "HEAD").stdout.strip()


def test_a_command_is_recorded_without_folders(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "texts.txt").write_text("")
    words = ["calibrate", "org/name", "--dataset=/home/me/chats.jsonl", "--output-dir", "../secret/routers"]
    words += ["data/texts.txt", "--seed", "1", "a prompt / or two"]
    assert provenance.command_line(words) == (
        "tide-hf calibrate org/name --dataset=chats.jsonl --output-dir routers texts.txt --seed 1 'a prompt / or two'"
    )
