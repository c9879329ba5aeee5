"""WHEN requests are due: offsets in seconds from the start of a Run, made before the first send.

Pure functions of a process, its parameters and a seed that has nothing to do with the prompts'. A
mean rate is the rate that was asked for: nothing is rescaled to end where the mean would.
In closed loop only each slot's first request has an offset: the next is due when its slot is free.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from headway.core import Level, Stage
from headway.lengths import Trace

PROCESSES = ("poisson", "gamma", "constant", "burst")
BURST_SIZE = 8
BURST_JITTER = 0.1
# Below it, thousands of requests come at once and then none for hours: no load that anybody means.
MIN_BURSTINESS = 1e-3
# A slot begins so long after the one before it: time to connect, and for one prompt or so.
FILL_S_PER_SLOT = 0.005
MAX_FILL_S = 1.0
_T = TypeVar("_T")


def schedule(level: Level, seed: int, launch: int, trace: Trace | None = None) -> tuple[float, ...]:
    """Return when each request of a level is due in a launch; empty in closed loop.

    A level with a number of requests gets other times in every launch, so that no one draw of them
    is what all launches see. A level with a duration (stages, a trace) gets the same in all of
    them, drawn from the seed alone: its number of requests is a draw as well, and only launches
    that sent as many are compared like with like. A count that was fixed instead would not vary as
    the process says.
    """
    if level.closed:
        return ()
    if level.speed is not None:
        if trace is None:
            raise ValueError(f"level {level.name} replays a trace, and there is none")
        return tuple(at / level.speed for at in trace.times_s)
    burstiness = 1.0 if level.burstiness is None else level.burstiness
    if level.stages:
        return in_stages(level.arrivals, level.stages, seed, burstiness)
    rate = math.inf if level.rate_per_s is None else level.rate_per_s
    return offsets(level.arrivals, level.num_requests, rate, seed * 1000 + launch, burstiness)


def offsets(
    process: str, n: int, rate_per_s: float, seed: int, burstiness: float = 1.0
) -> tuple[float, ...]:
    """Return n arrival offsets, never decreasing, with mean rate `rate_per_s`.

    poisson: independent exponential gaps, so that counts vary as a Poisson count does. gamma:
    independent gamma gaps of shape `burstiness` and mean 1 / rate: 1 is Poisson, less is burstier,
    infinite is constant. constant: gaps of exactly 1 / rate. burst: groups of 8 at the times of a
    constant process of rate / 8, each request moved back by up to a tenth of the burst's period.
    An infinite rate puts all at 0. Raises ValueError for what cannot be a rate, a burstiness or a
    process.
    """
    make = _maker(process, burstiness)
    if not rate_per_s > 0:
        raise ValueError(f"rate_per_s is {rate_per_s}; it must be above 0")
    if math.isinf(rate_per_s):
        return (0.0,) * n
    times = make(rate_per_s, random.Random(f"arrivals/{process}/{seed}"))
    return tuple(sorted(itertools.islice(times, n)))


def in_stages(
    process: str, stages: Sequence[Stage], seed: int, burstiness: float = 1.0
) -> tuple[float, ...]:
    """Return the arrival offsets within all stages, one after the other; how many is drawn too.

    The process at rate 1, its time t stretched so that the number expected until t is what the
    stages' rates add up to until then: poisson becomes the inhomogeneous Poisson process of that
    rate (Cinlar 1975, the inversion of its mean function). Raises ValueError as `offsets` does,
    and for rates and seconds that are none.
    """
    make = _maker(process, burstiness)
    expected = expected_until(stages)
    ends = [0.0, *expected]
    starts_s = [0.0, *itertools.accumulate(stage.seconds for stage in stages)]
    times = make(1.0, random.Random(f"stages/{process}/{seed}"))
    found: list[float] = []
    while True:
        some = list(itertools.islice(times, BURST_SIZE))
        found += [at for at in some if at < ends[-1]]
        if min(some) >= ends[-1]:
            break
    placed = []
    for at in sorted(found):
        number = bisect.bisect_right(expected, at)  # stages at rate 0 hold nothing
        within_s = _time_in(stages[number], at - ends[number])
        placed.append(min(starts_s[number] + within_s, starts_s[number + 1]))
    return tuple(placed)


def expected_until(stages: Sequence[Stage]) -> list[float]:
    """Return how many arrivals are expected until the end of each stage."""
    for stage in stages:
        rates = (stage.rate_per_s, _end_rate(stage))
        if not all(math.isfinite(rate) and rate >= 0 for rate in rates):
            raise ValueError(f"a stage has the rates {rates}; they must be 0 or above, and finite")
        if not (math.isfinite(stage.seconds) and stage.seconds > 0):
            raise ValueError(f"a stage lasts {stage.seconds} s; it must be above 0, and finite")
    each = (stage.seconds * (stage.rate_per_s + _end_rate(stage)) / 2 for stage in stages)
    return list(itertools.accumulate(each))


def _end_rate(stage: Stage) -> float:
    return stage.rate_per_s if stage.to_per_s is None else stage.to_per_s


def _time_in(stage: Stage, count: float) -> float:
    """Return the seconds into a stage until `count` arrivals are expected.

    The root of a·t + (b − a)·t² / 2s = count, in the form that does not cancel where a is near b.
    """
    if count <= 0:
        return 0.0
    a, slope = stage.rate_per_s, (_end_rate(stage) - stage.rate_per_s) / stage.seconds
    return 2 * count / (a + math.sqrt(max(0.0, a * a + 2 * slope * count)))


Maker = Callable[[float, random.Random], Iterator[float]]


def _maker(process: str, burstiness: float) -> Maker:
    """Return the endless process of that name; within a burst its times are in no order."""
    if process not in PROCESSES:
        raise ValueError(f"arrivals {process!r} is not known; allowed: {', '.join(PROCESSES)}")
    if process == "gamma":
        if not burstiness >= MIN_BURSTINESS:
            raise ValueError(f"burstiness is {burstiness}; it must be at least {MIN_BURSTINESS:g}")
        if math.isinf(burstiness):
            return _constant
        return lambda rate, draw: itertools.accumulate(_gamma_gaps(rate, burstiness, draw))
    return {"poisson": _poisson, "constant": _constant, "burst": _bursts}[process]


def _poisson(rate_per_s: float, draw: random.Random) -> Iterator[float]:
    return itertools.accumulate(draw.expovariate(rate_per_s) for _ in itertools.count())


def _gamma_gaps(rate_per_s: float, burstiness: float, draw: random.Random) -> Iterator[float]:
    while True:
        yield draw.gammavariate(burstiness, 1 / (rate_per_s * burstiness))


def _constant(rate_per_s: float, draw: random.Random) -> Iterator[float]:
    return (k / rate_per_s for k in itertools.count())


def _bursts(rate_per_s: float, draw: random.Random) -> Iterator[float]:
    period = BURST_SIZE / rate_per_s
    for k in itertools.count():
        yield k // BURST_SIZE * period + draw.uniform(0, BURST_JITTER * period)


def default_fill_s(concurrency: int) -> float:
    """Return the seconds within which so many slots begin, unless a suite says otherwise."""
    return min(MAX_FILL_S, FILL_S_PER_SLOT * (concurrency - 1))


def slot_offsets(concurrency: int, fill_s: float) -> tuple[float, ...]:
    """Return when each slot's first request is due: the first at 0, the last at `fill_s`."""
    return tuple(slot * fill_s / max(1, concurrency - 1) for slot in range(concurrency))


def deal(items: Sequence[_T], worker: int, workers: int) -> Sequence[_T]:
    """Return a worker's part of requests, offsets or slots, dealt out like cards: every N-th.

    All parts together are the whole, each item once; a part of a Poisson process is no Poisson
    process, but all of them sent together are the one schedule that was drawn.
    """
    if not 0 <= worker < workers:
        raise ValueError(f"worker {worker} of {workers}: workers count from 0")
    return items[worker::workers]


def schedule_hash(offsets_s: Sequence[float], concurrency: int | None, fill_s: float = 0.0) -> str:
    """Return a short name of the schedule: two Runs with the same one sent at the same times."""
    text = json.dumps([list(offsets_s), concurrency, *([fill_s] if fill_s else [])])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
