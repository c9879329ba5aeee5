"""Schedule + transport → Run: sends what was prepared when it is due, and keeps what came back.

Closed loop: each of C slots takes the next request as soon as its last one ended. Open loop: each
request leaves at its own absolute time, whatever became of the others. Nothing is parsed before
the last response has ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headway import sse, stats
from headway.core import Capabilities, Level, Request, RequestError, RequestRecord, TokenEvent
from headway.transport import Exchange, Target, Transport

LAG_PERIOD_S = 0.02
Progress = Callable[[int], None]


@dataclass(slots=True)
class Sent:
    """One request's wire life, with the time at which it was due."""

    due_s: float
    exchange: Exchange


@dataclass(slots=True)
class Drive:
    """Everything one Run left behind, on the clock of the load generator; `start_s` is its zero.

    `offsets_s` is the schedule in open loop, and empty in closed loop.
    """

    offsets_s: Sequence[float] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    client: dict[str, float] = field(default_factory=dict)


def payload(
    request: Request, model: str, target: Target, can: Capabilities, api_key: str | None = None
) -> bytes:
    """Serialize a request for `/v1/completions`, with the fields that the endpoint understands."""
    body: dict[str, object] = {
        "model": model,
        "prompt": list(request.prompt_token_ids),
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "stream": True,
    }
    if request.seed is not None:
        body["seed"] = request.seed
    if can.ids_out:
        body["return_token_ids"] = True
    if request.ignore_eos and can.ignore_eos != "none":
        body["ignore_eos"] = True
    if can.usage_in_stream:
        body["stream_options"] = {"include_usage": True}
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    return target.post("/v1/completions", body, headers)


async def drive(
    payloads: Sequence[bytes],
    level: Level,
    offsets_s: Sequence[float],
    transport: Transport,
    *,
    clock: Callable[[], float] = time.monotonic,
    timeout_s: float = 3600.0,
    progress: Progress = lambda _: None,
) -> Drive:
    """Send every payload as the level says; what is unfinished after `timeout_s` is cut off."""
    result = Drive(() if level.closed else offsets_s)
    run = _closed if level.closed else _open
    with _no_garbage_collection():
        # The clock starts when everything is ready: collecting garbage takes tens of milliseconds.
        lag = asyncio.create_task(_sample_lag(result, clock))
        cpu_s = time.process_time()
        result.start_s = clock()
        try:
            async with asyncio.timeout(timeout_s):
                await run(payloads, level, transport, result, clock, progress)
        except TimeoutError:
            for sent in result.sent:
                if sent.exchange.ended_s is None and sent.exchange.error is None:
                    limit = f"unfinished when the level's {timeout_s:g} s were over"
                    sent.exchange.error = RequestError("level_timeout", limit)
        finally:
            result.end_s = clock()
            lag.cancel()
            await asyncio.wait([lag])
            await transport.close()
    span_s = result.end_s - result.start_s
    result.client["cpu_share"] = (time.process_time() - cpu_s) / span_s if span_s > 0 else 0.0
    return result


async def _closed(
    payloads: Sequence[bytes],
    level: Level,
    transport: Transport,
    result: Drive,
    clock: Callable[[], float],
    progress: Progress,
) -> None:
    waiting = iter(payloads)

    async def slot() -> None:
        due_s = result.start_s
        for data in waiting:
            sent = Sent(due_s, Exchange())
            result.sent.append(sent)
            await _one(data, sent.exchange, transport, clock)
            progress(1)
            ended_s = sent.exchange.ended_s
            due_s = clock() if ended_s is None else ended_s

    async with asyncio.TaskGroup() as group:
        for _ in range(min(level.concurrency or 1, len(payloads))):
            group.create_task(slot())


async def _open(
    payloads: Sequence[bytes],
    level: Level,
    transport: Transport,
    result: Drive,
    clock: Callable[[], float],
    progress: Progress,
) -> None:
    async def one(data: bytes, exchange: Exchange) -> None:
        await _one(data, exchange, transport, clock)
        progress(1)

    async with asyncio.TaskGroup() as group:
        for offset_s, data in zip(result.offsets_s, payloads, strict=True):
            sent = Sent(result.start_s + offset_s, Exchange())
            await _sleep_until(sent.due_s, clock)
            result.sent.append(sent)
            group.create_task(one(data, sent.exchange))


async def _sleep_until(due_s: float, clock: Callable[[], float]) -> None:
    """Sleep to an absolute time, never less: a timer may fire early by its loop's resolution."""
    await asyncio.sleep(max(0.0, due_s - clock()))
    while (left_s := due_s - clock()) > 0:
        await asyncio.sleep(left_s)


async def _one(
    data: bytes, exchange: Exchange, transport: Transport, clock: Callable[[], float]
) -> None:
    try:
        await transport.send(data, exchange)
    except Exception as error:  # noqa: BLE001 - the one place where any failure becomes a record
        exchange.error = RequestError("client_error", f"{type(error).__name__}: {error}", "client")
        exchange.ended_s = clock()


async def _sample_lag(result: Drive, clock: Callable[[], float]) -> None:
    """Note how late this event loop wakes up: what it adds to every stamp at worst."""
    late: list[float] = []
    try:
        while True:
            due_s = clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            late.append(clock() - due_s)
    finally:
        for q in (50, 99):
            value = stats.percentile(late, q)
            if value is not None:
                result.client[f"loop_lag_p{q}_s"] = max(0.0, value)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def records(driven: Drive, requests: Sequence[Request]) -> tuple[RequestRecord, ...]:
    """Parse what came back, in the order of the requests; those never reached are `not_sent`."""
    parsed = [_record(driven.start_s, s, r) for s, r in zip(driven.sent, requests, strict=False)]
    never = range(len(parsed), len(requests))
    return (*parsed, *(_not_sent(driven, place, requests[place]) for place in never))


def _not_sent(driven: Drive, place: int, request: Request) -> RequestRecord:
    """In closed loop the engine kept the slots busy; an open schedule was cut off by us."""
    reason = "the level's time was over before this request was due"
    if driven.offsets_s:
        error, due_s = RequestError("not_sent", reason, "client"), driven.offsets_s[place]
    else:
        error, due_s = RequestError("not_sent", reason), driven.end_s - driven.start_s
    return RequestRecord(request.index, due_s, None, None, error=error, **_asked(request))


def _asked(request: Request) -> dict[str, Any]:
    """Return what the counts of an answer are held against."""
    return {
        "asked_tokens": request.max_tokens,
        "asked_prompt_tokens": len(request.prompt_token_ids),
        "ignore_eos": request.ignore_eos,
    }


def _record(start_s: float, sent: Sent, request: Request) -> RequestRecord:
    exchange = sent.exchange
    stream = sse.parse(exchange.chunks) if exchange.status == 200 else sse.Stream()
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
        **_asked(request),
    )


def _shift(event: TokenEvent, start_s: float) -> TokenEvent:
    engine_at_s = None if event.engine_at_s is None else event.engine_at_s - start_s
    return TokenEvent(
        event.at_s - start_s, event.text, event.token_ids, event.num_tokens, engine_at_s
    )


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
    return b"".join(piece for _, piece in exchange.chunks)[:500].decode("utf-8", "replace")


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
