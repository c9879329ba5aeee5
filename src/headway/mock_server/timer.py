"""A timer that epoll waits for: its own time-outs are whole milliseconds, rounded up."""

from __future__ import annotations

import ctypes
import os
import time

_ABSOLUTE = 1  # TFD_TIMER_ABSTIME
_LIBC = ctypes.CDLL(None, use_errno=True)
_Spec = ctypes.c_long * 4  # interval, then value: seconds and nanoseconds each


class Timer:
    """A Linux timerfd on the monotonic clock.

    Register `fd` edge-triggered: setting it again forgets the last expiry, so it is never read.
    """

    def __init__(self) -> None:
        self.fd: int = _LIBC.timerfd_create(time.CLOCK_MONOTONIC, os.O_CLOEXEC | os.O_NONBLOCK)
        if self.fd < 0:
            raise OSError(ctypes.get_errno(), "there is no timerfd")
        self._spec = _Spec()

    def set(self, at_s: float) -> None:
        """Expire at a monotonic time above 0, at once if it has passed."""
        seconds = int(at_s)
        self._spec[2], self._spec[3] = seconds, int((at_s - seconds) * 1e9)
        if _LIBC.timerfd_settime(self.fd, _ABSOLUTE, ctypes.byref(self._spec), None) < 0:
            raise OSError(ctypes.get_errno(), f"the timer cannot be set to {at_s} s")

    def close(self) -> None:
        """Give the descriptor back."""
        os.close(self.fd)
