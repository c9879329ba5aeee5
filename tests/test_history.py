"""What earlier nights leave behind: whole files, one a night, whoever writes at the same time."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os

import pytest

from headway import atomic, codec, decisions, history, verdict
from headway.core import Case
from headway.suite import BaselineGate

CASE = Case("b", "fake", "w32_16", "c4")
DEVICE, SUITE = "Test CPU x2", "smoke"


@pytest.fixture
def record(factory):
    (made,) = factory.recorded(factory.baseline_nights(1))
    return made


def named(record, night, **changes):
    return dataclasses.replace(record, night=night, **changes)


def test_a_night_is_kept_and_read_back_whole(factory, tmp_path):
    records = factory.recorded(factory.baseline_nights(3))
    paths = [history.save(tmp_path, record) for record in records]
    assert paths[0].is_relative_to(tmp_path / "history")
    assert history.load(tmp_path, DEVICE, SUITE) == (records, ())
    assert history.load(tmp_path, "another", SUITE) == ((), ())
    assert history.load(tmp_path, DEVICE, "another") == ((), ())
    assert history.devices(tmp_path, SUITE) == (DEVICE,)
    assert [r.night for r in history.newest(tmp_path)] == [r.night for r in reversed(records)]


def test_what_a_night_leaves_behind(factory, record):
    night = factory.baseline_nights(1)[0]
    assert (record.night, record.suite, record.device) == (night.night, SUITE, DEVICE)
    assert record.started_at == night.started_at
    assert record.minutes == pytest.approx(night.measured_s() / 60)
    assert record.calibration == pytest.approx(factory.KERNELS)
    kept = record.of(CASE)
    assert kept.sample.identity == verdict.identity_of(night, CASE)
    assert kept.sample.environment == night.machine.environment()
    assert kept.sample.treatment == verdict.treatment_of(night, "b")
    assert set(kept.sample.cells) == set(BaselineGate().metrics)
    for name, cell in kept.sample.cells.items():
        assert kept.cells[name].sound
        assert [sample.launch for sample in cell.samples] == [1, 2]
    assert kept.cells["success_rate"].gates == {"limit": "PASS"}
    assert kept.cells["ttft_p50"].verdict == "RECORDING"
    assert "e2el_p99" not in kept.cells  # watched only
    assert verdict.record_of(night, factory.judge(night), minutes=7.0).minutes == 7.0


def test_a_regression_is_kept_as_it_was_measured(factory):
    nights = factory.baseline_nights()
    files = {case: factory.baseline_of(nights, case) for case in nights[0].suite.cases()}
    slow = factory.dated(6, {"a": factory.Speed(), "b": factory.Speed(slower=0.2)})
    (record,) = factory.recorded([slow], files.get)
    kept = record.of(CASE)
    assert kept.cells["ttft_p50"].verdict == "REGRESSION"
    assert kept.sample.cells["ttft_p50"].samples[0].value == pytest.approx(0.072)


@pytest.mark.parametrize("fault", ["failing", "wrong", "unverified"])
def test_what_was_not_right_is_not_kept(factory, fault):
    night = factory.make_night({"a": factory.Speed(salt=1), "b": factory.Speed()})
    if fault == "failing":
        night = factory.make_night({"a": factory.Speed(), "b": factory.Speed(fails=1)})
    elif fault == "wrong":
        night = factory.verified(night, first_wrong=99)
    else:
        night = dataclasses.replace(night, verifications={})
    (record,) = factory.recorded([night])
    assert not record.of(CASE).sample.cells
    assert not any(cell.sound for cell in record.of(CASE).cells.values())


def test_a_resumed_night_replaces_its_own_file(record, tmp_path):
    history.save(tmp_path, record)
    history.save(tmp_path, named(record, "another"))
    history.save(tmp_path, dataclasses.replace(record, minutes=99.0))
    found, _ = history.load(tmp_path, DEVICE, SUITE)
    assert sorted((r.night, r.minutes == 99.0) for r in found) == [
        (record.night, True),
        ("another", False),
    ]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Expecting value"),
        ("{", "Expecting"),
        ("[]", "schema None"),
        ('{"schema": 2}', "schema 2, this Headway reads 1: upgrade Headway"),
        ('{"schema": 1}', "night.night is missing"),
    ],
)
def test_a_broken_file_is_skipped_by_name(record, tmp_path, text, why):
    path = history.save(tmp_path, record)
    broken = path.with_name("broken.json")
    broken.write_text(text)
    found, skipped = history.load(tmp_path, DEVICE, SUITE)
    assert found == (record,)
    (line,) = skipped
    assert line.startswith(f"{broken} is skipped: ")
    assert why in line


def test_a_file_that_was_cut_anywhere_is_skipped(record, tmp_path):
    path = history.save(tmp_path, record)
    text = path.read_text()
    for length in range(0, len(text) - 2, 997):
        path.write_text(text[:length])
        assert history.load(tmp_path, DEVICE, SUITE)[0] == ()


def test_a_disk_that_refuses_is_one_sentence(record, tmp_path):
    (tmp_path / "history").touch()
    with pytest.raises(history.HistoryError, match="will not count towards a baseline") as told:
        history.save(tmp_path, record)
    assert "\n" not in str(told.value)


def test_nights_are_read_in_the_order_they_began(record, tmp_path):
    for night, at in (("c", "2026-11-01"), ("a", "2026-11-03"), ("b", "2026-11-02")):
        history.save(tmp_path, named(record, night, started_at=f"{at}T00:00:00Z"))
    found, _ = history.load(tmp_path, DEVICE, SUITE)
    assert [r.night for r in found] == ["c", "b", "a"]


def test_a_busy_suite_is_read_in_full_for_its_last_nights_and_by_the_day_before(record, tmp_path):
    names = [f"202611{day:02}-{hour:02}0000-smoke" for day in range(1, 11) for hour in range(24)]
    for name in names:
        history.save(tmp_path, named(record, name))
    found, _ = history.load(tmp_path, DEVICE, SUITE)
    nights = sorted(r.night for r in found)
    assert nights[-history.MAX_NIGHTS :] == names[-history.MAX_NIGHTS :]
    assert nights[: -history.MAX_NIGHTS] == [name for name in names[:-60] if "-000000-" in name]


def test_the_minutes_of_a_month_are_those_of_all_suites_of_a_device(record, tmp_path):
    for number, (suite, at, device) in enumerate(
        [
            (SUITE, "2026-11-01", DEVICE),
            ("quick", "2026-11-30", DEVICE),
            ("quick", "2026-10-31", DEVICE),
            (SUITE, "2026-11-15", "another"),
        ]
    ):
        changes = {"suite": suite, "device": device, "started_at": f"{at}T23:00:00Z"}
        history.save(tmp_path, named(record, f"n{number}", minutes=10.0 + number, **changes))
    assert history.minutes_in_month(tmp_path, DEVICE, "2026-11") == 21.0
    assert history.minutes_in_month(tmp_path, DEVICE, "2026-11", but="n1") == 10.0
    assert history.minutes_in_month(tmp_path, DEVICE, "2026-09") == 0.0
    old = history.folder_of(tmp_path, DEVICE, SUITE) / "n0.json"
    os.utime(old, (0, 0))  # a file that is older than the month is of an earlier one
    assert history.minutes_in_month(tmp_path, DEVICE, "2026-11") == 11.0


def write_many(home, record, who, go):
    """Save nights of one's own and one that all write, as another process would."""
    go.wait()
    for number in range(20):
        history.save(home, dataclasses.replace(record, night=f"{who}-{number}"))
        history.save(home, dataclasses.replace(record, night="shared", minutes=float(who)))
        decision = decisions.Decision(
            1, "mute", "a:b", f"{who}-{number}", "2026-12-01", "2026-12-31"
        )
        decisions.save(home / "baselines", decision)
        atomic.write_text(home / "baseline.patch", f"{who}\n" * 5000)


