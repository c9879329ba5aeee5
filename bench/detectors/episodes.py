"""Episodes: a clean past, then the nights of an injection, as arrays for rules that need no more.

A pure rule asks for nothing launch by launch, so every rule can be given the same draws.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from detectors.detector import NotAvailable
from detectors.injections import CANDIDATE, NONE, Injection
from detectors.layout import Array, Conditions

PAST_NIGHTS = 100
# The longest injection.
NIGHTS = 10
# Launches that are kept of a past night; of tonight, and of the anchor, there are more.
PAST_LAUNCHES, LAUNCHES = 3, 10
ANCHOR = -PAST_NIGHTS - 1
# What a rule over numbers cannot say: a project knows it by its keys and its tests, if at all, and
# to give it a mark for what is not simulated would be unfair.
NOT_ASKED = frozenset({"incomparable", "failures"})


@dataclass(frozen=True, slots=True)
class Past:
    """What is stored: `nights` [night, launch, case, metric], the last one yesterday's.

    `anchor` [launch, case, metric] is one night, stored before all of these and never replaced.
    """

    nights: Array
    anchor: Array

    @property
    def first_launches(self) -> Array:
        """One launch of each night: [night, case, metric]."""
        first: Array = self.nights[:, 0]
        return first


def episode(
    conditions: Conditions, injection: Injection, seed: int, number: int, launches: int
) -> Iterator[tuple[Past, Array]]:
    """Yield (past, tonight) for each night of an injection; tonight is [launch, case, metric].

    Yields nothing for what is not asked. Raises NotAvailable where a night of these conditions has
    fewer launches.
    """
    if conditions.launches is not None and conditions.launches < launches:
        raise NotAvailable(f"needs {launches} launches a night, not {conditions.launches}")
    if injection.expected in NOT_ASKED:
        return
    past, tonight, anchor = _quiet(conditions, seed, number)
    for night in range(injection.lasts):
        stored = past[night : PAST_NIGHTS + night]
        if night:
            stored = stored.copy()
            for earlier in range(night):
                stored[earlier - night] += injection.on(conditions.layout, earlier, CANDIDATE)
        added = injection.on(conditions.layout, night, CANDIDATE)
        yield Past(stored, anchor), tonight[night, :launches] + added


@functools.lru_cache(maxsize=64)
def _quiet(conditions: Conditions, seed: int, number: int) -> tuple[Array, Array, Array]:
    """Return an episode's nights as they are without any injection: past, tonight, anchor."""
    series = conditions.series((seed, number), NONE)
    most = conditions.launches or LAUNCHES

    def drawn(night: int, count: int) -> Array:
        of_night = series.night(night)
        return np.stack([of_night.launch(CANDIDATE).values for _ in range(min(most, count))])

    tonight = np.stack([drawn(night, LAUNCHES) for night in range(NIGHTS)])
    before = np.stack([drawn(night, PAST_LAUNCHES) for night in range(-PAST_NIGHTS, 0)])
    past = np.concatenate([before, tonight[:, :PAST_LAUNCHES]])
    return past, tonight, drawn(ANCHOR, LAUNCHES)
