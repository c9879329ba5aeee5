"""The baseline gate: fresh samples against the stored ones of several nights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from headway import baseline, fingerprint, stats
from headway.core import Case
from headway.metrics import Metric
from headway.results import Results
from headway.suite import BaselineGate
from headway.verdict import subject
from headway.verdict.finding import Finding, Verdict, shown

Load = Callable[[Case], baseline.Baseline | None]
# A change this large is more often a wrong unit or a wrong file than a change.
SUSPICIOUS = 10.0


def against_baseline(
    results: Results,
    case: Case,
    metric: Metric,
    values: Sequence[float],
    load: Load,
    gate: BaselineGate,
) -> Finding:
    """Judge a cell by what is stored of it, or say why that cannot be done yet."""
    value = stats.median(values)
    assert value is not None

    def finding(verdict: Verdict, reason: str, changed: Sequence[str] = ()) -> Finding:
        return Finding(
            case,
            metric.name,
            "baseline",
            verdict,
            reason,
            value,
            metric.unit,
            tuple(values),
            changed=tuple(changed),
        )

    try:
        stored = load(case)
    except baseline.BaselineError as error:
        return finding("INCOMPATIBLE", str(error))
    if stored is None or metric.name not in stored.cells:
        return finding("RECORDING", f"{shown(value, metric.unit)}, no baseline is stored yet")
    differing = fingerprint.differences(stored.identity, subject.identity_of(results, case))
    if differing:
        return finding("INCOMPATIBLE", f"another thing was measured: {'; '.join(differing)}")
    cell = stored.cells[metric.name]
    if (cell.unit, cell.direction) != (metric.unit, metric.direction):
        return finding("INCOMPATIBLE", f"unit: {cell.unit} → {metric.unit}")
    epoch = fingerprint.differences(stored.environment, results.machine.environment())
    if epoch:
        return finding("RECORDING", f"a new epoch, the machine changed: {'; '.join(epoch)}", epoch)
    launches, nights = len(cell.samples), cell.num_nights
    if launches < gate.min_launches or nights < gate.min_nights:
        progress = (
            f"{launches} of {gate.min_launches} launches, night {nights} of {gate.min_nights}"
        )
        return finding("RECORDING", f"{shown(value, metric.unit)}, {progress}")
    changed = fingerprint.differences(
        subject.flat(stored.treatment), subject.flat(subject.treatment_of(results, case.instance))
    )
    return against(case, metric, values, [s.value for s in cell.samples], gate, changed)


def against(
    case: Case,
    metric: Metric,
    values: Sequence[float],
    stored: Sequence[float],
    gate: BaselineGate,
    changed: Sequence[str] = (),
) -> Finding:
    """Judge fresh samples by stored ones: the baseline gate's arithmetic.

    Stored samples of a speed must be positive and at least two; a share of requests is judged by
    an absolute rule, because "3 of 100 requests fail now" is no matter of percent.
    """
    value = stats.median(values)
    assert value is not None
    if metric.unit == "1":
        return _against_share(case, metric, values, stored, changed)
    if not value > 0:
        reason = f"{shown(value, metric.unit)} is not a measurement: nothing takes no time"
        return Finding(
            case, metric.name, "baseline", "INCOMPATIBLE", reason, value, metric.unit, tuple(values)
        )
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
    if max(value / center, center / value) > SUSPICIOUS:
        verdict: Verdict = "INCOMPATIBLE"
        reason += f"; a change beyond {SUSPICIOUS:g} x is more often a wrong unit or file"
    elif worse > margin:
        verdict = "REGRESSION"
    elif metric.worse_by(center, value) > margin:
        verdict = "IMPROVEMENT"
    elif margin > gate.resolution:
        verdict = "INCONCLUSIVE"
        reason += f"; it cannot see less than {visible:.1%}"
    else:
        verdict = "PASS"
    return Finding(
        case,
        metric.name,
        "baseline",
        verdict,
        reason,
        value,
        metric.unit,
        tuple(values),
        worse,
        margin,
        visible,
        tuple(changed),
    )


def _against_share(
    case: Case,
    metric: Metric,
    values: Sequence[float],
    stored: Sequence[float],
    changed: Sequence[str],
) -> Finding:
    """Judge a share of requests: below the lowest that is stored is worse, by however little."""
    value, floor = min(values), min(stored)
    verdict: Verdict = "PASS"
    if value < floor:
        verdict = "REGRESSION"
    elif value > max(stored):
        verdict = "IMPROVEMENT"
    lowest = f"the baseline's lowest {shown(floor, metric.unit)} ({len(stored)} launches)"
    reason = f"{shown(value, metric.unit)}, {lowest}"
    return Finding(
        case,
        metric.name,
        "baseline",
        verdict,
        reason,
        value,
        metric.unit,
        tuple(values),
        changed=tuple(changed),
    )
