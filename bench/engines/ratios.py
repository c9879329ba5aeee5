"""A figure of several launches, or the ratio of two engines' figures, with its interval. Pure.

Launch k of one engine and launch k of another are a pair: the same prompts, one soon after the
other. So a ratio is taken launch by launch, and what the night does to both falls out of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway import stats

CONFIDENCE = 0.95
# A few launches that happen to agree are no proof of a spread of zero; what no engine goes below.
LEAST_SD = 5e-4


@dataclass(frozen=True, slots=True)
class Interval:
    """The geometric mean of `n` launches' figures, and where it lies with 95 % confidence.

    `low` and `high` are None from fewer than two launches: one says nothing of its spread.
    """

    value: float
    low: float | None
    high: float | None
    n: int


def interval(values: Sequence[float]) -> Interval | None:
    """Return the mean of positive figures with Student's interval of their logs; None of none."""
    if not values:
        return None
    logs = [math.log(value) for value in values]
    n, mean = len(logs), math.fsum(logs) / len(logs)
    if n < 2:
        return Interval(math.exp(mean), None, None, n)
    sd = math.sqrt(math.fsum((log - mean) ** 2 for log in logs) / (n - 1))
    reach = stats.student((1 + CONFIDENCE) / 2, n - 1) * max(sd, LEAST_SD) / math.sqrt(n)
    return Interval(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), n)


def ratio(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Interval | None:
    """Return mine / theirs over the launches that both have; None where they share none."""
    shared = sorted(mine.keys() & theirs.keys())
    return interval([mine[launch] / theirs[launch] for launch in shared])
