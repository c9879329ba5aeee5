"""Schedule + transport → what came back: sends what was prepared when it is due, and keeps it.

Closed loop: each of C slots takes the next request as soon as its last one ended. Open loop: each
request leaves at its own absolute time, whatever became of the others. Nothing is parsed before
the last response has ended. Where the server takes no request at all, the rest is not sent.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headway.core import Level, RequestError
from headway.loadgen.conversation import Conversation
from headway.loadgen.pacing import pacer
from headway.loadgen.spool import SPILL_BYTES, Spool
from headway.loadgen.watch import watching
from headway.transport import Exchange, Transport

# So many refusals for each slot (in open loop, at all), all alike and no answer among them, are the
# server's last word: a busy one says something else, and one that breaks breaks now and then.
REFUSALS_PER_SLOT, REFUSALS_IN_OPEN_LOOP = 2, 16
BUSY = frozenset((408, 425, 429, 502, 503, 504))

Progress = Callable[[int], None]
Begin = Callable[[], Awaitable[float]]


@dataclass(slots=True)
class Sent:
    """The wire life of request number `place`, with the time at which it was due."""

    place: int
    due_s: float
    exchange: Exchange


@dataclass(slots=True)
class Drive:
    """Everything one Run left behind, on the clock of the load generator; `start_s` is its zero.

    `offsets_s` is what the schedule was; see `drive`. `stopped` says why not all were sent.
    """

    level: Level
    offsets_s: Sequence[float] = ()
    start_s: float = 0.0
    end_s: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    client: dict[str, float] = field(default_factory=dict)
    stopped: str | None = None


async def drive(
    talks: Sequence[Conversation],
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
    """Hold every conversation as the level says; what is unfinished after `timeout_s` is cut off.

    `offsets_s` says when each request is due in open loop (of a conversation, its first one), and
    when each slot begins in closed loop (empty: all at once). The clock starts when everything is
    ready: `begin`, if there is one, is told so, and returns the time at which it starts. Answers
    beyond `spill_bytes` are kept in a file until they are parsed.
    """
    result = Drive(level, offsets_s)
    # What each begins with is made before the clock starts; what follows depends on an answer.
    begun = [(talk, next(talk.turns)) for talk in talks]
    sending = _Sending(begun, transport, result, clock, progress, Spool(spill_bytes))
    try:
        await transport.open(_connections(level, len(talks), offsets_s))
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
class _Refusals:
    """Whether every answer so far was the same refusal."""

    may_be_all: bool = True
    status: int | None = None
    num: int = 0

    def count(self, exchange: Exchange, most: int) -> str | None:
        """Count an answer; returns why no more should be sent once there were `most` alike."""
        status = exchange.status
        self.may_be_all = (
            exchange.error is None
            and status is not None
            and status >= 400
            and status not in BUSY
            and self.status in (None, status)
        )
        self.status, self.num = status, self.num + 1
        if not self.may_be_all or self.num < most:
            return None
        said = bytes(exchange.body.data[:300]).decode("utf-8", "replace").strip()
        return f"all of the first {self.num} answers were {status} {said}"


@dataclass(slots=True)
class _Sending:
    """Requests on their way, as tasks of one event loop."""

    begun: Sequence[tuple[Conversation, bytes]]
    transport: Transport
    result: Drive
    clock: Callable[[], float]
    progress: Progress
    spool: Spool
    refusals: _Refusals = field(default_factory=_Refusals)

    async def closed(self) -> None:
        """Let each slot begin the next conversation as soon as its last one has ended."""
        waiting, level = iter(self.begun), self.result.level
        slots = min(level.concurrency or 1, len(self.begun))
        begins = self.result.offsets_s or (0.0,) * slots

        async def slot(due_s: float) -> None:
            for talk, data in waiting:
                if self.result.stopped is not None:
                    return
                due_s = await self._hold(talk, data, due_s)

        async with asyncio.TaskGroup() as group:
            await self._each(begins[:slots], lambda _, at_s: group.create_task(slot(at_s)))

    async def open(self) -> None:
        """Begin each conversation at its own time, whatever became of the others."""
        due_s = [self.result.offsets_s[talk.first] for talk, _ in self.begun]
        async with asyncio.TaskGroup() as group:
            await self._each(
                due_s,
                lambda number, at_s: group.create_task(self._hold(*self.begun[number], at_s)),
            )

    async def _each(
        self, offsets_s: Sequence[float], begin: Callable[[int, float], object]
    ) -> None:
        """Begin something at each of some times."""
        with pacer(self.clock) as pace:
            for number, offset_s in enumerate(offsets_s):
                at_s = self.result.start_s + offset_s
                await pace.until(at_s)
                if self.result.stopped is not None:
                    return
                begin(number, at_s)

    async def _hold(self, talk: Conversation, data: bytes, due_s: float) -> float:
        """Hold a conversation to its end; returns when its slot is free again."""
        place = talk.first
        while True:
            sent = Sent(place, due_s, Exchange())
            ended_s = await self._one(data, sent)
            following = talk.following(sent.exchange)
            self.spool.keep(sent.exchange.body)
            if following is None:
                return ended_s
            data, place, due_s = following, place + 1, ended_s + talk.think_s
            await self._until(due_s)

    async def _until(self, due_s: float) -> None:
        """Think: a turn has no schedule to keep that its loop's own timers would miss by much."""
        while (left_s := due_s - self.clock()) > 0:
            await asyncio.sleep(left_s)

    async def _one(self, data: bytes, sent: Sent) -> float:
        """Send one request and wait for its end; returns when that was."""
        self.result.sent.append(sent)
        exchange = sent.exchange
        try:
            await self.transport.send(data, exchange)
        except Exception as error:  # noqa: BLE001 - where any failure becomes a record
            text = f"{type(error).__name__}: {error}"
            exchange.error = RequestError("client_error", text, "client")
            exchange.ended_s = self.clock()
        if self.refusals.may_be_all and self.result.stopped is None:
            slots = self.result.level.concurrency
            most = REFUSALS_IN_OPEN_LOOP if slots is None else slots * REFUSALS_PER_SLOT
            self.result.stopped = self.refusals.count(exchange, most)
        self.progress(1)
        return self.clock() if exchange.ended_s is None else exchange.ended_s