def test_several_processes_write_at_once_and_nothing_is_lost_or_torn(record, tmp_path):
    context = multiprocessing.get_context("spawn" if os.name == "nt" else "fork")
    go = context.Event()
    writers = [
        context.Process(target=write_many, args=(tmp_path, record, who, go)) for who in range(6)
    ]
    for writer in writers:
        writer.start()
    go.set()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        found, skipped = history.load(tmp_path, DEVICE, SUITE)
        _, broken = decisions.load(tmp_path / "baselines")
        assert not skipped, skipped  # a reader never meets half a file
        assert not broken, broken
        seen = max(seen, len(found))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    folder = history.folder_of(tmp_path, DEVICE, SUITE)
    assert len(list(folder.glob("*.json"))) == 6 * 20 + 1
    assert len(decisions.load(tmp_path / "baselines")[0]) == 6 * 20
    lines = set((tmp_path / "baseline.patch").read_text().splitlines())
    assert len(lines) == 1  # one writer's text, whole
    assert not list(tmp_path.rglob("*.tmp"))


def test_a_file_in_the_making_is_nobodys_to_read(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    atomic.write_text(target, "old")

    def refused(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refused)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_text(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


def test_a_record_is_small(record):
    assert len(json.dumps(codec.encode(record))) < 4096 * len(record.cases)
