"""Pairs of fresh launches: a candidate's change against the reference, launch by launch.

Launch k of the candidate and launch k of the reference are pair k: the same prompts at the same
times, one right after the other in random order. What the night does to the machine falls out of
their ratio. Differences are log-ratios, positive where the candidate is worse.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway import metrics
from headway.core import Case
from headway.metrics import Metric
from headway.results import Results, applies
from headway.suite import Suite

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

CellKey = tuple[Case, str]
# Of the chance of a false SLOWER, what the first look may use; the second has the rest.
FIRST_LOOK = 0.2
# A cell needs this share of a look's pairs, and so many at least; the rest may be lost to the
# machine, blindly, before anybody looked at what they measured.
MIN_SHARE, MIN_PAIRS = 0.75, 3


@dataclass(frozen=True, slots=True)
class Look:
    """The differences of one candidate over some pairs: `rows[pair][cell]`, None where one is lost.

    `planned` is how many pairs there were to be. `lost` says why a difference is missing, by pair
    and cell; `cells` holds those that have enough of them.
    """

    candidate: str
    planned: int
    pairs: tuple[int, ...]
    cells: tuple[CellKey, ...]
    rows: tuple[tuple[float | None, ...], ...]
    lost: Mapping[CellKey, tuple[str, ...]]

    def table(self) -> NDArray[np.float64]:
        """Return the differences as an array [pairs, cells], NaN where one is lost."""
        import numpy as np

        return np.array(self.rows, dtype=float).reshape(len(self.pairs), len(self.cells))

    def column(self, cell: CellKey) -> tuple[float, ...]:
        """Return the differences that one cell has, pair by pair."""
        index = self.cells.index(cell)
        return tuple(value for row in self.rows if (value := row[index]) is not None)


def compared(suite: Suite, instance: str) -> tuple[str, ...]:
    """Return the candidates in whose comparison an instance takes part."""
    gate = suite.reference
    if gate is None:
        return ()
    if instance == gate.instance:
        return gate.candidates
    return tuple(name for name in gate.candidates if name == instance)


def counterpart(suite: Suite, case: Case) -> Case | None:
    """Return the reference's case that a candidate's case is paired with; None for others."""
    gate = suite.reference
    if gate is None or case.instance not in gate.candidates or not case.level:
        return None
    return Case(gate.instance, case.model, case.workload, case.level)


def family(suite: Suite, candidate: str) -> tuple[CellKey, ...]:
    """Return every cell that is tested of a candidate: fixed by the suite, not by a selection."""
    gate = suite.reference
    assert gate is not None
    return tuple(
        (case, name)
        for case in suite.cases()
        if case.instance == candidate
        for name in gate.metrics
        if applies(suite, case, metrics.ALL[name])
    )


def look(
    results: Results, candidate: str, launches: Sequence[int], cells: Collection[CellKey]
) -> Look:
    """Return the differences of some cells over some pairs; those that no budget was left for do
    not count as planned: the clock chose them, not what was measured."""
    gate = results.suite.reference
    assert gate is not None
    launches = [n for n in launches if not _unpaid(results, candidate, n)]
    columns = {cell: _column(results, cell, launches) for cell in cells}
    least = max(MIN_PAIRS, math.ceil(MIN_SHARE * len(launches)))
    kept = [c for c in cells if sum(v is not None for v, _ in columns[c].values()) >= least]
    lost = {
        cell: tuple(f"pair {n}: {why}" for n, (value, why) in column.items() if value is None)
        for cell, column in columns.items()
    }
    rows = tuple(tuple(columns[c][n][0] for c in kept) for n in launches)
    return Look(candidate, len(launches), tuple(launches), tuple(kept), rows, lost)


def _unpaid(results: Results, candidate: str, launch: int) -> bool:
    gate = results.suite.reference
    assert gate is not None
    records = (results.launch_of(name, launch) for name in (candidate, gate.instance))
    return any(record is not None and record.failure_kind == "budget" for record in records)


def _column(
    results: Results, cell: CellKey, launches: Sequence[int]
) -> dict[int, tuple[float | None, str]]:
    """Return a cell's difference per pair, or None and why there is none."""
    case, name = cell
    metric, other = metrics.ALL[name], counterpart(results.suite, cell[0])
    assert other is not None
    mine = {s.launch: s for s in results.samples(case, metric)}
    theirs = {s.launch: s for s in results.samples(other, metric)}
    found: dict[int, tuple[float | None, str]] = {}
    for launch in launches:
        reason, values = "", []
        for who, samples in ((case.instance, mine), (other.instance, theirs)):
            sample = samples.get(launch)
            if sample is None or not sample.value:
                reason = reason or (sample.reason if sample and sample.reason else "")
                reason = reason or f"launch {launch} of {who} was not measured"
            elif sample.invalid:
                reason = reason or f"launch {launch} of {who}: {sample.invalid[0]}"
            else:
                values.append(sample.value)
        found[launch] = (_worse(metric, *values), "") if len(values) == 2 else (None, reason)
    return found


