"""The reference gate: pairs of fresh launches, and what they show of each of a candidate's cells.

Two looks share the error: the first few pairs of every night stop at once what is far beyond the
margin, and more pairs follow only where the first ones make a slowdown likely. At the second look
the sign of whole pairs is flipped, so that the family of cells needs no assumption on its noise.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from headway import fingerprint, metrics, pairs, stats
from headway.core import Case
from headway.pairs import CellKey, Look
from headway.results import Results
from headway.suite import ReferenceGate
from headway.verdict import subject
from headway.verdict.finding import Finding, Interval, Verdict

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]

CONFIDENCE = 0.95
POWER = 0.8
NUM_FLIPS = 20_000
# Numbers of pairs that a comparison may be told to take.
MORE = (*range(4, 40, 2), *range(40, 201, 10))


@dataclass(frozen=True, slots=True)
class Shift:
    """What a look says of one cell; changes are log-ratios, positive when worse.

    `needed` pairs would show what the suite wants found, at this spread; None for very many.
    `p_slower` is that of the test which says most, for the whole family of cells.
    """

    change: float
    interval: Interval
    visible: float
    num_pairs: int
    slower: bool
    faster: bool
    needed: int | None = None
    p_slower: float = 1.0


def reference_findings(results: Results) -> dict[CellKey, Finding]:
    """Judge every cell of every candidate that the suite's reference gate is set on."""
    gate = results.suite.reference
    if gate is None:
        return {}
    found: dict[CellKey, Finding] = {}
    for candidate in gate.candidates:
        if any(instance == candidate for instance, _, _ in results.expected):
            found |= dict(_candidate(results, gate, candidate))
    return found


def _candidate(
    results: Results, gate: ReferenceGate, candidate: str
) -> Iterator[tuple[CellKey, Finding]]:
    first, second = pairs.first_look(results, candidate), pairs.second_look(results, candidate)
    # Where there is no second look to come, the first one is the last, and may use all the error.
    last = gate.max_pairs <= results.suite.launches
    shifts = _shifts(results, gate, first, flips=last) if first.cells else {}
    if second is not None and second.cells and second.planned > first.planned:
        # Fewer pairs than planned, where time ran out, are still a fair look: the clock chose them.
        shifts |= _shifts(results, gate, second, flips=True)
    measured = {name for i, _, name in results.expected if i == candidate}
    for cell in pairs.family(results.suite, candidate):
        if cell[0].name in measured:
            seen = second if second is not None and cell in second.lost else first
            yield cell, _finding(results, gate, cell, shifts.get(cell), seen)


def _shifts(results: Results, gate: ReferenceGate, look: Look, flips: bool) -> dict[CellKey, Shift]:
    import numpy as np

    from headway.stats import pairs as arithmetic

    suite = results.suite
    size = len(pairs.family(suite, look.candidate))
    table, margin = look.table(), math.log1p(gate.margin)
    by_t, by_flips = pairs.alphas(suite)
    # Student's part of the error is spent once: at the first look, which may be the last.
    tests = []
    if look.planned <= suite.launches:
        tests.append((by_t, partial(arithmetic.student_p, family=size)))
    if flips:
        by_flip = partial(arithmetic.max_t, seed=suite.seed, num_flips=NUM_FLIPS, family=size)
        tests.append((by_flips, by_flip))
    slower, p_slower = _surest(tests, table, margin)
    faster, _ = _surest(tests, -table, margin)
    found = {}
    for index, cell in enumerate(look.cells):
        column = np.array(look.column(cell))
        change, interval = _estimate(column)
        seen = _visible(float(column.std(ddof=1)), by_flips, margin, size)
        found[cell] = Shift(
            change=change,
            interval=interval,
            visible=seen(gate.max_pairs),
            num_pairs=len(column),
            slower=bool(slower[index]),
            faster=bool(faster[index]),
            needed=next((n for n in MORE if seen(n) <= math.log1p(gate.finds)), None),
            p_slower=float(p_slower[index]),
        )
    return found


def _surest(
    tests: Sequence[tuple[float, Callable[[Array, float], Array]]], table: Array, margin: float
) -> tuple[Array, Array]:
    """Return which cells any of the tests calls worse, each at its alpha, and their p.

    The p is that of the test in which it is the smallest share of alpha.
    """
    import numpy as np

    ps = np.array([test(table, margin) for _, test in tests])
    alphas = np.array([alpha for alpha, _ in tests])[:, None]
    best = (ps / alphas).argmin(axis=0)
    called: Array = np.any(ps <= alphas, axis=0)
    return called, ps[best, np.arange(ps.shape[1])]


def _estimate(column: NDArray[np.float64]) -> tuple[float, Interval]:
    """Return Hodges and Lehmann's estimate with its interval.

    Five pairs are too few for one without any assumption: there it is Student's.
    """
    from headway.stats import pairs as arithmetic

    change, low, high = arithmetic.hodges_lehmann(column, CONFIDENCE)
    if low is None or high is None:
        n = len(column)
        half = stats.student((1 + CONFIDENCE) / 2, n - 1) * float(column.std(ddof=1)) / math.sqrt(n)
        low, high = float(column.mean()) - half, float(column.mean()) + half
    return change, (low, high)


