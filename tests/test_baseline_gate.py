"""The armed baseline gate: what one night shows, what several show, and what it never says."""

from __future__ import annotations

import dataclasses

import pytest

from headway import baseline, verdict
from headway.core import Case
from headway.suite import BaselineGate

CASE = Case("b", "fake", "w32_16", "c4")
GATED = set(BaselineGate().metrics)
FIVE = 5


@pytest.fixture
def episode(factory):
    """Return a function that judges nights after five stored ones: each knows those before it."""

    def run(slower, kernels=None, spread=0.002, anchor=FIVE, days=1, stored_kernels=None):
        stored_kernels = kernels if stored_kernels is None else stored_kernels
        past = factory.baseline_nights(anchor, spread=spread, kernels=stored_kernels)
        files = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
        records = factory.recorded(past)
        told = []
        for number, slow in enumerate(slower):
            speeds = {"a": factory.Speed(), "b": factory.Speed(slower=slow)}
            day = anchor + 1 + number * days
            night = factory.dated(day, speeds, spread=spread, seed=500 + number, kernels=kernels)
            judged = factory.judge(night, files.get, nights=records)
            records += (verdict.record_of(night, judged),)
            told.append(judged)
        return told, records

    return run


def said(factory, judged, metric="ttft_p50"):
    return factory.cell(judged, "b", metric).findings[0]


def failing(judged):
    return {(j.case.instance, j.case.level, j.metric) for j in judged if j.verdict in verdict.FAILS}


def test_a_large_slowdown_is_a_regression_in_its_first_night(factory, episode):
    told, _ = episode([0.12])
    assert failing(told[0]) == {("b", lv, m) for lv in ("c1", "c4") for m in GATED}
    found = said(factory, told[0])
    assert found.worse_by == pytest.approx(0.12, abs=0.01)
    low, high = found.interval
    assert low < found.worse_by < high
    assert found.bound < found.visible
    assert "12" in found.reason
    assert not found.suspected


def test_what_no_calibration_vouches_for_needs_a_second_night_unless_it_is_huge(factory, episode):
    told, _ = episode([0.12, 0.12], kernels={})
    first, second = (said(factory, judged) for judged in told)
    assert (first.verdict, first.suspected) == ("INCONCLUSIVE", True)
    assert "suspected, night 1 of 2: no calibration" in first.reason
    assert second.verdict == "REGRESSION"
    assert "so it was the night before" in second.reason
    told, _ = episode([0.5], kernels={})
    assert said(factory, told[0]).verdict == "REGRESSION"


def test_one_bad_night_that_nothing_vouches_for_is_no_regression(factory, episode):
    told, _ = episode([0.2, 0.0, 0.0, 0.0], kernels={})
    assert [said(factory, judged).verdict for judged in told] == [
        "INCONCLUSIVE",
        *["PASS"] * 3,
    ]


def test_a_small_slowdown_is_suspected_and_fails_when_it_persists(factory, episode):
    told, records = episode([0.04] * 4)
    found = [said(factory, judged) for judged in told]
    assert [f.verdict for f in found] == ["INCONCLUSIVE"] * 2 + ["REGRESSION"] * 2
    for number, finding in enumerate(found[:2], 1):
        assert f"suspected, night {number} of 3" in finding.reason
        assert finding.suspected
    assert "persists: night 3 of 3" in found[2].reason
    assert "persists: night 4," in found[3].reason
    assert found[2].worse_by == pytest.approx(0.04, abs=0.005)
    # Its samples are kept, or the fourth night could not have known the third.
    assert [r.of(CASE).cells["ttft_p50"].suspected for r in records[FIVE:]] == [True, True, 0, 0]
    assert all("ttft_p50" in r.of(CASE).sample.cells for r in records)


def test_a_suspicion_ends_with_the_slowdown(factory, episode):
    told, _ = episode([0.04, 0.04, 0.0, 0.04, 0.04])
    verdicts = [said(factory, judged).verdict for judged in told]
    assert verdicts == ["INCONCLUSIVE", "INCONCLUSIVE", "PASS", "INCONCLUSIVE", "INCONCLUSIVE"]


def test_a_slow_creep_is_caught_because_what_is_compared_with_stays(factory, episode):
    told, _ = episode([0.003 * night for night in range(1, 21)])
    verdicts = [said(factory, judged).verdict for judged in told]
    first = verdicts.index("REGRESSION")
    assert set(verdicts[first:]) == {"REGRESSION"}
    assert 9 <= first <= 14  # 3 % on average over three nights is reached in the eleventh
    lines = said(factory, told[first]).explanation
    assert any("in every night since 2026-11-06" in line for line in lines), lines


def test_no_change_is_no_alarm_in_many_nights(factory, episode):
    told, _ = episode([0.0] * 25, spread=0.01)
    for judged in told:
        assert not failing(judged)


