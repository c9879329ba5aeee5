"""DETBENCH's scores, its command, and recordings of real nights."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import detectors as bench
import detectors.detector
import detectors.episodes
import detectors.injections
import detectors.layout
import detectors.noise
import detectors.peers
import detectors.real_tools
import detectors.record
import detectors.recordings
import detectors.scores
import detectors.table
import detectors.work
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headway.night import journal

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench" / "detectors"

CANDIDATE, INJECTIONS = bench.injections.CANDIDATE, bench.injections.INJECTIONS
LAYOUT = bench.layout.SIMULATED


# Scores


def night(number: int = 0, *, episode: int = 0, slower: str = "", faster: str = "", **said: int):
    cells = frozenset(filter(None, slower.split(", ")))
    others = frozenset(filter(None, faster.split(", ")))
    return bench.detector.NightOutcome(episode, number, cells, 2.0, others, said)


ONE = "chat-c1 ttft_p50"
HIGH = "chat-c64 ttft_p50"


@pytest.mark.parametrize(
    ("name", "said", "right"),
    [
        ("none", night(PASS=24), True),
        ("none", night(slower=ONE), False),
        ("bad_night", night(slower=ONE), False),
        ("bad_night", night(INVALID=24), True),
        ("5%", night(slower=ONE), True),
        ("5%", night(faster=ONE), False),
        ("5%", night(INCONCLUSIVE=24), False),
        ("one_level", night(slower=ONE), False),
        ("one_level", night(slower=HIGH), True),
        ("improvement", night(faster=ONE), True),
        ("improvement", night(faster=HIGH, slower=ONE), False),
        ("driver_slower", night(RECORDING=24), True),
        ("driver_slower", night(INCOMPATIBLE=24, slower=ONE), False),
        ("workload", night(PASS=24), False),
        ("failures", night(LIMIT=1), True),
        ("failures", night(PASS=24), False),
        ("failures", night(LIMIT=1, slower=ONE), False),
    ],
)
def test_what_is_right_to_say(name, said, right):
    assert bench.scores.tally([said], INJECTIONS[name], LAYOUT).right == right


def test_detections_are_counted_by_episode_and_alarms_by_night():
    outcomes = [
        night(0, episode=0),
        night(1, episode=0, slower=HIGH),
        night(2, episode=0),
        night(0, episode=1, slower=f"{ONE}, {HIGH}"),
        night(1, episode=1, slower=HIGH),
        night(2, episode=1),
    ]
    counts = bench.scores.tally(outcomes, INJECTIONS["one_level"], LAYOUT)
    assert (counts.episodes, counts.nights, counts.alarms) == (2, 6, 3)
    assert (counts.found, counts.found_in_3, counts.found_ever) == (1, 2, 2)
    assert (counts.named, counts.hit, counts.cells) == (0.5, 1 / 8, 2)
    parts = [outcomes[:3], outcomes[3:]]
    halves = [bench.scores.tally(part, INJECTIONS["one_level"], LAYOUT) for part in parts]
    assert halves[0] + halves[1] == counts


def test_the_third_night_is_within_three_and_the_fourth_is_not():
    for late, within in ((2, 1), (3, 0)):
        nights = [night(n, slower=ONE if n == late else "") for n in range(4)]
        counts = bench.scores.tally(nights, INJECTIONS["drift"], LAYOUT)
        assert (counts.found, counts.found_in_3, counts.found_ever) == (0, within, 1)


def test_no_chunk_has_the_luck_of_another():
    todo = bench.work.jobs(["fixed_5pct"], ["shared"], ["none"], 1, 50)
    made = [(job.num_nights, bench.work.do(job).tallies) for job in todo["rules"]]
    assert [count for count, _ in made] == [10] * 5
    cells = [tallies["fixed_5pct", "shared", "none"].cells for _, tallies in made]
    assert len(set(cells)) > 2


def test_the_family_that_had_the_least_time_comes_next():
    jobs = {name: iter(range(3)) for name in "ab"}
    queue = bench.work.Queue(jobs, math.inf)
    order = []
    while (job := queue.next()) is not None:
        order.append(job)
        queue.spent["a"] += 5.0 * (len(order) == 1)
    assert sorted(order) == [0, 0, 1, 1, 2, 2]
    assert order[1:4] == [0, 1, 2]
    assert bench.work.Queue({"a": iter(range(3))}, 0.0).next() is None


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 2000), st.data())
def test_bounds_are_clopper_and_pearson(total, data):
    count = data.draw(st.integers(0, total))
    low, high = bench.scores.interval(count, total)
    want_low = stats.beta.ppf(0.025, count, total - count + 1) if count else 0.0
    want_high = stats.beta.ppf(0.975, count + 1, total - count) if count < total else 1.0
    assert (low, high) == pytest.approx((want_low, want_high), abs=1e-4)
    one_sided = stats.beta.ppf(0.95, count + 1, total - count) if count < total else 1.0
    assert bench.scores.upper(count, total) == pytest.approx(one_sided, abs=1e-6)


def test_three_hundred_quiet_nights_show_one_percent():
    assert 0.0095 < bench.scores.upper(0, 300) < 0.01
    assert bench.scores.upper(0, 0) is None
    assert bench.scores.interval(0, 0) is None


def test_a_row_has_what_the_issue_asks_for_and_none_for_what_was_not_run():
    said = [night(PASS=24), night(episode=1, slower=ONE)]
    quiet = bench.scores.tally(said, INJECTIONS["none"], LAYOUT)
    row = bench.scores.row("some", "5%", "shared", {"none": quiet})
    asked = "detector preset sensitivity false_alarms_per_100_nights false_alarms_upper found_2pct "
    asked += "found_3pct found_5pct pairs_mean launches_per_night"
    assert set(asked.split()) <= set(row)
    assert row["false_alarms_per_100_nights"] == 50.0
    assert row["false_alarms_upper"] > 90
    assert row["found_5pct"] is row["pairs_mean"] is None
    json.dumps(row, allow_nan=False)
    assert "some" in bench.table.render([row])


# The command


def run(*words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCH), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["benchmark"] == "detbench"
    return last["rows"]


FEW = ["--presets", "shared", "dedicated", "--detectors", "fixed_5pct", "conbench_z5"]
FEW += ["--injections", "none", "10%", "bad_night"]


def test_the_command_says_the_same_with_any_number_of_processes():
    one, two = (run(*FEW, "--nights", 24, "--processes", n) for n in (1, 2))
    rows = rows_of(one)
    assert rows == rows_of(two)
    named = itertools.product(("shared", "dedicated"), ("fixed_5pct", "conbench_z5"))
    assert [(r["preset"], r["detector"]) for r in rows] == list(named)
    assert all(r["nights"] == (24 if r["preset"] == "shared" else 6) for r in rows)
    dedicated = rows[2]
    assert dedicated["false_alarms_per_100_nights"] == 0
    assert dedicated["found_10pct"] == 1
    assert dedicated["scenarios"]["bad_night"]["right"] == 0
    assert "24 nights" in one.stderr
    assert "dedicated: alarms" in one.stdout
    assert run(*FEW, "--nights", 24, "--seed", 2).stdout != one.stdout


def test_without_time_there_is_no_score():
    rows = rows_of(run(*FEW, "--seconds", 0))
    assert all(r["not_run"] and r["false_alarms_per_100_nights"] is None for r in rows)


@pytest.mark.parametrize(
    "words", [["--presets", "quiet"], ["--nights", "0"], ["--detectors", "hunch"]]
)
def test_what_is_not_known_is_refused(words):
    done = run(*words)
    assert done.returncode == 2
    assert words[1] in done.stderr


# Recordings


def report(factory: Any, folder: Path, results: Any) -> Path:
    """Write a night's journal as the night would."""
    header = journal.Header(
        journal.SCHEMA,
        results.night,
        "key",
        results.started_at,
        results.suite,
        results.machine,
        results.models,
    )
    items = [header, journal.Expected(results.expected), *results.launches, *results.runs]
    journal.append(folder / results.night, *items, journal.End("2026-11-30T01:00:00Z"))
    return folder


