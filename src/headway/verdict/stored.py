"""The baseline gate: fresh samples against the stored ones of several nights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from headway import baseline, fingerprint, stats
from headway.core import Case
from headway.metrics import Metric
from headway.results import Results
from headway.suite import BaselineGate
from headway.verdict import subject
from headway.verdict.finding import Finding, Verdict, shown
from headway.verdict.memory import Memory

# A change this large is more often a wrong unit or a wrong file than a change.
SUSPICIOUS = 10.0


def against_baseline(
    results: Results,
    case: Case,
    metric: Metric,
    values: Sequence[float],
    memory: Memory,
    gate: BaselineGate,
) -> Finding:
    """Judge a cell by what is stored of it, or say why that cannot be done yet."""
    finding = partial(_finding, case, metric, values)
    value = shown(stats.median(values), metric.unit)
    try:
        stored = memory.load(case)
    except baseline.BaselineError as error:
        return finding("INCOMPATIBLE", str(error))
    if stored is None or metric.name not in stored.cells:
        return finding("RECORDING", f"{value}, no baseline is stored yet")
    differing = fingerprint.differences(stored.identity, subject.identity_of(results, case))
    if differing:
        return finding("INCOMPATIBLE", f"another thing was measured: {'; '.join(differing)}")
    cell = stored.cells[metric.name]
    if (cell.unit, cell.direction) != (metric.unit, metric.direction):
        return finding("INCOMPATIBLE", f"unit: {cell.unit} → {metric.unit}")
    epoch = tuple(fingerprint.differences(stored.environment, results.machine.environment()))
    if epoch:
        reason = f"a new epoch, the machine changed: {'; '.join(epoch)}"
        return finding("RECORDING", reason, changed=epoch)
    launches, nights = len(cell.samples), cell.num_nights
    # Two nights at least: a spread between nights cannot be seen in one.
    min_nights = max(gate.min_nights, 2)
    if launches < gate.min_launches or nights < min_nights:
        progress = f"{launches} of {gate.min_launches} launches, night {nights} of {min_nights}"
        return finding("RECORDING", f"{value}, {progress}")
    changed = fingerprint.differences(
        subject.flat(stored.treatment), subject.flat(subject.treatment_of(results, case.instance))
    )
    if metric.unit == "1":
        samples = [sample.value for sample in cell.samples]
        return against(case, metric, values, samples, gate, changed)
    return against(case, metric, values, _night_medians(cell), gate, changed, "nights")


def _night_medians(cell: baseline.Cell) -> list[float]:
    """Launches of one night share what it did to the machine: a night is one sample."""
    nights: dict[str, list[float]] = {}
    for sample in cell.samples:
        nights.setdefault(sample.night, []).append(sample.value)
    return [median for v in nights.values() if (median := stats.median(v)) is not None]


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
    of: str = "launches",
) -> Finding:
    """Judge fresh samples, by their median, by stored ones: the baseline gate's arithmetic.

    `stored` holds independent samples: one per night, or per launch where there is one night
    (`of` says which). Those of a speed must be positive and at least two; a share of requests is
    judged by an absolute rule, because "3 of 100 requests fail now" is no matter of percent.
    """
    finding = partial(_finding, case, metric, values, changed=tuple(changed))
    value = stats.median(values)
    assert value is not None
    if metric.unit == "1":
        return _against_share(metric, values, stored, finding)
    if value == 0 and metric.direction == "higher":
        was = shown(stats.median(stored), metric.unit)
        return finding("REGRESSION", f"nothing is left of the baseline's {was}")
    if not value > 0:
        reason = f"{shown(value, metric.unit)} is not a measurement: nothing takes no time"
        return finding("INCOMPATIBLE", reason)
    prediction = stats.predict_log(stored)
    center = math.exp(prediction.center)
    margin = math.expm1(max(prediction.margin, math.log1p(gate.tolerance)))
    visible = math.expm1(max(prediction.visible, math.log1p(gate.tolerance)))
    worse = metric.worse_by(value, center)
    change = f"{worse:.1%} worse" if worse >= 0 else f"{metric.worse_by(center, value):.1%} better"
    reason = (
        f"{shown(value, metric.unit)}, {change} than the baseline's "
        f"{shown(center, metric.unit)} ({len(stored)} {of}; margin {margin:.1%})"
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
    return finding(verdict, reason, worse_by=worse, bound=margin, visible=visible)


def _against_share(
    metric: Metric,
    values: Sequence[float],
    stored: Sequence[float],
    finding: Callable[..., Finding],
) -> Finding:
    """Judge a share of requests: below the lowest that is stored is worse, by however little."""
    value, floor = min(values), min(stored)
    verdict: Verdict = "PASS"
    if value < floor:
        verdict = "REGRESSION"
    elif value > max(stored):
        verdict = "IMPROVEMENT"
    lowest = f"the baseline's lowest {shown(floor, metric.unit)} ({len(stored)} launches)"
    return finding(verdict, f"{shown(value, metric.unit)}, {lowest}", value=value)
