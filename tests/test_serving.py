"""The chat server, through the real `openai` client and through sockets that misbehave."""

import asyncio
import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from servers import running  # noqa: E402

from tide_hf import TIDEModelForCausalLM, TIDERouters  # noqa: E402
from tide_hf.errors import ConfigurationError  # noqa: E402
from tide_hf.serving.app import create_app  # noqa: E402
from tide_hf.serving.batching import Batcher  # noqa: E402
from tide_hf.serving.engine import Engine, EngineOptions  # noqa: E402
from tide_hf.serving.limits import Limits, RateLimiter, is_loopback  # noqa: E402
from tide_hf.serving.protocol import Accepted, Delta, Finished, Refused, parse_chat_request  # noqa: E402

TEXTS = ("hello", "abcabcabcabc", "one two one two one", "x")


def chat(text):
    return [{"role": "user", "content": text}]


@pytest.fixture
def make_engine(tiny_llama, tiny_tokenizer):
    """A function that makes an engine with a tiny attached model."""

    def make(mode="self_speculative", slow=0.0, config=None, **options):
        model = tiny_llama(**(config or {}))
        routers = TIDERouters.for_model(model, exit_layers=[2])
        TIDEModelForCausalLM.attach(model, routers, mode=mode)
        if slow:
            model.register_forward_pre_hook(lambda *_: time.sleep(slow))
        return Engine(model, tiny_tokenizer, EngineOptions(model="tiny", mode=mode, **options))

    return make


@contextmanager
def serving(engine, **limits):
    """A server for an engine; gives its address, the batcher and the app."""
    batcher = Batcher(engine)
    app = create_app(batcher, "tiny", Limits(**{"requests_per_minute": 0, **limits}))
    with running(app) as url:
        yield url, batcher, app


def client(url, key="-", **settings):
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, **settings)


def ask(connection, text, **fields):
    return connection.chat.completions.create(model="tiny", messages=chat(text), **{"temperature": 0, **fields})