def calibrated(results: Any) -> Any:
    """Give each Run what the kernels read around it."""
    seconds = {"matmul": 0.02, "copy": 0.04, "launch": 0.01, "python": 0.008}
    runs = [
        replace(run, calibration=(seconds, {k: v * (1 + n / 100) for k, v in seconds.items()}))
        for n, run in enumerate(results.runs)
    ]
    return replace(results, runs=tuple(runs))


@pytest.fixture(scope="module")
def recorded(factory, tmp_path_factory):
    """Ten nights of two equal engines, recorded by the command."""
    folder = tmp_path_factory.mktemp("recorded")
    for number in range(10):
        name = f"2026-11-{number + 1:02}"
        made = factory.make_night(night=name, spread=0.02, seed=number)
        report(factory, folder / "reports", calibrated(made))
    done = run("record", folder / "reports", "--name", "pair", "--out", folder / "out")
    assert done.returncode == 0, done.stderr
    assert "10 nights, 40 launches, 2 cases" in done.stdout
    return folder / "out" / "pair.json"


def test_a_recording_holds_the_values_and_nothing_private(recorded, factory):
    text = recorded.read_text()
    assert len(text) < 40_000
    assert not any(word in text for word in ("prompt", "SECRET", "hostname", "events"))
    recording = bench.recordings.load(recorded)
    first = factory.make_night(night="n", spread=0.02, seed=0)
    run = next(r for r in first.runs if r.case.instance == "a")
    column = recording.layout.metrics.index("ttft_p50")
    ttft = recording.file.nights[0].launches[0].values[0][column]
    assert ttft == pytest.approx(bench.record.metrics.ALL["ttft_p50"].of_run(run), rel=1e-5)
    assert [launch.instance for launch in recording.file.nights[0].launches] == ["a", "b", "a", "b"]


