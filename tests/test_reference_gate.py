"""The reference gate on nights in closed form: what it calls slower, faster, equal, untellable."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest

from headway import pairs, verdict
from headway.core import Case, LaunchRecord
from headway.results import Results
from headway.suite import SENSITIVITIES, Limit, ReferenceGate, Suite

OLD, NEW = "old", "new"


def gate(sensitivity: str = "5%", **changes: Any) -> ReferenceGate:
    preset = SENSITIVITIES[sensitivity]
    made = ReferenceGate(
        OLD,
        (NEW,),
        sensitivity=sensitivity,
        margin=preset.margin,
        first_pairs=preset.first_pairs,
        max_pairs=preset.max_pairs,
    )
    return dataclasses.replace(made, **changes)


def suite(factory: ModuleType, asked: ReferenceGate | None = None) -> Suite:
    asked = asked or gate()
    made = factory.make_suite((OLD, NEW), launches=asked.first_pairs)
    no_baseline = dataclasses.replace(made.baseline, metrics=())
    return dataclasses.replace(made, reference=asked, baseline=no_baseline)


def night(
    factory: ModuleType, slower: float = 0.0, asked: ReferenceGate | None = None, **more: Any
) -> Results:
    speeds = {OLD: factory.Speed(), NEW: factory.Speed(slower=slower)}
    options = {"spread": 0.004, "seed": 5} | more
    return factory.make_night(speeds, suite=suite(factory, asked), **options)


def found(factory: ModuleType, results: Results, level: str = "c4") -> dict[str, verdict.Finding]:
    """Return what the reference gate says of the candidate at a level, by metric."""
    return {
        cell.metric: finding
        for cell in verdict.judge(results, verdict.Memory())
        for finding in cell.findings
        if finding.gate == "reference" and cell.case.level == level and cell.case.instance == NEW
    }


@pytest.mark.parametrize(
    ("slower", "expected"),
    [(0.0, "PASS"), (0.10, "REGRESSION"), (-0.10, "IMPROVEMENT")],
)
def test_what_is_far_beyond_the_margin_is_called_after_the_first_pairs(
    factory: ModuleType, slower: float, expected: str
) -> None:
    findings = found(factory, night(factory, slower))
    assert set(findings) == {"output_throughput", "ttft_p50", "tpot_p50"}
    assert {f.verdict for f in findings.values()} == {expected}
    for finding in findings.values():
        assert finding.worse_by == pytest.approx(slower, abs=0.02)
        assert finding.interval is not None
        low, high = finding.interval
        assert low is None or high is None or low <= finding.worse_by <= high
        assert "5 pairs" in finding.reason


def test_a_flipped_direction_is_not_an_improvement(factory: ModuleType) -> None:
    """Throughput falls where latency rises: both are worse, and never one better."""
    findings = found(factory, night(factory, 0.10))
    assert all(f.worse_by is not None and f.worse_by > 0 for f in findings.values())


def test_the_reference_itself_has_no_reference(factory: ModuleType) -> None:
    judged = verdict.judge(night(factory, 0.10), verdict.Memory())
    assert not [
        f for c in judged for f in c.findings if f.gate == "reference" and c.case.instance == OLD
    ]


def test_only_suspects_and_one_control_are_measured_again(factory: ModuleType) -> None:
    speeds = {OLD: factory.Speed(), NEW: factory.Speed()}
    levels = [factory.level(n) for n in (1, 2, 4, 8)]
    made = factory.make_suite((OLD, NEW), levels, launches=5)
    results = factory.make_night(
        speeds, suite=dataclasses.replace(made, reference=gate()), spread=0.001, seed=3
    )
    assert pairs.extension(results) == {}
    slow = factory.Speed(slower=0.03)
    runs = [
        factory.make_run(run.case, run.launch, run.level, slow, 1.0 + 0.002 * (run.launch % 3))
        if run.case.instance == NEW and run.case.level == "c4"
        else run
        for run in results.runs
    ]
    more = pairs.extension(dataclasses.replace(results, runs=tuple(runs)))
    assert {case.level for case in more[NEW]} > {"c4"}
    assert len(more[NEW]) == 2
    assert {case.level for case in more[OLD]} == {case.level for case in more[NEW]}


def with_pairs(
    factory: ModuleType, results: Results, speeds: dict[str, Any], until: int
) -> Results:
    """Add the second look's launches, at every level."""
    again = factory.make_night(
        speeds,
        suite=dataclasses.replace(results.suite, launches=until),
        spread=0.004,
        seed=11,
    )
    first = results.suite.launches
    return factory.verified(
        dataclasses.replace(
            results,
            runs=results.runs + tuple(r for r in again.runs if r.launch > first),
            launches=results.launches + tuple(r for r in again.launches if r.launch > first),
            expected=results.expected + tuple(e for e in again.expected if e[1] > first),
        )
    )


