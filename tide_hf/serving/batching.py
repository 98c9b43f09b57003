"""Which requests share a batch. One batch runs at a time; those that come meanwhile make up the next."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from ..errors import RequestError
from .job import SHUTTING_DOWN, Job
from .protocol import Accepted, ChatRequest, Delta, Event, Finished, Refused
from .served_model import ServedModel

logger = logging.getLogger(__name__)
MAX_FAILURES = 3  # batches in a row, after which the model counts as broken


class Batcher:
    """Gathers requests into batches for a served model.

    Args:
        served: What decodes them.
    """

    def __init__(self, served: ServedModel) -> None:
        self.served = served
        self.waiting: list[Job] = []
        self.failures = 0
        self._closing = False
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tide-decode")
        self._wake = asyncio.Event()
        self._runner: asyncio.Task[None] | None = None

    async def stream(self, request: ChatRequest) -> AsyncIterator[Event]:
        """Answer a request.

        Closing the iterator cancels it: it leaves the queue, or its row ends with its next token.

        Args:
            request: The request.

        Yields:
            `Accepted`, the text in pieces, and `Finished`; or `Refused`.
        """
        loop, events = asyncio.get_running_loop(), asyncio.Queue[Event]()

        def emit(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            job = await asyncio.to_thread(self.served.prepare, request, emit)
        except RequestError as error:
            yield Refused(str(error), error.status, error.code, error.param)
            return
        if self._closing:
            yield SHUTTING_DOWN
            return
        if self._runner is None:
            self._runner = asyncio.create_task(self._run())
        self.waiting.append(job)
        self._wake.set()
        try:
            yield Accepted(len(job.prompt))
            while True:
                for event in await _next_events(events):
                    yield event
                    if isinstance(event, (Finished, Refused)):
                        return
        finally:
            job.cancelled = True

    async def is_healthy(self) -> bool:
        """Whether batches succeed."""
        return self.failures < MAX_FAILURES

    async def drain(self, seconds: float) -> None:
        """Take no more requests: refuse what waits, and give what runs some time."""
        self._closing = True
        for job in self.waiting:
            job.turn_away()
            job.cancelled = True
        if self._runner is not None:
            self._wake.set()
            await asyncio.wait([self._runner], timeout=seconds)

    async def close(self) -> None:
        """End what runs, and refuse what waits."""
        await self.drain(0)
        if self._runner is not None:
            self._runner.cancel()
            await asyncio.wait([self._runner])
        await asyncio.to_thread(self._thread.shutdown)

    async def _run(self) -> None:
        running: list[Job] = []
        try:
            while True:
                await self._wake.wait()
                if len(self.waiting) < self.served.options.max_batch:
                    await asyncio.sleep(self.served.options.gather_ms / 1000)
                running = self._take_batch()
                if running:
                    await self._decode(running)
                elif self._closing:
                    return
                else:
                    self._wake.clear()
        finally:
            for job in running:
                job.cancelled = True
                job.turn_away()

    async def _decode(self, batch: list[Job]) -> None:
        future = asyncio.get_running_loop().run_in_executor(self._thread, self.served.run, batch)
        await asyncio.wait([future])
        error = future.exception()
        self.failures = 0 if error is None else self.failures + 1
        if error is not None:
            logger.error("a batch of %d failed", len(batch), exc_info=error)
            for job in batch:
                job.fail()

    def _take_batch(self) -> list[Job]:
        """The longest waiting request, and those behind it that can share its batch."""
        batch: list[Job] = []
        self.waiting = [job for job in self.waiting if not job.cancelled]
        for job in self.waiting:
            if len(batch) < self.served.options.max_batch and self.served.fits([*batch, job]):
                batch.append(job)
        self.waiting = [job for job in self.waiting if job not in batch]
        return batch


async def _next_events(events: asyncio.Queue[Event]) -> list[Event]:
    """Wait for an event; take those that are there already along, text joined."""
    taken = [await events.get()]
    while not events.empty():
        event, last = events.get_nowait(), taken[-1]
        if isinstance(event, Delta) and isinstance(last, Delta):
            taken[-1] = Delta(last.text + event.text)
        else:
            taken.append(event)
    return taken
