"""OpenAI's bodies: what may be asked, checked strictly. Pure: bytes in, an `Ask` out.

A field that this host does not know is refused, never ignored: a misspelt `ignore_eos` would
silently measure something else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

COMMON_FIELDS = (
    "model",
    "max_tokens",
    "stream",
    "stream_options",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "ignore_eos",
    "return_token_ids",
    "cache_salt",
    "n",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)
COMPLETION_FIELDS = ("prompt", *COMMON_FIELDS)
CHAT_FIELDS = ("messages", "max_completion_tokens", *COMMON_FIELDS)

# Fields that are understood only where they change nothing: a client that pins every default of
# sampling, as a comparison should, is served.
NEUTRAL: Mapping[str, float] = {
    "n": 1,
    "presence_penalty": 0,
    "frequency_penalty": 0,
    "repetition_penalty": 1,
}
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's own default for /v1/completions
MOST_STOPS = 16


class BadRequestError(Exception):
    """A request that is answered with an error: status, one sentence, and the field it is about."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


@dataclass(frozen=True, slots=True)
class Ask:
    """A checked request for a completion; exactly one of the three kinds of prompt is set."""

    model: str
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...] | None
    messages: tuple[dict[str, str], ...] | None
    max_tokens: int | None
    stream: bool
    include_usage: bool
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    return_token_ids: bool
    salt: str | None

    @property
    def chat(self) -> bool:
        """Whether the answer is a chat message."""
        return self.messages is not None


def parse_ask(content: bytes, chat: bool) -> Ask:
    """Return what a completions or chat body asks; raises BadRequestError."""
    return read_ask(_read_json(content), chat)


def read_ask(given: object, chat: bool) -> Ask:
    """Return what a body asks, as the JSON value that it is; raises BadRequestError."""
    body = _read_object(given, CHAT_FIELDS if chat else COMPLETION_FIELDS)
    for name, neutral in NEUTRAL.items():
        if body.get(name, neutral) != neutral or isinstance(body.get(name), bool):
            raise BadRequestError(400, f"{name} must be {neutral}, not {_shown(body[name])}", name)
    stream = _flag(body, "stream")
    text, ids = (None, None) if chat else _prompt(body.get("prompt"))
    return Ask(
        model=_model(body),
        prompt_text=text,
        prompt_token_ids=ids,
        messages=_messages(body.get("messages")) if chat else None,
        max_tokens=_max_tokens(body, chat),
        stream=stream,
        include_usage=_include_usage(body, stream),
        temperature=_number(body, "temperature", 1.0, lambda x: 0 <= x <= 2, "from 0 to 2"),
        top_p=_number(body, "top_p", 1.0, lambda x: 0 < x <= 1, "above 0, to 1"),
        seed=_whole(body, "seed", -(2**63), 2**63 - 1),
        stop=_stop(body.get("stop")),
        ignore_eos=_flag(body, "ignore_eos"),
        return_token_ids=_flag(body, "return_token_ids"),
        salt=_salt(body),
    )


def parse_object(content: bytes, allowed: tuple[str, ...]) -> dict[str, Any]:
    """Return a JSON object without its null fields; BadRequestError for what is not allowed."""
    return _read_object(_read_json(content), allowed)


def _read_json(content: bytes) -> object:
    try:
        value: object = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequestError(400, f"the body is not JSON: {error}") from None
    return value


