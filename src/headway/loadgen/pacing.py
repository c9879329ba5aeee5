"""Waiting for absolute times, finer than an event loop's timers, which are rounded up to 1 ms."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# <linux/timerfd.h>, <time.h>; Python knows them from 3.13 on.
CLOCK_MONOTONIC, TFD_NONBLOCK, TFD_CLOEXEC, TFD_TIMER_ABSTIME = 1, 0o4000, 0o2000000, 1
# Where there is no such timer: from here on the loop is asked in every turn what time it is.
SPIN_S = 0.0015


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class Pacer:
    """Sleeps until times of a clock, never less, and on Linux hardly more.

    It lives in a running event loop, within `pacer`, and serves one sleeper at a time.
    """

    def __init__(self, clock: Callable[[], float], descriptor: int | None) -> None:
        self.clock = clock
        self._descriptor = descriptor
        self._woken: asyncio.Future[None] | None = None

    async def until(self, due_s: float) -> None:
        """Sleep to an absolute time; a time that has passed gives others their turn and returns."""
        if self._descriptor is None:
            await self._by_the_loop(due_s)
            return
        if due_s <= self.clock():
            await asyncio.sleep(0)
        while due_s > self.clock():
            self._woken = asyncio.get_running_loop().create_future()
            _set(self._descriptor, due_s)
            await self._woken

    def wake(self) -> None:
        """Wake the sleeper: its timer has run out."""
        assert self._descriptor is not None
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 8)
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
    loop = asyncio.get_running_loop()
    descriptor = _timer() if clock is time.monotonic else None
    made = Pacer(clock, descriptor)
    if descriptor is None:
        yield made
        return
    loop.add_reader(descriptor, made.wake)
    try:
        yield made
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _timer() -> int | None:
    """Return a timer's descriptor, or None where the system has none."""
    if sys.platform != "linux":
        return None
    descriptor: int = _libc().timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
    return None if descriptor < 0 else descriptor


def _set(descriptor: int, due_s: float) -> None:
    """Let a timer run out at a time of the monotonic clock, which is above 0 as 0 disarms it."""
    seconds = int(due_s)
    nanoseconds = max(1, int((due_s - seconds) * 1e9))
    spec = _Itimerspec(_Timespec(0, 0), _Timespec(seconds, nanoseconds))
    if _libc().timerfd_settime(descriptor, TFD_TIMER_ABSTIME, ctypes.byref(spec), None):
        raise OSError(ctypes.get_errno(), "timerfd_settime")
