"""A closed loop inside the engine's own process: the same requests, without HTTP around them.

What is submitted when, and what is noted of it, is decided here; whoever drives it has the engine
and the clock. A step loop asks `due` before each step and tells `left` after it; an engine that
delivers by itself, in an event loop, is driven by `replay`.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from headway.engines.contract import Departure, Output, Submission


@dataclass(frozen=True, slots=True)
class Schedule:
    """Requests in order, and when each slot begins, in seconds from the start.

    As many are in flight as there are slots: a slot takes the next request as soon as its last one
    has ended.
    """

    submissions: tuple[Submission, ...]
    slots_s: tuple[float, ...]


@dataclass(slots=True)
class Life:
    """One request, on the engine's clock: `departed` holds (at_s, number of tokens) in order."""

    due_s: float
    arrived_s: float
    departed: list[tuple[float, int]] = field(default_factory=list)
    ended_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None


class Replay:
    """A schedule in progress. It began at `start_s`; all times are of the clock that this is of."""

    def __init__(self, schedule: Schedule, start_s: float) -> None:
        self._waiting = deque(schedule.submissions)
        self._free = [start_s + begin_s for begin_s in schedule.slots_s]
        heapq.heapify(self._free)
        self._order = [one.id for one in schedule.submissions]
        self._lives: dict[int, Life] = {}
        self._start_s = start_s
        self.in_flight: set[int] = set()

    @property
    def done(self) -> bool:
        """Whether every request has ended."""
        return not self._waiting and not self.in_flight

    @property
    def next_s(self) -> float | None:
        """When a slot begins that will take a request; None while all of them are taken."""
        return self._free[0] if self._free and self._waiting else None

    def due(self, clock: Callable[[], float]) -> Iterator[Submission]:
        """Yield what is to be submitted now; it counts as arrived when it is handed out."""
        while self._waiting and self._free and self._free[0] <= (now_s := clock()):
            submission = self._waiting.popleft()
            self._lives[submission.id] = Life(heapq.heappop(self._free), now_s)
            self.in_flight.add(submission.id)
            yield submission

    def left(self, output: Output, at_s: float) -> None:
        """Note what left the engine; what ends a request frees its slot at that moment."""
        if output.id not in self.in_flight:
            return
        life = self._lives[output.id]
        if output.token_ids:
            life.departed.append((at_s, len(output.token_ids)))
        if output.finish_reason is not None:
            life.ended_s, life.finish_reason, life.error = at_s, output.finish_reason, output.error
            self.in_flight.discard(output.id)
            heapq.heappush(self._free, at_s)

    def answer(self) -> dict[str, Any]:
        """Return when it began and what became of each request, in their order."""
        return {
            "start_s": self._start_s,
            "requests": [asdict(self._lives[id]) for id in self._order if id in self._lives],
        }


Submit = Callable[[Submission, Callable[[Departure], None]], None]


async def replay(
    schedule: Schedule,
    submit: Submit,
    abort: Callable[[int], None],
    clock: Callable[[], float],
) -> dict[str, Any]:
    """Drive an engine that delivers in this event loop; returns `Replay.answer`.

    Cancelled, it aborts what is in flight.
    """
    running, moved = Replay(schedule, clock()), asyncio.Event()

    def deliver(departure: Departure) -> None:
        running.left(departure.output, departure.at_s)
        if departure.output.finish_reason is not None:
            # At once, not in the task's next turn: the engine is not to wait for it.
            hand_over()
            moved.set()

    def hand_over() -> None:
        for submission in running.due(clock):
            submit(submission, deliver)

    try:
        while not running.done:
            moved.clear()
            hand_over()
            next_s = running.next_s
            if next_s is None:
                await moved.wait()
            else:
                await asyncio.sleep(max(0.0, next_s - clock()))
    finally:
        for id in tuple(running.in_flight):
            abort(id)
    return running.answer()
