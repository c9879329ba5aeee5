"""What moved with a cell and what did not: everything else that was seen of the same pairs.

A candidate's launch k against the reference's launch k, as the gate compares them; so what a night
does to the machine is in neither side of a change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from headway import calibration, metrics, pairs, stats
from headway.core import Case, Run
from headway.metrics import Metric
from headway.pairs import Look
from headway.results import Results, Sample
from headway.verdict import split

CONFIDENCE = 0.95
# Of fewer pairs nothing is said.
MIN_PAIRS = 3
# A cause moves what it explains by a share of its own effect; below it, something else is going on.
LEAST_SHARE, MOST_UNMOVED = 0.25, 0.5
# Pairs that agree to the last digit (a coarse clock) do not make anything certain.
LEAST_SD = 5e-4
WATCHED = ("output_throughput", "ttft_p50", "tpot_p50", "peak_memory")
# What TTFT and TPOT are made of.
TTFT_PARTS: Mapping[str, split.Part] = {
    "engine": split.engine_ttft_s,
    "waiting in the client": split.waiting_s,
    "protocol": split.protocol_ttft_s,
}
TPOT_PARTS: Mapping[str, split.Part] = {
    "engine": split.engine_tpot_s,
    "protocol": split.protocol_tpot_s,
}
PARTS: Mapping[str, tuple[split.Part, Mapping[str, split.Part]]] = {
    "ttft_p50": (metrics.ttft_s, TTFT_PARTS),
    "tpot_p50": (metrics.tpot_s, TPOT_PARTS),
}


@dataclass(frozen=True, slots=True)
class Change:
    """By which share one thing became worse (better: negative), between its confidence bounds."""

    name: str
    worse_by: float
    low: float
    high: float

    def goes_with(self, effect: float) -> bool | None:
        """Whether it certainly moved as an effect did; False: certainly not as much as half of it.

        None where neither is certain.
        """
        sign = 1 if effect >= 0 else -1
        near, far = (self.low, self.high) if sign > 0 else (-self.high, -self.low)
        if near > 0 and sign * self.worse_by >= LEAST_SHARE * abs(effect):
            return True
        return False if far < MOST_UNMOVED * abs(effect) else None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """All that some pairs show besides the cell that is judged by them.

    `kernels` are the calibration kernels around both sides' Runs, `changes` everything watched.
    `parts` says by how many seconds TTFT and TPOT are longer, and which parts of them.
    """

    kernels: tuple[Change, ...]
    changes: tuple[Change, ...]
    parts: Mapping[str, tuple[float, Mapping[str, float]]]
    same_prompts: bool


def surroundings(results: Results, case: Case, launches: Sequence[int]) -> Surroundings:
    """Return what the pairs of a candidate's case show besides."""
    split_up = {name: _parts(results, case, name, launches) for name in PARTS}
    return Surroundings(
        tuple(_kernels(results, case, launches)),
        tuple(_beside(results, case, launches)),
        {name: found for name, found in split_up.items() if found is not None},
        _same_prompts(results, case, launches),
    )


def seen_pairs(results: Results, case: Case, metric: str) -> Look:
    """Return the pairs that the reference gate judges a candidate's cell by."""
    gate = results.suite.reference
    assert gate is not None
    more = case in pairs.extended(results, case.instance)
    last = gate.max_pairs if more else results.suite.launches
    return pairs.look(results, case.instance, range(1, last + 1), [(case, metric)])


def used_pairs(look: Look) -> tuple[int, ...]:
    """Return those of a single cell's pairs that are compared."""
    pairs_of_rows = zip(look.pairs, look.rows, strict=True)
    return tuple(pair for pair, row in pairs_of_rows if row and row[0] is not None)


