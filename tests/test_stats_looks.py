"""The two looks of the reference gate as one procedure: alarms and findings in simulated nights."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy.stats import binom

from headway.stats.pairs import max_t, student_p, suspicious

LEVELS, METRICS = 8, 3
CELLS = LEVELS * METRICS
BY_T, BY_FLIPS = 0.001, 0.004


@dataclass(frozen=True)
class Machine:
    start: float
    drift: float
    run: float
    burst: float


SHARED = Machine(0.007, 0.006, 0.006, 0.03)
HOSTILE = Machine(0.007, 0.006, 0.006, 0.10)
DEDICATED = Machine(0.002, 0.001, 0.002, 0.0)


def night(rng, machine, pairs):
    """Differences [pairs, cells] of two equal engines, order within a pair random."""
    steps = rng.standard_normal(2 * pairs)
    drift = [steps[0]]
    for step in steps[1:]:
        drift.append(0.9 * drift[-1] + math.sqrt(0.19) * step)
    common = machine.drift * np.array(drift) + machine.start * rng.standard_normal(2 * pairs)
    runs = (2 * pairs, LEVELS, 1)
    burst = (rng.random(runs) < machine.burst) * rng.exponential(0.08, runs)
    run = machine.run * rng.standard_normal(runs) + burst
    cell = 0.002 * rng.standard_normal((2 * pairs, LEVELS, METRICS))
    badness = (common[:, None, None] + run + cell).reshape(pairs, 2, CELLS)
    sign = np.where(rng.random(pairs) < 0.5, 1, -1)[:, None]
    return (badness[:, 0] - badness[:, 1]) * sign


def judge(d, margin, first_pairs):
    """Return whether any cell is called slower, and after how many pairs."""
    margin, first = math.log1p(margin), d[:first_pairs]
    if (student_p(first, margin, family=CELLS) <= BY_T).any():
        return True, first_pairs
    doubtful = suspicious(first, margin).reshape(LEVELS, METRICS).any(axis=1)
    if not doubtful.any():
        return False, first_pairs
    rest = np.flatnonzero(~doubtful)
    if len(rest):
        moved = np.abs(first.mean(axis=0)).reshape(LEVELS, METRICS).max(axis=1)
        doubtful[rest[moved[rest].argmin()]] = True
    extended = d[:, np.repeat(doubtful, METRICS)]
    p = max_t(extended, margin, seed=1, num_flips=4000, family=CELLS)
    return bool((p <= BY_FLIPS).any()), len(d)


def study(machine, change, margin, first_pairs, max_pairs, nights, cells=slice(None)):
    """Return in how many nights something was called slower, and the mean number of pairs."""
    rng = np.random.default_rng(12)
    found = pairs = 0
    for _ in range(nights):
        d = night(rng, machine, max_pairs)
        d[:, cells] += math.log1p(change)
        slower, took = judge(d, margin, first_pairs)
        found, pairs = found + slower, pairs + took
    return found, pairs / nights


# What the sensitivities of a suite are made of: margin, pairs every night, pairs on suspicion.
FIVE, THREE, SHARP = (0.02, 5, 12), (0.01, 5, 14), (0.005, 6, 24)


@pytest.mark.parametrize("gate", [FIVE, THREE, SHARP])
@pytest.mark.parametrize("machine", [SHARED, HOSTILE])
def test_equal_engines_raise_no_alarm(machine, gate):
    found, _ = study(machine, 0.0, *gate, nights=150)
    assert found == 0


@pytest.mark.parametrize("gate", [FIVE, THREE, SHARP])
def test_a_change_as_large_as_the_margin_is_an_alarm_as_often_as_stated(gate):
    found, _ = study(SHARED, gate[0], *gate, nights=200)
    assert found <= binom.ppf(1 - 1e-4, 200, BY_T + BY_FLIPS)


@pytest.mark.parametrize(
    ("gate", "change", "cells", "power"),
    [
        (FIVE, 0.05, slice(None), 0.98),
        (FIVE, 0.10, slice(None), 0.99),
        (FIVE, 0.05, slice(9, 12), 0.70),  # one level
        (FIVE, 0.05, slice(1, None, 3), 0.98),  # one metric
        (THREE, 0.03, slice(None), 0.97),
        (SHARP, 0.02, slice(None), 0.97),
        (SHARP, 0.03, slice(9, 12), 0.95),
    ],
)
def test_slowdowns_are_found_the_same_night(gate, change, cells, power):
    found, _ = study(SHARED, change, *gate, nights=60, cells=cells)
    assert found >= binom.ppf(1e-3, 60, power)


def test_a_dedicated_machine_shows_2_percent_in_12_pairs():
    found, pairs = study(DEDICATED, 0.02, 0.005, 6, 12, nights=60)
    assert found == 60
    assert pairs <= 8


def test_quiet_nights_are_short():
    assert study(SHARED, 0.0, *FIVE, nights=150)[1] <= 6.5
    assert study(DEDICATED, 0.0, *SHARP, nights=60)[1] <= 10