def _worse(metric: Metric, mine: float, theirs: float) -> float:
    """Return how much worse `mine` is, as a log-ratio."""
    return math.log1p(metric.worse_by(mine, theirs))


def alphas(suite: Suite) -> tuple[float, float]:
    """Return how much of the error Student's t and the flips of signs may make of one candidate.

    The first is for what is far beyond the margin after few pairs, where flips cannot speak yet.
    """
    gate = suite.reference
    assert gate is not None
    each = gate.alpha / len(gate.candidates)
    return FIRST_LOOK * each, (1 - FIRST_LOOK) * each


def first_look(results: Results, candidate: str) -> Look:
    """Return what every night has of a candidate."""
    suite = results.suite
    return look(results, candidate, range(1, suite.launches + 1), family(suite, candidate))


def extended(results: Results, candidate: str) -> tuple[Case, ...]:
    """Return the cases of a candidate that the second look set out to measure again."""
    first = results.suite.launches
    names = {name for i, launch, name in results.expected if i == candidate and launch > first}
    return tuple(case for case in results.suite.cases() if case.name in names)


def second_look(results: Results, candidate: str) -> Look | None:
    """Return all pairs of the extended cases, the first look's among them; None without any."""
    gate, cases = results.suite.reference, extended(results, candidate)
    assert gate is not None
    if not cases:
        return None
    cells = [cell for cell in family(results.suite, candidate) if cell[0] in cases]
    return look(results, candidate, range(1, gate.max_pairs + 1), cells)


def extension(results: Results) -> dict[str, tuple[Case, ...]]:
    """Return the cases, of each instance, that need more pairs: suspects and one control each.

    Suspects either way: a gate that looks again only at what is slower never sees what got faster.
    The control is the case whose cells moved least: what moves it too is not the level's doing.
    """
    gate = results.suite.reference
    found: dict[str, dict[Case, None]] = {}
    if gate is None or gate.max_pairs <= results.suite.launches:
        return {}
    for candidate in gate.candidates:
        for case in _suspects(results, candidate):
            found.setdefault(candidate, {})[case] = None
            other = counterpart(results.suite, case)
            assert other is not None
            found.setdefault(gate.instance, {})[other] = None
    return {name: tuple(cases) for name, cases in found.items()}


def _suspects(results: Results, candidate: str) -> list[Case]:
    import numpy as np

    from headway.stats import pairs as arithmetic

    gate, seen = results.suite.reference, first_look(results, candidate)
    assert gate is not None
    if not seen.cells:
        return []
    margin, size = math.log1p(gate.margin), len(family(results.suite, candidate))
    table, (early, _) = seen.table(), alphas(results.suite)
    sides = (table, -table)
    beyond = [arithmetic.student_p(one, margin, family=size) <= early for one in sides]
    doubt = max(margin, math.log1p(gate.finds) / 2)
    doubtful = arithmetic.suspicious(table, doubt) | arithmetic.suspicious(-table, doubt)
    if np.any(beyond):
        return []  # it is decided
    cases = list(dict.fromkeys(case for case, _ in seen.cells))
    suspects = {case for (case, _), doubt in zip(seen.cells, doubtful, strict=True) if doubt}
    rest = [case for case in cases if case not in suspects]
    if suspects and rest:
        mean = np.nanmean(table, axis=0)
        moved = {
            c: max(abs(m) for (k, _), m in zip(seen.cells, mean, strict=True) if k == c)
            for c in rest
        }
        suspects.add(min(rest, key=moved.__getitem__))
    return [case for case in cases if case in suspects]
