"""The plan's order, the journal, and the lock on the device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import night, suite
from headway.core import LaunchRecord, Verification
from headway.night import journal
from headway.night.session import _key

SUITES = Path(__file__).parents[1] / "perf_tests" / "suites"
SMOKE = suite.load(SUITES / "smoke.toml")


@given(st.integers(0, 1000), st.integers(1, 6))
def test_launches_are_interleaved_and_levels_rotate(seed: int, launches: int) -> None:
    planned = night.order(replace(SMOKE, seed=seed, launches=launches))
    names = [item.instance for item in planned]
    for start in range(0, len(names), 2):
        assert sorted(names[start : start + 2]) == ["fake_a", "fake_b"]
    first = [item.cases[0].level for item in planned if item.instance == "fake_a"]
    levels = [case.level for case in planned[0].cases]
    assert first == [levels[n % 3] for n in range(launches)]
    for item in planned:
        assert sorted(case.level for case in item.cases) == sorted(levels)


def test_the_order_within_a_launch_is_drawn_from_the_seed() -> None:
    firsts = Counter(night.order(replace(SMOKE, seed=s))[0].instance for s in range(200))
    assert min(firsts.values()) > 60
    assert night.order(SMOKE) == night.order(SMOKE)


@pytest.fixture
def header(factory: ModuleType) -> journal.Header:
    results = factory.make_night()
    return journal.Header(
        1, "night1", "key1", "2026-01-01", results.suite, results.machine, results.models
    )


def test_a_journal_reads_back_what_was_written(
    factory: ModuleType, header: journal.Header, tmp_path: Path
) -> None:
    results = factory.make_night()
    journal.append(tmp_path, header)
    journal.append(tmp_path, journal.Expected(results.expected))
    journal.append(tmp_path, *results.launches, *results.runs, *results.steps)
    journal.append(tmp_path, *results.verifications.values())
    journal.append(tmp_path, journal.End("later"))
    found, read = journal.read(tmp_path)
    assert found == header
    assert read.finished
    for name in ("expected", "launches", "runs", "steps", "verifications", "suite", "machine"):
        assert getattr(read, name) == getattr(results, name), name
    assert journal.peek(tmp_path) == ("key1", True)


def test_knowing_an_item_is_the_same_as_reading_it(
    factory: ModuleType, header: journal.Header, tmp_path: Path
) -> None:
    results = factory.make_night()
    journal.append(tmp_path, header)
    _, known = journal.read(tmp_path)
    items = [
        journal.Expected(results.expected),
        *results.launches,
        *results.runs,
        Verification("k", 3),
        journal.End("later"),
    ]
    for item in items:
        journal.append(tmp_path, item)
        known = journal.with_items(known, [item])
    assert journal.read(tmp_path)[1] == known


def test_a_torn_last_line_costs_that_line_alone(header: journal.Header, tmp_path: Path) -> None:
    journal.append(tmp_path, header)
    launch = LaunchRecord("a", 1, 1, "now", failure="none")
    journal.append(tmp_path, launch)
    whole = (tmp_path / journal.NAME).read_bytes()
    journal.append(tmp_path, replace(launch, launch=2))
    torn = (tmp_path / journal.NAME).read_bytes()
    for cut in range(len(whole), len(torn)):
        (tmp_path / journal.NAME).write_bytes(torn[:cut])
        assert journal.read(tmp_path)[1].launches == (launch,)
        assert journal.peek(tmp_path) == ("key1", False)
    journal.mend(tmp_path)
    assert (tmp_path / journal.NAME).read_bytes() == whole
    journal.append(tmp_path, replace(launch, launch=3))
    assert len(journal.read(tmp_path)[1].launches) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "does not begin with a night"),
        ("not json\n", "line 1 is broken"),
        ('{"type": "run", "data": {}}\n', "line 1 is broken"),
        ('{"type": "night", "data": {"schema": 99}}\n', "has schema 99; this Headway reads 1"),
        ('{"type": "surprise", "data": {}}\n', "line 1 is broken"),
    ],
)
def test_what_is_no_journal_is_said(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / journal.NAME).write_text(text)
    with pytest.raises(night.JournalError, match=message):
        night.read(tmp_path)


def test_a_missing_journal_is_said(tmp_path: Path) -> None:
    with pytest.raises(night.JournalError, match="cannot be read: No such file"):
        night.read(tmp_path / "nowhere")


FULL = """
import resource, sys
from pathlib import Path
from headway.core import LaunchRecord
from headway.night import journal
folder = Path(sys.argv[1])
size = (folder / journal.NAME).stat().st_size
import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 50, size + 50))
try:
    journal.append(folder, LaunchRecord("a", 1, 1, "now", failure="x" * 200))
except journal.JournalError as error:
    print(error)
"""


def test_a_full_disk_loses_nothing_that_was_written(header: journal.Header, tmp_path: Path) -> None:
    journal.append(tmp_path, header)
    before = (tmp_path / journal.NAME).read_bytes()
    command = [sys.executable, "-c", FULL, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "cannot be written" in done.stdout
    assert "what was measured before it is kept" in done.stdout
    assert (tmp_path / journal.NAME).read_bytes() == before


def test_the_key_names_what_must_be_equal_to_carry_on(factory: ModuleType) -> None:
    results = factory.make_night()
    same = (results.suite, results.machine, results.models, "abc")
    assert _key(*same) == _key(*same)
    assert _key(*same) != _key(replace(results.suite, seed=2), *same[1:])
    assert _key(*same) != _key(same[0], replace(results.machine, device="other"), *same[2:])
    assert _key(*same) != _key(*same[:3], "abc-dirty")


HOLD = """
import sys, time
from pathlib import Path
from headway.night import device_lock
with device_lock(Path(sys.argv[1]), "GPU 0", "first"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_one_night_at_a_time_on_a_device(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(night.DeviceBusy, match=rf"night first \(process {holder.pid}\)"):
            with night.device_lock(tmp_path, "GPU 0", "second"):
                pass
        with night.device_lock(tmp_path, "GPU 1", "other device"):
            pass
        holder.kill()  # the kernel gives the lock back
    with night.device_lock(tmp_path, "GPU 0", "second"):
        pass
    with night.device_lock(tmp_path, "GPU 0", "again"):
        pass


def test_the_journal_is_plain_json_lines(header: journal.Header, tmp_path: Path) -> None:
    journal.append(tmp_path, header)
    first = json.loads((tmp_path / journal.NAME).read_text().splitlines()[0])
    assert first["type"] == "night"
    assert "prompt" not in json.dumps(first["data"]["models"])
