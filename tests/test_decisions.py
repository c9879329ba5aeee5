"""What people decide about cells for a time: when it holds, what it changes, and what never."""

from __future__ import annotations

import dataclasses
import json
from datetime import date, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import codec, decisions, verdict
from headway.core import Case
from headway.decisions import Decision, DecisionError
from headway.verdict import Finding, Judged, decided

CASE = Case("hf_static", "smollm2_135m", "w32_12", "c8")
TODAY = date(2026, 12, 1)
GOOD = Decision(
    1, "accept", "hf_static-*:tpot_p50", "exact fp32", "2026-12-01", "2027-01-31", "#12",
    {"hf_static-w32_12-c8:tpot_p50": 0.08},
)  # fmt: skip
MUTE = dataclasses.replace(GOOD, kind="mute", effects={})


def judged(name="REGRESSION", gate="baseline", worse_by=0.07, bound=0.05, **more):
    finding = Finding(
        CASE, "tpot_p50", gate, name, "7 %", 0.1, "s", (0.1,), worse_by, bound, **more
    )
    held = Finding(CASE, "tpot_p50", "limit", "PASS", "held")
    return Judged(CASE, "tpot_p50", verdict.worst([finding, held]))


def test_a_decision_is_written_and_read_back(tmp_path):
    path = decisions.save(tmp_path, GOOD)
    assert path.parent == tmp_path / "decisions"
    assert decisions.load(tmp_path) == ((GOOD,), ())
    assert decisions.save(tmp_path, GOOD) == path  # the same decision is the same file
    other = decisions.save(tmp_path, dataclasses.replace(GOOD, reason="another"))
    assert other != path
    assert len(decisions.load(tmp_path)[0]) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cell": "hf_static-w32_12-c8"}, "cell is .* it must be CASE:METRIC"),
        ({"cell": ":tpot_p50"}, "it must be CASE:METRIC"),
        ({"cell": "a:b:c"}, "it must be CASE:METRIC"),
        ({"reason": "  "}, "reason is empty"),
        ({"until": "soon"}, "until is 'soon'; it must be a day"),
        ({"until": "2026-11-30"}, "which has passed; today is 2026-12-01"),
        ({"until": "2027-05-31"}, "at most 180 days from today, 2027-05-30"),
        ({"effects": {}}, "nothing is accepted"),
        ({"effects": {"x:y": 0.0}}, r"effects.x:y is 0; it must be above 0"),
        ({"effects": {"x:y": float("inf")}}, "must be above 0"),
    ],
)
def test_what_should_not_be_decided_is_refused(change, message):
    decisions.check(GOOD, TODAY)
    with pytest.raises(DecisionError, match=message) as told:
        decisions.check(dataclasses.replace(GOOD, **change), TODAY)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a decision"),
        ("[]", "has schema None"),
        ('{"schema": 2}', "has schema 2, this Headway reads 1: upgrade Headway"),
        ('{"schema": 1}', "decision.kind is missing"),
        (json.dumps(codec.encode(GOOD) | {"kind": "forget"}), "decision.kind is 'forget'"),
        (json.dumps(codec.encode(GOOD) | {"until": "soon"}), "until is 'soon'"),
    ],
)
def test_a_broken_file_does_nothing_and_is_named(tmp_path, text, message):
    decisions.save(tmp_path, GOOD)
    (tmp_path / "decisions" / "x.json").write_text(text)
    found, broken = decisions.load(tmp_path)
    assert found == (GOOD,)
    (line,) = broken
    assert line.startswith(str(tmp_path / "decisions" / "x.json"))
    assert message in line


def test_a_pattern_covers_cells_by_case_and_metric():
    def covers(cell, metric="tpot_p50", case=CASE):
        return dataclasses.replace(GOOD, cell=cell).covers(case, metric)

    assert covers("hf_static-w32_12-c8:tpot_p50")
    assert covers("hf_static-*:tpot_p50")
    assert covers("*:*")
    assert not covers("hf_static-*:ttft_p50")
    assert not covers("hf_naive-*:tpot_p50")
    assert not covers("HF_static-*:tpot_p50")
    assert covers("hf_static:launch_time", "launch_time", Case("hf_static", "m", "", ""))


def test_an_accepted_slowdown_passes_and_a_larger_one_does_not():
    told = decided.apply(judged(), (GOOD,), TODAY)
    assert told.verdict == "PASS"
    reason = told.findings[0].reason
    assert "up to 8.0% worse is accepted until 2027-01-31: exact fp32 (#12)" in str(told.findings)
    assert reason
    assert told.findings[0].was in ("REGRESSION", None)
    # The gate compares with the accepted level: its own margin comes on top.
    within, beyond = 1.08 * 1.05 - 1, 1.08 * 1.05 - 1 + 1e-6
    assert decided.apply(judged(worse_by=within - 1e-9), (GOOD,), TODAY).verdict == "PASS"
    more = decided.apply(judged(worse_by=beyond), (GOOD,), TODAY)
    assert more.verdict == "REGRESSION"
    assert "8.0% worse was accepted until 2027-01-31" in more.findings[0].reason


