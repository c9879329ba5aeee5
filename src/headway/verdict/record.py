"""What is kept of a judged night: its samples, what the gates said, and what may be built on it."""

from __future__ import annotations

from collections.abc import Sequence

from headway import baseline, calibration, history, metrics
from headway.core import Case
from headway.history import CaseNight, CellNight, NightRecord
from headway.results import Results
from headway.verdict import subject
from headway.verdict.finding import EQUALITY, FAILS, Finding, Judged, Verdict

# What must hold of a case before any of its speeds is worth keeping.
MUST_HOLD = (EQUALITY, "success_rate", "token_accuracy")
# What another gate than the baseline's may say of a sample that never becomes part of a baseline.
SPOILT: frozenset[Verdict] = frozenset(("WRONG", "REGRESSION", "LIMIT"))


def record_of(
    results: Results, judged: Sequence[Judged], minutes: float | None = None
) -> NightRecord:
    """Return what the history keeps of a night.

    `minutes` is what measuring took; without it, what the launches and Runs of the night took.
    """
    by_cell = {(cell.case, cell.metric): cell for cell in judged}
    measured = {(instance, name) for instance, _, name in results.expected}
    cases = tuple(
        _case(results, case, {m: cell for (c, m), cell in by_cell.items() if c == case})
        for case in results.suite.cases()
        if (case.instance, case.name) in measured
    )
    return NightRecord(
        history.SCHEMA,
        results.night,
        results.suite.name,
        results.started_at,
        results.machine.device,
        results.measured_s() / 60 if minutes is None else minutes,
        cases,
        calibration.night_medians(results.readings()),
    )


def _case(results: Results, case: Case, cells: dict[str, Judged]) -> CaseNight:
    holds = _holds(cells)
    suite = results.suite
    gated = dict.fromkeys(
        [*suite.baseline.metrics, *(suite.reference.metrics if suite.reference else ())]
    )
    samples = {
        name: found
        for name in gated
        if name in cells and cells[name].value
        for found in [_samples(results, case, name)]
        if holds and found.samples
    }
    sample = baseline.Baseline(
        baseline.SCHEMA,
        subject.identity_of(results, case),
        results.machine.environment(),
        subject.treatment_of(results, case.instance),
        samples,
    )
    nights = {
        name: _cell(cell, name in samples)
        for name, cell in cells.items()
        if any(finding.gate != "watch" for finding in cell.findings)
    }
    return CaseNight(case, sample, nights)


def _holds(cells: dict[str, Judged]) -> bool:
    """Whether a case was answered whole and right, as far as anybody looked.

    An output that was not verified may be wrong, unless it was sampled: then there is none to be
    right. People's decisions make none right.
    """
    said = {m: [_raw(f) for f in cells[m].findings] for m in MUST_HOLD if m in cells}
    failing = any(verdict in FAILS for found in said.values() for verdict in found)
    return not failing and said.get(EQUALITY) in (["PASS"], ["SKIPPED"])


def _samples(results: Results, case: Case, name: str) -> baseline.Cell:
    """Return what may be stored: of the launches that every night has, those that are valid."""
    metric = metrics.ALL[name]
    lowest = 0.0 if metric.unit == "1" else None
    samples = tuple(
        baseline.Stored(results.night, s.launch, s.value)
        for s in results.samples(case, metric)
        if s.launch <= results.suite.launches and s.value is not None and not s.invalid
        if s.value > 0 or s.value == lowest
    )
    return baseline.Cell(metric.unit, metric.direction, samples)


def _cell(cell: Judged, kept: bool) -> CellNight:
    others = (_raw(f) for f in cell.findings if f.gate != "baseline")
    worst = cell.findings[0]
    findings = cell.findings[::-1]  # of a gate's several findings the worst is kept
    return CellNight(
        verdict=_raw(worst),
        gates={f.gate: _raw(f) for f in findings},
        effects={f.gate: f.worse_by for f in findings if f.worse_by is not None},
        sound=kept and SPOILT.isdisjoint(others),
        suspected=any(f.suspected for f in findings),
        reason="" if _raw(worst) == "PASS" else worst.reason,
    )


def _raw(finding: Finding) -> Verdict:
    """Return what the gate said before anything that people decided."""
    return finding.was or finding.verdict
