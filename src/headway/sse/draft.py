"""What a stream has said so far, whatever its dialect, and how it becomes a `Stream`."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from headway.core import EventKind, TokenEvent

# What a count, an id or a length may be at most: beyond it a number is a mistake or an attack, and
# arithmetic with floats ends somewhere after it.
MOST = 2**53
# Where servers differ from OpenAI in why an answer ended.
FINISH = {
    "eos_token": "stop",  # TGI
    "stop_sequence": "stop",  # TGI
    "eos": "stop",  # llama.cpp
    "word": "stop",  # llama.cpp
    "limit": "length",  # llama.cpp
    "none": None,  # llama.cpp
    "max_output_tokens": "length",  # the Responses API
}


@dataclass(frozen=True, slots=True)
class StreamError:
    """Why a stream that began well is no answer.

    `kind` is `server_error` (the server said so), `malformed_event` (not JSON, or no object) or
    `several_choices` (n > 1, or several prompts: whose token is it?).
    """

    kind: str
    message: str


@dataclass(frozen=True, slots=True)
class Stream:
    """What one response said. Counts are None where the server did not give them.

    `finish_reason` is in OpenAI's words; `done` says that the stream's own end mark came.
    `cached_prompt_tokens` of the `prompt_tokens` were found in the server's prefix cache.
    """

    events: tuple[TokenEvent, ...] = ()
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    engine_arrived_s: float | None = None
    done: bool = False
    error: StreamError | None = None
    warnings: tuple[str, ...] = ()
    cached_prompt_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One event of a dialect that may repeat what it said before (SGLang's /generate)."""

    at_s: float
    text: str
    token_ids: tuple[int, ...] | None
    total: int | None


@dataclass(slots=True)
class Draft:
    """A `Stream` in the making.

    `counted` is how many output tokens there were up to the last token event, by the server's
    running count or by ids; None once an event came without either.
    """

    events: list[TokenEvent] = field(default_factory=list)
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_prompt_tokens: int | None = None
    finish_reason: str | None = None
    engine_arrived_s: float | None = None
    done: bool = False
    error: StreamError | None = None
    warnings: list[str] = field(default_factory=list)
    counted: int | None = 0
    snapshots: list[Snapshot] = field(default_factory=list)
    deltas_of: set[str] = field(default_factory=set)


def add(
    draft: Draft,
    at_s: float,
    text: str,
    token_ids: tuple[int, ...] | None,
    *,
    kind: EventKind = "content",
    total: int | None = None,
    engine_at_s: float | None = None,
) -> None:
    """Add a token event, unless it carries neither text nor ids.

    `total` is the server's count of output tokens up to and with this event. What it counted in
    events without text is counted with the next one that has some.
    """
    if not (text or token_ids):
        return
    num = _num_tokens(draft, token_ids, total)
    kind = kind if text else "hidden"
    draft.events.append(TokenEvent(at_s, text, token_ids, num, engine_at_s, kind))


def _num_tokens(draft: Draft, token_ids: tuple[int, ...] | None, total: int | None) -> int | None:
    before = draft.counted
    if token_ids is not None:
        draft.counted = total or (None if before is None else before + len(token_ids))
        return len(token_ids)
    # A 0 beside text is a field that was never filled in. And the first count after an event
    # without one is the usage of the whole answer, not this event's.
    if not total or before is None or total < before:
        draft.counted = None
        return None
    draft.counted = total
    return total - before


def fail(draft: Draft, kind: str, message: str) -> None:
    """Set the error that the stream ends with; half a surrogate pair, which JSON can spell and no
    file can hold, is replaced."""
    draft.error = StreamError(kind, message[:500].encode("utf-8", "replace").decode())


def set_count(draft: Draft, name: str, value: object) -> None:
    """Set a count of the draft; the last one holds, what is no count is left out and warned of."""
    if type(value) is int and 0 <= value <= MOST:
        setattr(draft, name, value)
    elif value is not None and "bad_usage" not in draft.warnings:
        draft.warnings.append("bad_usage")


def set_finish(draft: Draft, reason: object) -> None:
    """Set why the answer ended, in OpenAI's words.

    No text says nothing, nor does an empty one: TGI's completions send that until the last event.
    """
    if isinstance(reason, str):
        draft.finish_reason = FINISH.get(reason, reason) or draft.finish_reason


def finished(draft: Draft) -> Stream:
    """Return the stream that the draft has become."""
    _settle(draft)
    if not draft.done and draft.finish_reason is not None and draft.error is None:
        draft.warnings.append("missing_done")
    return Stream(
        events=tuple(draft.events),
        prompt_tokens=draft.prompt_tokens,
        completion_tokens=draft.completion_tokens,
        finish_reason=draft.finish_reason,
        engine_arrived_s=draft.engine_arrived_s,
        done=draft.done,
        error=draft.error,
        warnings=tuple(draft.warnings),
        cached_prompt_tokens=draft.cached_prompt_tokens,
    )


def _settle(draft: Draft) -> None:
    """Turn snapshots into token events.

    Whether texts are deltas or the whole so far is a switch of the server, and by its versions not
    the same for ids. So both are read off the stream: texts are the whole so far when each begins
    with the one before, ids when there are as many as the total, deltas when there are as many as
    it grew by. Ids that are neither (0.5.3 drops some under load) are None.
    """
    rows = draft.snapshots
    whole = all(after.text.startswith(before.text) for before, after in pairwise(rows))
    shown, total = 0, 0
    for row in rows:
        text = row.text[shown:] if whole else row.text
        shown = len(row.text)
        ids, length = row.token_ids, len(row.token_ids or ())
        if ids is None or row.total is None or length not in (row.total, row.total - total):
            ids = None
        elif length == row.total:
            ids = ids[total:]
        total = row.total or total
        add(draft, row.at_s, text, ids, total=row.total)
