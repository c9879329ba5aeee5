"""What the nights so far would make of the stored baselines, and what they never make of them."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from headway import baseline, proposal, verdict
from headway.anchor import MOST_NIGHTS
from headway.core import Case
from headway.suite import BaselineGate, Limit

CASE = Case("b", "fake", "w32_16", "c4")
GATED = set(BaselineGate().metrics)
DEVICE = "Test CPU x2"


def git(folder, *arguments):
    command = ["git", "-c", "user.name=t", "-c", "user.email=t@t", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True)


def loader(root):
    return lambda case: baseline.load(baseline.path_of(root, DEVICE, case))


def made(factory, nights, root, since=None):
    """Judge nights one after the other by what is stored; propose after the last one."""
    return proposal.propose(nights[0].suite, factory.recorded(nights, loader(root)), root, since)


def accept(proposed):
    for path, _, text in proposed.changes:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def cells(proposed):
    """Return the metrics proposed, per case name."""
    found = {}
    for row in proposed.proposed:
        found.setdefault(row.case.name, set()).add(row.metric)
    return found


def instances(proposed):
    return {row.case.instance for row in proposed.proposed}


def why(proposed, metric="ttft_p50", case=CASE):
    (row,) = [r for r in proposed.rows if (r.case, r.metric) == (case, metric)]
    return row.outcome.why


def stored(root, case=CASE):
    return baseline.load(baseline.path_of(root, DEVICE, case))


def test_enough_nights_are_proposed_and_fewer_refused(factory, tmp_path):
    nights = factory.baseline_nights(5)
    for count in range(1, 5):
        proposed = made(factory, nights[:count], tmp_path)
        assert not proposed.changes
        assert why(proposed) == f"{2 * count} of 10 launches, night {count} of 5"
    proposed = made(factory, nights, tmp_path)
    assert why(proposed) == "ready"
    assert cells(proposed) == dict.fromkeys(
        ("a-w32_16-c1", "a-w32_16-c4", "b-w32_16-c1", "b-w32_16-c4"), GATED
    )
    accept(proposed)
    found = stored(tmp_path)
    assert found == factory.baseline_of(nights, CASE)
    assert set(found.nights) == {night.night for night in nights}
    assert found.facts(nights[0].night).calibration == factory.KERNELS
    # What is armed is not proposed again.
    again = made(factory, nights, tmp_path)
    assert not again.changes
    assert why(again) == "armed"


def test_the_table_says_on_what_grounds(factory, tmp_path):
    head, *lines = proposal.table(made(factory, factory.baseline_nights(5), tmp_path).rows)
    assert head.split()[:3] == ["cell", "launches", "nights"]
    (line,) = [line for line in lines if line.startswith("b-w32_16-c4:ttft_p50")]
    assert line.split()[1:3] == ["10", "5"]
    assert " ms " in line
    assert "±" in line
    assert line.endswith("ready")


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A git repository with a folder `some where` in it, which is the current one."""
    git(tmp_path, "init", "-q")
    folder = tmp_path / "some where"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return tmp_path


@pytest.mark.parametrize("root", ["baselines", "deep/er/base lines", "./baselines", "{here}/b"])
def test_the_patch_applies_where_it_was_made_for_any_folder_of_baselines(factory, repository, root):
    """In a folder below the repository's top, for new files and for known ones."""
    here = repository / "some where"
    root = Path(root.format(here=here))
    for count in (5, 10):
        proposed = made(factory, factory.baseline_nights(count), root)
        assert len(proposed.changes) == 4
        line = proposal.write_patch(here / "night", proposed)
        assert line == f"baselines of 12 cells are ready; review and apply:  git apply {here}" + (
            "/night/baseline.patch"
        )
        text = (here / "night" / "baseline.patch").read_text()
        assert text.startswith("# cell ")  # the table, for whoever reviews it
        git(here, "apply", "night/baseline.patch")
        assert stored(root).cells["ttft_p50"].num_nights == count


def test_baselines_above_the_current_folder_are_refused_and_no_night_fails_by_it(
    factory, repository, tmp_path
):
    proposed = made(factory, factory.baseline_nights(5), Path("../baselines"))
    with pytest.raises(baseline.BaselineError, match=r"not below .*start in a folder above"):
        proposal.patch_of(proposed, Path())
    line = proposal.write_patch(tmp_path, proposed)
    assert "is not written: " in line
    assert proposal.write_patch(tmp_path, proposal.Proposal()) is None
    (tmp_path / "file").touch()
    proposed = made(factory, factory.baseline_nights(5), Path("baselines"))
    assert "cannot be written" in proposal.write_patch(tmp_path / "file", proposed)