def launches_of(drawn: Any, count: int) -> list[Any]:
    """The values of a night's launches, candidate and reference in turn."""
    arms = itertools.cycle((CANDIDATE, bench.injections.REFERENCE))
    return [drawn.launch(arm).values for arm in itertools.islice(arms, count)]


def test_nights_are_drawn_from_a_recording(recorded):
    recording = bench.recordings.load(recorded)
    assert recording.launches == 4
    stacked = np.concatenate([values for values, _, _ in recording.nights])
    assert np.median(stacked, axis=0) == pytest.approx(0.0, abs=1e-9)
    # A night's noise is of the whole launch: better throughput is what lower latencies are.
    throughput = recording.layout.metrics.index("output_throughput")
    assert stacked[..., throughput] == pytest.approx(stacked[..., 1], abs=2e-3)
    series = recording.series((1,), INJECTIONS["5%"])
    drawn = launches_of(series.night(3), 4)
    index = series.night(3).index
    assert drawn[1] == pytest.approx(recording.nights[index][0][1])
    assert drawn[0] == pytest.approx(recording.nights[index][0][0] + math.log1p(0.05))
    assert len({series.night(n).index for n in range(60)}) == 10
    last = series.night(3)
    for _ in range(4):
        draw = last.launch(CANDIDATE)
    assert draw.after.shape == (2, 4)
    assert last.calibrate()["matmul"] > 0
    with pytest.raises(LookupError, match="4 launches"):
        last.launch(CANDIDATE)


def test_detectors_run_on_a_recording_if_it_has_enough_launches(recorded):
    recording = bench.recordings.load(recorded)
    outcomes = bench.peers.PEERS["fixed_5pct"].run(recording, INJECTIONS["10%"], 1, 20)
    assert sum(o.alarm for o in outcomes) > 30
    with pytest.raises(bench.detector.NotAvailable, match="10 launches"):
        bench.peers.PEERS["benchstat_u05"].run(recording, INJECTIONS["none"], 1, 1)


def test_what_cannot_be_used_is_left_out_and_counted(factory, tmp_path):
    good = calibrated(factory.make_night(night="a"))
    runs = list(good.runs)
    runs[0] = replace(runs[0], invalid=("the client was late",))
    runs[3] = replace(runs[3], calibration=runs[3].calibration[:1])
    report(factory, tmp_path, replace(good, runs=tuple(runs)))
    done = run("record", tmp_path, "--name", "few", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert "2 launches" in done.stdout
    assert "a Run is invalid" in done.stderr
    assert "a calibration is missing" in done.stderr


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(schema=7), "schema 7; this DETBENCH reads 1"),
        (lambda d: d.pop("better"), "better is missing"),
        (lambda d: d["better"].update(ttft_p50="up"), "higher or lower"),
        (lambda d: d["nights"][0]["launches"][1]["values"].pop(), "of b has values which are not"),
        (lambda d: d["nights"][0]["launches"][1]["values"][0].__setitem__(0, 0), "no measurement"),
        (lambda d: d["nights"][0].update(launches=[]), "without launches"),
    ],
)
def test_a_broken_recording_is_one_clear_error(recorded, tmp_path, change, says):
    data = json.loads(recorded.read_text())
    change(data)
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps(data))
    bench.recordings.load.cache_clear()
    with pytest.raises(bench.recordings.RecordingError, match=says) as error:
        bench.recordings.load(broken)
    assert "broken.json" in str(error.value)


def test_engines_that_differ_are_no_recording(factory, tmp_path):
    made = factory.make_night(night="a")
    suite = made.suite
    other = replace(suite.instances[1], args={"slower": 0.1})
    suite = replace(suite, instances=(suite.instances[0], other))
    report(factory, tmp_path, replace(made, suite=suite))
    done = run("record", tmp_path, "--name", "two", "--out", tmp_path)
    assert done.returncode == 2
    assert "must be equal" in done.stderr
    done = run("record", tmp_path, "--name", "two", "--out", tmp_path, "--instances", "a")
    assert done.returncode == 0, done.stderr
    assert "2 launches" in done.stdout


def test_no_nights_are_no_recording(tmp_path):
    done = run("record", tmp_path, "--name", "none", "--out", tmp_path)
    assert done.returncode == 2
    assert "no finished night" in done.stderr


@pytest.mark.parametrize("name", bench.recordings.names())
def test_the_recordings_that_are_shipped_can_be_read(name):
    recording = bench.recordings.load(bench.recordings.FOLDER / f"{name}.json")
    assert len(recording.nights) >= 5
