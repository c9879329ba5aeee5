"""Waiting for absolute times, finer than an event loop's timers, which are rounded up to 1 ms."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator

from headway.timer import Timer

# Where there is no such timer: from here on the loop is asked in every turn what time it is.
SPIN_S = 0.0015


class Pacer:
    """Sleeps until times of a clock, never less, and on Linux hardly more.

    It lives in a running event loop, within `pacer`, and serves one sleeper at a time.
    """

    def __init__(self, clock: Callable[[], float], timer: Timer | None) -> None:
        self.clock = clock
        self._timer = timer
        self._woken: asyncio.Future[None] | None = None

    async def until(self, due_s: float) -> None:
        """Sleep to an absolute time; a time that has passed gives others their turn and returns."""
        if self._timer is None:
            await self._by_the_loop(due_s)
            return
        if due_s <= self.clock():
            await asyncio.sleep(0)
        while due_s > self.clock():
            self._woken = asyncio.get_running_loop().create_future()
            self._timer.set(due_s)
            await self._woken

    def wake(self) -> None:
        """Wake the sleeper: its timer has run out."""
        assert self._timer is not None
        self._timer.read()
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    async def _by_the_loop(self, due_s: float) -> None:
        real = self.clock is time.monotonic
        await asyncio.sleep(max(0.0, due_s - self.clock() - (SPIN_S if real else 0.0)))
        while (left_s := due_s - self.clock()) > 0:
            await asyncio.sleep(0.0 if real and left_s < SPIN_S else left_s)


@contextlib.contextmanager
def pacer(clock: Callable[[], float]) -> Iterator[Pacer]:
    """Give a pacer for this loop; a clock other than the machine's is waited for by the loop."""
    timer = _timer() if clock is time.monotonic else None
    made = Pacer(clock, timer)
    if timer is None:
        yield made
        return
    loop = asyncio.get_running_loop()
    loop.add_reader(timer.fd, made.wake)
    try:
        yield made
    finally:
        loop.remove_reader(timer.fd)
        timer.close()


def _timer() -> Timer | None:
    try:
        return Timer()
    except OSError:
        return None
