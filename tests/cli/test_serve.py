"""``tide-hf serve``: transformers' own server, with TIDE attached before it listens."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import pytest
from repository import ROOT

from tide_hf.cli import main as cli
from tide_hf.cli import serve
from tide_hf.cli.parser import make_parser
from tide_hf.common.errors import ConfigurationError
from tide_hf.generation import TIDEGenerationMixin

for package in ("fastapi", "uvicorn", "openai"):
    pytest.importorskip(package)

from transformers.cli.serve import Serve  # noqa: E402
from transformers.cli.serving.model_manager import ModelManager  # noqa: E402


def parsed(*arguments):
    args, args.passed_on = make_parser().parse_known_args(["serve", *arguments])
    return args


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def is_listening(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def wait_for_port(port, is_over=lambda: False):
    deadline = time.monotonic() + 300
    while not is_listening(port):
        assert not is_over() and time.monotonic() < deadline, "the server did not start"  # noqa: PT018
        time.sleep(0.1)


def ask(port, model, **fields):
    """The raw answer to one chat message."""
    body = {"model": str(model), "messages": [{"role": "user", "content": "abcabc"}], "max_tokens": 6}
    return post(port, "chat/completions", {"generation_config": json.dumps({"do_sample": False}), **body, **fields})


def post(port, path, body):
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return answer.read().decode()


def test_the_model_is_attached_and_warmed_up_before_the_server_listens(tiny_model_folder, routers_folder, monkeypatch):
    """TIDE decodes, with the options of the other commands, and transformers' class is as before afterwards."""
    port, warmed_up = free_port(), []
    warm_up = TIDEGenerationMixin.tide_warm_up
    monkeypatch.setattr(
        TIDEGenerationMixin,
        "tide_warm_up",
        lambda model: (warm_up(model), warmed_up.append((is_listening(port), type(model)))),
    )
    args = parsed(str(tiny_model_folder), "--routers", str(routers_folder), "--remembered-tokens", "9")
    named = serve.named_routers(args)
    load = ModelManager._load_model
    with serve.prepared_models(lambda model: serve.attach_warmed_up(model, args, named)):
        server = Serve(force_model=str(tiny_model_folder), host="127.0.0.1", port=port, non_blocking=True)
    try:
        assert ModelManager._load_model is load
        wait_for_port(port)
        (loaded,) = server._model_manager.loaded_models.values()
        assert warmed_up == [(False, type(loaded.model))]
        answer = json.loads(ask(port, tiny_model_folder))
        stats = loaded.model.last_exit_stats
        assert (stats.mode, stats.engine, stats.total_tokens) == ("self_speculative", "eager", 6)
        assert loaded.model._tide.answers.max_tokens == 9
        assert answer["usage"]["completion_tokens"] == 6
    finally:
        server.kill_server()


def test_a_server_from_the_command_line_streams_and_takes_the_options_of_transformers(tiny_model_folder):
    """`--port` and `--default-seed` are transformers'."""
    port = free_port()
    options = ["--threads", "1", "--port", str(port), "--default-seed", "3"]
    command = [sys.executable, "-m", "tide_hf.cli", "serve", str(tiny_model_folder), *options]
    process = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    try:
        wait_for_port(port, lambda: process.poll() is not None)
        with pytest.raises(urllib.error.HTTPError, match="400"):
            ask(port, tiny_model_folder, max_tokens=4097)
        whole = json.loads(ask(port, tiny_model_folder))
        chunks = [line.removeprefix("data: ") for line in ask(port, tiny_model_folder, stream=True).splitlines()]
        process.send_signal(signal.SIGINT)
        assert process.wait(60) in (0, cli.EXIT_INTERRUPTED)
    finally:
        process.kill()
        process.wait()
    assert whole["usage"]["completion_tokens"] == 6
    deltas = [json.loads(chunk)["choices"] for chunk in chunks if chunk.startswith("{")]
    streamed = "".join(choices[0]["delta"].get("content") or "" for choices in deltas if choices)
    assert streamed == whole["choices"][0]["message"]["content"]


