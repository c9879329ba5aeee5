"""Timed bytes of an OpenAI-style event stream → token events. Pure: no clock, no socket.

An event is stamped with the arrival of the read that completed it, so how the bytes were split
into reads changes nothing but the stamps. A token event carries a non-empty text, reasoning or
tool-argument piece, or token ids; all else (role, empty, usage, comments) is metadata.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from headway.core import TokenEvent

BOM = b"\xef\xbb\xbf"
# What a count, an id or a length may be at most: beyond it a number is a mistake or an attack, and
# arithmetic with floats ends somewhere after it.
MOST = 2**53


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error the server reported inside a stream that began well, or a malformed event."""

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Stream:
    """What one response said. Counts are None where the server did not give them."""

    events: tuple[TokenEvent, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    engine_arrived_s: float | None = None
    done: bool = False
    error: StreamError | None = None
    warnings: tuple[str, ...] = ()


@dataclass(slots=True)
class _State:
    events: list[TokenEvent] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    engine_arrived_s: float | None = None
    done: bool = False
    error: StreamError | None = None
    warnings: list[str] = field(default_factory=list)


def parse(chunks: Iterable[tuple[float, bytes]]) -> Stream:
    """Return what a stream said; raises nothing, whatever the bytes are."""
    state = _State()
    for at_s, data in events(chunks):
        if data.strip() == b"[DONE]":
            state.done = True
        elif state.error is None:
            _take(state, at_s, data)
    if not state.done and state.finish_reason is not None and state.error is None:
        state.warnings.append("missing_done")
    return Stream(
        events=tuple(state.events),
        prompt_tokens=state.prompt_tokens,
        completion_tokens=state.completion_tokens,
        finish_reason=state.finish_reason,
        engine_arrived_s=state.engine_arrived_s,
        done=state.done,
        error=state.error,
        warnings=tuple(state.warnings),
    )


def events(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    """Yield (arrival of the completing read, data) per event, as the WHATWG standard frames them.

    Lines end in LF, CRLF or CR, by bytes alone; a last event without its blank line counts.
    """
    data: list[bytes] = []
    at_s = 0.0
    for number, (at_s, whole) in enumerate(_lines(chunks)):
        line = whole.removeprefix(BOM) if number == 0 else whole
        if not line:
            if data:
                yield at_s, b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(line[6:] if line[5:6] == b" " else line[5:])
        elif line == b"data":
            data.append(b"")
    if data:
        yield at_s, b"\n".join(data)


def _lines(chunks: Iterable[tuple[float, bytes]]) -> Iterator[tuple[float, bytes]]:
    pending = b""
    after_cr = False
    at_s = 0.0
    for read_s, chunk in chunks:
        if not chunk:
            continue
        at_s = read_s
        # A CR ends its line at once; where two reads share a CRLF, the LF is swallowed here.
        rest = chunk[1:] if after_cr and chunk.startswith(b"\n") else chunk
        after_cr = rest.endswith(b"\r")
        parts = rest.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        for part in parts[:-1]:
            yield at_s, pending + part
            pending = b""
        pending += parts[-1]
    if pending:
        yield at_s, pending


def _take(state: _State, at_s: float, data: bytes) -> None:
    if not data.strip():
        return
    try:
        body = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):
        shown = data[:80].decode("utf-8", "replace")
        state.error = StreamError("malformed_event", f"the stream holds {shown!r}, not JSON")
        return
    if not isinstance(body, dict):
        state.error = StreamError("malformed_event", f"an event holds {type(body).__name__}")
        return
    if body.get("error") is not None:
        state.error = StreamError("server_error", _error_text(body["error"], data))
        return
    _take_usage(state, body.get("usage"))
    choices = body.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if isinstance(choice, dict):
        _take_choice(state, at_s, body, choice)


def _take_usage(state: _State, usage: object) -> None:
    if not isinstance(usage, dict):
        return
    for name in ("prompt_tokens", "completion_tokens"):
        count = usage.get(name)
        if type(count) is int and 0 <= count <= MOST:
            setattr(state, name, count)
        elif count is not None and "bad_usage" not in state.warnings:
            state.warnings.append("bad_usage")


def _take_choice(state: _State, at_s: float, body: dict[str, Any], choice: dict[str, Any]) -> None:
    if isinstance(choice.get("finish_reason"), str):
        state.finish_reason = choice["finish_reason"]
    text = _pieces(choice)
    ids = _ids(choice.get("token_ids"))
    stamps = body.get("headway")
    stamps = stamps if isinstance(stamps, dict) else {}
    if state.engine_arrived_s is None:
        state.engine_arrived_s = _number(stamps.get("arrived_s"))
    if not (text or ids):
        return
    state.events.append(
        TokenEvent(
            at_s=at_s,
            text=text,
            token_ids=ids,
            num_tokens=None if ids is None else len(ids),
            engine_at_s=_number(stamps.get("at_s")),
        )
    )


def _pieces(choice: dict[str, Any]) -> str:
    """Return reasoning, tool arguments and content of a completions or chat choice, in one."""
    delta = choice.get("delta")
    delta = delta if isinstance(delta, dict) else {}
    content = _text(choice.get("text")) + _text(delta.get("content"))
    # Some servers send the same reasoning under both names; it was generated once.
    other = _text(delta.get("reasoning_content")) or _text(delta.get("reasoning"))
    calls = delta.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            other += _text(function.get("arguments"))
    return other + content


def _ids(value: object) -> tuple[int, ...] | None:
    if isinstance(value, list) and all(type(item) is int and 0 <= item <= MOST for item in value):
        return tuple(value)
    return None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


def _number(value: object) -> float | None:
    """Return a finite number as a float; JSON as Python reads it also has NaN and huge integers."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= MOST:
        return float(value)
    return None


def _error_text(error: object, data: bytes) -> str:
    message = error.get("message") if isinstance(error, dict) else error
    shown = message if isinstance(message, str) else data.decode("utf-8", "replace")
    # JSON can spell half a surrogate pair, which no file can hold.
    return shown[:500].encode("utf-8", "replace").decode()
