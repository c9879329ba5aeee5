"""Every cell of a night: may it be judged, by which gates, and what do they say."""

from __future__ import annotations

from collections.abc import Sequence

from headway import correctness, metrics, stats
from headway.core import Case
from headway.metrics import Metric
from headway.results import Results, Sample, applies
from headway.suite import Suite
from headway.verdict import decided
from headway.verdict.explain import explain
from headway.verdict.finding import EQUALITY, Finding, Judged, Verdict, shown, worst
from headway.verdict.limits import limits
from headway.verdict.memory import Memory, day_of
from headway.verdict.reference import reference_findings
from headway.verdict.stored import against_baseline

# Judged whatever the success rate: they are about it, or not about speed.
NOT_SPEED = ("success_rate", "token_accuracy", "peak_memory")
# The share of a cell's launches that may be lost to the machine; what is left is judged.
MAX_DROPPED = 0.25


def judge(results: Results, memory: Memory) -> tuple[Judged, ...]:
    """Judge every cell of a night that was to be measured, by all that is remembered."""
    cells: list[Judged] = []
    paired = reference_findings(results)
    names = {(instance, name) for instance, _, name in results.expected}
    for case in results.suite.cases():
        if (case.instance, case.name) in names:
            cells += [
                judge_cell(results, case, m, memory, paired.get((case, m.name)))
                for m in applicable(results.suite, case)
                if not m.where_known or _known(results, case, m)
            ]
            cells.append(judge_equality(results, case))
    for instance in dict.fromkeys(name for name, _, _ in results.expected):
        case = results.launch_case(instance)
        cells.append(judge_cell(results, case, metrics.LAUNCH_TIME, memory))
        for metric, samples in results.step_cells(instance).items():
            cells.append(_cell(case, metric, [_watched(case, metric, samples)]))
    today = day_of(results)
    decided_on = [decided.apply(cell, memory.decisions, today) for cell in cells]
    return explain(results, decided_on, memory)


def applicable(suite: Suite, case: Case) -> list[Metric]:
    """Return the metrics that a case has."""
    return [metric for metric in metrics.TABLE.values() if applies(suite, case, metric)]


def _known(results: Results, case: Case, metric: Metric) -> bool:
    """Whether a case has a metric that only some engines have, or a limit says that it must."""
    limited = any(one.metric == metric.name and one.covers(case) for one in results.suite.limits)
    return limited or any(s.value is not None for s in results.samples(case, metric))


def judge_cell(
    results: Results, case: Case, metric: Metric, memory: Memory, paired: Finding | None = None
) -> Judged:
    """Judge one cell: first whether it may be judged at all, then by each gate on it.

    `paired` is what the reference gate says of it. Limits and baseline look at the launches that
    every night has: those of a second look were taken because the first ones looked bad.
    """
    first = results.suite.launches
    samples = [s for s in results.samples(case, metric) if s.launch <= first]
    blocked = _blocked(results, case, metric, samples)
    if blocked is not None:
        # Where time ran out, the pairs that there are may still say something, or say what would.
        unpaid = blocked.verdict == "INCONCLUSIVE" and paired is not None
        return _cell(case, metric, [paired] if unpaid and paired is not None else [blocked])
    values = [s.value for s in samples if s.value is not None and not s.invalid]
    findings = list(limits(results, case, metric, values))
    gate = results.suite.baseline
    if metric.name in gate.metrics and case.level:
        findings.append(against_baseline(results, case, metric, values, memory, gate))
    findings += [] if paired is None else [paired]
    return _cell(case, metric, findings or [_watched(case, metric, samples)])


def _cell(case: Case, metric: Metric, findings: Sequence[Finding]) -> Judged:
    return Judged(case, metric.name, worst(findings))


def _blocked(
    results: Results, case: Case, metric: Metric, samples: Sequence[Sample]
) -> Finding | None:
    """Return why a cell cannot be judged: not measured, not valid, or requests failed."""

    def finding(verdict: Verdict, reason: str) -> Finding:
        return Finding(case, metric.name, "complete", verdict, reason, unit=metric.unit)

    invalid = [f"launch {s.launch}: {s.invalid[0]}" for s in samples if s.invalid]
    if len(invalid) > MAX_DROPPED * len(samples):
        return finding("INVALID", "; ".join(invalid))
    if metric.name not in NOT_SPEED and case.level:
        failures = _failures(results, case)
        if failures:
            return finding("LIMIT", f"{failures}; the speed of the rest is not judged")
    if metric is metrics.LAUNCH_TIME:
        wrong = correctness.wrong_first_tokens(results, case.instance)
        if wrong:
            return finding("WRONG", wrong[0])
    if not samples:
        return finding("MISSING", "it was not measured")
    spent = results.ran_out(case, results.suite.launches)
    if spent is not None:
        return finding("INCONCLUSIVE", f"budget: {spent}")
    missing = [s.reason or "no value" for s in samples if s.value is None and not s.invalid]
    if metric is metrics.LAUNCH_TIME:
        missing += correctness.unverified_first_tokens(results, case.instance)
    return finding("MISSING", missing[0]) if missing else None


def _failures(results: Results, case: Case) -> str:
    """Say how many requests failed and at what, or return an empty text."""
    records = [r for run in results.runs_of(case).values() for r in run.records]
    failed = [r for r in records if r.error is not None]
    if not failed:
        return ""
    kinds = sorted({r.error.kind for r in failed if r.error is not None})
    counts = [f"{sum(r.error.kind == k for r in failed if r.error)} {k}" for k in kinds]
    return f"{len(failed)} of {len(records)} requests failed ({', '.join(counts)})"


def _watched(case: Case, metric: Metric, samples: Sequence[Sample]) -> Finding:
    values = [s.value for s in samples if s.value is not None]
    value = stats.median(values)
    reason = f"{shown(value, metric.unit)}, watched: no gate is set on it"
    return Finding(case, metric.name, "watch", "PASS", reason, value, metric.unit, tuple(values))


def judge_equality(results: Results, case: Case) -> Judged:
    """Judge a case's outputs against the reference: WRONG, MISSING or PASS; SKIPPED if sampled."""
    sampled = correctness.why_unverified(results, case)
    if sampled is not None:
        return Judged(case, EQUALITY, (Finding(case, EQUALITY, "correctness", "SKIPPED", sampled),))
    found = correctness.equality(results, case)
    verdict: Verdict = "PASS"
    reason = f"{found.num_requests} outputs, {found.num_tokens} tokens verified"
    if found.num_nonargmax:
        reason += f", {found.num_nonargmax} ties"
    if found.wrong:
        verdict, reason = "WRONG", "; ".join(found.wrong[:3])
        reason += f"; and {len(found.wrong) - 3} more" if len(found.wrong) > 3 else ""
    elif found.unverified and len(found.unverified) == found.unpaid:
        verdict, reason = "INCONCLUSIVE", f"budget: {found.unverified[0]}; {reason} so far"
    elif found.unverified or not found.num_requests:
        verdict = "MISSING"
        reason = found.unverified[0] if found.unverified else "no request was completed"
    finding = Finding(case, EQUALITY, "correctness", verdict, reason)
    return Judged(case, EQUALITY, (finding,))
