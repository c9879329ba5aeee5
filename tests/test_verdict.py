from __future__ import annotations

import dataclasses
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from headway import baseline, fingerprint, metrics, questions, verdict
from headway.core import Case, RequestError, Slo, Stage, Verification
from headway.lengths import Trace, Uniform
from headway.stats.nights import ONE_NIGHT
from headway.suite import BaselineGate, Limit
from headway.verdict import Finding, Judged
from headway.verdict.series import series_of
from headway.verdict.stored import against_baseline
from headway.workload import Prefix, pair_key

CASE = Case("b", "fake", "w32_16", "c4")
GATE = BaselineGate()
THROUGHPUT, TTFT = metrics.ALL["output_throughput"], metrics.ALL["ttft_p50"]
RATIOS = (
    Limit("output_throughput", over="*", min=0.95),
    Limit("ttft_p50", over="*", max=1.06),
)


def against(metric, values, stored, gate=GATE):
    return verdict.against(CASE, metric, values, stored, gate)


def draws(seed, n, center=100.0, spread=0.01):
    draw = random.Random(seed)
    return [center * draw.lognormvariate(0, spread) for _ in range(n)]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(
    ("metric", "factor"), [(THROUGHPUT, 1 / 1.12), (TTFT, 1.12)], ids=["throughput", "latency"]
)
def test_twelve_percent_slower_is_a_regression_in_either_direction(metric, factor, seed):
    stored, fresh = draws(seed, 10), [v * factor for v in draws(seed + 1000, 2)]
    found = against(metric, fresh, stored)
    assert found.verdict == "REGRESSION"
    assert found.worse_by == pytest.approx(0.12, abs=0.03)
    assert against(metric, [v / factor**2 for v in fresh], stored).verdict == "IMPROVEMENT"


@pytest.mark.parametrize("metric", [THROUGHPUT, TTFT], ids=["throughput", "latency"])
def test_unchanged_gives_no_false_alarm_beyond_the_stated_rate(metric):
    alarms = 0
    for seed in range(200):
        stored, fresh = draws(seed, 10, spread=0.03), draws(seed + 5000, 1, spread=0.03)
        alarms += against(metric, fresh, stored).verdict == "REGRESSION"
    # The margin is passed by a fresh sample with probability 0.01 (0.012: the centre's a median).
    assert alarms <= binom.ppf(0.999, 200, 0.012)


def test_a_noisy_cell_says_what_it_could_see():
    found = against(TTFT, [0.1], [0.08, 0.1, 0.12])
    assert found.verdict == "INCONCLUSIVE"
    assert found.visible > found.bound > GATE.resolution
    assert f"{found.visible:.1%}" in found.reason


def test_the_margin_is_never_tighter_than_the_tolerance():
    same = [0.1] * 10
    assert against(TTFT, [0.1049], same).verdict == "PASS"
    assert against(TTFT, [0.1051], same).verdict == "REGRESSION"
    assert against(THROUGHPUT, [100 / 1.049], [100.0] * 10).verdict == "PASS"
    assert against(THROUGHPUT, [100 / 1.051], [100.0] * 10).verdict == "REGRESSION"


@pytest.mark.parametrize("factor", [0.0011, 0.09, 11.0, 1000.0])
@pytest.mark.parametrize("metric", [THROUGHPUT, TTFT], ids=["throughput", "latency"])
def test_case_27_a_change_beyond_tenfold_is_suspected_in_either_direction(metric, factor):
    found = against(metric, [0.85 * factor], [0.85] * 3)
    assert found.verdict == "INCOMPATIBLE"
    assert "wrong unit" in found.reason


def test_case_25_a_fresh_latency_of_zero_is_no_measurement():
    assert against(TTFT, [0.0], [0.1, 0.1]).verdict == "INCOMPATIBLE"


def test_case_25_failures_from_none_to_three_are_a_regression_by_an_absolute_rule():
    success = metrics.ALL["success_rate"]
    assert against(success, [1.0, 0.97], [1.0] * 10).verdict == "REGRESSION"
    assert against(success, [1.0, 1.0], [1.0] * 10).verdict == "PASS"
    assert against(success, [0.5], [0.0, 0.0]).verdict == "IMPROVEMENT"


