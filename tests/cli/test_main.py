"""`main`: exit statuses, errors on standard error, the standard streams, and the warning of a busy machine."""

import io
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from repository import ROOT

import tide_hf
from tide_hf.cli.main import main
from tide_hf.common.choices import DEFAULT_MODEL


@pytest.fixture
def places(tmp_path, tiny_model_folder, routers_folder, tiny_llama, monkeypatch):
    """Files and folders that stand for the upper-case words of a command line; the Hub is out of reach."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tide_hf.cli.benchmark.CLONE", tmp_path)  # so that no suite can begin
    contents = {"FILE": b"a", "EMPTY": b"", "EMPTY.txt": b"", "BINARY": b"\xff\xfe\x00", "BROKEN.jsonl": b"{"}
    contents |= {"TEXT.txt": b"rivers run\n\nto the sea", "ROWS.jsonl": b'{"question": "a"}'}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    tide_hf.TIDERouters.for_model(tiny_llama(num_hidden_layers=5), exit_layers=[2]).save_pretrained(tmp_path / "OTHER")
    made = {name: tmp_path / name for name in (*contents, "OTHER", "OUT")}
    made |= {"MODEL": tiny_model_folder, "ROUTERS": routers_folder, "FILE/plot": tmp_path / "FILE" / "plot.png"}
    return made | {"LONG": "a" * 2048}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate MODEL a --prompt-file FILE", "the prompt is given twice"),
        ("generate MODEL --prompt-file no/such/file", "the prompt cannot be read"),
        ("generate MODEL --prompt-file BINARY", "is not text"),
        ("generate MODEL --prompt-file EMPTY", "the prompt is empty"),
        ("generate MODEL \udcff", "PROMPT is not text"),
        ("generate MODEL a --mode post_hoc", "there are no routers for the model: got --mode post_hoc"),
        ("generate MODEL a --device cuda:99", "there is no such device"),
        ("generate MODEL a --device x", "there is no such device"),
        ("generate MODEL a --max-new-tokens 3000", "the text is too long for the model: got 15 tokens, and up to 3000"),
        ("generate MODEL a --routers no/such/routers", "no routers at no/such/routers"),
        ("generate no/such/model a", "no base model at no/such/model"),
        ("benchmark MODEL --mode early_exit", "Pass --routers"),
        ("demo MODEL --prompt LONG", "the text is too long for the model"),
        ("benchmark MODEL --prompts no/such/file", "the prompts cannot be read"),
        ("benchmark MODEL --prompts EMPTY.txt", "there are no prompts"),
        ("benchmark MODEL --prompts ROWS.jsonl", "has no prompt: got {'question': 'a'}"),
        ("benchmark MODEL --prompts BROKEN.jsonl", "BROKEN.jsonl: got"),
        ("benchmark MODEL --prompt a --prompt \udcff", "--prompt is not text"),
        ("benchmark MODEL --config full --output-dir x", "without --suite: got --config, --output-dir"),
        ("benchmark MODEL --suite decode --mode all --repeats 1", "with --suite: got --mode, --repeats"),
        ("benchmark MODEL --suite decode --json --raw --prompt a", "got --prompt, --raw, --json"),
        ("benchmark MODEL --suite decode", "the suites are not there"),
        ("calibrate MODEL --output-dir FILE", "the output cannot be written"),
        ("calibrate no/such/model --output-dir OUT", "no base model at no/such/model"),
        ("calibrate MODEL --output-dir OUT --exit-layers 9", "exit layer out of range"),
        ("evaluate MODEL --text TEXT.txt", "there are no routers for the model: got evaluate"),
        ("evaluate MODEL --routers ROUTERS --text no/such/file.txt", "the dataset cannot be found"),
        ("evaluate MODEL --routers ROUTERS --text TEXT.txt --plot FILE/plot", "the output cannot be written"),
        ("inspect MODEL --text no/such/file", "the text cannot be read"),
        ("inspect MODEL --text BINARY", "the text cannot be read"),
        ("inspect MODEL --text EMPTY", "convergence cannot be measured"),
        ("inspect MODEL --routers OTHER", "belong to another base model"),
    ],
)
def test_an_error_is_explained_and_nothing_is_printed(places, refused, line, message):
    arguments = [str(places.get(word, word)) for word in line.split(" ")]
    assert refused(arguments, message) == ""


def test_debug_logs_and_shows_the_traceback(tmp_path):
    code = (
        "import logging, sys; from tide_hf.cli import main as cli\n"
        "def run(args): logging.getLogger('tide_hf.some.where').info('begun'); raise cli.TIDEError('no')\n"
        "cli._run = run; cli.main(sys.argv[1:])"
    )
    command = [sys.executable, "-c", code, "demo", "--debug"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert "INFO:tide_hf.some.where:begun" in done.stderr
    assert "Traceback (most recent call last)" in done.stderr
    assert done.stderr.endswith("tide-hf: no\n")


@pytest.mark.parametrize("function", ["main.import_module", "demo.load"])
def test_an_interrupt_ends_quietly(monkeypatch, capsys, function):
    monkeypatch.setattr(f"tide_hf.cli.{function}", Mock(side_effect=KeyboardInterrupt))
    assert main(["demo"]) == 130
    assert capsys.readouterr().err in ("", f"Loading {DEFAULT_MODEL} ...\n")


@pytest.mark.parametrize(
    ("line", "is_terminal", "shown"),
    [(["push", "a", "b"], True, True), (["push", "a", "b"], False, False), (["completion", "bash"], True, False)],
)
def test_the_slow_import_is_shown_on_a_terminal(monkeypatch, line, is_terminal, shown):
    stream = io.StringIO()
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("tide_hf.cli.main.import_module", Mock())
    assert main(line) == 0
    assert ("Importing PyTorch" in stream.getvalue()) is shown


def test_of_what_torchao_logs_on_import_only_the_known_noise_is_dropped(monkeypatch, caplog):
    logged = {
        "torchao": [
            "Failed to load /torchao/_C_cutlass_90a.abi3.so: Could not load",
            "Failed to load /torchao/_C.so: a",
        ],
        "torch.utils._pytree": ["<enum 'A'> is an Enum subclass and is now natively supported by torch.compile", "b"],
    }

    def imported(*_):
        for name, (noise, other) in logged.items():
            logging.getLogger(name).warning("%s", noise)
            logging.getLogger(name).warning("%s", other)
        return Mock()

    monkeypatch.setattr("tide_hf.cli.main.import_module", imported)
    monkeypatch.setattr("sys.stderr", SimpleNamespace(isatty=lambda: True, write=Mock(), flush=Mock()))
    assert main(["completion", "bash"]) == 0
    assert caplog.messages == [other for _, other in logged.values()]


def in_a_shell(line):
    """A light command in a process of its own, whose exit flushes the streams."""
    pytest.importorskip("shtab")
    line = f"'{sys.executable}' -m tide_hf.cli {line}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, cwd=ROOT)
    assert "Traceback" not in done.stderr
    return done


def test_streams_that_fail_end_it_with_a_status_and_no_traceback():
    if Path("/dev/full").exists():
        done = in_a_shell("completion bash > /dev/full")
        assert done.returncode == 2
        assert "the system refused to read or write: got '[Errno 28]" in done.stderr
    done = in_a_shell("generate no/such/model <&-")
    assert (done.returncode, "the prompt is empty" in done.stderr) == (2, True)
    assert in_a_shell("completion bash >&-").returncode == 0
    done = in_a_shell("completion bash | true; echo ${PIPESTATUS[0]}")
    assert (done.stdout.strip(), done.stderr) == ("141", "")


def test_characters_that_the_output_cannot_encode_are_replaced(monkeypatch):
    output = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(output, encoding="cp1252"))
    monkeypatch.setattr("tide_hf.cli.main._run", lambda args: print("a\u65e5\xe9", end=""))
    assert main(["demo"]) == 0
    assert output.getvalue() == b"a?\xe9"


@pytest.mark.parametrize(("load", "threads", "warned"), [(2.1, 2, 1), (2.0, 2, 0), (9.0, 1, 0), (None, 2, 0)])
@pytest.mark.parametrize("line", ["generate no/model hello --device cpu", "benchmark MODEL --suite decode"])
def test_a_load_above_the_number_of_cores_causes_a_warning(
    monkeypatch, caplog, threads_restored, line, load, threads, warned
):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("tide_hf.cli.benchmark.subprocess.run", lambda *_, **__: SimpleNamespace(returncode=0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr("tide_hf.common.busy._warned", set())
    if load is None:  # as on Windows
        monkeypatch.delattr("os.getloadavg")
    else:
        monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    main([*line.split(), "--threads", str(threads)])
    assert ["load average is 2.1 on 2 cores" in message for message in caplog.messages] == [True] * warned