@pytest.mark.parametrize(("slower", "expected"), [(0.0, "PASS"), (0.05, "REGRESSION")])
def test_the_second_look_flips_the_signs_of_pairs(
    factory: ModuleType, slower: float, expected: str
) -> None:
    speeds = {OLD: factory.Speed(), NEW: factory.Speed(slower=slower)}
    results = night(factory, slower)
    results = with_pairs(factory, results, speeds, results.suite.reference.max_pairs)
    findings = found(factory, results)
    assert {f.verdict for f in findings.values()} == {expected}
    assert all("for the whole family" in f.reason for f in findings.values())


def test_out_of_budget_is_never_a_pass(factory: ModuleType) -> None:
    results = night(factory)
    spent = LaunchRecord(
        NEW, 5, 1, "", failure_kind="budget", failure="the night's budget was spent before it"
    )
    kept = tuple(r for r in results.launches if (r.instance, r.launch) != (NEW, 5))
    runs = tuple(r for r in results.runs if (r.case.instance, r.launch) != (NEW, 5))
    findings = found(factory, dataclasses.replace(results, launches=(*kept, spent), runs=runs))
    assert {f.verdict for f in findings.values()} == {"INCONCLUSIVE"}
    for finding in findings.values():
        assert "budget: the night's budget was spent" in finding.reason
        assert "pairs would show" in finding.reason
        assert finding.interval is not None


def spoilt(results: Results, instance: str, launches: tuple[int, ...]) -> Results:
    runs = tuple(
        dataclasses.replace(r, invalid=("the machine was not as it was: planted",))
        if r.case.instance == instance and r.launch in launches
        else r
        for r in results.runs
    )
    return dataclasses.replace(results, runs=runs)


def test_one_lost_pair_in_five_is_dropped_and_said(factory: ModuleType) -> None:
    findings = found(factory, spoilt(night(factory, 0.10), OLD, (2,)))
    assert {f.verdict for f in findings.values()} == {"REGRESSION"}
    assert all("4 pairs, 1 dropped" in f.reason for f in findings.values())


@pytest.mark.parametrize("instance", [OLD, NEW])
def test_too_many_lost_pairs_are_no_verdict_on_speed(factory: ModuleType, instance: str) -> None:
    results = spoilt(night(factory, 0.10), instance, (1, 2))
    judged = {
        cell.verdict
        for cell in verdict.judge(results, verdict.Memory())
        if cell.case.instance == NEW and cell.metric == "tpot_p50"
    }
    assert judged == {"INVALID"}


def test_the_family_is_the_suites_not_what_was_selected(factory: ModuleType) -> None:
    """Measuring one level only must not make its cells easier to condemn."""
    speeds = {OLD: factory.Speed(), NEW: factory.Speed(slower=0.032)}
    asked = gate(first_pairs=8, max_pairs=8)
    whole = factory.make_night(speeds, suite=suite(factory, asked), spread=0.006, seed=2)
    alone = dataclasses.replace(
        whole,
        expected=tuple(e for e in whole.expected if e[2].endswith("c4")),
        runs=tuple(r for r in whole.runs if r.case.level == "c4"),
    )
    sizes = [len(pairs.family(results.suite, NEW)) for results in (whole, alone)]
    assert sizes == [6, 6]
    said = [found(factory, results)["tpot_p50"].reason for results in (whole, alone)]
    p = [float(text.partition(", p ")[2].partition(" ")[0]) for text in said]
    assert p[1] >= p[0]


def test_a_limit_looks_at_the_launches_that_every_night_has(factory: ModuleType) -> None:
    """A second look is taken on suspicion: what it adds must not move other gates."""
    limit = Limit("tpot_p50", engine=NEW, max=0.0125)
    asked = dataclasses.replace(suite(factory), limits=(limit,))
    speeds = {OLD: factory.Speed(), NEW: factory.Speed()}
    results = factory.make_night(speeds, suite=asked, spread=0.001)
    slow = {OLD: factory.Speed(), NEW: factory.Speed(slower=0.2)}
    results = with_pairs(factory, results, slow, 10)
    cell = factory.cell(verdict.judge(results, verdict.Memory()), NEW, "tpot_p50")
    assert [f.verdict for f in cell.findings if f.gate == "limit"] == ["PASS"]


def test_a_case_without_a_counterpart_has_none(factory: ModuleType) -> None:
    made = suite(factory)
    assert pairs.counterpart(made, Case(OLD, "fake", "w32_16", "c4")) is None
    assert pairs.counterpart(made, Case(NEW, "fake", "w32_16", "c4")) == Case(
        OLD, "fake", "w32_16", "c4"
    )