VERDICTS = st.sampled_from(verdict.ORDER)


@given(st.lists(VERDICTS, min_size=1, max_size=6))
def test_the_worst_finding_comes_first(names):
    findings = verdict.worst([Finding(CASE, "m", "limit", name, "") for name in names])
    assert [f.verdict for f in findings] == sorted(names, key=verdict.ORDER.index)


def test_a_limit_that_held_outweighs_a_baseline_that_is_not_there_yet():
    recording = Finding(CASE, "m", "baseline", "RECORDING", "")
    held = Finding(CASE, "m", "limit", "PASS", "")
    watched = Finding(CASE, "m", "watch", "PASS", "")
    assert Judged(CASE, "m", verdict.worst([held, recording])).verdict == "PASS"
    assert Judged(CASE, "m", verdict.worst([watched, recording])).verdict == "RECORDING"
    broken = dataclasses.replace(held, verdict="LIMIT")
    assert Judged(CASE, "m", verdict.worst([held, recording, broken])).verdict == "LIMIT"


@pytest.mark.parametrize("name", verdict.ORDER)
def test_exit_codes(name):
    code = verdict.exit_code([("PASS", False), (name, False)])
    assert code == (3 if name == "INVALID" else 1 if name in verdict.FAILS else 0)
    due = name in verdict.WAITS
    assert verdict.exit_code([("PASS", False), (name, due)], strict=True) == (3 if due else code)
    assert verdict.exit_code([("PASS", False), (name, False)], strict=True) == code


@pytest.mark.parametrize(
    ("name", "overdue", "due"),
    [
        ("PASS", True, False),
        ("INCONCLUSIVE", False, True),
        ("RECORDING", False, False),
        ("RECORDING", True, True),
        ("MUTED", False, False),
        ("SKIPPED", False, False),
    ],
)
def test_what_waits_is_due_once_its_gate_was_armed(name, overdue, due):
    cell = Judged(CASE, "m", (Finding(CASE, "m", "baseline", name, "", due=overdue),))
    assert (cell.due, cell.fails(strict=True), cell.fails(strict=False)) == (due, due, False)


def test_case_26_nothing_judged_is_not_a_pass():
    assert verdict.exit_code([]) == 3
    assert verdict.exit_code([("SKIPPED", False)] * 2) == 3
    assert verdict.exit_code([("SKIPPED", False), ("PASS", False)], strict=True) == 0


def test_something_slower_outweighs_what_cannot_be_told():
    assert verdict.exit_code([("INVALID", False), ("REGRESSION", False)]) == 1


def failing(judged):
    return {(j.case.instance, j.case.level, j.metric) for j in judged if j.verdict in verdict.FAILS}


def test_a_planted_slowdown_reddens_its_own_cells_and_no_others(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.1)}
    suite = factory.make_suite(limits=RATIOS)
    judged = factory.judge(factory.make_night(speeds, suite=suite))
    assert failing(judged) == {
        ("b", level, metric)
        for level in ("c1", "c4")
        for metric in ("output_throughput", "ttft_p50")
    }
    slow = factory.cell(judged, "b", "ttft_p50")
    assert slow.findings[0].message.startswith("LIMIT b-w32_16-c4 ttft_p50: 1.100 of a's")


def test_equal_engines_are_green_under_ratio_limits(factory):
    suite = factory.make_suite(limits=RATIOS)
    for seed in range(20):
        night = factory.make_night(suite=suite, spread=0.003, seed=seed)
        assert not failing(factory.judge(night))


def test_a_ratio_limit_compares_with_every_other_instance(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(), "c": factory.Speed(slower=0.2)}
    suite = factory.make_suite(tuple(speeds), limits=[RATIOS[1]])
    judged = factory.judge(factory.make_night(speeds, suite=suite))
    slow = factory.cell(judged, "c", "ttft_p50")
    reasons = [f.reason for f in slow.findings if f.gate == "limit"]
    assert len(reasons) == 2
    assert "of a's" in reasons[0]
    assert "of b's" in reasons[1]
    assert failing(judged) == {("c", "c1", "ttft_p50"), ("c", "c4", "ttft_p50")}