def test_an_improvement_passes_and_says_when_it_is_confirmed(factory, episode):
    told, _ = episode([-0.2, -0.2])
    first, second = (said(factory, judged) for judged in told)
    assert (first.verdict, second.verdict) == ("IMPROVEMENT", "IMPROVEMENT")
    assert "another night would confirm it" in first.reason
    assert "confirmed: night 2" in second.reason


SLOW_MACHINE = {"matmul": 0.024, "copy": 0.030, "launch": 0.005, "python": 0.008}


def test_a_machine_that_moved_makes_this_gate_invalid_and_says_what_moved(factory, episode):
    told, _ = episode([0.3], kernels=SLOW_MACHINE, stored_kernels=factory.KERNELS)
    found = said(factory, told[0])
    assert found.verdict == "INVALID"
    assert "matrix product 20.0 % slower" in found.reason
    assert "memory copy" not in found.reason
    # Other gates judge on: only cells with a baseline are concerned.
    assert {metric for _, _, metric in failing(told[0])} == GATED


def test_a_machine_that_moved_for_good_is_told_what_to_do_about_it(factory, episode):
    told, _ = episode([0.0] * 3, kernels=SLOW_MACHINE, stored_kernels=factory.KERNELS)
    found = [said(factory, judged) for judged in told]
    assert [f.verdict for f in found] == ["INVALID"] * 3
    advice = ["delete the baseline's file" in str(f.explanation) for f in found]
    assert advice == [False, False, True]


def test_nights_of_another_machine_do_not_count_towards_persistence(factory):
    past = factory.baseline_nights(spread=0.002)
    files = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
    records = factory.recorded(past)
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.04)}
    for day, kernels in ((6, SLOW_MACHINE), (7, SLOW_MACHINE), (8, factory.KERNELS)):
        night = factory.dated(day, speeds, kernels=kernels)
        judged = factory.judge(night, files.get, nights=records)
        records += (verdict.record_of(night, judged),)
    assert "suspected, night 1 of 3" in said(factory, judged).reason


def test_a_stored_share_or_a_broken_file_needs_no_calibration(factory, episode):
    def load(case):
        raise baseline.BaselineError("x.json is not a baseline: it was cut off")

    judged = factory.judge(factory.dated(9, kernels=SLOW_MACHINE), load)
    assert said(factory, judged).verdict == "INCOMPATIBLE"


def test_the_best_of_90_days_is_named_and_decides_nothing(factory, episode):
    told, _ = episode([-0.02, 0.0], days=30, spread=0.0)
    line = said(factory, told[1]).explanation[-1]
    assert line.startswith("best night in 90 days: ")
    assert "on 2026-11-06, tonight is 2.0% worse" in line
    told, _ = episode([-0.02, 0.0], days=100)
    assert "2026-11-06" not in str(said(factory, told[1]).explanation)
    told, _ = episode([-0.02])
    assert said(factory, told[0]).explanation[-1] == "tonight is the best night in 90 days"


def test_what_changed_since_the_last_good_night_is_said_of_a_regression(factory, episode):
    past = factory.baseline_nights(spread=0.002)
    files = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
    good = factory.dated(6, {"a": factory.Speed(), "b": factory.Speed(version="1.1")})
    records = factory.recorded([good], files.get)
    slow = factory.Speed(version="1.2", slower=0.15)
    judged = factory.judge(
        factory.dated(7, {"a": factory.Speed(), "b": slow}), files.get, nights=records
    )
    found = said(factory, judged)
    assert found.changed == ("version: 1.0 → 1.2",)
    assert "since the last good night, 2026-11-06: version: 1.1 → 1.2" in found.explanation


def test_judging_again_later_says_the_same(factory, episode):
    _, records = episode([0.04] * 4)
    past = factory.baseline_nights(spread=0.002)
    files = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.04)}
    night = factory.dated(FIVE + 2, speeds, spread=0.002, seed=501)
    then = factory.judge(night, files.get, nights=records[: FIVE + 1])
    assert factory.judge(night, files.get, nights=records) == then


def test_a_cell_that_sees_nothing_in_a_night_may_see_enough_in_three(factory, episode):
    told, _ = episode([0.0], spread=0.03)
    found = said(factory, told[0])
    assert found.bound > BaselineGate().resolution
    assert found.verdict == "PASS"
    told, _ = episode([0.0], spread=0.2)
    found = said(factory, told[0])
    assert found.verdict == "INCONCLUSIVE"
    assert "it cannot see less than" in found.reason
    assert not found.suspected


def test_launches_of_a_second_look_are_neither_judged_nor_kept(factory):
    night = factory.make_night()
    suite = dataclasses.replace(night.suite, launches=1)  # launch 2 was taken on suspicion
    night = dataclasses.replace(night, suite=suite)
    judged = factory.judge(night)
    assert len(said(factory, judged).samples) == 1, said(factory, judged).message
    kept = verdict.record_of(night, judged).of(CASE).sample.cells["ttft_p50"].samples
    assert [sample.launch for sample in kept] == [1]