def test_what_failed_its_limit_is_left_out_by_name(factory, tmp_path):
    limits = (Limit("ttft_p50", engine="b", over="a", max=1.05),)
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.2)}
    suite = factory.make_suite(limits=limits)
    nights = [factory.dated(day, speeds, suite=suite, spread=0.002, seed=day) for day in range(5)]
    proposed = made(factory, nights, tmp_path)
    assert cells(proposed)["a-w32_16-c4"] == GATED
    assert cells(proposed)["b-w32_16-c4"] == GATED - {"ttft_p50"}
    assert why(proposed).startswith("not proposed (LIMIT: 1.20")


def armed(factory, root, count=5, **changes):
    nights = factory.baseline_nights(count, spread=0.002, **changes)
    accept(made(factory, nights, root))
    return nights


def nights_from(factory, first, count, slower=0.0, version="1.0", **changes):
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=slower, version=version)}
    days = range(first, first + count)
    return [factory.dated(day, speeds, spread=0.002, seed=day, **changes) for day in days]


def test_a_regression_never_becomes_the_standard(factory, tmp_path):
    nights = armed(factory, tmp_path)
    slow = nights_from(factory, 6, 5, slower=0.2)
    proposed = made(factory, [*nights, *slow], tmp_path)
    assert instances(proposed) == {"a"}  # whose nights are good, and ten by now
    assert why(proposed).startswith("armed; not proposed (REGRESSION: ")
    # Whoever wants it deletes the file, and says from which night on.
    baseline.path_of(tmp_path, DEVICE, CASE).unlink()
    proposed = made(factory, [*nights, *slow], tmp_path)
    assert "its halves disagree: +20" in why(proposed)
    assert why(proposed).endswith("say from which night on (--since)")
    proposed = made(factory, [*nights, *slow], tmp_path, since=slow[0].started_at[:10])
    assert cells(proposed)["b-w32_16-c4"] == GATED


def test_neither_does_one_that_is_suspected_or_accepted_or_muted(factory, tmp_path):
    nights = armed(factory, tmp_path)
    suspected = nights_from(factory, 6, 2, slower=0.04)
    proposed = made(factory, [*nights, *suspected], tmp_path)
    assert why(proposed).startswith("armed; not proposed (INCONCLUSIVE: ")
    slow = nights_from(factory, 6, 6, slower=0.2)
    records = factory.recorded(nights, loader(tmp_path))
    decided = factory.decision("accept", "b-*", effect=0.3), factory.decision("mute", "a-*")
    for night in slow:
        judged = factory.judge(night, loader(tmp_path), nights=records, decisions=decided)
        assert factory.cell(judged, "b", "ttft_p50").verdict == "PASS"
        records += (verdict.record_of(night, judged),)
    proposed = proposal.propose(slow[0].suite, records, tmp_path)
    assert not [row for row in proposed.proposed if row.case == CASE]
    assert why(proposed).startswith("armed; not proposed (REGRESSION: ")


def test_another_thing_is_never_mixed_into_what_is_stored(factory, tmp_path):
    nights = armed(factory, tmp_path)
    other = [factory.dated(day, revision="r2") for day in range(6, 11)]
    proposed = made(factory, [*nights, *other], tmp_path)
    assert not proposed.changes
    assert "another thing was measured: revision: r1 → r2; delete" in why(proposed)
    for case in nights[0].suite.cases():
        baseline.path_of(tmp_path, DEVICE, case).unlink()
    proposed = made(factory, [*nights, *other], tmp_path)
    assert why(proposed) == "ready"
    accept(proposed)
    assert set(stored(tmp_path).nights) == {night.night for night in other}