def test_case_15_a_level_with_failed_requests_is_red_whatever_the_survivors_did(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(fails=3)}
    judged = factory.judge(factory.make_night(speeds, suite=factory.make_suite(limits=RATIOS)))
    cell = factory.cell(judged, "b", "e2el_p50")
    assert cell.verdict == "LIMIT"
    assert cell.value is None
    assert "6 of 32 requests failed (6 http_500)" in cell.findings[0].reason
    assert factory.cell(judged, "b", "success_rate").verdict == "LIMIT"
    assert factory.cell(judged, "a", "success_rate").verdict == "PASS"


def test_an_invalid_run_makes_its_cells_invalid_and_no_others(factory):
    night = factory.make_night()
    runs = tuple(
        dataclasses.replace(r, invalid=("the client slept",))
        if (r.case.instance, r.case.level, r.launch) == ("b", "c4", 1)
        else r
        for r in night.runs
    )
    judged = factory.judge(dataclasses.replace(night, runs=runs))
    assert {j.verdict for j in judged if j.case == CASE and j.metric != "greedy_equality"} == {
        "INVALID"
    }
    assert "launch 1: the client slept" in factory.cell(judged, "b", "ttft_p50").findings[0].reason
    assert not {key for key in failing(judged) if key[:2] != ("b", "c4")}
    assert verdict.exit_code([(j.verdict, j.due) for j in judged]) == 3


def test_a_launch_that_failed_leaves_its_cells_missing(factory):
    night = factory.make_night()
    died = factory.make_launch(
        "b", 1, factory.Speed(), launch_s=None, failure="it ran out of memory"
    )
    judged = factory.judge(
        dataclasses.replace(
            night,
            runs=tuple(r for r in night.runs if (r.case.instance, r.launch) != ("b", 1)),
            launches=(*night.launches[:-1], died),
        )
    )
    cell = factory.cell(judged, "b", "ttft_p50")
    assert cell.verdict == "MISSING"
    assert "launch 1 of b failed: it ran out of memory" in cell.findings[0].reason
    assert factory.cell(judged, "b", "launch_time", "").verdict == "MISSING"
    assert {key[0] for key in failing(judged)} == {"b"}


def test_a_wrong_token_is_wrong_for_its_own_engine_only(factory):
    speeds = {"a": factory.Speed(), "b": factory.Speed(salt=1)}
    judged = factory.judge(factory.verified(factory.make_night(speeds), first_wrong=1))
    wrong = [j for j in judged if j.verdict == "WRONG"]
    assert {(j.case.instance, j.metric) for j in wrong} == {("a", "greedy_equality")}
    assert "request 0: token 4 is not what the reference would emit" in wrong[0].findings[0].reason
    assert factory.cell(judged, "b", "greedy_equality").verdict == "PASS"


def test_an_unverified_output_is_missing_not_right(factory):
    judged = factory.judge(dataclasses.replace(factory.make_night(), verifications={}))
    assert factory.cell(judged, "a", "greedy_equality").verdict == "MISSING"


def nights_then(factory, tonight, **changes):
    """Return the cells of b when a baseline of five nights is stored."""
    past = factory.baseline_nights()
    stored = {case: factory.baseline_of(past, case) for case in tonight.suite.cases()}
    stored = {case: dataclasses.replace(base, **changes) for case, base in stored.items()}
    return factory.judge(tonight, stored.get)


def test_a_stored_baseline_judges_tonight(factory):
    tonight = factory.make_night({"a": factory.Speed(), "b": factory.Speed(slower=0.12)})
    judged = nights_then(factory, tonight)
    gated = [f"{m}" for m in GATE.metrics]
    assert failing(judged) == {("b", lv, m) for lv in ("c1", "c4") for m in gated}
    assert factory.cell(judged, "a", "ttft_p50").verdict == "PASS"
    assert factory.cell(judged, "b", "ttft_p50").verdict == "REGRESSION"


