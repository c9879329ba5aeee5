"""The limit gate: absolute bounds that a person set, and bounds on ratios between instances."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headway import metrics, stats
from headway.core import Case, Run
from headway.metrics import Metric
from headway.results import Results
from headway.suite import Limit
from headway.verdict.finding import Finding, Verdict, shown

# How sure one wants to be of a share of requests.
CONFIDENCE = 0.99
SURE = f"with {CONFIDENCE:.0%} confidence"


def limits(
    results: Results, case: Case, metric: Metric, values: Sequence[float]
) -> Iterator[Finding]:
    """Judge a cell by each limit on it."""
    for limit in results.suite.limits:
        if limit.metric != metric.name or not limit.covers(case):
            continue
        if metric.name == "slo_attainment" and limit.over is None and limit.min:
            yield _attainment(results, case, metric, limit.min, values)
            continue
        if limit.over is None:
            yield _limit(
                case, metric, limit, values, list(values), "", _within(results, case, metric)
            )
            continue
        others = [i.name for i in results.suite.instances if i.name != case.instance]
        for other in others if limit.over == "*" else [limit.over]:
            yield _ratio(results, case, metric, limit, values, other)


def _within(results: Results, case: Case, metric: Metric) -> str:
    """Say between which of the night's requests a percentile lies: what chance it leaves open.

    And of counts that are wrong, the first one.
    """
    if metric.name == "token_accuracy":
        wrong = (
            f"; launch {run.launch} request {index}: {problem}"
            for run in _runs(results, case)
            for index, problem in metrics.wrong_counts(run)
        )
        return next(wrong, "")
    if metric.percentile is None or metric.samples is None:
        return ""
    from headway.stats import intervals

    found = [value for run in _runs(results, case) for value in metric.samples(run)]
    low, high = intervals.percentile_interval(found, metric.percentile)
    bounds = " to ".join("unknown" if v is None else shown(v, metric.unit) for v in (low, high))
    return f" (95% interval {bounds}, {len(found)} values)"


def _runs(results: Results, case: Case) -> list[Run]:
    """Return a case's valid Runs in the launches that every night has."""
    runs = results.runs_of(case)
    return [runs[n] for n in sorted(runs) if n <= results.suite.launches and not runs[n].invalid]


def _ratio(
    results: Results,
    case: Case,
    metric: Metric,
    limit: Limit,
    values: Sequence[float],
    other: str,
) -> Finding:
    """Compare launch by launch: what one night did to both cancels."""
    model = results.suite.instance(other).model_name
    theirs = results.samples(Case(other, model, case.workload, case.level), metric)
    mine = results.samples(case, metric)
    by_launch = {s.launch: s.value for s in theirs if s.value and not s.invalid}
    ratios = [s.value / by_launch[s.launch] for s in mine if s.value and s.launch in by_launch]
    if len(ratios) < len(values):
        # The other instance fails in cells of its own: this one did nothing wrong.
        reason = f"{other} has no valid value to compare with in each launch"
        median = stats.median(values)
        return Finding(case, metric.name, "limit", "INCONCLUSIVE", reason, median, metric.unit)
    return _limit(case, metric, limit, values, ratios, f" of {other}'s")


def _attainment(
    results: Results, case: Case, metric: Metric, share: float, values: Sequence[float]
) -> Finding:
    """Say what so many requests can show: that enough are within the SLO, too few, or neither."""
    from headway.stats import intervals

    runs = _runs(results, case)
    num = sum(len(run.records) for run in runs)
    over = sum(not metrics.is_good(record, run) for run in runs for record in run.records)
    wanted = f"at least {share:.2%} {SURE}"
    reason = f"{num - over} of {num} requests are within the SLO"
    verdict: Verdict = "INCONCLUSIVE"
    if intervals.keeps_within(num, over, share, CONFIDENCE):
        verdict = "PASS"
        reason += f", at least {intervals.share_within(num, over, CONFIDENCE):.2%} {SURE}"
    elif intervals.falls_short(num, over, share, CONFIDENCE):
        verdict, reason = "LIMIT", f"{reason}, {1 - over / num:.2%}; {wanted} is required"
    else:
        needed = intervals.requests_needed(over, share, CONFIDENCE)
        reason += f"; {wanted} would take {needed} requests with no more beyond it than {over}"
    return Finding(
        case,
        metric.name,
        "limit",
        verdict,
        reason,
        stats.median(values),
        metric.unit,
        tuple(values),
        worse_by=_excess(1 - over / num, share, True),
        bound=share,
    )


def _limit(
    case: Case,
    metric: Metric,
    limit: Limit,
    values: Sequence[float],
    compared: Sequence[float],
    of: str,
    within: str = "",
) -> Finding:
    got = stats.median(compared)
    assert got is not None
    low = limit.min is not None and got < limit.min
    high = limit.max is not None and got > limit.max
    bound = limit.min if low or limit.max is None else limit.max
    assert bound is not None
    text = f"{got:.3f}{of}" if of else shown(got, metric.unit)
    wanted = f"{bound:g}{of}" if of else shown(bound, metric.unit)
    side = "at least" if bound == limit.min else "at most"
    reason = f"{text}, {side} {wanted} is required{within}"
    return Finding(
        case,
        metric.name,
        "limit",
        "LIMIT" if low or high else "PASS",
        reason,
        stats.median(values),
        metric.unit,
        tuple(values),
        worse_by=_excess(got, bound, bound == limit.min),
        bound=bound,
    )


def _excess(got: float, bound: float, at_least: bool) -> float | None:
    """Return how far a value is beyond its bound, relative to it; None for a bound of 0."""
    if bound == 0:
        return None
    return (bound - got) / bound if at_least else (got - bound) / bound
