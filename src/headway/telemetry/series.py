"""Readings → series: gauges as they were, counters by how much they grew since the Run began."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from headway.core import Series
from headway.telemetry.cpu import Ticks, others_share
from headway.telemetry.readings import Reading, Watched
from headway.telemetry.servers import QUANTITIES

Points = Sequence[tuple[float, float]]
Share = Literal["others", "steal"]
SHARES: Sequence[Share] = ("others", "steal")
Source = Literal["server", "machine", "gpu"]
GPU_UNITS = {
    "power": "W",
    "sm_clock": "Hz",
    "memory_clock": "Hz",
    "temperature": "C",
    "memory": "bytes",
    "reasons": "bits",
}
MACHINE_UNITS = {"load": "1", "clock_min": "Hz", "clock_mean": "Hz"}


def series(watched: Watched, start_s: float) -> tuple[Series, ...]:
    """Return everything that was read around a Run which began at `start_s` of the clock.

    A reading that failed is a gap. Of several GPUs each has its number in the name, in the order
    in which they were asked for.
    """
    return tuple(_all(watched, start_s))


def _all(watched: Watched, start_s: float) -> Iterator[Series]:
    for quantity in QUANTITIES:
        read = gauge if quantity.kind == "gauge" else growth
        points = read(watched.server, quantity.name)
        yield from _series("server", quantity.name, quantity.unit, points, start_s)
    for name, unit in MACHINE_UNITS.items():
        yield from _series("machine", name, unit, gauge(watched.machine, name), start_s)
    for name in SHARES:
        yield from _series("machine", name, "1", shares(watched.machine, name), start_s)
    for number, readings in enumerate(watched.gpus.values()):
        end = f"_{number}" if len(watched.gpus) > 1 else ""
        for name, unit in GPU_UNITS.items():
            yield from _series("gpu", name + end, unit, gauge(readings, name), start_s)
        yield from _series("gpu", f"energy{end}", "J", growth(readings, "energy"), start_s)


def _series(
    source: Source, name: str, unit: str, points: Points, start_s: float
) -> Iterator[Series]:
    if points:
        times, values = zip(*points, strict=True)
        yield Series(source, name, unit, tuple(at - start_s for at in times), values)


def gauge(readings: Sequence[Reading], name: str) -> Points:
    """Return (time, value) of each reading that has it."""
    return [
        (one.at_s, one.values[name])
        for one in readings
        if one.values is not None and name in one.values
    ]


def growth(readings: Sequence[Reading], name: str) -> Points:
    """Return by how much a counter had grown at each reading since the first that has it.

    One that is lower than before began anew: what it holds since then is what it grew by.
    """
    points = gauge(readings, name)
    total, found = 0.0, [(at, 0.0) for at, _ in points[:1]]
    for (_, before), (at, value) in itertools.pairwise(points):
        total += value - before if value >= before else value
        found.append((at, total))
    return found


def shares(readings: Sequence[Reading], name: Share) -> Points:
    """Return the share of all cores that others, or a hypervisor, used before each reading."""
    known = [one for one in readings if one.values is not None and "total" in one.values]
    found = []
    for one, other in itertools.pairwise(known):
        before, after = _ticks(one), _ticks(other)
        total = after.total - before.total
        if total > 0:
            stolen = max(0, after.steal - before.steal) / total
            share = others_share(before, after) if name == "others" else stolen
            found.append((other.at_s, min(1.0, share)))
    return found


def _ticks(reading: Reading) -> Ticks:
    values = reading.values or {}
    return Ticks(*(int(values.get(name, 0)) for name in ("total", "busy", "ours", "steal")))


def thinned(one: Series, most: int) -> Series:
    """Return a series of at most `most` points (4 or more), its lowest and highest among them.

    Of each stretch of equally many points the lowest and the highest stay, and so do both ends.
    """
    count = len(one.values)
    if count <= most:
        return one
    stretches = (most - 2) // 2
    kept = {0, count - 1}
    for number in range(stretches):
        places = range(number * count // stretches, (number + 1) * count // stretches)
        kept |= {min(places, key=one.values.__getitem__), max(places, key=one.values.__getitem__)}
    places_kept = sorted(kept)
    return replace(
        one,
        at_s=tuple(one.at_s[k] for k in places_kept),
        values=tuple(one.values[k] for k in places_kept),
    )