REFUSED = [
    ({"generation_config": json.dumps({"num_beams": 10**6})}, "may not set an option: got num_beams=1000000. Expected"),
    ({"generation_config": json.dumps({"num_return_sequences": 2})}, "got num_return_sequences=2."),
    ({"generation_config": json.dumps({"tide_mode": "post_hoc"})}, "got tide_mode='post_hoc'."),
    ({"generation_config": json.dumps({"tide_engine": "compiled"}), "stream": True}, "got tide_engine='compiled'."),
    ({"generation_config": json.dumps({"max_length": 10**9})}, "got max_length=1000000000."),
    ({"generation_config": json.dumps({"max_new_tokens": 9}), "max_tokens": None}, "got 9 tokens. Expected at most 8."),
    ({"generation_config": json.dumps([1])}, "cannot convert"),
    ({"max_tokens": 10**400}, "too long: got a number beyond 64 bits tokens. Expected at most 8."),
    ({"max_tokens": 9, "stream": True}, "Ask for fewer; the server's --max-new-tokens sets the limit."),
    ({"max_tokens": -1}, "got -1 tokens"),
    ({"max_tokens": "many"}, "invalid literal"),
    (
        {"stop": ["a" * 200, "b" * 200]},
        "the stop strings are too long: got 400 characters. Expected at most 256 together",
    ),
]


def test_requests_that_ask_for_too_much_are_refused_and_the_others_are_answered(tiny_model_folder):
    """With status 400, before anything is generated; nobody's answers draft for others."""
    port, args = free_port(), parsed(str(tiny_model_folder), "--max-new-tokens", "8")
    with serve.prepared_models(lambda model: serve.attach_warmed_up(model, args, None)), serve.bounded_requests(8):
        server = Serve(force_model=str(tiny_model_folder), host="127.0.0.1", port=port, non_blocking=True)
        try:
            wait_for_port(port)
            (loaded,) = server._model_manager.loaded_models.values()
            for fields, message in REFUSED:
                with pytest.raises(urllib.error.HTTPError) as caught:
                    ask(port, tiny_model_folder, **fields)
                assert (caught.value.code, message in json.load(caught.value)["detail"]) == (400, True), fields
            assert loaded.model.last_exit_stats is None
            usual = json.dumps({"num_beams": 1, "do_sample": False, "eos_token_id": None, "top_k": 5})
            for fields in ({}, {"generation_config": None, "max_tokens": None, "temperature": 0}, {"max_tokens": None}):
                answer = json.loads(ask(port, tiny_model_folder, **{"generation_config": usual, **fields}))
                assert answer["usage"]["completion_tokens"] <= 8
            for path, prompt, limit in (
                ("completions", "prompt", "max_tokens"),
                ("responses", "input", "max_output_tokens"),
            ):
                fields = {"model": str(tiny_model_folder), prompt: "abc", "stream": False}
                with pytest.raises(urllib.error.HTTPError, match="400"):
                    post(port, path, {**fields, limit: 10**9})
                post(port, path, {**fields, limit: 3})
            assert loaded.model._tide.answers.max_tokens == 0
        finally:
            server.kill_server()


def test_errors_are_explained_before_a_model_is_loaded(monkeypatch, tiny_llama, refused, capsys):
    monkeypatch.setattr(ModelManager, "_load_model", lambda *_, **__: pytest.fail("it loads"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    refused(["serve", "MODEL", "--routers", "no/such/routers"], "no routers at no/such/routers")
    refused(["serve", "MODEL", "--port", "8001", "--continuous-batching"], "does not support continuous batching")
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "MODEL", "--no-such-option"])
    assert caught.value.code == 2
    assert "No such option" in capsys.readouterr().err
    monkeypatch.setattr(serve, "is_serve_available", lambda: False)
    refused(["serve", "m"], 'Run: pip install "tide-hf[serve]"')
    args = parsed("MODEL", "--mode", "early_exit")  # the model has to be loaded, since its head finds shipped routers
    with pytest.raises(ConfigurationError, match="got --mode early_exit, which needs them"):
        serve.attach_warmed_up(tiny_llama(), args, serve.named_routers(args))


def test_dtype_and_model_go_to_transformers_server(monkeypatch, tiny_model_folder):
    asked = []
    monkeypatch.setattr(serve.typer.Typer, "__call__", lambda app, command, **_: asked.extend(command))
    assert cli.main(["serve", str(tiny_model_folder), "--dtype", "bfloat16", "--device", "cpu"]) == 0
    assert asked == [str(tiny_model_folder), "--dtype", "bfloat16", "--device", "cpu"]