@pytest.mark.parametrize("gate", ["baseline", "reference"])
def test_a_suspicion_within_what_was_accepted_is_none(gate):
    found = judged("INCONCLUSIVE", gate, suspected=True)
    told = decided.apply(found, (GOOD,), TODAY)
    assert told.verdict == "PASS"
    assert not told.due
    unsure = judged("INCONCLUSIVE", gate)
    assert decided.apply(unsure, (GOOD,), TODAY) == unsure


@pytest.mark.parametrize("name", ["LIMIT", "INVALID", "MISSING", "INCOMPATIBLE", "WRONG", "PASS"])
def test_nothing_but_a_slowdown_can_be_accepted(name):
    assert decided.apply(judged(name), (GOOD,), TODAY) == judged(name)
    limit = judged("REGRESSION", "limit")
    assert decided.apply(limit, (GOOD,), TODAY) == limit


@given(st.sampled_from(verdict.ORDER))
def test_a_mute_silences_all_but_wrong_output(name):
    told = decided.apply(judged(name), (MUTE,), TODAY)
    quiet = name in verdict.FAILS | verdict.WAITS and name != "WRONG"
    assert told.verdict == ("MUTED" if quiet else judged(name).verdict)
    assert not told.fails(strict=True) or name == "WRONG"
    if quiet:
        assert told.findings[0].was == name
        assert told.findings[0].reason.startswith("muted until 2027-01-31: exact fp32 (#12); it")


def test_a_mute_of_a_cell_with_wrong_outputs_leaves_them_wrong():
    wrong = Finding(CASE, "tpot_p50", "correctness", "WRONG", "token 4")
    slow = judged().findings[0]
    told = decided.apply(Judged(CASE, "tpot_p50", (wrong, slow)), (MUTE,), TODAY)
    assert told.verdict == "WRONG"
    assert told.findings[0] == wrong


@given(st.integers(-400, 400))
def test_a_decision_holds_to_its_last_day_and_is_named_afterwards(days):
    today = MUTE.last_day + timedelta(days=days)
    told = decided.apply(judged(), (MUTE,), today)
    assert told.verdict == ("MUTED" if days <= 0 else "REGRESSION")
    if days > 0:
        assert told.findings[0].explanation[-1] == (
            "it was muted until 2027-01-31, which has passed: exact fp32"
        )


def test_what_covers_other_cells_changes_nothing():
    other = dataclasses.replace(GOOD, cell="hf_naive-*:tpot_p50")
    assert decided.apply(judged(), (other,), TODAY) == judged()
    elsewhere = dataclasses.replace(GOOD, effects={"hf_static-w32_12-c1:tpot_p50": 0.5})
    assert decided.apply(judged(), (elsewhere,), TODAY) == judged()


def test_of_several_the_widest_acceptance_counts():
    wide = dataclasses.replace(GOOD, effects={"*:tpot_p50": 0.5})
    told = decided.apply(judged(worse_by=0.4), (GOOD, wide), TODAY)
    assert told.verdict == "PASS"


def test_a_night_is_judged_by_the_decisions_of_its_own_day(factory):
    nights = factory.baseline_nights()
    files = {case: factory.baseline_of(nights, case) for case in nights[0].suite.cases()}
    slow = factory.dated(6, {"a": factory.Speed(), "b": factory.Speed(slower=0.2)})

    def told(*decided_):
        judged_ = factory.judge(slow, files.get, decisions=decided_)
        return factory.cell(judged_, "b", "ttft_p50")

    accepted = factory.decision("accept", "b-*", effect=0.2)
    assert told().verdict == "REGRESSION"
    assert told(accepted).verdict == "PASS"
    assert told(dataclasses.replace(accepted, until="2026-11-05")).verdict == "REGRESSION"
    assert told(dataclasses.replace(accepted, effects={"b-*:*": 0.1})).verdict == "REGRESSION"
    assert told(factory.decision("mute", "b-*")).verdict == "MUTED"
    # The history keeps what the gates said: a decision that ends hides nothing afterwards.
    record = verdict.record_of(slow, factory.judge(slow, files.get, decisions=(accepted,)))
    case = Case("b", "fake", "w32_16", "c4")
    kept = record.of(case).cells["ttft_p50"]
    assert (kept.verdict, kept.gates["baseline"]) == ("REGRESSION", "REGRESSION")
    assert kept.effects["baseline"] == pytest.approx(0.2, abs=0.01)