def _visible(sd: float, alpha: float, margin: float, family: int) -> Callable[[int], float]:
    """Return what change so many pairs would find: a multiple of the spread beyond the margin."""
    return lambda num_pairs: margin + sd * _reach(num_pairs, alpha, family)


@functools.cache
def _reach(num_pairs: int, alpha: float, family: int) -> float:
    from headway.stats import pairs as arithmetic

    found = arithmetic.visible(1.0, num_pairs, alpha=alpha, power=POWER, family=family)
    return math.inf if found is None else found


def _finding(
    results: Results, gate: ReferenceGate, cell: CellKey, shift: Shift | None, seen: Look
) -> Finding:
    case, name = cell
    metric = metrics.ALL[name]
    samples = results.samples(case, metric)
    values = tuple(s.value for s in samples if s.value is not None and not s.invalid)

    def finding(verdict: Verdict, reason: str, **more: Any) -> Finding:
        value = stats.median(values)
        return Finding(case, name, "reference", verdict, reason, value, metric.unit, values, **more)

    spent, lost = _out_of_budget(results, case), seen.lost[cell]
    if shift is None:
        if spent is not None:
            return finding("INCONCLUSIVE", f"budget: {spent}")
        # The reference's own failures are red in its own cells: the candidate did nothing wrong.
        why: Verdict = "INVALID" if _by_machine(results, cell) else "INCONCLUSIVE"
        return finding(why, f"{len(lost)} of {seen.planned} pairs are lost; {lost[0]}")
    bounds = _percent_interval(shift.interval)
    facts: dict[str, Any] = {
        "worse_by": math.expm1(shift.change),
        "bound": gate.margin,
        "visible": math.expm1(shift.visible) if shift.visible < math.inf else None,
        "interval": bounds,
        "changed": _changed(results, case.instance, gate.instance),
    }
    verdict, more = _verdict(gate, shift, spent)
    reason = f"{_effect(gate, shift, bounds, len(lost))}{more}"
    return finding(verdict, reason, **facts)


def _verdict(gate: ReferenceGate, shift: Shift, spent: str | None) -> tuple[Verdict, str]:
    """Return the verdict, and what has to be said beside the effect."""
    if shift.slower:
        return "REGRESSION", ""
    if shift.faster:
        return "IMPROVEMENT", ""
    if spent is not None:
        return "INCONCLUSIVE", f"; budget: {spent}{_would_decide(gate, shift)}"
    finds, high = math.log1p(gate.finds), shift.interval[1]
    if high is not None and high < finds:
        return "PASS", ""
    would_show = shift.visible <= finds
    if would_show and shift.change < math.log1p(gate.margin):
        return "PASS", f"; a change of {math.expm1(shift.visible):.1%} would have shown"
    if would_show:
        return "INCONCLUSIVE", "; beyond the margin, and not beyond chance"
    seen = "" if shift.visible == math.inf else f" less than {math.expm1(shift.visible):.1%}"
    limit = f"; with at most {gate.max_pairs} pairs it cannot see{seen}"
    return "INCONCLUSIVE", limit + _would_decide(gate, shift)


def _would_decide(gate: ReferenceGate, shift: Shift) -> str:
    """Say what would decide."""
    many = f"more than {MORE[-1]}" if shift.needed is None else f"{shift.needed}"
    return f"; {many} pairs would show a change of {gate.finds:.1%}"


def _effect(gate: ReferenceGate, shift: Shift, bounds: Interval, lost: int) -> str:
    """Say effect, interval, margin, and how sure: the first line of every explanation."""
    change = math.expm1(shift.change)
    if change < 0:  # a log-ratio of -0.05 is 5 % better, seen from the candidate
        size, word = math.expm1(-shift.change), "better"
    else:
        size, word = change, "worse"
    dropped = f", {lost} dropped" if lost else ""
    return (
        f"{size:.1%} {word} than {gate.instance} ({CONFIDENCE:.0%} interval {_shown(bounds)} worse;"
        f" margin {gate.margin:.1%}; {shift.num_pairs} pairs{dropped},"
        f" p {shift.p_slower:.2g} for the whole family)"
    )


def _shown(bounds: Interval) -> str:
    low, high = ("unknown" if b is None else f"{b:+.1%}" for b in bounds)
    return f"{low} to {high}"


def _percent_interval(interval: Interval) -> Interval:
    low, high = interval
    return (
        None if low is None else math.expm1(low),
        None if high is None else math.expm1(high),
    )


def _by_machine(results: Results, cell: CellKey) -> bool:
    """Whether pairs were lost to what makes Runs invalid, not to an engine that failed."""
    case, name = cell
    other = pairs.counterpart(results.suite, case)
    assert other is not None
    samples = [s for c in (case, other) for s in results.samples(c, metrics.ALL[name])]
    return any(sample.invalid for sample in samples)


def _out_of_budget(results: Results, case: Case) -> str | None:
    """Say that a launch of either side was never started for want of budget."""
    other = pairs.counterpart(results.suite, case)
    assert other is not None
    return results.ran_out(case) or results.ran_out(other)


def _changed(results: Results, candidate: str, reference: str) -> tuple[str, ...]:
    """Return what differs between the two that were put under test."""
    mine, theirs = (
        subject.flat(subject.treatment_of(results, name)) for name in (candidate, reference)
    )
    return tuple(fingerprint.differences(theirs, mine))
