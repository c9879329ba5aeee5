"""The baseline gate: fresh samples against the stored ones of several nights.

What is compared with is fixed, never a window that moves along: a slow drift is a regression on
the day it uses up its budget.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from headway import baseline, calibration, fingerprint, history, stats
from headway.baseline import Baseline, Cell
from headway.core import Case
from headway.history import Past
from headway.metrics import Metric
from headway.results import Results
from headway.suite import BaselineGate
from headway.verdict import series, subject
from headway.verdict.finding import Finding, Verdict, shown
from headway.verdict.memory import Memory, day_of
from headway.verdict.nightly import Tonight, judge_nights, surroundings
from headway.verdict.recording import Waiting, waiting

# A change this large is more often a wrong unit or a wrong file than a change.
SUSPICIOUS = 10.0
# Nights longer ago say nothing of tonight, and the best of those since is worth a line.
LOOK_BACK = timedelta(days=90)
Make = Callable[..., Finding]


def against_baseline(
    results: Results,
    case: Case,
    metric: Metric,
    values: Sequence[float],
    memory: Memory,
    gate: BaselineGate,
) -> Finding:
    """Judge a cell by what is stored of it, or say why that cannot be done yet."""
    finding: Make = partial(_finding, case, metric, values)
    try:
        stored = memory.load(case)
    except baseline.BaselineError as error:
        return finding("INCOMPATIBLE", str(error))
    identity, environment = subject.identity_of(results, case), results.machine.environment()
    past = history.earlier(memory.before(results), case, metric.name, identity, environment)
    cell = stored.cells.get(metric.name) if stored is not None else None
    epoch: tuple[str, ...] = ()
    if stored is not None:
        differing = fingerprint.differences(stored.identity, identity)
        if differing:
            return finding("INCOMPATIBLE", f"another thing was measured: {'; '.join(differing)}")
        epoch = tuple(fingerprint.differences(stored.environment, environment))
    if cell is not None and (cell.unit, cell.direction) != (metric.unit, metric.direction):
        return finding("INCOMPATIBLE", f"unit: {cell.unit} → {metric.unit}")
    if stored is None or cell is None or epoch or not series.armed(cell, gate):
        past = series.asked_alike(past, subject.treatment_of(results, case.instance))
        tonight = Waiting(results.night, len(values), day_of(results), stored, cell, epoch)
        verdict, reason, due = waiting(tonight, past, gate)
        value = shown(stats.median(values), metric.unit)
        return finding(verdict, f"{value}, {reason}", changed=epoch, due=due)
    return _against_cell(results, case, metric, values, (stored, cell), past, gate, finding)


def _against_cell(
    results: Results,
    case: Case,
    metric: Metric,
    values: Sequence[float],
    known: tuple[Baseline, Cell],
    past: Sequence[Past],
    gate: BaselineGate,
    finding: Make,
) -> Finding:
    """Judge a cell by an armed gate."""
    stored, cell = known
    engine = subject.treatment_of(results, case.instance)
    changed = fingerprint.differences(subject.flat(stored.treatment), subject.flat(engine))
    finding = partial(finding, changed=tuple(changed))
    if metric.unit == "1":
        return _against_share(metric, values, [sample.value for sample in cell.samples], finding)
    tonights = calibration.night_medians(results.readings())
    machine = series.calibrations(stored, cell)
    moved = calibration.shifted(tonights, machine)
    if moved:
        return finding(
            "INVALID", "; ".join(moved), explanation=_moved_for_good(past, machine, gate)
        )
    unusable = _unusable(metric, values, [s.value for s in cell.samples], finding)
    if unusable is not None:
        return unusable
    recent = [p for p in past if day_of(results) - p.day <= LOOK_BACK]
    alike = series.alike(recent, machine)
    tonight = Tonight(
        metric,
        gate,
        values,
        cell,
        since=series.since(stored, cell, alike),
        vouched=series.vouched(tonights, machine),
    )
    found = judge_nights(tonight, finding)
    more = surroundings(tonight, found, alike)
    return replace(found, explanation=(*found.explanation, *more))


def _moved_for_good(
    past: Sequence[Past], known: Sequence[Mapping[str, float]], gate: BaselineGate
) -> tuple[str, ...]:
    """Say what to do where the machine has been another one for several nights by now."""
    last = [p for p in past if p.calibration][1 - gate.persistence :]
    if len(last) + 1 < gate.persistence or series.alike(last, known):
        return ()
    return (
        f"so it was in the last {len(last) + 1} nights: if the machine stays as it is, delete the "
        "baseline's file, and the cell records anew",
    )


def _finding(
    case: Case,
    metric: Metric,
    values: Sequence[float],
    verdict: Verdict,
    reason: str,
    **more: Any,
) -> Finding:
    fixed = {"value": stats.median(values), "unit": metric.unit, "samples": tuple(values)}
    return Finding(case, metric.name, "baseline", verdict, reason, **{**fixed, **more})


def against(
    case: Case,
    metric: Metric,
    values: Sequence[float],
    stored: Sequence[float],
    gate: BaselineGate,
    changed: Sequence[str] = (),
) -> Finding:
    """Judge the launches of one night by those of another one, by their median.

    Launches stand for nights here, so what differs between nights is not in the margin: two
    reports can be compared so, and no gate is. Values of a speed must be positive, `stored` ones
    at least two; a share of requests is judged by an absolute rule, because "3 of 100 requests fail
    now" is no matter of percent.
    """
    finding = partial(_finding, case, metric, values, changed=tuple(changed))
    if metric.unit == "1":
        return _against_share(metric, values, stored, finding)
    unusable = _unusable(metric, values, stored, finding)
    if unusable is not None:
        return unusable
    value = stats.median(values)
    assert value is not None
    prediction = stats.predict_log(stored)
    center = math.exp(prediction.center)
    margin = math.expm1(max(prediction.margin, math.log1p(gate.tolerance)))
    visible = math.expm1(max(prediction.visible, math.log1p(gate.tolerance)))
    worse = metric.worse_by(value, center)
    change = f"{worse:.1%} worse" if worse >= 0 else f"{metric.worse_by(center, value):.1%} better"
    reason = (
        f"{shown(value, metric.unit)}, {change} than the baseline's "
        f"{shown(center, metric.unit)} ({len(stored)} launches; margin {margin:.1%})"
    )
    if worse > margin:
        verdict: Verdict = "REGRESSION"
    elif metric.worse_by(center, value) > margin:
        verdict = "IMPROVEMENT"
    elif margin > gate.resolution:
        verdict = "INCONCLUSIVE"
        reason += f"; it cannot see less than {visible:.1%}"
    else:
        verdict = "PASS"
    return finding(verdict, reason, worse_by=worse, bound=margin, visible=visible)


def _unusable(
    metric: Metric, values: Sequence[float], stored: Sequence[float], finding: Make
) -> Finding | None:
    """Return what can be said of a value that has no sensible ratio to the stored ones."""
    value, center = stats.median(values), stats.median(stored)
    assert value is not None
    assert center is not None
    was = shown(center, metric.unit)
    if value == 0 and metric.direction == "higher":
        return finding("REGRESSION", f"nothing is left of the baseline's {was}")
    if not (value > 0 and (metric.direction == "higher" or min(values) > 0)):
        zero = shown(min(values), metric.unit)
        return finding("INCOMPATIBLE", f"{zero} is not a measurement: nothing takes no time")
    if max(value / center, center / value) > SUSPICIOUS:
        reason = (
            f"{shown(value, metric.unit)}, the baseline's is {was}; a change beyond "
            f"{SUSPICIOUS:g} x is more often a wrong unit or file"
        )
        worse = metric.worse_by(value, center)
        return finding("INCOMPATIBLE", reason, worse_by=worse)
    return None


def _against_share(
    metric: Metric, values: Sequence[float], stored: Sequence[float], finding: Make
) -> Finding:
    """Judge a share: beyond the worst that is stored is worse, by however little."""
    worst, best = (min, max) if metric.direction == "higher" else (max, min)
    value, bound = worst(values), worst(stored)
    verdict: Verdict = "PASS"
    if worst(value, bound) != bound:
        verdict = "REGRESSION"
    elif best(value, best(stored)) != best(stored):
        verdict = "IMPROVEMENT"
    said = "lowest" if worst is min else "highest"
    known = f"the baseline's {said} {shown(bound, metric.unit)} ({len(stored)} launches)"
    return finding(verdict, f"{shown(value, metric.unit)}, {known}", value=value)
