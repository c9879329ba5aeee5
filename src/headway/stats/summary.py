"""Percentiles and means, and how many samples a percentile needs: standard library only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], q: float) -> float | None:
    """Return the q-th percentile (0 < q < 100) by linear interpolation; None without samples.

    The k-th of n sorted samples (k from 0) stands at 100·k/(n-1) percent (Hyndman and Fan's
    definition 7, numpy's default). A q between 0 and 1 is refused: it is nearly always a fraction
    meant as a percentage.
    """
    if not 1 <= q < 100:
        raise ValueError(f"percentile {q} must be at least 1 and below 100 (99, not 0.99)")
    if not samples:
        return None
    ordered = sorted(samples)
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    # A convex combination, clamped: rounding must not push it outside its two neighbours.
    value = ordered[low] + (ordered[high] - ordered[low]) * (position - low)
    return min(max(value, ordered[low]), ordered[high])


def median(samples: Sequence[float]) -> float | None:
    """Return the 50th percentile; None without samples."""
    return percentile(samples, 50)


def mean(samples: Sequence[float]) -> float | None:
    """Return the arithmetic mean; None without samples."""
    return math.fsum(samples) / len(samples) if samples else None


def min_samples(q: float, confidence: float = 0.99) -> int:
    """Return the fewest samples on which a gate on the q-th percentile may stand.

    With n samples, the second largest bounds the q-th percentile from above with the stated
    confidence when P(Binomial(n, 1 - q/100) <= 1) <= 1 - confidence: 11 for p50, 64 for p90,
    130 for p95, 662 for p99 (MLPerf's early stopping with one sample to spare).
    """
    below = q / 100
    n = 1
    while below**n + n * (1 - below) * below ** (n - 1) > 1 - confidence:
        n += 1
    return n


@functools.cache
def student(p: float, degrees: int) -> float:
    """Return the p-quantile (0 < p < 1) of Student's t distribution.

    Nights ask for the same few of them over and over; `scipy.stats` takes a second to import, and
    a quarter of a millisecond for each.
    """
    from scipy.special import stdtrit

    return float(stdtrit(degrees, p))


@dataclass(frozen=True, slots=True)
class Prediction:
    """Where one more sample is expected, from earlier ones: on the scale of logarithms.

    `margin` is the distance from `center` that a fresh sample passes with probability 1 - level
    on each side; `visible` is the smallest shift that would be noticed four times out of five.
    """

    center: float
    margin: float
    visible: float


def predict_log(samples: Sequence[float], level: float = 0.99) -> Prediction:
    """Predict one further sample of a positive quantity from at least two.

    Student's prediction interval of log x: center ± t(level, n-1) · s · sqrt(1 + 1/n). It treats
    tonight as one more draw, whatever the number of tonight's launches: launches of one night
    share what that night does to the machine.
    """
    if len(samples) < 2 or min(samples) <= 0:
        raise ValueError(f"a prediction needs two or more positive samples, not {list(samples)}")
    logs = sorted(math.log(value) for value in samples)
    n = len(logs)
    center = percentile(logs, 50)
    assert center is not None
    average = math.fsum(logs) / n
    spread = math.sqrt(math.fsum((x - average) ** 2 for x in logs) / (n - 1))
    scale = spread * math.sqrt(1 + 1 / n)
    margin = student(level, n - 1) * scale
    return Prediction(center, margin, margin + student(0.8, n - 1) * scale)
