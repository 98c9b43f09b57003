"""The chat server's batches: who shares one, how one leaves, and what becomes of the rest."""

import asyncio
import json
import threading

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx2")

from servers import ask, chat, client, connected, metrics_of, request_head, serving, wait_until  # noqa: E402

from tide_hf.serving.batching import Batcher  # noqa: E402
from tide_hf.serving.protocol import Accepted, Delta, Finished, Refused  # noqa: E402
from tide_hf.serving.requests import parse_chat_request  # noqa: E402
from tide_hf.serving.served_model import ServingOptions, batch_sizes  # noqa: E402


def test_only_requests_that_agree_share_a_batch(make_served):
    served = make_served(config={"max_position_embeddings": 64})

    def job(text, **fields):
        body = json.dumps({"model": "tiny", "messages": chat(text), "max_tokens": 8, **fields}).encode()
        return served.prepare(parse_chat_request(body, "tiny"), None)

    assert served.fits([job("a"), job("b", max_tokens=20)])
    assert not served.fits([job("a", temperature=0), job("b", temperature=1)])
    assert served.fits([job("a", seed=3)])
    assert not served.fits([job("a", seed=3), job("b", seed=3)])
    assert not served.fits([job("a" * 30), job("b", max_tokens=30)])  # the two together would not fit the context


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(make_served, stream):
    served = make_served(slow=0.002, max_batch=2, gather_ms=100, max_tokens=1900)
    batches, run = [], served.run
    served.run = lambda jobs: batches.append(jobs) or run(jobs)
    with serving(served) as (url, _, _):
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


def test_a_request_that_is_cancelled_in_the_queue_is_never_decoded(make_served):
    async def run():
        served = make_served(slow=0.01)
        served.options = ServingOptions(model="tiny", max_batch=1)
        batcher = Batcher(served)
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


def test_a_batch_that_fails_is_told_and_the_next_one_runs(make_served, caplog):
    served = make_served(gather_ms=100)
    original, failing = served.model.forward, [True]

    def forward(*args, **kwargs):
        if failing:
            raise RuntimeError("no memory")
        return original(*args, **kwargs)

    served.model.forward = forward
    with serving(served) as (url, _, _):
        with pytest.raises(openai.InternalServerError, match="model failed"):
            ask(client(url), "a", max_tokens=4)
        with pytest.raises(openai.APIError, match="model failed"):
            list(ask(client(url), "a", max_tokens=4, stream=True))
        assert httpx.get(f"{url}/health").status_code == 200
        failing.clear()
        assert ask(client(url), "a", max_tokens=4).usage.completion_tokens == 4
    assert "no memory" in caplog.text


def test_closing_ends_what_runs_and_refuses_what_waits(make_served):
    async def run():
        served = make_served(slow=0.02, max_batch=1, gather_ms=0)
        batcher = Batcher(served)
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
        assert (last.status, last.code) == (503, "shutting_down")


def test_a_server_that_stops_ends_what_runs_and_refuses_what_waits(make_served):
    served = make_served(slow=0.01, max_batch=1, gather_ms=0, max_tokens=1900)
    outcomes = {}

    def answer(name, connection, **fields):
        try:
            outcomes[name] = ask(connection, name, **fields).usage.completion_tokens
        except openai.APIStatusError as error:
            outcomes[name] = (error.status_code, error.code)

    with serving(served) as (url, batcher, _):
        connection = client(url)
        names = ("runs", "waits")
        threads = [
            threading.Thread(target=answer, args=(name, connection), kwargs={"max_tokens": 40}) for name in names
        ]
        threads[0].start()
        wait_until(lambda: not batcher.waiting and metrics_of(url)["tide_requests_open"] == 1)
        threads[1].start()
        wait_until(lambda: batcher.waiting)
    for thread in threads:
        thread.join()
    assert outcomes == {"runs": 40, "waits": (503, "shutting_down")}


def test_a_row_that_generate_ends_is_answered(make_served):
    served = make_served(slow=0.01, max_tokens=1900)
    served.model.generation_config.max_time = 0.1
    with serving(served) as (url, _, _):
        answer = ask(client(url, timeout=20), "a", max_tokens=1900)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens < 1900


@pytest.mark.parametrize(("most", "sizes"), [(1, [1]), (2, [1, 2]), (5, [1, 2, 4, 5]), (8, [1, 2, 4, 8])])
def test_few_sizes_serve_all_batches(most, sizes):
    assert batch_sizes(most) == sizes
    for rows in range(1, most + 1):
        assert any(rows <= size < 2 * rows for size in sizes)
