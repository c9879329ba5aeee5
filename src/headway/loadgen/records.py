"""What a drive left on the wire → records: parsed after the last response has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

from headway import sse
from headway.core import Request, RequestError, RequestRecord, TokenEvent
from headway.loadgen.drive import Drive, Sent
from headway.transport import Exchange
from headway.workload import following

TIME_WAS_OVER = "the level's time was over before this request was due"
NO_IDS = "the answer before it came without token ids, which the next turn begins with"


def records(driven: Drive, requests: Sequence[Request]) -> tuple[RequestRecord, ...]:
    """Parse what came back, in the order of the requests; those never reached are `not_sent`,
    or `stopped` where the server refused all that came before them.

    What a turn asked for is known once the answers before it are.
    """
    sent = {one.place: one for one in driven.sent}
    found: list[RequestRecord] = []
    before: tuple[Request, RequestRecord] | None = None
    for place, own in enumerate(requests):
        turn: Request | None = own
        if own.turn and before is not None:
            turn = following(own, before[0], before[1].events)
        request = turn or own
        if place in sent:
            found.append(_record(driven.start_s, sent[place], request))
        elif own.turn and found[-1].error is not None:
            found.append(_not_sent(driven, place, request, "the turn before it failed"))
        elif turn is None:
            found.append(_not_sent(driven, place, request, NO_IDS))
        else:
            found.append(_not_sent(driven, place, request, driven.stopped or TIME_WAS_OVER))
        before = request, found[-1]
    return tuple(found)


def _not_sent(driven: Drive, place: int, request: Request, reason: str) -> RequestRecord:
    """In closed loop the engine kept the slots busy; an open schedule was cut off by us, unless
    the engine refused all of it."""
    first = not driven.level.closed and not request.turn
    due_s = driven.offsets_s[place] if first else driven.end_s - driven.start_s
    ours = reason == NO_IDS or (first and driven.stopped is None)
    origin: Literal["client", "engine"] = "client" if ours else "engine"
    kind = "not_sent" if driven.stopped is None else "stopped"
    error = RequestError(kind, reason, origin)
    return RequestRecord(request.index, due_s, None, None, error=error, **_asked(request))


def _asked(request: Request) -> dict[str, Any]:
    """Return what the counts of an answer are held against."""
    return {
        "asked_tokens": request.max_tokens,
        "asked_prompt_tokens": len(request.prompt_token_ids),
        "ignore_eos": request.ignore_eos,
    }


def _record(start_s: float, sent: Sent, request: Request) -> RequestRecord:
    exchange = replace(sent.exchange, body=sent.exchange.body.whole())
    stream = sse.parse(exchange.body) if exchange.status == 200 else sse.Stream()
    error, warnings = _judge(exchange, stream)

    def since(at_s: float | None) -> float | None:
        return None if at_s is None else at_s - start_s

    return RequestRecord(
        index=request.index,
        due_s=sent.due_s - start_s,
        sent_s=since(exchange.sent_s),
        ended_s=since(exchange.ended_s),
        events=tuple(_shift(event, start_s) for event in stream.events),
        prompt_tokens=stream.prompt_tokens,
        completion_tokens=stream.completion_tokens,
        finish_reason=stream.finish_reason,
        engine_arrived_s=since(stream.engine_arrived_s),
        error=error,
        warnings=warnings,
        connect_s=exchange.connect_s,
        cached_prompt_tokens=stream.cached_prompt_tokens,
        **_asked(request),
    )


def _shift(event: TokenEvent, start_s: float) -> TokenEvent:
    engine_at_s = None if event.engine_at_s is None else event.engine_at_s - start_s
    return replace(event, at_s=event.at_s - start_s, engine_at_s=engine_at_s)


def _judge(exchange: Exchange, stream: sse.Stream) -> tuple[RequestError | None, tuple[str, ...]]:
    """Return why the request failed, or None, and what else is odd about its answer."""
    warnings = stream.warnings + (("retried",) if exchange.retried else ())
    error, said = exchange.error, stream.error
    ours = error is not None and error.origin == "client"
    if said is not None and said.kind == "server_error" and not ours:
        # Servers hang up after such an event: what they said is the cause, the end its symptom.
        return RequestError(said.kind, said.message), warnings
    finished = stream.events and stream.finish_reason is not None and stream.error is None
    if error is not None and error.kind == "truncated_stream" and finished:
        # Every token came; what is missing is the end of the wrapping.
        warnings, error = (*warnings, error.kind), None
    return error or _http_error(exchange) or _stream_error(exchange, stream), warnings


def _http_error(exchange: Exchange) -> RequestError | None:
    if exchange.status is None or exchange.status == 200:
        return None
    return RequestError(f"http_{exchange.status}", _body(exchange))


def _body(exchange: Exchange) -> str:
    return bytes(exchange.body.data[:500]).decode("utf-8", "replace")


def _stream_error(exchange: Exchange, stream: sse.Stream) -> RequestError | None:
    """Name what a 200 hid: an error event, no output at all, or an end that never came."""
    if stream.error is not None:
        return RequestError(stream.error.kind, stream.error.message)
    if not stream.events:
        return _without_tokens(exchange, stream)
    if not stream.done and stream.finish_reason is None:
        return RequestError("truncated_stream", "the stream ended without a finish reason")
    if stream.finish_reason in ("abort", "error"):
        reason = f"the server ended the stream with the finish reason {stream.finish_reason!r}"
        return RequestError("aborted", reason)
    return None


def _without_tokens(exchange: Exchange, stream: sse.Stream) -> RequestError:
    if exchange.content_type and "event-stream" not in exchange.content_type:
        text = f"the answer is {exchange.content_type}, no event stream: {_body(exchange)}"
        return RequestError("not_a_stream", text)
    claimed = stream.completion_tokens or 0
    kind = "no_token_event" if claimed else "no_choices_received"
    return RequestError(kind, f"the stream held no token; its usage claims {claimed}")
