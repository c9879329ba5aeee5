"""The machine's cores through /proc: how busy they are, by whom, and how fast."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from headway.engines.supervise import descendants
from headway.telemetry.readings import Reading

PROC = Path("/proc")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Ticks:
    """The time of all cores since boot, how much of it was busy, and how much of that was ours.

    `steal` of it, which is busy as well, a hypervisor gave to other machines.
    """

    total: int
    busy: int
    ours: int
    steal: int = 0


def others_share(before: Ticks, after: Ticks) -> float:
    """Return the share of all cores that others used between two looks; 0 when no time passed."""
    total = after.total - before.total
    others = (after.busy - before.busy) - (after.ours - before.ours)
    return max(0, others) / total if total > 0 else 0.0


def read_ticks(proc: Path = PROC, family: int | None = None) -> Ticks | None:
    """Look at the machine; None where /proc does not say.

    Ours are a process (this one) and its descendants. What a hypervisor gave to other machines
    is busy, and not ours.
    """
    try:
        fields = proc.joinpath("stat").read_text(encoding="ascii").split("\n", 1)[0].split()
        # user nice system idle iowait irq softirq steal; what guests use is within user already
        ticks = [int(field) for field in fields[1:9]]
        idle = ticks[3] + ticks[4]
    except (OSError, ValueError, IndexError):
        return None
    root = os.getpid() if family is None else family
    ours = sum(_ticks_of(proc, pid) for pid in (root, *descendants(root)))
    return Ticks(sum(ticks), sum(ticks) - idle, ours, ticks[7] if len(ticks) > 7 else 0)


def _ticks_of(proc: Path, pid: int) -> int:
    """Return the ticks of a process and of its children that were reaped; 0 for one that is gone.

    A child's ticks pass to its parent when it is reaped: the sum over a tree loses none.
    """
    try:
        text = proc.joinpath(str(pid), "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    # The name in brackets may hold anything; utime stime cutime cstime are fields 14 to 17.
    return sum(int(field) for field in text.rpartition(")")[2].split()[11:15])


def read(family: int, cores: Collection[int] = (), proc: Path = PROC) -> Reading:
    """Read the machine: ticks since boot, the load of the last minute, the clock of its cores.

    `cores` are those whose clocks count (none: all); of a machine that does not tell, none is
    there.
    """
    values: dict[str, float] = {}
    ticks = read_ticks(proc, family)
    if ticks is not None:
        values |= {"total": ticks.total, "busy": ticks.busy, "ours": ticks.ours}
        values["steal"] = ticks.steal
    with contextlib.suppress(OSError, ValueError, IndexError):
        values["load"] = float(proc.joinpath("loadavg").read_text().split()[0])
    clocks = _clocks(proc, cores)
    if clocks:
        values |= {"clock_min": min(clocks), "clock_mean": sum(clocks) / len(clocks)}
    return Reading(time.monotonic(), values or None)


def _clocks(proc: Path, cores: Collection[int]) -> list[float]:
    """Return the clock of each core in Hz."""
    try:
        text = proc.joinpath("cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = re.findall(r"^processor\s*:\s*(\d+)$(?s:.*?)^cpu MHz\s*:\s*([\d.]+)$", text, re.M)
    return [float(mhz) * 1e6 for core, mhz in found if not cores or int(core) in cores]