def test_an_engine_that_fails_miscounts_or_is_wrong_is_not_proposed_at_all(factory, tmp_path):
    nights = factory.baseline_nights(5)
    speeds = {"a": factory.Speed(), "b": factory.Speed(fails=1, salt=1)}
    failing = factory.dated(6, speeds)
    proposed = made(factory, [*nights, failing], tmp_path)
    assert instances(proposed) == {"a"}
    assert why(proposed).startswith("not proposed, success_rate is LIMIT: ")
    wrong = factory.verified(factory.dated(6, {"a": factory.Speed(), "b": factory.Speed(salt=1)}))
    wrong = factory.verified(wrong, first_wrong=1)
    proposed = made(factory, [*nights, wrong], tmp_path)
    assert instances(proposed) == {"b"}
    assert "greedy_equality is WRONG" in why(proposed, case=dataclasses.replace(CASE, instance="a"))
    night = factory.dated(6)
    miscounted = tuple(
        dataclasses.replace(
            run, records=tuple(dataclasses.replace(r, prompt_tokens=1) for r in run.records)
        )
        if run.case == CASE
        else run
        for run in night.runs
    )
    proposed = made(factory, [*nights, dataclasses.replace(night, runs=miscounted)], tmp_path)
    assert set(cells(proposed)) == {"a-w32_16-c1", "a-w32_16-c4", "b-w32_16-c1"}
    assert why(proposed).startswith("not proposed, token_accuracy is LIMIT")


@pytest.mark.parametrize("fault", ["wrong", "unverified", "failing", "invalid"])
def test_a_night_that_was_not_sound_never_counts(factory, tmp_path, fault):
    bad = factory.dated(1, {"a": factory.Speed(), "b": factory.Speed(fails=fault == "failing")})
    if fault == "wrong":
        bad = factory.verified(bad, first_wrong=99)
    if fault == "unverified":
        bad = dataclasses.replace(bad, verifications={})
    if fault == "invalid":
        runs = tuple(dataclasses.replace(run, invalid=("the client slept",)) for run in bad.runs)
        bad = dataclasses.replace(bad, runs=runs)
    good = [factory.dated(day) for day in range(2, 6)]
    assert why(made(factory, [bad, *good], tmp_path)) == "8 of 10 launches, night 4 of 5"


def test_a_launch_that_is_missing_is_not_proposed(factory, tmp_path):
    night = factory.dated(6)
    runs = tuple(r for r in night.runs if (r.case, r.launch) != (CASE, 1))
    nights = [*factory.baseline_nights(5), dataclasses.replace(night, runs=runs)]
    proposed = made(factory, nights, tmp_path)
    assert "b-w32_16-c4" not in cells(proposed)
    assert "MISSING" in why(proposed)


def test_an_invalid_launch_that_a_cell_can_do_without_is_not_stored(factory, tmp_path):
    suite = factory.make_suite(launches=4)
    night = factory.make_night(suite=suite)
    runs = tuple(
        dataclasses.replace(r, invalid=("the client slept",)) if r.launch == 2 else r
        for r in night.runs
    )
    night = dataclasses.replace(night, runs=runs)
    record = verdict.record_of(night, factory.judge(night))
    samples = record.of(CASE).sample.cells["ttft_p50"].samples
    assert [sample.launch for sample in samples] == [1, 3, 4]


def test_only_the_nights_of_the_present_engine_count_if_they_are_enough(factory, tmp_path):
    old = nights_from(factory, 1, 5)
    few = nights_from(factory, 6, 3, version="1.1")
    proposed = made(factory, [*old, *few], tmp_path)
    assert why(proposed) == "ready, over 2 states of the engine"
    accept(proposed)
    assert stored(tmp_path).treatment.version == "1.1"
    assert stored(tmp_path).cells["ttft_p50"].num_nights == 8
    baseline.path_of(tmp_path, DEVICE, CASE).unlink()
    enough = nights_from(factory, 6, 5, version="1.1")
    proposed = made(factory, [*old, *enough], tmp_path)
    assert why(proposed) == "ready, of the present engine alone (5 others)"
    accept(proposed)
    assert set(stored(tmp_path).nights) == {night.night for night in enough}


def test_what_somebody_tried_with_other_arguments_does_not_count(factory, tmp_path):
    tried = factory.make_suite(args={"step_s": 0.015})
    odd = factory.dated(3, suite=tried)
    nights = [factory.dated(day) for day in (1, 2, 4, 5)]
    nights[2:2] = [odd]
    proposed = made(factory, nights, tmp_path)
    left = ", 1 left out: the engine had other arguments"
    assert why(proposed) == f"8 of 10 launches, night 4 of 5{left}"
    records = factory.recorded(nights)
    judged = factory.judge(factory.dated(6), nights=records)
    finding = factory.cell(judged, "b", "ttft_p50").findings[0]
    assert "10 launches over 5 nights, ready" in finding.reason
    proposed = made(factory, [*nights, factory.dated(6)], tmp_path)
    assert why(proposed) == f"ready{left}"