def test_a_faster_engine_is_an_improvement_and_passes(factory):
    tonight = factory.make_night({"a": factory.Speed(), "b": factory.Speed(slower=-0.2)})
    assert factory.cell(nights_then(factory, tonight), "b", "tpot_p50").verdict == "IMPROVEMENT"


def test_what_was_put_under_test_is_shown_as_what_changed(factory):
    tonight = factory.make_night({"a": factory.Speed(), "b": factory.Speed(version="1.1")})
    cell = factory.cell(nights_then(factory, tonight), "b", "ttft_p50")
    assert cell.verdict == "PASS"
    assert cell.findings[0].changed == ("version: 1.0 → 1.1",)


def test_another_identity_is_incompatible(factory):
    tonight = factory.make_night(revision="r2")
    cell = factory.cell(nights_then(factory, tonight), "b", "ttft_p50")
    assert cell.verdict == "INCOMPATIBLE"
    assert "revision: r1 → r2" in cell.findings[0].reason


def test_another_environment_opens_a_new_epoch(factory):
    judged = nights_then(factory, factory.make_night(), environment={"os": "old"})
    cell = factory.cell(judged, "b", "ttft_p50")
    assert cell.verdict == "RECORDING"
    assert "new epoch" in cell.findings[0].reason


def test_too_few_nights_are_still_recording(factory):
    past = factory.baseline_nights(2)
    stored = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
    cell = factory.cell(factory.judge(factory.make_night(), stored.get), "b", "ttft_p50")
    assert cell.verdict == "RECORDING"
    assert "6 of 10 launches, night 3 of 5" in cell.findings[0].reason


def test_a_broken_baseline_file_is_incompatible_and_says_why(factory):
    def load(case):
        raise baseline.BaselineError("x.json is not a baseline: it was cut off")

    cell = factory.cell(factory.judge(factory.make_night(), load), "b", "ttft_p50")
    assert cell.verdict == "INCOMPATIBLE"
    assert cell.findings[0].reason == "x.json is not a baseline: it was cut off"


def test_a_noisy_baseline_is_inconclusive(factory):
    past = factory.baseline_nights(spread=0.2)
    stored = {case: factory.baseline_of(past, case) for case in past[0].suite.cases()}
    cell = factory.cell(factory.judge(factory.make_night(), stored.get), "b", "ttft_p50")
    assert cell.verdict == "INCONCLUSIVE"


def test_the_same_night_is_judged_alike_twice(factory):
    night = factory.make_night(spread=0.01)
    assert factory.judge(night) == factory.judge(night)


def test_client_failures_do_not_count_as_the_engine_being_slow(factory):
    night = factory.make_night()
    broken = RequestError("client_error", "no more sockets", "client")
    first = night.runs[0]
    spoilt = dataclasses.replace(
        first,
        records=(dataclasses.replace(first.records[0], error=broken), *first.records[1:]),
        invalid=("the client failed on request 0: no more sockets",),
    )
    judged = factory.judge(dataclasses.replace(night, runs=(spoilt, *night.runs[1:])))
    assert factory.cell(judged, "a", "ttft_p50", "c1").verdict == "INVALID"


def test_outputs_of_a_launch_that_was_not_measured_are_missing_not_right(factory):
    night = factory.make_night()
    runs = tuple(r for r in night.runs if (r.case, r.launch) != (CASE, 1))
    cell = factory.cell(
        factory.judge(dataclasses.replace(night, runs=runs)), "b", "greedy_equality"
    )
    assert cell.verdict == "MISSING"
    assert "launch 1 of b ended before this level" in cell.findings[0].reason


@pytest.mark.parametrize("error", [None, "the reference's device has no memory"])
def test_a_launch_time_ends_with_a_verified_token_or_is_missing(factory, error):
    night = factory.make_night()
    key = pair_key(questions.launch_prompt(night, "fake"), night.launches[0].first_output)
    known = {k: v for k, v in night.verifications.items() if k != key}
    if error:
        known[key] = Verification(key, error=error)
    judged = factory.judge(dataclasses.replace(night, verifications=known))
    cell = factory.cell(judged, "b", "launch_time", "")
    assert cell.verdict == "MISSING"
    assert "its first token was not verified" in cell.findings[0].reason
    assert factory.cell(factory.judge(night), "b", "launch_time", "").verdict == "PASS"


