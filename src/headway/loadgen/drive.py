"""Schedule + transport → what came back: sends what was prepared when it is due, and keeps it.

Closed loop: each of C slots takes the next request as soon as its last one ended. Open loop: each
request leaves at its own absolute time, whatever became of the others. Nothing is parsed before
the last response has ended.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headway.core import Level, RequestError
from headway.loadgen.pacing import pacer
from headway.loadgen.spool import SPILL_BYTES, Spool
from headway.loadgen.watch import watching
from headway.transport import Exchange, Transport

Progress = Callable[[int], None]
Begin = Callable[[], Awaitable[float]]


@dataclass(slots=True)
class Sent:
    """One request's wire life, with the time at which it was due."""

    due_s: float
    exchange: Exchange


@dataclass(slots=True)
class Drive:
    """Everything one Run left behind, on the clock of the load generator; `start_s` is its zero.

    `offsets_s` is what the schedule was; see `drive`.
    """

    level: Level
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
    spill_bytes: int = SPILL_BYTES,
    progress: Progress = lambda _: None,
    begin: Begin | None = None,
) -> Drive:
    """Send every payload as the level says; what is unfinished after `timeout_s` is cut off.

    `offsets_s` says when each request is due in open loop, and when each slot begins in closed
    loop (empty: all at once). The clock starts when everything is ready: `begin`, if there is one,
    is told so, and returns the time at which it starts. Answers beyond `spill_bytes` are kept in
    a file until they are parsed.
    """
    result = Drive(level, offsets_s)
    sending = _Sending(payloads, transport, result, clock, progress, Spool(spill_bytes))
    try:
        await transport.open(_connections(level, len(payloads), offsets_s))
        start_s = None if begin is None else await begin()
        async with watching(clock) as watch:
            result.start_s = clock() if start_s is None else start_s
            try:
                async with asyncio.timeout(timeout_s):
                    await (sending.closed() if level.closed else sending.open())
            except TimeoutError:
                _cut_off(result, timeout_s)
            finally:
                result.end_s = clock()
    finally:
        await transport.close()
    result.client.update(watch.figures(sent.exchange.body for sent in result.sent))
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


@dataclass(slots=True)
class _Sending:
    """Requests on their way, as tasks of one event loop."""

    payloads: Sequence[bytes]
    transport: Transport
    result: Drive
    clock: Callable[[], float]
    progress: Progress
    spool: Spool

    async def closed(self) -> None:
        """Let each slot take the next request as soon as its last one has ended."""
        waiting, level = iter(self.payloads), self.result.level
        slots = min(level.concurrency or 1, len(self.payloads))
        begins = self.result.offsets_s or (0.0,) * slots

        async def slot(due_s: float) -> None:
            for data in waiting:
                ended_s = await self._one(data, due_s)
                due_s = self.clock() if ended_s is None else ended_s

        async with asyncio.TaskGroup() as group:
            await self._each(begins[:slots], lambda _, at_s: group.create_task(slot(at_s)))

    async def open(self) -> None:
        """Send each request at its own time, whatever became of the others."""
        async with asyncio.TaskGroup() as group:
            await self._each(
                self.result.offsets_s,
                lambda place, at_s: group.create_task(self._one(self.payloads[place], at_s)),
            )

    async def _each(
        self, offsets_s: Sequence[float], begin: Callable[[int, float], object]
    ) -> None:
        """Begin something at each of some times."""
        with pacer(self.clock) as pace:
            for place, offset_s in enumerate(offsets_s):
                at_s = self.result.start_s + offset_s
                await pace.until(at_s)
                begin(place, at_s)

    async def _one(self, data: bytes, due_s: float) -> float | None:
        """Send one request and wait for its end; returns when that was."""
        exchange = Exchange()
        self.result.sent.append(Sent(due_s, exchange))
        try:
            await self.transport.send(data, exchange)
        except Exception as error:  # noqa: BLE001 - where any failure becomes a record
            text = f"{type(error).__name__}: {error}"
            exchange.error = RequestError("client_error", text, "client")
            exchange.ended_s = self.clock()
        self.spool.keep(exchange.body)
        self.progress(1)
        return exchange.ended_s
