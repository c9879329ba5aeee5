"""WHEN requests are due: offsets in seconds from the start of a Run, made before the first send.

A pure function of (process, n, rate, seed). Closed loop has no offsets: a request is due when its
slot becomes free.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence

PROCESSES = ("poisson", "burst", "constant")
BURST_SIZE = 8
BURST_JITTER = 0.1


def offsets(process: str, n: int, rate_per_s: float, seed: int) -> tuple[float, ...]:
    """Return n arrival offsets, never decreasing, with mean rate `rate_per_s`.

    poisson: independent exponential gaps, neither rescaled nor clipped, so that counts vary as a
    Poisson count does. constant: gaps of exactly 1 / rate. burst: groups of 8 at the times of a
    constant process of rate / 8, each request moved back by up to a tenth of the burst's period.
    An infinite rate puts all at 0. Raises ValueError for what cannot be a rate or a process.
    """
    if process not in PROCESSES:
        raise ValueError(f"arrivals {process!r} is not known; allowed: {', '.join(PROCESSES)}")
    if not rate_per_s > 0:
        raise ValueError(f"rate_per_s is {rate_per_s}; it must be above 0")
    if math.isinf(rate_per_s):
        return (0.0,) * n
    draw = random.Random(f"arrivals/{process}/{seed}")
    if process == "constant":
        return tuple(k / rate_per_s for k in range(n))
    if process == "burst":
        period = BURST_SIZE / rate_per_s
        jitter = (draw.uniform(0, BURST_JITTER * period) for _ in range(n))
        return tuple(sorted(k // BURST_SIZE * period + j for k, j in enumerate(jitter)))
    now, times = 0.0, []
    for _ in range(n):
        now += draw.expovariate(rate_per_s)
        times.append(now)
    return tuple(times)


def schedule_hash(offsets_s: Sequence[float], concurrency: int | None) -> str:
    """Return a short name of the schedule: two Runs with the same one sent at the same times."""
    text = json.dumps([list(offsets_s), concurrency])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
