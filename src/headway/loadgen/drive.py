"""Schedule + transport → what came back: sends what was prepared when it is due, and keeps it.

Closed loop: each of C slots takes the next request as soon as its last one ended. Open loop: each
request leaves at its own absolute time, whatever became of the others. Nothing is parsed before
the last response has ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headway.core import Level, RequestError
from headway.loadgen.pacing import pacer
from headway.loadgen.watch import watching
from headway.transport import Exchange, Transport

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
    try:
        await transport.open(_connections(level, len(payloads), offsets_s))
        async with watching(clock) as watch:
            # The clock starts when everything is ready.
            result.start_s = clock()
            try:
                async with asyncio.timeout(timeout_s):
                    await run(payloads, level, transport, result, clock, progress)
            except TimeoutError:
                _cut_off(result, timeout_s)
            finally:
                result.end_s = clock()
    finally:
        await transport.close()
    result.client.update(watch.figures(sent.exchange for sent in result.sent))
    return result


def _connections(level: Level, count: int, offsets_s: Sequence[float]) -> int:
    """Return how many connections are made ahead: one a slot, or for a second's worth of sends."""
    if level.concurrency is not None:
        return min(level.concurrency, count)
    return min(count, math.ceil(count / max(1.0, max(offsets_s, default=0.0))))


def _cut_off(result: Drive, timeout_s: float) -> None:
    for sent in result.sent:
        if sent.exchange.ended_s is None and sent.exchange.error is None:
            limit = f"unfinished when the level's {timeout_s:g} s were over"
            sent.exchange.error = RequestError("level_timeout", limit)


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

    with pacer(clock) as pace:
        async with asyncio.TaskGroup() as group:
            for offset_s, data in zip(result.offsets_s, payloads, strict=True):
                sent = Sent(result.start_s + offset_s, Exchange())
                await pace.until(sent.due_s)
                result.sent.append(sent)
                group.create_task(one(data, sent.exchange))


async def _one(
    data: bytes, exchange: Exchange, transport: Transport, clock: Callable[[], float]
) -> None:
    try:
        await transport.send(data, exchange)
    except Exception as error:  # noqa: BLE001 - the one place where any failure becomes a record
        exchange.error = RequestError("client_error", f"{type(error).__name__}: {error}", "client")
        exchange.ended_s = clock()
