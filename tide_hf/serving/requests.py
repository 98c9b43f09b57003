"""Checks of what clients ask for."""

from __future__ import annotations

import json
import reprlib
from typing import Any

from ..errors import RequestError, describe
from .protocol import ChatRequest, Sampling

ROLES = ("system", "developer", "user", "assistant")
MESSAGE_FIELDS = ("role", "content", "name", "refusal")
MAX_STOPS = 4
MAX_STOP_LENGTH = 100  # characters
MAX_SEED = 2**63 - 1
SHOWN = 80  # characters of a wrong value that go into an error
_repr = reprlib.Repr()
_repr.maxlevel = 2

# Fields that do not change the answer, and fields that may only say what happens anyway.
IGNORED = ("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user")
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "n": (1,),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
KNOWN = (
    *("max_completion_tokens", "max_tokens", "messages", "model", "seed"),
    *("stop", "stream", "stream_options", "temperature", "top_p"),
)


def parse_chat_request(body: bytes, model_id: str) -> ChatRequest:
    """Read and check a request.

    Args:
        body: The raw body.
        model_id: The only model there is.

    Raises:
        RequestError: It is no JSON in UTF-8, or asks for what there is not.
    """
    fields = _json_object(body)
    for name, value in fields.items():
        _check_known(name, value)
    if fields.get("model") != model_id:
        raise refuse("model", fields.get("model"), repr(model_id), status=404, code="model_not_found")
    options = fields.get("stream_options")
    options = {} if options is None else options
    if not isinstance(options, dict) or set(options) - {"include_usage", "include_obfuscation"}:
        raise refuse("stream_options", options, "an object with include_usage")
    limits = [_integer(fields, name, 1, 2**31) for name in ("max_completion_tokens", "max_tokens")]
    return ChatRequest(
        messages=_messages(fields.get("messages")),
        sampling=Sampling(
            temperature=_number(fields, "temperature", 0.0, 2.0),
            top_p=_number(fields, "top_p", 0.0, 1.0),
            seed=_integer(fields, "seed", 0, MAX_SEED),
        ),
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=_stops(fields.get("stop")),
        stream=_flag(fields, "stream"),
        include_usage=_flag(options, "include_usage"),
    )


def refuse(param: str, got: object, expected: str, *, status: int = 400, code: str = "invalid_value") -> RequestError:
    """The error of a field that has the wrong value."""
    shown = got if isinstance(got, (int, float, bool, type(None))) else _shortened(got)
    message = describe(f"'{param}' cannot be answered", got=shown, expected=expected, do="Correct it, or leave it out.")
    return RequestError(message, status=status, code=code, param=param)


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also what is no UTF-8, and numbers of absurd length
        problem = f"'{_shortened(error)}'"
        message = describe("the body cannot be read", got=problem, expected="JSON in UTF-8", do="Correct the request.")
        raise RequestError(message, code="invalid_json") from error
    if not isinstance(fields, dict):
        message = describe("the body is no request", got=_shortened(fields), expected="a JSON object", do="Correct it.")
        raise RequestError(message, code="invalid_json")
    return fields


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _shortened(value: object) -> str:
    """What a client sent, or what is wrong with it, short enough to send back, whatever is in it."""
    text = str(value) if isinstance(value, (str, Exception)) else _repr.repr(value)
    text = text if len(text) <= SHOWN else text[:SHOWN] + "..."
    return text.encode("utf-8", "backslashreplace").decode()


def _check_known(name: str, value: Any) -> None:
    if value is None or name in KNOWN or name in IGNORED:
        return
    if name not in NEUTRAL:
        raise refuse(_shortened(name), value, "a field that this server knows", code="unknown_parameter")
    # To Python true is 1, to JSON it is not.
    if not any(value == allowed and isinstance(value, bool) == isinstance(allowed, bool) for allowed in NEUTRAL[name]):
        allowed = " or ".join(json.dumps(allowed) for allowed in NEUTRAL[name])
        raise refuse(name, value, f"{allowed}, since this server can do nothing else", code="unsupported_value")


def _messages(messages: Any) -> tuple[dict[str, str], ...]:
    if not isinstance(messages, list) or not messages:
        raise refuse("messages", messages, "a list of at least one message")
    checked = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or any(
            value is not None and name not in MESSAGE_FIELDS for name, value in message.items()
        ):
            raise refuse(where, message, "an object with role and content alone")
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise refuse(f"{where}.role", role, f"one of {', '.join(ROLES)}")
        role = "system" if role == "developer" else role
        checked.append({"role": role, "content": _content(message.get("content"), f"{where}.content")})
    return tuple(checked)


def _content(content: Any, where: str) -> str:
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise refuse(where, part, "a text, or a list of parts of type text")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise refuse(where, content, "a text, or a list of parts of type text")
    return _unicode(content, where)


def _unicode(text: str, where: str) -> str:
    """JSON can spell half a surrogate pair, which is no character and which tokenizers refuse."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise refuse(where, text, "text without lone surrogates", code="invalid_unicode") from error
    return text


def _stops(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    allowed = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not allowed or not all(isinstance(text, str) and 0 < len(text) <= MAX_STOP_LENGTH for text in stops):
        raise refuse("stop", stop, f"up to {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return tuple(_unicode(text, "stop") for text in stops)


def _number(fields: dict[str, Any], name: str, low: float, high: float) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise refuse(name, value, f"a number from {low:g} to {high:g}")
    return float(value)


def _integer(fields: dict[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise refuse(name, value, f"a whole number from {low} to {high}")
    return value


def _flag(fields: dict[str, Any], name: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise refuse(name, value, "true or false")
    return bool(value)