def plain_answer(engine, text, max_new_tokens):
    """What the base model says: text and whether it ended by itself."""
    prompt = engine.tokenizer(f"<user>{text}<answer>", return_tensors="pt", return_token_type_ids=False)
    model = TIDEModelForCausalLM.detach(engine.model)
    tokens = model.generate(**prompt, max_new_tokens=max_new_tokens, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return engine.tokenizer.decode(tokens, skip_special_tokens=True), int(tokens[-1]) == engine.tokenizer.eos_token_id


def metrics_of(url, **headers):
    lines = httpx.get(f"{url}/metrics", headers=headers).text.splitlines()
    return {line.rsplit(" ", 1)[0]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.startswith("#")}


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["self_speculative", "early_exit"])
def test_answers_are_the_models_own_whole_and_streamed_and_share_batches(make_engine, mode):
    engine = make_engine(mode, max_batch=8, gather_ms=200)
    lengths = dict(zip(TEXTS, (24, 7, 16, 30), strict=True))
    answers = {}
    with serving(engine) as (url, _, _):

        def whole(text):
            answer = ask(client(url), text, max_tokens=lengths[text])
            choice = answer.choices[0]
            answers[text] = choice.message.content, choice.finish_reason, answer.usage.completion_tokens

        def streamed(text):
            options = {"include_usage": True}
            chunks = list(
                ask(client(url), text, max_completion_tokens=lengths[text], stream=True, stream_options=options)
            )
            assert chunks[0].choices[0].delta.role == "assistant"
            text_pieces = [c.choices[0].delta.content for c in chunks[1:-2]]
            reason, usage = chunks[-2].choices[0].finish_reason, chunks[-1].usage
            answers[text, "streamed"] = "".join(text_pieces), reason, usage.completion_tokens

        threads = [threading.Thread(target=f, args=[text]) for text in TEXTS for f in (whole, streamed)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = metrics_of(url)
    for text in TEXTS:
        assert answers[text] == answers[text, "streamed"]
        if mode == "self_speculative":
            expected, ended = plain_answer(engine, text, lengths[text])
            TIDEModelForCausalLM.attach(engine.model)
            assert answers[text][:2] == (expected, "stop" if ended else "length")
    assert counts["tide_batch_rows_total"] == 8
    assert counts["tide_batches_total"] < 8
    assert counts["tide_completion_tokens_total"] == sum(answer[2] for answer in answers.values())
    assert counts["tide_prompt_tokens_total"] == 2 * sum(len(f"<user>{text}<answer>") for text in TEXTS)
    assert counts['tide_responses_total{path="/v1/chat/completions",status="200"}'] == 8
    assert counts["tide_requests_open"] == 0
    plain = counts["tide_layers_plain_total"]
    assert counts["tide_depth_fraction"] == pytest.approx(counts["tide_layers_executed_total"] / plain)
    if mode == "self_speculative":
        assert counts["tide_acceptance_rate"] == pytest.approx(
            counts["tide_accepted_total"] / max(1, counts["tide_drafted_total"])
        )


def test_text_streams_while_it_is_made(make_engine):
    with serving(make_engine(slow=0.02)) as (url, batcher, _):
        stream = ask(client(url), "abc", max_tokens=60, stream=True)
        next(stream), next(stream)
        assert batcher._runner is not None
        assert metrics_of(url)["tide_requests_open"] == 1
        assert len(list(stream)) > 3


def test_models_health_and_what_is_not_there(make_engine):
    with serving(make_engine()) as (url, batcher, _):
        assert [model.id for model in client(url).models.list()] == ["tiny"]
        assert client(url).models.retrieve("tiny").owned_by == "tide_hf"
        assert httpx.get(f"{url}/health").json() == {"status": "ok"}
        batcher.failures = 3
        assert httpx.get(f"{url}/health").status_code == 503
        for call in (
            lambda: client(url).models.retrieve("other/model"),
            lambda: client(url).embeddings.create(model="tiny", input="a"),
            lambda: client(url).chat.completions.create(model="gpt", messages=chat("a")),
        ):
            with pytest.raises(openai.NotFoundError) as caught:
                call()
            assert caught.value.body["type"] == "not_found_error"
        assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_sampling_stop_strings_and_seeds(make_engine):
    engine = make_engine(gather_ms=100)
    with serving(engine) as (url, _, _):
        connection = client(url)
        whole = ask(connection, "hello", max_tokens=24).choices[0].message.content
        stop = whole[5:7]
        answer = ask(connection, "hello", max_tokens=24, stop=[stop]).choices[0]
        assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")
        seeded = [ask(connection, "hello", temperature=1.5, seed=7, max_tokens=24).choices[0].message for _ in range(2)]
        assert seeded[0] == seeded[1]
        state = torch.get_rng_state()
        ask(connection, "hello", temperature=1.5, seed=7, max_tokens=4)
        assert torch.equal(torch.get_rng_state(), state)  # or all later answers could be foretold
        free = {ask(connection, "hello", temperature=1.5, max_tokens=24).choices[0].message.content for _ in range(4)}
        assert len(free) > 1
        assert ask(connection, "hello", temperature=1e-30, max_tokens=24).choices[0].message.content == whole
        assert ask(connection, "hello", temperature=1.0, top_p=0, max_tokens=24).choices[0].message.content == whole


def test_only_requests_that_agree_share_a_batch(make_engine):
    engine = make_engine(config={"max_position_embeddings": 64})

    def job(text, **fields):
        body = json.dumps({"model": "tiny", "messages": chat(text), "max_tokens": 8, **fields}).encode()
        return engine.prepare(parse_chat_request(body, "tiny"), None)

    assert engine.fits([job("a"), job("b", max_tokens=20)])
    assert not engine.fits([job("a", temperature=0), job("b", temperature=1)])
    assert engine.fits([job("a", seed=3)])
    assert not engine.fits([job("a", seed=3), job("b", seed=3)])
    assert not engine.fits([job("a" * 30), job("b", max_tokens=30)])  # the two together would not fit the context


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(make_engine, stream):
    engine = make_engine(slow=0.002, max_batch=2, gather_ms=100, max_tokens=1900)
    batches, run = [], engine.run
    engine.run = lambda jobs: batches.append(jobs) or run(jobs)
    with serving(engine) as (url, _, _):
        other = threading.Thread(target=ask, args=(client(url), "b"), kwargs={"max_tokens": 30})
        other.start()
        body = {"model": "tiny", "messages": chat("a"), "max_tokens": 1900, "temperature": 0, "stream": stream}
        content = json.dumps(body).encode()
        with connected(url) as connection:
            connection.sendall(request_head(len(content)) + content)
            wait_until(lambda: any(job.max_tokens == 1900 and job.num_tokens > 5 for jobs in batches for job in jobs))
        other.join()
        wait_until(lambda: metrics_of(url)["tide_requests_open"] == 0)
        ask(client(url), "c", max_tokens=1)  # the counts of the batch before come along
        counts = metrics_of(url)
    assert counts["tide_batch_rows_total"] == 3
    assert counts["tide_tokens_total"] < 900
    status = "200" if stream else "499"
    assert counts[f'tide_responses_total{{path="/v1/chat/completions",status="{status}"}}'] >= 1


def test_a_request_that_is_cancelled_in_the_queue_is_never_decoded(make_engine):
    async def run():
        engine = make_engine(slow=0.01)
        engine.options = EngineOptions(model="tiny", max_batch=1)
        batcher = Batcher(engine)
        request = parse_chat_request(
            json.dumps({"model": "tiny", "messages": chat("a"), "max_tokens": 9}).encode(), "tiny"
        )
        first, second = batcher.stream(request), batcher.stream(request)
        assert isinstance(await anext(first), Accepted)
        assert isinstance(await anext(second), Accepted)
        await second.aclose()
        events = [event async for event in first]
        assert isinstance(events[-1], Finished)
        await batcher.close()
        return events[-1].work, batcher.waiting

    work, waiting = asyncio.run(run())
    assert work["batches"] == 1
    assert all(job.cancelled for job in waiting)


def test_a_batch_that_fails_is_told_and_the_next_one_runs(make_engine, caplog):
    engine = make_engine(gather_ms=100)
    original, failing = engine.model.forward, [True]

    def forward(*args, **kwargs):
        if failing:
            raise RuntimeError("no memory")
        return original(*args, **kwargs)

    engine.model.forward = forward
    with serving(engine) as (url, _, _):
        with pytest.raises(openai.InternalServerError, match="engine failed"):
            ask(client(url), "a", max_tokens=4)
        with pytest.raises(openai.APIError, match="engine failed"):
            list(ask(client(url), "a", max_tokens=4, stream=True))
        assert httpx.get(f"{url}/health").status_code == 200
        failing.clear()
        assert ask(client(url), "a", max_tokens=4).usage.completion_tokens == 4
    assert "no memory" in caplog.text


def test_closing_ends_what_runs_and_refuses_what_waits(make_engine):
    async def run():
        engine = make_engine(slow=0.02, max_batch=1, gather_ms=0)
        batcher = Batcher(engine)
        request = parse_chat_request(
            json.dumps({"model": "tiny", "messages": chat("a"), "stream": True}).encode(), "tiny"
        )
        streams = [batcher.stream(request) for _ in range(2)]
        for stream in streams:
            await anext(stream)
        assert isinstance(await anext(streams[0]), Delta)
        await batcher.close()
        return [await last_of(stream) for stream in streams]

    async def last_of(stream):
        return [event async for event in stream][-1]

    for last in asyncio.run(asyncio.wait_for(run(), 30)):
        assert isinstance(last, Refused)
        assert last.status == 500


@pytest.mark.parametrize(
    ("text", "fields", "param", "expected"),
    [
        ("a" * 200, {}, "messages", "1 to 100 tokens"),
        ("a", {"max_tokens": 65}, "max_tokens", "at most 64"),
        ("a" * 80, {"max_tokens": 60}, "max_tokens", "at most 34 after a prompt of 94 tokens"),
    ],
)
def test_prompts_and_answers_have_limits(make_engine, text, fields, param, expected):
    engine = make_engine(max_prompt_tokens=100, max_tokens=64, config={"max_position_embeddings": 128})
    with serving(engine) as (url, _, _), pytest.raises(openai.BadRequestError, match=expected) as caught:
        ask(client(url), text, **fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_an_answer_without_a_limit_gets_what_there_is(make_engine):
    engine = make_engine(max_tokens=64, config={"max_position_embeddings": 60, "eos_token_id": None})
    with serving(engine) as (url, _, _):
        answer = ask(client(url), "a" * 10)
    assert answer.usage.completion_tokens == 60 - len(f"<user>{'a' * 10}<answer>")
    assert answer.choices[0].finish_reason == "length"


def test_a_conversation_that_the_template_refuses(make_engine):
    engine = make_engine()
    engine.tokenizer = type(engine.tokenizer)(tokenizer_object=engine.tokenizer._tokenizer)
    engine.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with serving(engine) as (url, _, _), pytest.raises(openai.BadRequestError, match="roles must alternate"):
        ask(client(url), "a")


def test_a_model_without_a_chat_template_is_refused(tiny_llama, tiny_tokenizer):
    plain = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer._tokenizer)
    with pytest.raises(ConfigurationError, match=r"cannot answer chats: got a tokenizer without a chat template\. Exp"):
        Engine(TIDEModelForCausalLM.attach(tiny_llama()), plain, EngineOptions(model="tiny"))


def test_an_answer_across_a_change_of_the_rotary_embedding_is_refused(make_engine):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    engine = make_engine(config={"rope_parameters": rope, "max_position_embeddings": 64}, max_tokens=64)
    engine.context = 2**31
    with serving(engine) as (url, _, _), pytest.raises(openai.BadRequestError, match="rotary embedding changes"):
        ask(client(url), "a", max_tokens=60)


def test_the_queue_is_bounded(make_engine):
    with serving(make_engine(slow=0.02), max_requests=1) as (url, _, _):
        stream = ask(client(url), "abc", max_tokens=50, stream=True)
        next(stream)
        with pytest.raises(openai.InternalServerError, match="the server is busy") as caught:
            ask(client(url), "abc", max_tokens=1)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        list(stream)
        wait_until(lambda: metrics_of(url)["tide_requests_open"] == 0)
        assert ask(client(url), "abc", max_tokens=1).usage.completion_tokens == 1


def test_the_rate_is_bounded(make_engine):
    with serving(make_engine(), requests_per_minute=3) as (url, _, _):
        for _ in range(3):
            client(url).models.list()
        with pytest.raises(openai.RateLimitError, match="Expected 3 a minute") as caught:
            client(url).models.list()
        assert caught.value.body["type"] == "rate_limit_error"
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_bucket_fills_again_and_the_oldest_is_forgotten(monkeypatch):
    monkeypatch.setattr("tide_hf.serving.limits.MAX_CLIENTS", 2)
    now = [0.0]
    limiter = RateLimiter(2, clock=lambda: now[0])
    assert [limiter.admits("a") for _ in range(3)] == [True, True, False]
    assert limiter.admits("b")
    now[0] = 30.0
    assert [limiter.admits("a") for _ in range(2)] == [True, False]
    assert [limiter.admits("c"), limiter.admits("d")] == [True, True]
    assert list(limiter.buckets) == ["c", "d"]


def test_strangers_are_turned_away(make_engine):
    with serving(make_engine(), api_key="secret") as (url, _, _), httpx.Client(base_url=url) as connection:
        keys = ["Bearer wrong", "Bearer", "Bearer secretsecret", "Bearer secre", "Bearer s\u00e9cret", "Basic secret"]
        headers = [[(b"authorization", key.encode())] for key in keys]
        headers += [[], [(b"authorization", b"\xff\xfe")], [(b"authorization", b"Bearer secret")] * 2]
        for path in ("/v1/models", "/metrics", "/v1/chat/completions", "/nothing"):
            for header in headers:
                response = connection.post(path, headers=header)
                assert response.status_code == 401
                assert response.json()["error"]["code"] == "invalid_api_key"
                assert "secret" not in response.text
        assert connection.get("/health").status_code == 200
        assert client(url, "secret").models.list().data[0].id == "tiny"
        assert metrics_of(url, authorization="Bearer secret")["tide_requests_open"] == 0


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"\xff{}", {}, 400, "invalid_json"),
        (b"{" * 99, {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "invalid_content_type"),
        (b"{}", {"content-type": ""}, 415, "invalid_content_type"),
        (b" " * 2000, {}, 413, "request_too_large"),
        (b"{}", {"x": "y" * 20_000}, 431, "headers_too_large"),
        (b"{}", {"host": "evil.example"}, 400, "invalid_host"),
        (b"{}", {"host": "localhost.evil.example:8000"}, 400, "invalid_host"),
        (b"{}", {"host": "localhost:1234"}, 404, "model_not_found"),
        (b"{}", {"host": "[::1]:80", "content-type": "application/json; charset=utf-8"}, 404, "model_not_found"),
    ],
)
def test_abuse_is_refused_in_the_shape_that_clients_know(make_engine, content, headers, status, code):
    hosts = ("localhost", "127.0.0.1", "[::1]")
    with serving(make_engine(), max_body_bytes=1000, hosts=hosts) as (url, _, _):
        headers = {"content-type": "application/json"} | headers
        response = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}