def test_a_night_on_a_machine_that_moved_is_left_out(factory, tmp_path):
    nights = factory.baseline_nights(5)
    odd = factory.dated(6, kernels={**factory.KERNELS, "copy": 0.040})
    proposed = made(factory, [*nights, odd], tmp_path)
    assert why(proposed) == "ready, 1 left out: the machine was another"
    accept(proposed)
    assert odd.night not in stored(tmp_path).nights


def test_a_new_epoch_takes_the_place_of_the_old_one_when_it_is_ready(factory, tmp_path):
    nights = armed(factory, tmp_path)
    new = [factory.dated(day, os="Linux 7") for day in range(6, 11)]
    proposed = made(factory, [*nights, *new[:4]], tmp_path)
    assert why(proposed) == "8 of 10 launches, night 4 of 5"
    proposed = made(factory, [*nights, *new], tmp_path)
    assert why(proposed) == ("ready, in place of what was measured before the machine changed")
    accept(proposed)
    assert set(stored(tmp_path).nights) == {night.night for night in new}


def test_an_anchor_is_extended_to_ten_nights_and_to_twenty_and_then_fixed(factory, tmp_path):
    nights = armed(factory, tmp_path)
    for count in range(1, 5):
        more = nights_from(factory, 6, count)
        assert not made(factory, [*nights, *more], tmp_path).changes
    more = nights_from(factory, 6, 7)
    proposed = made(factory, [*nights, *more], tmp_path)
    assert why(proposed).startswith("sharper: 10 nights in place of 5")
    accept(proposed)
    assert set(stored(tmp_path).nights) == {night.night for night in (*nights, *more[:5])}
    later = nights_from(factory, 13, 15)
    assert not made(factory, [*nights, *more, *later[:7]], tmp_path).changes
    proposed = made(factory, [*nights, *more, *later], tmp_path)
    assert why(proposed).startswith("sharper: 20 nights in place of 10, and fixed from then on")
    accept(proposed)
    assert set(stored(tmp_path).nights) == {n.night for n in (*nights, *more, *later[:8])}
    much_later = nights_from(factory, 28, 25)
    assert not made(factory, [*nights, *more, *later, *much_later], tmp_path).changes
    assert MOST_NIGHTS == 20


def test_a_confirmed_improvement_is_proposed_and_nothing_ever_loosens(factory, tmp_path):
    nights = armed(factory, tmp_path)
    fast = nights_from(factory, 6, 5, slower=-0.2)
    proposed = made(factory, [*nights, *fast[:1]], tmp_path)
    assert why(proposed) == "armed"
    proposed = made(factory, [*nights, *fast[:4]], tmp_path)
    assert why(proposed) == "armed; faster, confirmed: night 4 of 5 of a new standard"
    assert not proposed.changes
    proposed = made(factory, [*nights, *fast], tmp_path)
    assert why(proposed).startswith("faster, confirmed: becomes the standard")
    assert cells(proposed)["b-w32_16-c4"] == GATED
    accept(proposed)
    assert set(stored(tmp_path).nights) == {night.night for night in fast}
    # Back at the old speed it is slower, however long that lasts.
    back = nights_from(factory, 11, 12)
    proposed = made(factory, [*nights, *fast, *back], tmp_path)
    assert not [row for row in proposed.proposed if row.case == CASE]
    assert "REGRESSION" in why(proposed)


def test_a_gate_that_nobody_armed_in_time_can_still_be_armed(factory, tmp_path):
    nights = factory.baseline_nights(40)
    records = factory.recorded(nights)
    assert records[-1].of(CASE).cells["ttft_p50"].verdict == "MISSING"
    assert why(proposal.propose(nights[0].suite, records, tmp_path)) == "ready"


def test_what_another_branch_accepted_too_little_of_is_filled_up(factory, tmp_path):
    nights = factory.baseline_nights(5)
    path = baseline.path_of(tmp_path, DEVICE, CASE)
    path.parent.mkdir(parents=True)
    path.write_text(baseline.dump(factory.baseline_of(nights[:2], CASE)), encoding="utf-8")
    # Of the first two nights this machine's history knows nothing.
    records = factory.recorded(nights[2:], loader(tmp_path))
    proposed = proposal.propose(nights[0].suite, records, tmp_path)
    assert why(proposed) == "ready"
    accept(proposed)
    assert json.loads(path.read_text()) == json.loads(
        baseline.dump(factory.baseline_of(nights, CASE))
    )
