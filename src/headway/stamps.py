"""Kernel receive stamps: when the last byte of a read reached this machine, not this program.

Linux stamps each packet as it arrives and hands the stamp over with the data, on the wall clock.
How far that clock is from the monotonic one is measured here; both are slewed alike, so it only
changes when somebody sets the time.
"""

from __future__ import annotations

import functools
import platform
import socket
import struct
import sys
import time
from collections.abc import Callable, Sequence

# <asm-generic/socket.h>; three machines number their socket options otherwise.
SO_TIMESTAMPNS = 35
KNOWN = sys.platform == "linux" and not platform.machine().startswith(("sparc", "parisc", "hppa"))
TIMESPEC = struct.Struct("@ll")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)
# The clocks are read one after the other: the shortest of some tries is the least disturbed.
TRIES = 15
# Stamping is switched on by the first socket that asks, but by work that the kernel puts off.
SWITCHED_ON_WITHIN_S = 0.5
PAUSE_S = 0.002
Ancillary = Sequence[tuple[int, int, bytes]]


def clocks_apart_s() -> float:
    """Return wall clock − monotonic clock, in seconds."""
    found = []
    for _ in range(TRIES):
        before, wall, after = time.monotonic_ns(), time.time_ns(), time.monotonic_ns()
        found.append((after - before, wall - (before + after) // 2))
    return min(found)[1] * 1e-9


def ask(sock: socket.socket) -> bool:
    """Ask the kernel to stamp what a socket receives; whether it knows how."""
    if not KNOWN:
        return False
    try:
        sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
    except OSError:
        return False
    return True


class KernelStamps:
    """Maps stamps to the monotonic clock. `on` says whether the kernel stamps at all.

    `steps` counts how often somebody has set the time since.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # A clock of a test's own has nothing to do with the kernel's.
        self.on = clock is time.monotonic and _stamping()
        self.steps = 0
        self._apart_s = clocks_apart_s()

    def look(self, tolerance_s: float = 0.001) -> None:
        """See whether somebody has set the time; from then on the new difference holds."""
        now_s = clocks_apart_s()
        if abs(now_s - self._apart_s) > tolerance_s:
            self.steps += 1
            self._apart_s = now_s

    def arrival_s(self, ancillary: Ancillary) -> float | None:
        """Return the monotonic time of a read's stamp; None where it carries none."""
        for level, kind, data in ancillary:
            if kind == SO_TIMESTAMPNS and level == socket.SOL_SOCKET:
                seconds, nanoseconds = TIMESPEC.unpack(data)
                return float(seconds - self._apart_s + nanoseconds * 1e-9)
        return None


@functools.cache
def _stamping() -> bool:
    """Whether the kernel stamps; if so, from now on until this process ends.

    A socket of this process's own asks for stamps, so that stamping is on before any other one
    receives. Its descriptor is never closed.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as held:
        try:
            stamped = ask(held) and _is_stamped(held)
        except OSError:
            return False
        if stamped:
            held.detach()
        return stamped


def _is_stamped(held: socket.socket) -> bool:
    """Whether a packet carries the time of its arrival, and not that of its read."""
    held.bind(("127.0.0.1", 0))
    held.settimeout(SWITCHED_ON_WITHIN_S)
    until_s = time.monotonic() + SWITCHED_ON_WITHIN_S
    while time.monotonic() < until_s:
        held.sendto(b"?", held.getsockname())
        sent = time.time()
        time.sleep(PAUSE_S)
        _, ancillary, _, _ = held.recvmsg(1, ANCILLARY_BYTES)
        for _, kind, data in ancillary:
            seconds, nanoseconds = TIMESPEC.unpack(data)
            if kind == SO_TIMESTAMPNS and seconds + nanoseconds * 1e-9 < sent + PAUSE_S / 2:
                return True
    return False