@contextmanager
def connected(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        yield connection


def request_head(length, *more):
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: localhost", "Content-Type: application/json", *more]
    lines += [] if length is None else [f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def test_sockets_that_misbehave(make_engine):
    with serving(make_engine(), max_body_bytes=1000, client_seconds=0.3, hosts=("localhost",)) as (url, _, _):

        def status_of(*parts):
            with connected(url) as connection:
                for part in parts:
                    connection.sendall(part)
                return int(connection.recv(4096).split()[1])

        assert status_of(request_head(10**9)) == 413  # before any of it has come
        assert status_of(request_head(None, "Transfer-Encoding: chunked"), b"400\r\n" + b" " * 1024 + b"\r\n") == 413
        assert status_of(request_head(500), b"{") == 408
        assert status_of(request_head("+5"), b"{") == 400
        assert status_of(request_head(2, "Host: localhost"), b"{}") == 400
        assert status_of(b"GET /v1/models HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n") == 400
        assert status_of(b"GET /v1/models HTTP/1.1\r\n" + b"a" * 200_000) in (400, 431)
        assert status_of(b"\x00\x01\x02\r\n\r\n") == 400
        assert client(url.replace("127.0.0.1", "localhost")).models.list().data


def test_a_client_that_does_not_read_loses_its_place(make_engine):
    async def run():
        batcher = Batcher(make_engine())
        app = create_app(batcher, "tiny", Limits(client_seconds=0.1))
        body = json.dumps({"model": "tiny", "messages": chat("a"), "stream": True, "max_tokens": 40}).encode()
        incoming = [{"type": "http.request", "body": body, "more_body": False}]
        sent = []

        async def receive():
            return incoming.pop() if incoming else await asyncio.sleep(60)

        async def send(message):
            sent.append(message["type"])
            if len(sent) > 2:
                await asyncio.sleep(60)

        path, headers = "/v1/chat/completions", [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        await app(scope, receive, send)
        await batcher.close()
        return sent, app.metrics.requests._value.get()

    sent, still_open = asyncio.run(asyncio.wait_for(run(), 50))
    assert sent == ["http.response.start", "http.response.body", "http.response.body"]
    assert still_open == 0


@pytest.mark.parametrize(
    ("host", "local"),
    [("127.0.0.1", True), ("::1", True), ("[::1]", True), ("localhost", True), ("0.0.0.0", False), ("::", False)]
    + [("192.168.1.5", False), ("myhost", False)],
)
def test_which_hosts_are_this_machine_alone(host, local):
    assert is_loopback(host) == local