def test_a_cell_without_a_gate_is_watched_and_not_ok(factory):
    judged = factory.judge(factory.make_night())
    watched = factory.cell(judged, "b", "e2el_p99")
    assert (watched.verdict, watched.word) == ("PASS", "watched")
    assert factory.cell(judged, "b", "success_rate").word == "OK"
    assert factory.cell(judged, "b", "ttft_p50").word == "CAN'T TELL YET"
    assert verdict.exit_code([(watched.verdict, watched.due)]) == 0


def slo_night(factory, slo, **more):
    at = dataclasses.replace(factory.level(4), slo=slo)
    suite = factory.make_suite(("a",), [at], **more)
    return factory.make_night({"a": factory.Speed()}, suite=suite)


def test_goodput_is_judged_only_where_an_slo_says_what_is_good(factory):
    without = {j.metric for j in factory.judge(slo_night(factory, None))}
    with_slo = {j.metric for j in factory.judge(slo_night(factory, Slo(ttft_s=0.1)))}
    assert with_slo - without == {"goodput", "token_goodput", "slo_attainment"}


@pytest.mark.parametrize(
    ("requests", "over", "verdict", "said"),
    [
        (231, 0, "PASS", "462 of 462 requests are within the SLO, at least 99.01% with 99%"),
        (331, 1, "PASS", "661 of 662"),
        (220, 0, "INCONCLUSIVE", "would take 459 requests with no more beyond it than 0"),
        (231, 3, "INCONCLUSIVE", "with no more beyond it than 3"),
        (231, 30, "LIMIT", "432 of 462 requests are within the SLO, 93.51%; at least 99.00%"),
    ],
)
def test_an_objective_is_judged_by_what_so_many_requests_can_show(
    factory, requests, over, verdict, said
):
    at = dataclasses.replace(factory.level(4, requests), slo=Slo(ttft_s=0.1))
    limit = Limit("slo_attainment", min=0.99)
    suite = factory.make_suite(("a",), [at], limits=[limit])
    night = factory.make_night({"a": factory.Speed()}, suite=suite)
    first, *rest = night.runs
    late = [
        dataclasses.replace(r, events=(), error=None) if index < over else r
        for index, r in enumerate(first.records)
    ]
    night = dataclasses.replace(night, runs=(dataclasses.replace(first, records=late), *rest))
    cell = factory.cell(factory.judge(night), "a", "slo_attainment")
    assert cell.verdict == verdict
    assert said in cell.findings[0].reason


def test_another_slo_is_another_identity_only_where_a_goodput_has_a_baseline(factory):
    case = Case("a", "fake", "w32_16", "c4")

    def identity(slo, gate):
        return verdict.identity_of(slo_night(factory, slo, gate=gate), case)

    speeds, goods = BaselineGate(), BaselineGate(metrics=("goodput",))
    assert identity(Slo(ttft_s=0.1), speeds) == identity(None, speeds)
    assert identity(Slo(ttft_s=0.1), goods) != identity(Slo(ttft_s=0.2), goods)


def test_the_identity_of_a_plain_load_is_what_it_was_before_there_were_others(factory):
    """Baselines stored by an older Headway stay comparable: what nobody chose is not named."""
    said = (
        "(Prompts(name='w32_16', prompt_tokens=32, output_tokens=16, kind='uniform', "
        "ignore_eos=True), Level(name='c4', num_requests=16, concurrency=4, rate_per_s=None, "
        "arrivals='closed', slo=None), 1)"
    )
    case = Case("a", "fake", "w32_16", "c4")
    found = verdict.identity_of(factory.make_night(), case)["workload"]
    assert found == fingerprint.short_hash(said)