def _beside(results: Results, case: Case, launches: Sequence[int]) -> list[Change]:
    """Return how all that is watched of a candidate's case changed over some pairs."""
    other = pairs.counterpart(results.suite, case)
    if other is None:
        return []
    theirs = {metric.name: values for metric, values in _watched(results, other)}
    found = []
    for metric, values in _watched(results, case):
        both = [n for n in launches if n in values and n in theirs.get(metric.name, {})]
        pairs_of_it = ((values[n], theirs[metric.name][n]) for n in both)
        ratios = [math.log1p(metric.worse_by(mine, its)) for mine, its in pairs_of_it]
        found += _change(metric.name, ratios)
    return found


def _watched(results: Results, case: Case) -> Iterator[tuple[Metric, dict[int, float]]]:
    """Return each watched metric with its value per launch."""
    for name in WATCHED:
        yield metrics.ALL[name], _by_launch(results.samples(case, metrics.ALL[name]))
    yield metrics.LAUNCH_TIME, _by_launch(results.samples(case, metrics.LAUNCH_TIME))
    for metric, samples in results.step_cells(case.instance).items():
        yield metric, _by_launch(samples)


def _by_launch(samples: Sequence[Sample]) -> dict[int, float]:
    return {s.launch: s.value for s in samples if s.value and not s.invalid}


def _change(name: str, ratios: Sequence[float]) -> list[Change]:
    """Return the mean of some log-ratios with Student's interval; nothing of too few."""
    n, mean = len(ratios), stats.mean(ratios)
    if mean is None or n < MIN_PAIRS:
        return []
    variance = math.fsum((x - mean) ** 2 for x in ratios) / (n - 1)
    sd = max(math.sqrt(variance), LEAST_SD)
    half = stats.student((1 + CONFIDENCE) / 2, n - 1) * sd / math.sqrt(n)
    return [Change(name, math.expm1(mean), math.expm1(mean - half), math.expm1(mean + half))]


def _parts(
    results: Results, case: Case, metric: str, launches: Sequence[int]
) -> tuple[float, dict[str, float]] | None:
    """Return by how many seconds TTFT or TPOT is longer than the reference's, and its parts.

    Medians over pairs of what differs between two Runs' medians, so that they add up roughly.
    """
    whole, known = PARTS[metric]
    total = _longer(results, case, launches, whole)
    if total is None:
        return None
    each = {name: _longer(results, case, launches, part) for name, part in known.items()}
    return total, {name: value for name, value in each.items() if value is not None}


def _longer(
    results: Results, case: Case, launches: Sequence[int], part: split.Part
) -> float | None:
    differences = []
    for mine, theirs in _runs(results, case, launches):
        values = [split.median_of(run, part) for run in (mine, theirs)]
        if values[0] is not None and values[1] is not None:
            differences.append(values[0] - values[1])
    return stats.median(differences) if len(differences) >= MIN_PAIRS else None


def _runs(results: Results, case: Case, launches: Sequence[int]) -> list[tuple[Run, Run]]:
    other = pairs.counterpart(results.suite, case)
    if other is None:
        return []
    mine, theirs = results.runs_of(case), results.runs_of(other)
    return [(mine[n], theirs[n]) for n in launches if n in mine and n in theirs]


def _same_prompts(results: Results, case: Case, launches: Sequence[int]) -> bool:
    """Whether both sides of every pair were sent the same prompts at the same times."""
    runs = _runs(results, case, launches)
    return bool(runs) and all(
        (a.workload_hash, a.schedule_hash) == (b.workload_hash, b.schedule_hash) for a, b in runs
    )


def _kernels(results: Results, case: Case, launches: Sequence[int]) -> list[Change]:
    """Return how the calibration kernels around the candidate's Runs differ from the reference's.

    They know nothing of an engine: what moves them is the machine.
    """
    ratios: dict[str, list[float]] = {}
    for mine, theirs in _runs(results, case, launches):
        a, b = calibration.during(mine.calibration), calibration.during(theirs.calibration)
        for kernel in a.keys() & b.keys():
            ratios.setdefault(kernel, []).append(math.log(a[kernel] / b[kernel]))
    return [
        change
        for kernel in sorted(ratios)
        for change in _change(calibration.NAMES.get(kernel, kernel), ratios[kernel])
    ]
