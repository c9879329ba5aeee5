"""A minute of DETBENCH: the shipped night on simulated machines, with fixed seeds.

Whole figures are `make bench-detectors`'s; what is wrong in here is wrong by far.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
from detectors import ours, work
from detectors.injections import INJECTIONS
from detectors.scores import Tally

from headway.history import day_of

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parent.parent
FAMILY = "headway_baseline 28"


def tally(detector: str, injection: str, nights: int, preset: str = "shared") -> Tally:
    """Run some episodes of one injection, the same ones every time."""
    done = work.do(work.Job((detector,), preset, (injection,), 7, 0, nights))
    assert not done.missing
    return done.tallies[detector, preset, injection]


@pytest.mark.parametrize(
    ("detector", "nights"),
    [("headway_reference 5%", 40), ("headway_reference 1.5%", 20), ("headway_baseline", 8)],
)
def test_equal_engines_raise_no_alarm(detector: str, nights: int) -> None:
    quiet = tally(detector, "none", nights)
    assert (quiet.nights, quiet.alarms) == (nights, 0)


@pytest.mark.parametrize(
    ("detector", "injection", "nights", "least"),
    [
        ("headway_reference 5%", "5%", 8, 7),
        ("headway_reference 5%", "10%", 6, 6),
        ("headway_reference 1.5%", "2%", 6, 5),
        ("headway_reference 1.5%", "one_level", 4, 3),
        ("headway_reference 5%", "improvement", 6, 5),
        ("headway_baseline", "10%", 6, 3),
    ],
)
def test_a_change_is_found_the_same_night_and_called_what_it_is(
    detector: str, injection: str, nights: int, least: int
) -> None:
    changed = tally(detector, injection, nights)
    assert changed.found >= least
    # An improvement is right without an alarm; of a slowdown only what it touches is blamed.
    if INJECTIONS[injection].expected == "faster":
        assert changed.alarms == 0
    else:
        assert changed.named == pytest.approx(changed.alarmed_first)


@pytest.mark.parametrize("injection", ["bad_night", "driver_slower", "workload"])
@pytest.mark.parametrize("detector", ["headway_reference 5%", "headway_baseline"])
def test_what_is_not_the_engines_doing_is_not_blamed_on_it(detector: str, injection: str) -> None:
    told = tally(detector, injection, 3)
    assert (told.alarms, told.right) == (0, 3)


def test_the_nights_of_an_episode_are_a_day_apart_however_fast_they_pass() -> None:
    nights = ours._armed(work.conditions("shared"), 7, 0, 5).nights
    days = [day_of(record.started_at) for record in nights]
    assert [b - a for a, b in itertools.pairwise(days)] == [timedelta(days=1)] * 4


def test_a_hostile_machine_makes_it_say_that_it_cannot_tell() -> None:
    hostile = tally("headway_reference 5%", "none", 10, "hostile")
    assert hostile.alarms == 0
    assert {"INCONCLUSIVE", "INVALID"} & set(hostile.verdicts)


def test_an_interrupted_benchmark_prints_what_there_is_and_leaves_nothing_running() -> None:
    command = [sys.executable, "bench/detectors", "--processes", "2", "--presets", "shared"]
    command += ["--injections", "none", "--nights", "1000", "--detectors"]
    command += ["headway_reference 5%", "headway_baseline", "conbench_z5"]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout
    assert process.stderr
    try:
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rows = json.loads(process.stdout.read().splitlines()[-1])
        assert process.wait(30) == 3
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    assert rows["interrupted"] is True
    assert any(row["nights"] >= 10 for row in rows["rows"])
    gone_by = time.monotonic() + 10
    while _is_there(process.pid) and time.monotonic() < gone_by:
        time.sleep(0.05)
    assert not _is_there(process.pid)


def test_work_that_no_detector_has_is_not_begun() -> None:
    todo = work.jobs(["headway_baseline"], ["shared", "fleet"], ["5%"], 1, 200)
    counts = [(job.preset, job.episodes("headway_baseline", "5%")) for job in todo[FAMILY]]
    assert counts == [("shared", 10), ("fleet", 10), *[("shared", 10)] * 3]


def _is_there(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
