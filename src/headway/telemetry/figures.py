"""Readings → the figures of a Run that telemetry gives: its peaks, its shares, its energy.

Names begin with who was asked: server_, machine_, gpu_. What is not known is not there.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Mapping, Sequence

from headway.telemetry.gpus import REASONS
from headway.telemetry.readings import Processes, Reading, Watched
from headway.telemetry.series import SHARES, Points, gauge, growth, shares

# A process that was there before and now holds so much more memory is at work.
GROWTH_BYTES = 256 << 20
PEAKS = {"running": "running_max", "waiting": "waiting_max", "kv_usage": "kv_usage_max"}
GROWN = ("preemptions", "prompt_tokens", "generation_tokens", "spec_drafted", "spec_accepted")


def figures(
    watched: Watched,
    start_s: float,
    span_s: float,
    resting: Mapping[str, Reading] | None = None,
    ours: Collection[int] = (),
) -> dict[str, float]:
    """Return what `core.Run.engine` holds of a Run's telemetry.

    `resting` is what each GPU said before this engine was launched, `ours` are the processes that
    are the engine's or our own, as the driver numbers them (empty: nobody knows).
    """
    found = _server(watched.server, start_s) | _machine(watched.machine)
    if watched.gpus:
        found |= _gpus(list(watched.gpus.values()), start_s, start_s + span_s)
        before = {uuid: (resting or {}).get(uuid) for uuid in watched.gpus}
        found |= _memory(watched.gpus, before)
        found |= _foreign(watched.gpus, before, {str(pid) for pid in ours})
    return found


def _server(readings: Sequence[Reading], start_s: float) -> dict[str, float]:
    found = {}
    if readings:
        found["server_scrapes"] = float(len(readings))
        found["server_scrapes_failed"] = float(sum(one.values is None for one in readings))
    for name, figure in PEAKS.items():
        during = [value for at_s, value in gauge(readings, name) if at_s >= start_s]
        if during:
            found[f"server_{figure}"] = max(during)
    for name in GROWN:
        grown = _grown(readings, name)
        if grown is not None:
            found[f"server_{name}"] = grown
    for figure, part, whole in (
        ("prefix_hit_rate", "prefix_hits", "prefix_queries"),
        ("spec_acceptance", "spec_accepted", "spec_drafted"),
        ("kv_filled", "kv_filled", "kv_held"),
    ):
        some, all_ = _grown(readings, part), _grown(readings, whole)
        if some is not None and all_:
            found[f"server_{figure}"] = some / all_
    return found


def _grown(readings: Sequence[Reading], name: str) -> float | None:
    """Return by how much a counter grew around the Run; None where its ends were not both read."""
    ends = [readings[0], readings[-1]] if len(readings) > 1 else []
    if not ends or any(one.values is None or name not in one.values for one in ends):
        return None
    return growth(readings, name)[-1][1]


def _machine(readings: Sequence[Reading]) -> dict[str, float]:
    found = {}
    for name in SHARES:
        points = shares(readings, name)
        if points:
            found[f"machine_{name}_max"] = max(value for _, value in points)
    clocks = [value for _, value in gauge(readings, "clock_mean")]
    if clocks:
        found["machine_clock_hz"] = math.fsum(clocks) / len(clocks)
    return found


def _gpus(gpus: Sequence[Sequence[Reading]], start_s: float, end_s: float) -> dict[str, float]:
    """Sum what each GPU used; of what slowed them down, the one that suffered longest counts."""
    found = {}
    energies = [energy_j(readings, start_s, end_s) for readings in gpus]
    if None not in energies:
        found["gpu_energy_j"] = math.fsum(energy or 0.0 for energy in energies)
        if end_s > start_s:
            found["gpu_power_w"] = found["gpu_energy_j"] / (end_s - start_s)
    temperatures = [v for readings in gpus for _, v in gauge(readings, "temperature")]
    if temperatures:
        found["gpu_temperature_max_c"] = max(temperatures)
    clocks = [v for r in gpus for at, v in gauge(r, "sm_clock") if start_s <= at <= end_s]
    if clocks:
        found["gpu_sm_clock_hz"] = math.fsum(clocks) / len(clocks)
    for bit, reason in REASONS.items():
        longest = max(_seconds_of(gauge(r, "reasons"), bit, start_s, end_s) for r in gpus)
        if longest > 0:
            found[f"gpu_{reason}_s"] = longest
    return found


def energy_j(readings: Sequence[Reading], start_s: float, end_s: float) -> float | None:
    """Return the energy of a GPU between two times: by its counter, else by its power.

    The counter is taken as linear between two readings, the power too (trapezoids). None where
    the readings do not reach from one end to the other.
    """
    counted = growth(readings, "energy")
    if len(counted) > 1 and _covers(counted, start_s, end_s):
        return _at(counted, end_s) - _at(counted, start_s)
    power = gauge(readings, "power")
    if len(power) < 2 or not _covers(power, start_s, end_s):
        return None
    inside = [(at, value) for at, value in power if start_s < at < end_s]
    points = [(start_s, _at(power, start_s)), *inside, (end_s, _at(power, end_s))]
    return math.fsum((b - a) * (v + w) / 2 for (a, v), (b, w) in itertools.pairwise(points))


def _covers(points: Points, start_s: float, end_s: float) -> bool:
    return points[0][0] <= start_s and points[-1][0] >= end_s


def _at(points: Points, at_s: float) -> float:
    """Return the value at a time within the points, on the line between its neighbours."""
    for (a, v), (b, w) in itertools.pairwise(points):
        if a <= at_s <= b:
            return v if b == a else v + (w - v) * (at_s - a) / (b - a)
    return points[-1][1]


def _seconds_of(points: Points, bit: int, start_s: float, end_s: float) -> float:
    """Return how long a reason held within the Run: from each reading that has it to the next."""
    total = 0.0
    for number, (at_s, bits) in enumerate(points):
        until_s = points[number + 1][0] if number + 1 < len(points) else at_s
        if int(bits) & bit:
            total += max(0.0, min(until_s, end_s) - max(at_s, start_s))
    return total


def _memory(
    gpus: Mapping[str, Sequence[Reading]], before: Mapping[str, Reading | None]
) -> dict[str, float]:
    """Return the most memory that was used at once on all GPUs, beside what rested there."""
    total = 0.0
    for uuid, readings in gpus.items():
        used = [value for _, value in gauge(readings, "memory")]
        rested = before[uuid]
        if not used or rested is None or rested.values is None or "memory" not in rested.values:
            return {}
        total += max(0.0, max(used) - rested.values["memory"])
    return {"gpu_memory_peak_bytes": total}


def _foreign(
    gpus: Mapping[str, Sequence[Reading]], before: Mapping[str, Reading | None], ours: set[str]
) -> dict[str, float]:
    """Count the processes at work on the GPUs that are not ours, and their memory.

    Absent where the driver names no processes: then nobody knows.
    """
    found: dict[str, int] = {}
    known = False
    for uuid, readings in gpus.items():
        rested = before[uuid]
        during = [one.processes for one in readings if one.processes is not None]
        if rested is None or rested.processes is None or not during:
            continue
        known = True
        for pid, held in foreign(rested.processes, during, ours).items():
            found[pid] = found.get(pid, 0) + held
    if not known:
        return {}
    return {
        "gpu_foreign_processes": float(len(found)),
        "gpu_foreign_bytes": float(sum(found.values())),
    }


def foreign(before: Processes, during: Sequence[Processes], ours: Collection[str]) -> Processes:
    """Return the processes at work that are not ours, with the most memory that each held.

    `before` are those from before the launch: idle residents, foreign only by what they grow.
    Without `ours` (in a container the driver numbers processes as the host does, which we cannot
    match with our own) those that came between the launch and the Run's beginning are the engine's.
    """
    seen = {pid for processes in during for pid in processes}
    engine = set(ours) or set(during[0]) - set(before)
    found = {}
    for pid in sorted(seen - engine):
        most = max(processes.get(pid, 0) for processes in during)
        if pid not in before:
            found[pid] = most
        elif most > before[pid] + GROWTH_BYTES:
            found[pid] = most - before[pid]
    return found
