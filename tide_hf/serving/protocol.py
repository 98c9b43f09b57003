"""What goes over the wire: chat requests, events of an answer, and the JSON of OpenAI that these become."""

from __future__ import annotations

import json
import time
import uuid
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; requests that agree in it can share a batch.

    Attributes:
        temperature: 0 is greedy; `None` is what the model's generation config says.
        top_p: As in `generate`; `None` is what the model's generation config says.
        seed: Makes sampling repeatable; such a request has a batch to itself.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None


@dataclass(frozen=True)
class ChatRequest:
    """One checked request.

    Attributes:
        messages: Role and content of each message.
        sampling: How tokens are chosen.
        max_tokens: Most new tokens; `None` is as many as the server allows.
        stop: Strings before which the answer ends.
        stream: Whether the answer comes piece by piece.
        include_usage: Whether a stream ends with the number of tokens.
    """

    messages: tuple[dict[str, str], ...]
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False


@dataclass(frozen=True)
class Accepted:
    """The first event of a request that will be answered."""

    prompt_tokens: int


@dataclass(frozen=True)
class Refused:
    """The only event of a request that will not be answered, or the last of one that failed."""

    message: str
    status: int
    code: str | None = None
    param: str | None = None


@dataclass(frozen=True)
class Delta:
    """More text of the answer."""

    text: str


@dataclass(frozen=True)
class Finished:
    """The last event of an answer.

    Attributes:
        reason: `"stop"` (end of sequence or a stop string) or `"length"`.
        completion_tokens: New tokens, one that ends the sequence included.
        work: Counts of the batches since the last report, by names in `metrics.WORK`; empty where none is new.
    """

    reason: str
    completion_tokens: int
    work: dict[str, int] = field(default_factory=dict)


Event = Accepted | Refused | Delta | Finished


def error_body(message: str, status: int, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape."""
    kinds = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class AnswerShape:
    """Builds the JSON of one answer, whole or in chunks."""

    def __init__(self, model_id: str) -> None:
        self.common = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model_id}

    def whole(self, text: str, prompt_tokens: int, finished: Finished) -> dict[str, Any]:
        """The answer of a request that does not stream."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finished.reason}
        usage = _usage(prompt_tokens, finished.completion_tokens)
        return {**self.common, "object": "chat.completion", "choices": [choice], "usage": usage}

    def first_chunk(self) -> dict[str, Any]:
        """The chunk that says who speaks."""
        return self._chunk([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])

    def chunk(self, text: str) -> dict[str, Any]:
        """More text."""
        return self._chunk([{"index": 0, "delta": {"content": text}, "finish_reason": None}])

    def last_chunk(self, reason: str) -> dict[str, Any]:
        """The chunk that says why the answer ends."""
        return self._chunk([{"index": 0, "delta": {}, "finish_reason": reason}])

    def usage_chunk(self, prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
        """The numbers of tokens, where they were asked for."""
        return self._chunk([]) | {"usage": _usage(prompt_tokens, completion_tokens)}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self.common, "object": "chat.completion.chunk", "choices": choices}


def server_sent_event(data: dict[str, Any] | str) -> bytes:
    """One event of a stream."""
    # In ASCII, since some ends of lines are none to JSON.
    text = data if isinstance(data, str) else json.dumps(data, separators=(",", ":"))
    return f"data: {text}\n\n".encode()


def _usage(prompt_tokens: int, completion_tokens: int) -> dict[str, int]:
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens, "total_tokens": total}
