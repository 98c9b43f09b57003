"""``tide-hf serve``: what its options mean, how it fails, and the whole of it in a process of its own."""

import argparse
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from repository import ROOT

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")

from tide_hf import cli  # noqa: E402
from tide_hf.commands import KEY_VARIABLE, make_parser, serve  # noqa: E402
from tide_hf.commands.serve import LOCAL_NAMES, limits_of, listener, model_name  # noqa: E402
from tide_hf.errors import ConfigurationError  # noqa: E402
from tide_hf.serving.limits import Limits  # noqa: E402


def parsed(*arguments):
    return make_parser().parse_args(["serve", *arguments])


def test_the_limits_that_options_name(monkeypatch):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert limits_of(parsed("m")) == Limits(hosts=LOCAL_NAMES)
    assert limits_of(parsed("m", "--host", "127.0.0.2")) == Limits(hosts=(*LOCAL_NAMES, "127.0.0.2"))
    assert limits_of(parsed("m", "--api-key", "k")) == Limits(api_key="k", hosts=None)  # as behind a proxy
    options = ["--max-queue", "3", "--rate", "0", "--max-body-bytes", "9", "--api-key", "k", "--host", "0.0.0.0"]
    limits = limits_of(parsed("m", *options))
    assert limits == Limits(api_key="k", hosts=None, max_body_bytes=9, max_requests=3, requests_per_minute=0)
    monkeypatch.setenv(KEY_VARIABLE, "from outside")
    assert limits_of(parsed("m")).api_key == "from outside"
    assert limits_of(parsed("m", "--api-key", "k")).api_key == "k"


def test_an_address_is_taken_while_the_model_is_loaded():
    refused = pytest.raises(ConfigurationError, match=r"the server cannot listen there: got .*in use")
    with listener("127.0.0.1", 0) as taken, refused:
        listener("127.0.0.1", taken.getsockname()[1])


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.9"])
def test_no_server_for_others_without_a_key(monkeypatch, host):
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigurationError, match=r"needs an API key: got --host .+ without one\. Expected a key in"):
        limits_of(parsed("m", "--host", host))


def test_clients_see_no_path_of_this_machine(tiny_model_folder):
    assert model_name(parsed(str(tiny_model_folder))) == "tiny-llama"
    assert model_name(parsed("org/name")) == "org/name"
    assert model_name(parsed("org/name", "--model-name", "mine")) == "mine"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--host", "0.0.0.0"], "needs an API key"),
        (["--server", "transformers", "--api-key", "k"], "neither API keys nor replicas"),
        (["--server", "transformers", "--replicas", "2"], "neither API keys nor replicas"),
        (["--mode", "early_exit"], "needs routers"),
        (["--routers", "no/such/routers"], "no routers at no/such/routers"),
    ],
)
def test_errors_are_explained(tiny_model_folder, monkeypatch, capsys, arguments, message):
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it serves"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(serve, "find_spec", lambda name: name)
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    assert cli.main(["serve", str(tiny_model_folder), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Expected" in error


def test_missing_packages_are_named(monkeypatch, capsys):
    monkeypatch.setattr(serve, "find_spec", lambda name: None if name in ("grpc", "uvicorn") else name)
    assert cli.main(["serve", "m", "--replicas", "2"]) == 2
    assert "an environment without uvicorn, grpc" in capsys.readouterr().err
    assert cli.main(["serve", "m"]) == 2
    assert "without uvicorn. Expected the packages of the extra 'serve'. Run: pip install \"tide-hf[serve]\"" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("number", ["-1", "x"])
def test_a_rate_is_a_whole_number(number, capsys):
    with pytest.raises(SystemExit):
        parsed("m", "--rate", number)
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("host", ["127.0.0.1", "192.0.2.1", "no.such.host.invalid"])
def test_an_address_that_cannot_be_had_is_told_before_a_model_is_loaded(host, monkeypatch, capsys):
    monkeypatch.setenv(KEY_VARIABLE, "k")
    monkeypatch.setattr(serve, "_local_backend", lambda options: pytest.fail("loaded a model"))
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        assert cli.main(["serve", "m", "--host", host, "--port", str(other.getsockname()[1])]) == 2
    err = capsys.readouterr().err
    assert "the server cannot listen there" in err
    assert "Name another --port or --host" in err


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_a_server_from_the_command_line(tiny_model_folder):
    port = free_port()
    command = [sys.executable, "-m", "tide_hf.cli", "serve", str(tiny_model_folder), "--port", str(port)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop(KEY_VARIABLE, None)
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
    messages = [{"role": "user", "content": "abcabc"}]
    request = {"model": "tiny-llama", "messages": messages, "temperature": 0, "max_tokens": 6}
    process = subprocess.Popen(command, env=environment)
    try:
        wait_for_port(port, process)
        whole = client.chat.completions.create(**request)
        chunks = list(client.chat.completions.create(**request, stream=True))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert whole.usage.completion_tokens == 6
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == whole.choices[0].message.content


def wait_for_port(port, process):
    deadline = time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.2)
    raise AssertionError("the server did not start")


def test_transformers_server_decodes_with_tide(tiny_model_folder):
    pytest.importorskip("fastapi")
    from transformers.cli.serving import model_manager  # noqa: PLC0415

    from tide_hf import TIDEModelForCausalLM  # noqa: PLC0415
    from tide_hf.serving.served_model import ServingOptions  # noqa: PLC0415
    from tide_hf.serving.transformers_server import run_transformers_server  # noqa: PLC0415

    own, port = model_manager.ModelManager, free_port()
    options = ServingOptions(model=str(tiny_model_folder), dtype="float32")
    server = run_transformers_server(options, "127.0.0.1", port, non_blocking=True)
    try:
        assert model_manager.ModelManager is own
        wait_for_port(port, argparse.Namespace(poll=lambda: None))
        (loaded,) = server._model_manager.loaded_models.values()
        assert isinstance(loaded.model, TIDEModelForCausalLM)
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
        answer = client.chat.completions.create(
            model=str(tiny_model_folder), messages=[{"role": "user", "content": "abcabc"}], temperature=0, max_tokens=6
        )
        stats = loaded.model.last_exit_stats
        assert stats.mode == "self_speculative"
        assert stats.total_tokens == answer.usage.completion_tokens == 6
    finally:
        server.kill_server()
