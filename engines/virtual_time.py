"""An event loop without waiting: its clock jumps to the next timer.

For code that reads time only from `asyncio.get_running_loop().time()` and waits only on the loop's
timers. What then happens at which time is exact, and takes no time to find out.
"""

from __future__ import annotations

import asyncio
import heapq
import selectors
from collections.abc import Coroutine
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def run_virtual(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a clock that starts at 0 and return its result.

    Raises RuntimeError where it waits for something that no timer will ever bring. Sockets and
    threads cannot take part: nobody would wait for them.
    """
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """The loop of `run_virtual`. `time()` is exactly the time of the timer that is served.

    Only timers less than a nanosecond apart are served together, at the time of the first: asyncio
    takes its clock to be no finer.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._times: list[float] = []  # of every timer ever set and not yet passed
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._now_s

    def call_at(
        self,
        when: float,
        callback: Any,
        *args: *Ts,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        """Set a timer, and remember its time: the wait that asyncio computes from it is rounded."""
        heapq.heappush(self._times, when)
        return super().call_at(when, callback, *args, context=context)

    def jump(self) -> None:
        """Go on to the next timer; a cancelled one is a stop at which nothing happens."""
        while self._times and self._times[0] <= self._now_s:
            heapq.heappop(self._times)
        if not self._times:
            raise RuntimeError("everything waits, and no timer is set: it would wait for ever")
        self._now_s = self._times[0]


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, lets the loop's time jump."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._loop.jump()
        return ready
