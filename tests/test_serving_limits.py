"""What the chat server refuses: too much, too often, from strangers, and what is no request at all."""

import asyncio
import json

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from servers import ask, chat, client, connected, metrics_of, request_head, serving, wait_until  # noqa: E402

from tide_hf import TIDEModelForCausalLM  # noqa: E402
from tide_hf.errors import ConfigurationError  # noqa: E402
from tide_hf.serving.app import create_app  # noqa: E402
from tide_hf.serving.batching import Batcher  # noqa: E402
from tide_hf.serving.limits import Limits, RateLimiter, is_loopback  # noqa: E402
from tide_hf.serving.served_model import ServedModel, ServingOptions  # noqa: E402


@pytest.mark.parametrize(
    ("text", "fields", "param", "expected"),
    [
        ("a" * 200, {}, "messages", "1 to 100 tokens"),
        ("a", {"max_tokens": 65}, "max_tokens", "at most 64"),
        ("a" * 80, {"max_tokens": 60}, "max_tokens", "at most 34 after a prompt of 94 tokens"),
    ],
)
def test_prompts_and_answers_have_limits(make_served, text, fields, param, expected):
    served = make_served(max_prompt_tokens=100, max_tokens=64, config={"max_position_embeddings": 128})
    with serving(served) as (url, _, _), pytest.raises(openai.BadRequestError, match=expected) as caught:
        ask(client(url), text, **fields)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", param)


def test_an_answer_without_a_limit_gets_what_there_is(make_served):
    served = make_served(max_tokens=64, config={"max_position_embeddings": 60, "eos_token_id": None})
    with serving(served) as (url, _, _):
        answer = ask(client(url), "a" * 10)
    assert answer.usage.completion_tokens == 60 - len(f"<user>{'a' * 10}<answer>")
    assert answer.choices[0].finish_reason == "length"


def test_a_conversation_that_the_template_refuses(make_served):
    served = make_served()
    served.tokenizer = type(served.tokenizer)(tokenizer_object=served.tokenizer._tokenizer)
    served.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with serving(served) as (url, _, _), pytest.raises(openai.BadRequestError, match="roles must alternate"):
        ask(client(url), "a")


def test_a_model_without_a_chat_template_is_refused(tiny_llama, tiny_tokenizer):
    plain = type(tiny_tokenizer)(tokenizer_object=tiny_tokenizer._tokenizer)
    with pytest.raises(ConfigurationError, match=r"cannot answer chats: got a tokenizer without a chat template\. Exp"):
        ServedModel(TIDEModelForCausalLM.attach(tiny_llama()), plain, ServingOptions(model="tiny"))


def test_an_answer_across_a_change_of_the_rotary_embedding_is_refused(make_served):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    served = make_served(config={"rope_parameters": rope, "max_position_embeddings": 64}, max_tokens=64)
    served.context = 2**31
    with serving(served) as (url, _, _), pytest.raises(openai.BadRequestError, match="rotary embedding changes"):
        ask(client(url), "a", max_tokens=60)


def test_the_queue_is_bounded(make_served):
    with serving(make_served(slow=0.02), max_requests=1) as (url, _, _):
        stream = ask(client(url), "abc", max_tokens=50, stream=True)
        next(stream)
        with pytest.raises(openai.InternalServerError, match="the server is busy") as caught:
            ask(client(url), "abc", max_tokens=1)
        assert caught.value.status_code == 503
        assert caught.value.response.headers["retry-after"] == "1"
        list(stream)
        wait_until(lambda: metrics_of(url)["tide_requests_open"] == 0)
        assert ask(client(url), "abc", max_tokens=1).usage.completion_tokens == 1


def test_the_rate_is_bounded(make_served):
    with serving(make_served(), requests_per_minute=3) as (url, _, _):
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


def test_strangers_are_turned_away(make_served):
    with serving(make_served(), api_key="secret") as (url, _, _), httpx.Client(base_url=url) as connection:
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
def test_abuse_is_refused_in_the_shape_that_clients_know(make_served, content, headers, status, code):
    hosts = ("localhost", "127.0.0.1", "[::1]")
    with serving(make_served(), max_body_bytes=1000, hosts=hosts) as (url, _, _):
        headers = {"content-type": "application/json"} | headers
        response = httpx.post(f"{url}/v1/chat/completions", content=content, headers=headers)
        assert response.status_code == status
        error = response.json()["error"]
        assert error["code"] == code
        assert set(error) == {"message", "type", "param", "code"}


def test_sockets_that_misbehave(make_served):
    with serving(make_served(), max_body_bytes=1000, client_seconds=0.3, hosts=("localhost",)) as (url, _, _):

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


def test_a_client_that_does_not_read_loses_its_place(make_served):
    async def run():
        batcher = Batcher(make_served())
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
