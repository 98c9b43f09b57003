"""Two replicas on a local Ray cluster, one killed while it answers: no accepted request is lost.

The same without a cluster: `RayBackend` and replicas that are played.
"""

import asyncio
import os
import signal
import subprocess
import threading
import time

import pytest
from repository import ROOT

ray = pytest.importorskip("ray")
pytest.importorskip("grpc")  # which Ray Serve needs
openai = pytest.importorskip("openai")

from servers import running  # noqa: E402

from tide_hf.serving.app import create_app  # noqa: E402
from tide_hf.serving.deployment import ATTEMPTS, ClusterOptions, RayBackend, start_replicas  # noqa: E402
from tide_hf.serving.limits import Limits  # noqa: E402
from tide_hf.serving.metrics import Metrics  # noqa: E402
from tide_hf.serving.protocol import Accepted, ChatRequest, Delta, Finished, Refused  # noqa: E402
from tide_hf.serving.served_model import ServingOptions  # noqa: E402

MESSAGES = ({"role": "user", "content": "a"},)
WHOLE = [Accepted(3), Delta("one "), Delta("two"), Finished("stop", 2)]


class PlayedHandle:
    """Stands for a deployment: each call plays the next script; an exception in it is a replica's death."""

    def __init__(self, *scripts):
        self.scripts = list(scripts)
        self.cancelled = 0
        self.stream = self.ping = self

    def options(self, stream):
        assert stream
        return self

    def remote(self, *request):
        return _Played(self, self.scripts.pop(0))


class _Played:
    def __init__(self, handle, script):
        self.handle, self.script = handle, script

    async def __aiter__(self):
        for event in self.script:
            if isinstance(event, Exception):
                raise event
            yield event

    def __await__(self):
        return self._answer().__await__()

    async def _answer(self):
        if isinstance(self.script, Exception):
            raise self.script
        return self.script

    def cancel(self):
        self.handle.cancelled += 1


def events_of(handle, monkeypatch, stream):
    monkeypatch.setattr("tide_hf.serving.deployment.RETRY_SECONDS", 0.0)
    metrics = Metrics()

    async def run():
        request = ChatRequest(messages=MESSAGES, stream=stream)
        return [event async for event in RayBackend(handle, metrics).stream(request)]

    return asyncio.run(run()), metrics.resubmitted._value.get()


def died():
    return ray.exceptions.ActorDiedError()


@pytest.mark.parametrize("stream", [True, False])
def test_what_has_not_begun_goes_to_another_replica(monkeypatch, stream):
    handle = PlayedHandle([died()], [Accepted(3), died()], WHOLE)
    events, resubmitted = events_of(handle, monkeypatch, stream)
    assert events == (WHOLE if stream else [Accepted(3), Delta("one two"), Finished("stop", 2)])
    assert (resubmitted, handle.cancelled) == (2, 3)


def test_an_answer_that_is_not_streamed_starts_over_at_any_time(monkeypatch):
    events, resubmitted = events_of(PlayedHandle([*WHOLE[:3], died()], WHOLE), monkeypatch, stream=False)
    assert events == [Accepted(3), Delta("one two"), Finished("stop", 2)]
    assert resubmitted == 1


def test_a_stream_that_has_begun_ends_with_an_error(monkeypatch):
    events, resubmitted = events_of(PlayedHandle([*WHOLE[:2], died()], WHOLE), monkeypatch, stream=True)
    assert events[:2] == WHOLE[:2]
    assert (events[2].status, events[2].code) == (503, "replica_lost")
    assert resubmitted == 0


def test_a_request_that_breaks_every_replica_is_given_up(monkeypatch):
    events, _ = events_of(PlayedHandle(*[[died()]] * 9), monkeypatch, stream=False)
    assert [type(event) for event in events] == [Refused]
    assert f"{ATTEMPTS} replicas were lost" in events[0].message


def test_a_refusal_is_handed_on_at_once(monkeypatch):
    refused = Refused("too long", 400)
    assert events_of(PlayedHandle([refused]), monkeypatch, stream=False) == ([refused], 0)


def test_health_is_that_some_replica_answers():
    assert asyncio.run(RayBackend(PlayedHandle(True), Metrics()).is_healthy())
    assert not asyncio.run(RayBackend(PlayedHandle(died()), Metrics()).is_healthy())


@pytest.fixture
def cluster(tiny_model_folder, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_raylet_start_wait_time_s", "180")  # on a busy machine
    monkeypatch.setenv("RAY_AUTH_TOKEN", "0" * 32)  # or it keeps one in the home folder
    options = ServingOptions(model=str(tiny_model_folder), dtype="float32", threads=1, max_batch=4)
    metrics = Metrics()
    backend = start_replicas(options, ClusterOptions(replicas=2, cpus_per_replica=0.5), metrics)
    try:
        yield backend, metrics
    finally:
        asyncio.run(backend.close())
        ray.shutdown()


def wait_until(condition, seconds=180):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.05)


def replica_processes():
    """Process ids of the living replicas."""
    lines = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    return [int(line.split()[0]) for line in lines if "ray::ServeReplica:tide_hf:Replica" in line]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_replica_loses_no_accepted_request(cluster):
    backend, metrics = cluster
    answers, errors, stop = [], [], threading.Event()
    with running(create_app(backend, "tiny", Limits(requests_per_minute=0), metrics)) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=120)

        def ask(text, **fields):
            return client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": text}], temperature=0, **fields
            )

        expected = {text: ask(text, max_tokens=60).choices[0].message.content for text in ("hello", "abcabc")}

        def load(text):
            while not stop.is_set():
                try:
                    answers.append((text, ask(text, max_tokens=60).choices[0].message.content))
                except openai.APIError as error:
                    errors.append(error)

        threads = [threading.Thread(target=load, args=[text]) for text in expected for _ in range(6)]
        for thread in threads:
            thread.start()
        victims = replica_processes()
        assert len(victims) == 2
        wait_until(lambda: len(answers) >= 8)
        os.kill(victims[0], signal.SIGKILL)
        before = len(answers)
        wait_until(lambda: errors or (metrics.resubmitted._value.get() and len(answers) >= before + 16))
        stop.set()
        for thread in threads:
            thread.join()
        assert not errors
        assert all(text == expected[asked] for asked, text in answers)
        assert metrics.totals["batches"] < metrics.totals["batch_rows"]
        wait_until(lambda: len(set(replica_processes()) - {victims[0]}) == 2)  # Ray Serve starts another

        stream = ask("hello", max_tokens=1000, stream=True, stop=["\0"])
        begun = [next(stream), next(stream)]
        assert expected["hello"].startswith(begun[1].choices[0].delta.content[:5])
        for process in replica_processes():
            os.kill(process, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was lost") as caught:
            list(stream)
        assert caught.value.code == "replica_lost"
        chunks = ask("hello", max_tokens=60, stream=True)  # accepted while no replica lives: it waits for one
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == expected["hello"]