def _read_object(body: object, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise BadRequestError(400, f"the body must be a JSON object, not {_shown(body)}")
    for name in body:
        if name not in allowed:
            known = ", ".join(allowed)
            raise BadRequestError(400, f"unknown field {_shown(name)}; allowed here: {known}", name)
    return {name: value for name, value in body.items() if value is not None}


def require_whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int:
    """Return a whole number that must be there; raises BadRequestError."""
    value = _whole(body, name, low, high)
    if value is None:
        raise BadRequestError(400, f"{name} is missing; it must be a whole number", name)
    return value


def error_body(status: int, message: str, param: str | None = None) -> bytes:
    """Return an error as OpenAI writes it."""
    kind = {404: "not_found_error", 429: "rate_limit_error"}.get(
        status, "invalid_request_error" if status < 500 else "server_error"
    )
    error = {"message": message, "type": kind, "param": param, "code": status}
    return json.dumps({"error": error}).encode()


def _shown(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _model(body: Mapping[str, Any]) -> str:
    model = body.get("model")
    if not isinstance(model, str):
        raise BadRequestError(400, f"model must be a text, not {_shown(model)}", "model")
    return model


def _prompt(value: object) -> tuple[str | None, tuple[int, ...] | None]:
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value, None
    if isinstance(value, list) and all(type(item) is int for item in value):
        return None, tuple(value)
    if isinstance(value, list) and all(isinstance(item, str | list) for item in value):
        raise BadRequestError(
            400, f"prompt holds {len(value)} prompts; send one a request", "prompt"
        )
    message = f"prompt must be a text or a list of token ids, not {_shown(value)}"
    raise BadRequestError(400, message, "prompt")


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list) or not value:
        message = f"messages must be a list with at least one message, not {_shown(value)}"
        raise BadRequestError(400, message, "messages")
    return tuple(_message(item, index) for index, item in enumerate(value))


def _message(item: object, index: int) -> dict[str, str]:
    where = f"messages[{index}]"
    if not isinstance(item, dict):
        raise BadRequestError(400, f"{where} must be an object, not {_shown(item)}", "messages")
    for name in item:
        if name not in ("role", "content"):
            known = f"{where} has an unknown field {_shown(name)}; allowed: role, content"
            raise BadRequestError(400, known, "messages")
    role, content = item.get("role"), item.get("content")
    if not isinstance(role, str):
        raise BadRequestError(400, f"{where}.role must be a text, not {_shown(role)}", "messages")
    if isinstance(content, list):
        content = "".join(_text_part(part, where) for part in content)
    if not isinstance(content, str):
        raise BadRequestError(
            400, f"{where}.content must be a text, not {_shown(content)}", "messages"
        )
    return {"role": role, "content": content}


def _text_part(part: object, where: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        message = f"{where}.content may hold parts of type text only, not {_shown(part)}"
        raise BadRequestError(400, message, "messages")
    return text


def _max_tokens(body: Mapping[str, Any], chat: bool) -> int | None:
    name = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
    if name != "max_tokens" and "max_tokens" in body:
        raise BadRequestError(400, "send max_tokens or max_completion_tokens, not both", name)
    value = _whole(body, name, 1, 2**31)
    return DEFAULT_COMPLETION_TOKENS if value is None and not chat else value


def _include_usage(body: Mapping[str, Any], stream: bool) -> bool:
    options = body.get("stream_options", {})
    if not isinstance(options, dict):
        message = f"stream_options must be an object, not {_shown(options)}"
        raise BadRequestError(400, message, "stream_options")
    if "stream_options" in body and not stream:
        raise BadRequestError(400, "stream_options needs stream to be true", "stream_options")
    for name in options:
        if name != "include_usage":
            message = f"unknown field stream_options.{name}; allowed here: include_usage"
            raise BadRequestError(400, message, f"stream_options.{name}")
    return _flag(options, "include_usage")


def _stop(value: object) -> tuple[str, ...]:
    stops = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(stop, str) and stop for stop in stops):
        message = f"stop must be a text or a list of texts, none empty, not {_shown(value)}"
        raise BadRequestError(400, message, "stop")
    if len(stops) > MOST_STOPS:
        message = f"stop holds {len(stops)} texts; at most {MOST_STOPS} are allowed"
        raise BadRequestError(400, message, "stop")
    return tuple(stops)


def _salt(body: Mapping[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is None or (isinstance(salt, str) and salt):
        return salt
    message = f"cache_salt must be a text that is not empty, not {_shown(salt)}"
    raise BadRequestError(400, message, "cache_salt")


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise BadRequestError(400, f"{name} must be true or false, not {_shown(value)}", name)
    return value


def _number(
    body: Mapping[str, Any],
    name: str,
    default: float,
    allows: Callable[[float], bool],
    allowed: str,
) -> float:
    value = body.get(name, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not allows(value):
        raise BadRequestError(400, f"{name} must be a number {allowed}, not {_shown(value)}", name)
    return float(value)


def _whole(body: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if type(value) is not int:
        raise BadRequestError(400, f"{name} must be a whole number, not {_shown(value)}", name)
    if not low <= value <= high:
        raise BadRequestError(400, f"{name} must be from {low} to {high}, not {value}", name)
    return value