@pytest.mark.parametrize(
    ("of_prompts", "of_level"),
    [
        ({"prompt_tokens": Uniform(8, 32)}, {}),
        ({"prefix": Prefix(8)}, {}),
        ({"temperature": 0.7}, {}),
        ({"trace": Trace("t.csv", (0.0,), (8,), (9,))}, {}),
        ({}, {"fill_s": 0.015}),
        ({}, {"burstiness": 0.5}),
        ({}, {"stages": (Stage(1.0, 5.0),)}),
        ({}, {"speed": 2.0}),
    ],
)
def test_each_choice_of_load_makes_another_identity(factory, of_prompts, of_level):
    night, case = factory.make_night(), Case("a", "fake", "w32_16", "c4")
    (workload,) = night.suite.workloads
    levels = tuple(dataclasses.replace(level, **of_level) for level in workload.levels)
    prompts = dataclasses.replace(workload.prompts, **of_prompts)
    suite = dataclasses.replace(
        night.suite, workloads=(dataclasses.replace(workload, prompts=prompts, levels=levels),)
    )
    other = dataclasses.replace(night, suite=suite)
    assert verdict.identity_of(other, case) != verdict.identity_of(night, case)


def test_a_goodput_that_is_gone_is_a_regression():
    goodput = metrics.ALL["goodput"]
    found = against(goodput, [0.0], [9.0, 10.0, 11.0])
    assert found.verdict == "REGRESSION"
    assert found.reason == "nothing is left of the baseline's 10.0 requests/s"


def stored_nights(nights):
    """Return a load function and a night's cells from lists of launches' values."""
    samples = tuple(
        baseline.Stored(f"n{night}", launch, value)
        for night, values in enumerate(nights)
        for launch, value in enumerate(values)
    )
    return baseline.Cell("s", "lower", samples)


def judge_tonight(factory, tonight, cell, gate):
    results = factory.make_night(suite=factory.make_suite(gate=gate))
    stored = baseline.Baseline(
        1,
        verdict.identity_of(results, CASE),
        results.machine.environment(),
        verdict.treatment_of(results, "b"),
        {"ttft_p50": cell},
    )
    return against_baseline(results, CASE, TTFT, tonight, verdict.Memory(lambda _: stored), gate)


def test_launches_of_one_night_are_one_sample_so_false_alarms_stay_at_the_stated_rate():
    """5 nights of 2 launches, 3 % between nights and 1 % within: 1 in 400, not 1 in 50."""
    draw, alarms, naive, rounds = random.Random(5), 0, 0, 2000

    def night():
        mood = draw.lognormvariate(0, 0.03)
        return [0.1 * mood * draw.lognormvariate(0, 0.01) for _ in range(2)]

    gate = BaselineGate(tolerance=1e-9)  # the margin alone, not its floor
    for _ in range(rounds):
        nights, tonight = [night() for _ in range(5)], night()
        pooled = [[value] for values in nights for value in values]
        for stored in (nights, pooled):
            change = series_of(TTFT, stored_nights(stored), [tonight]).change(gate)
            alarms += stored is nights and change.decisive
            naive += stored is pooled and change.decisive
    assert alarms <= binom.ppf(0.999, rounds, ONE_NIGHT)
    assert naive > binom.ppf(0.999, rounds, ONE_NIGHT)


def test_the_gate_counts_nights_and_says_so(factory):
    gate = BaselineGate(min_launches=2, min_nights=2)
    nights = stored_nights([(0.100, 0.102), (0.101, 0.103), (0.100, 0.101)])
    found = judge_tonight(factory, [0.101, 0.102], nights, gate)
    assert found.verdict == "PASS"
    assert "(3 nights; 95% interval" in found.reason


def test_one_night_can_show_no_spread_between_nights(factory):
    gate = BaselineGate(min_launches=2, min_nights=1)
    found = judge_tonight(factory, [0.2], stored_nights([(0.1, 0.1, 0.1)]), gate)
    assert found.verdict == "RECORDING"
    found = judge_tonight(factory, [0.2, 0.2], baseline.Cell("s", "lower", ()), gate)
    assert "2 of 2 launches, night 1 of 2" in found.reason
