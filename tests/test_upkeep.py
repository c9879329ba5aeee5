"""From the first night to an armed gate and beyond, with nothing kept but HEADWAY_HOME and git."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from headway import baseline, decisions, history, proposal, upkeep, verdict
from headway.core import Case
from headway.suite import BaselineGate

CASE = Case("b", "fake", "w32_16", "c4")
GATED = set(BaselineGate().metrics)
DEVICE, SUITE = "Test CPU x2", "smoke"
TODAY = date(2026, 11, 30)
UNTIL = (datetime.now(UTC).date() + timedelta(days=90)).isoformat()


def spend(results, home, root, folder):
    """Do what the end of a night does; return its judgement and what it says of a patch."""
    memory, skipped = verdict.recall(home, root, results.machine.device, results.suite.name)
    assert not skipped
    judged = verdict.judge(results, memory)
    record = verdict.record_of(results, judged)
    history.save(home, record)
    folder.mkdir(parents=True)
    proposed = proposal.propose(results.suite, (*memory.before(results), record), root)
    return judged, proposal.write_patch(folder, proposed)


def said(factory, judged, metric="ttft_p50"):
    return factory.cell(judged, "b", metric).findings[0]


def test_five_nights_in_wiped_workspaces_arm_the_gate(factory, tmp_path, monkeypatch):
    home, kept = tmp_path / "home", tmp_path / "kept.patch"
    for number in range(1, 6):
        work = tmp_path / f"work{number}"
        work.mkdir()
        monkeypatch.chdir(work)
        judged, line = spend(
            factory.dated(number, spread=0.002, seed=number), home, work, work / "n"
        )
        found = said(factory, judged)
        assert found.verdict == "RECORDING"
        if number < 5:
            assert f"{2 * number} of 10 launches, night {number} of 5" in found.reason
            assert line is None
        else:
            assert "10 launches over 5 nights, ready: accept it" in found.reason
            assert "baselines of 12 cells are ready" in line
            shutil.copy(work / "n" / "baseline.patch", kept)
        shutil.rmtree(work)
    work = tmp_path / "accepted"
    work.mkdir()
    monkeypatch.chdir(work)
    subprocess.run(["git", "apply", str(kept)], check=True)
    judged, line = spend(factory.dated(6, spread=0.002, seed=6), home, work, work / "n6")
    assert said(factory, judged).verdict == "PASS"
    assert line is None
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.1)}
    judged, line = spend(factory.dated(7, speeds, spread=0.002, seed=7), home, work, work / "n7")
    slow = {(j.case.instance, j.metric) for j in judged if j.verdict == "REGRESSION"}
    assert slow == {("b", metric) for metric in GATED}
    assert line is None


def test_a_gate_that_nobody_arms_in_time_is_red_and_says_what_to_do(factory, tmp_path):
    days = BaselineGate().arm_within_days
    nights = [factory.dated(day) for day in (1, 2, 3, 4, 5, days + 1, days + 2)]
    told = []
    for number, night in enumerate(nights):
        judged, _ = spend(night, tmp_path / "home", tmp_path, tmp_path / str(number))
        told.append(said(factory, judged))
    assert [f.verdict for f in told] == ["RECORDING"] * 6 + ["MISSING"]
    assert "are recorded since 2026-11-01" in told[-1].reason
    assert "headway baseline propose, review the patch and commit it" in told[-1].reason
    assert not told[-1].due


def test_too_few_nights_are_never_late(factory, tmp_path):
    for number, day in enumerate((1, 60, 120, 180)):
        judged, _ = spend(factory.dated(day), tmp_path / "home", tmp_path, tmp_path / str(number))
        assert said(factory, judged).verdict == "RECORDING"


def test_a_changed_machine_opens_an_epoch_that_is_due_and_records_anew(factory, tmp_path):
    nights = factory.baseline_nights(5)
    for case in nights[0].suite.cases():
        path = baseline.path_of(tmp_path, DEVICE, case)
        path.parent.mkdir(exist_ok=True)
        path.write_text(baseline.dump(factory.baseline_of(nights, case)), encoding="utf-8")
    for number in range(1, 3):
        changed = factory.dated(5 + number, os="Linux 7")
        judged, _ = spend(changed, tmp_path / "home", tmp_path, tmp_path / str(number))
        found = said(factory, judged)
        assert found.verdict == "RECORDING"
        assert found.due
        assert factory.cell(judged, "b", "ttft_p50").fails(strict=True)
        assert "a new epoch, the machine changed: os: Linux 6 x86_64 → Linux 7" in found.reason
        assert "pairs with a reference carry on" in found.reason
        assert f"{2 * number} of 10 launches, night {number} of 5" in found.reason
    # A cell that was never armed is not due while it records.
    judged, _ = spend(
        factory.dated(9, revision="r2"), tmp_path / "h", tmp_path / "x", tmp_path / "9"
    )
    assert not said(factory, judged).due


def test_a_night_that_is_resumed_counts_once(factory, tmp_path):
    night = factory.dated(1)
    for number in range(3):
        judged, _ = spend(night, tmp_path / "home", tmp_path, tmp_path / str(number))
    assert "2 of 10 launches, night 1 of 5" in said(factory, judged).reason


def files_of(factory, root, nights):
    for case in nights[0].suite.cases():
        path = baseline.path_of(root, DEVICE, case)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(baseline.dump(factory.baseline_of(nights, case)), encoding="utf-8")


def test_show_says_where_every_cell_stands(factory, tmp_path):
    nights = factory.baseline_nights(5)
    suite = nights[0].suite
    files_of(factory, tmp_path, nights)
    baseline.path_of(tmp_path, DEVICE, CASE).unlink()
    load = lambda case: baseline.load(baseline.path_of(tmp_path, DEVICE, case))  # noqa: E731
    records = factory.recorded(nights, load)
    muted = factory.decision("mute", "a-*", until="2026-12-05")
    expired = factory.decision("accept", "b-*", effect=0.1, until="2026-11-29")
    decided = (muted, expired)
    found = upkeep.standing(suite, records, tmp_path, DEVICE, decided, TODAY)
    assert len(found) == 4 * len(GATED)
    by_cell = {(s.row.case, s.row.metric): s for s in found}
    mine = by_cell[CASE, "ttft_p50"]
    assert mine.row.outcome.why == "ready"
    assert mine.decided == (
        "EXPIRED: up to 10.0% worse accepted until 2026-11-29: it is meant to be so",
    )
    other = by_cell[dataclasses.replace(CASE, instance="a"), "ttft_p50"]
    assert other.row.outcome.why == "armed"
    assert other.decided == ("muted until 2026-12-05: it is meant to be so (5 days left)",)
    # Where this machine has no history, what is stored is shown all the same.
    found = upkeep.standing(suite, (), tmp_path, DEVICE, (), TODAY)
    whys = {s.row.outcome.why for s in found}
    assert whys == {"armed", "nothing is recorded yet"}


def problems(factory, root, *suites):
    return upkeep.problems(root, suites or (factory.make_suite(),), TODAY)


def test_check_finds_nothing_wrong_in_what_was_accepted(factory, tmp_path):
    files_of(factory, tmp_path, factory.baseline_nights(5))
    decisions.save(tmp_path, factory.decision("mute", "a-*"))
    assert problems(factory, tmp_path) == []


def test_check_finds_what_is_wrong_one_line_each(factory, tmp_path):
    nights = factory.baseline_nights(6, spread=0.002)
    files_of(factory, tmp_path, nights[:5])
    path = baseline.path_of(tmp_path, DEVICE, CASE)
    (tmp_path / "decisions").mkdir()

    def only(text):
        (line,) = problems(factory, tmp_path)
        assert "\n" not in line
        assert text in line, line

    # A copy under another name; one of a case that no suite has; one in a foreign folder.
    copy = path.with_name("copy.json")
    shutil.copy(path, copy)
    assert len(problems(factory, tmp_path)) == 2
    copy.unlink()
    gone = dataclasses.replace(factory.baseline_of(nights, CASE), identity={"device": DEVICE})
    copy.write_text(baseline.dump(gone))
    only("is of no case of any suite")
    copy.unlink()
    (tmp_path / "elsewhere").mkdir()
    path.rename(tmp_path / "elsewhere" / path.name)
    only("it belongs into the folder Test_CPU_x2")
    (tmp_path / "elsewhere" / path.name).rename(path)
    # Schema, a metric that no gate is on, halves that disagree.
    text = path.read_text()
    path.write_text(text.replace('"schema": 2', '"schema": 3'))
    only("has schema 3; this Headway reads up to 2: upgrade Headway")
    stored = factory.baseline_of(nights, CASE)
    cells = {**stored.cells, "itl_p50": stored.cells["ttft_p50"]}
    path.write_text(baseline.dump(dataclasses.replace(stored, cells=cells)))
    only("itl_p50 is no metric of [baseline] in smoke")
    slow = [
        factory.dated(day, {"a": factory.Speed(), "b": factory.Speed(slower=0.1 * (day > 3))})
        for day in range(1, 7)
    ]
    path.write_text(baseline.dump(factory.baseline_of(slow, CASE)))
    assert len(problems(factory, tmp_path)) == len(GATED)
    assert "the halves of" in problems(factory, tmp_path)[0]
    path.write_text(text)
    # Decisions: expired, of no cell, unreadable.
    expired = decisions.save(tmp_path, factory.decision("mute", "a-*", until="2026-11-29"))
    only("has expired on 2026-11-29 and does nothing")
    expired.unlink()
    other = decisions.save(tmp_path, factory.decision("mute", "hf_*"))
    only("hf_*:* is no cell of any suite")
    other.write_text("{")
    only("is not a decision")


def test_what_is_accepted_is_what_the_newest_night_shows(factory, tmp_path):
    nights = factory.baseline_nights(5)
    files_of(factory, tmp_path, nights)
    load = lambda case: baseline.load(baseline.path_of(tmp_path, DEVICE, case))  # noqa: E731
    speeds = {"a": factory.Speed(), "b": factory.Speed(slower=0.2)}
    records = factory.recorded([*nights, factory.dated(6, speeds)], load)
    effects = upkeep.slowdowns(reversed(records), "*-c4:*")
    assert set(effects) == {f"b-w32_16-c4:{metric}" for metric in GATED}
    assert all(effect == pytest.approx(0.2, abs=0.01) for effect in effects.values())
    with pytest.raises(decisions.DecisionError, match="is slower in night 2026-11-06: there is n"):
        upkeep.slowdowns(reversed(records), "a-*:ttft_p50")
    with pytest.raises(decisions.DecisionError, match="no night in the history of this machine"):
        upkeep.slowdowns(reversed(records), "c-*:ttft_p50")


COMMAND = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]


def headway(folder, *words):
    env = {"HEADWAY_HOME": str(folder / "home"), "PATH": "/usr/bin:/bin"}
    command = [*COMMAND, "baseline", *words]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


MUTE = ("mute", "--cell", "a-*:ttft_p50", "--reason", "noisy", "--until")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*MUTE, "soon"), "until is 'soon'; it must be a day"),
        ((*MUTE, "2020-01-01"), "which has passed"),
        ((*MUTE, "2999-01-01"), "at most 180 days from today"),
        (("mute", "--cell", "a", "--reason", "x", "--until", UNTIL), "it must be CASE:METRIC"),
        (("mute", "--cell", "a:b", "--reason", "x"), "the following arguments are required"),
        (("accept", *MUTE[1:], UNTIL), "no night in the history of this machine has a cell a-*"),
        (("accept", *MUTE[1:], UNTIL, "--effect", "8"), "--effect is '8'; it must be a percentage"),
        (("accept", *MUTE[1:], UNTIL, "--run", "nowhere"), "nowhere cannot be read"),
        (("propose", "smoke"), "holds no night of smoke on"),
        (("propose", "no_such_suite"), "no_such_suite"),
        (("check",), "baselines is no folder"),
        (("frob",), "invalid choice"),
        ((), "the following arguments are required: ACTION"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(tmp_path, words, message):
    done = headway(tmp_path, *words)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "baselines").exists()


def test_decisions_are_made_from_the_command_line(tmp_path):
    done = headway(tmp_path, *MUTE, UNTIL, "--issue", "#7")
    assert done.returncode == 0, done.stderr
    done = headway(tmp_path, "accept", *MUTE[1:], UNTIL, "--effect", "8%")
    assert done.returncode == 0, done.stderr
    assert f"a-*:ttft_p50: up to 8.0% worse, until {UNTIL}" in done.stdout
    found, broken = decisions.load(tmp_path / "baselines")
    assert not broken
    assert {(d.kind, d.issue) for d in found} == {("mute", "#7"), ("accept", None)}


def test_merging_what_only_a_person_can_merge_fails_and_leaves_the_file(factory, tmp_path):
    first, second = factory.baseline_nights(2)
    ours, theirs = tmp_path / "ours.json", tmp_path / "theirs.json"
    ours.write_text(baseline.dump(factory.baseline_of([first], CASE)))
    theirs.write_text(baseline.dump(factory.baseline_of([second], CASE)))
    done = headway(tmp_path, "merge", "ours.json", "theirs.json")
    assert done.returncode == 0, done.stderr
    assert baseline.load(ours) == factory.baseline_of([first, second], CASE)
    other = factory.make_night(
        {"a": factory.Speed(), "b": factory.Speed(slower=0.5)},
        night=first.night,
        started_at=first.started_at,
    )
    theirs.write_text(baseline.dump(factory.baseline_of([other], CASE)))
    before = ours.read_text()
    done = headway(tmp_path, "merge", "ours.json", "theirs.json")
    assert done.returncode == 1
    assert "in night 2026-11-01 is" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert ours.read_text() == before


@pytest.fixture
def wiped(workspace: Any) -> Any:
    """Return a function that leaves nothing of a workspace but HEADWAY_HOME and a suite."""
    more = "\n[baseline]\nmin_launches = 5\nmin_nights = 5\nresolution = 5.0\ndrift_budget = 0.5\n"

    def wipe() -> None:
        for path in workspace.folder.iterdir():
            if path.name != "home":
                shutil.rmtree(path)
        workspace.write(more=more)
        subprocess.run(["git", "init", "-q"], cwd=workspace.folder, check=True)

    return wipe


@pytest.mark.slow
def test_five_nights_of_the_command_in_wiped_workspaces(
    workspace: Any, wiped: Any, tmp_path_factory: Any
) -> None:
    """The issue's proof: what survives is HEADWAY_HOME, and the patch that a person took."""
    one = ("--level", "c1")
    kept: Path = tmp_path_factory.mktemp("reviewer") / "baseline.patch"
    for number in range(1, 6):
        wiped()
        done = workspace.mini(*one)
        assert ("fake_a", "ttft_p50") in done.cells("RECORDING"), done.text
        said = f"{number} of 5 launches, night {number} of 5"
        assert (said in str(done.report())) == (number < 5)
        assert (done.night / "baseline.patch").exists() == (number == 5)
    assert "are ready; review and apply" in done.text
    shutil.copy(done.night / "baseline.patch", kept)
    wiped()
    again = workspace.run("baseline", "propose", "mini")  # the same, from the history alone
    assert again.code == 0, again.text
    assert (workspace.folder / "baseline.patch").read_text().splitlines()[-3:] == (
        kept.read_text().splitlines()[-3:]
    )
    subprocess.run(["git", "apply", str(kept)], cwd=workspace.folder, check=True)
    assert workspace.run("baseline", "check", "mini").code == 0
    assert "armed" in workspace.run("baseline", "show", "mini").text
    engines = ("fake_a", "fake_b")
    planted = [word for e in engines for word in ("--set", f"engine.{e}.args.slower=0.5")]
    slow = workspace.mini(*one, *planted)
    assert slow.code == 1
    assert {(e, m) for e in engines for m in GATED} <= slow.cells("REGRESSION")
    decide = ("--cell", "fake_?-*:*", "--reason", "it does more now", "--until", UNTIL)
    accepted = workspace.run("baseline", "accept", *decide)
    assert accepted.code == 0, accepted.text
    assert "fake_a-w-c1:tpot_p50: up to " in accepted.text
    judged = workspace.run("judge", str(slow.night))
    assert judged.code == 0, judged.text
