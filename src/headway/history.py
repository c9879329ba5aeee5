"""What earlier nights measured, kept outside of any checkout: one small file per night.

`HEADWAY_HOME/history/DEVICE/SUITE/NIGHT.json`. A night's file is written whole and moved into its
place, so that neither a crash nor another writer can tear it; a night that is resumed replaces its
own file and nobody else's. A checkout may be wiped: what was recorded so far is still here.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

from headway import atomic, codec
from headway.baseline import Baseline, Stored
from headway.core import Case
from headway.fingerprint import Treatment, slug

SCHEMA = 1
# So many of the newest nights are read, and of earlier days one night each: what is asked of them
# is since when there are any, and which was the best.
MAX_NIGHTS, MAX_DAYS = 60, 120


class HistoryError(RuntimeError):
    """The history cannot be written; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class CellNight:
    """What a night said of one cell, before anything that people decided about it.

    `gates` holds each gate's verdict, `effects` by how much worse it found the cell. `sound` says
    that the sample may become part of a baseline: nothing is wrong with it but what the baseline
    itself says. `suspected` says that the baseline gate suspected it. `reason` is the worst
    finding's, empty for a cell that passed.
    """

    verdict: str
    gates: Mapping[str, str] = field(default_factory=dict)
    effects: Mapping[str, float] = field(default_factory=dict)
    sound: bool = False
    suspected: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CaseNight:
    """One case in one night: the samples of its launches, in the shape a baseline stores them."""

    case: Case
    sample: Baseline
    cells: Mapping[str, CellNight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NightRecord:
    """One night of one suite on one device. `started_at` is UTC, so that it sorts as text.

    `minutes` is what measuring took; `calibration` holds the night's median of each kernel.
    """

    schema: int
    night: str
    suite: str
    started_at: str
    device: str
    minutes: float
    cases: tuple[CaseNight, ...] = ()
    calibration: Mapping[str, float] = field(default_factory=dict)

    def of(self, case: Case) -> CaseNight | None:
        """Return what this night holds of a case; None for nothing."""
        return next((found for found in self.cases if found.case == case), None)


@dataclass(frozen=True, slots=True)
class Past:
    """One earlier night of one cell: a value per launch, and what the night said of it."""

    night: str
    started_at: str
    samples: tuple[Stored, ...]
    calibration: Mapping[str, float]
    treatment: Treatment
    cell: CellNight

    @property
    def values(self) -> tuple[float, ...]:
        """The samples' values."""
        return tuple(sample.value for sample in self.samples)

    @property
    def day(self) -> date:
        """The day on which the night began."""
        return day_of(self.started_at)


def day_of(started_at: str) -> date:
    """Return the day of a night's UTC time stamp."""
    return date.fromisoformat(started_at[:10])


def earlier(
    records: Sequence[NightRecord],
    case: Case,
    metric: str,
    identity: Mapping[str, str],
    environment: Mapping[str, str],
) -> tuple[Past, ...]:
    """Return the nights in which the same thing was measured on the same machine, oldest first."""
    found = []
    for record in records:
        night = record.of(case)
        if night is None or metric not in night.sample.cells:
            continue
        sample = night.sample
        if (sample.identity, sample.environment) != (identity, environment):
            continue
        samples, cell = sample.cells[metric].samples, night.cells.get(metric)
        if samples and cell is not None:
            seconds, engine = record.calibration, sample.treatment
            found.append(Past(record.night, record.started_at, samples, seconds, engine, cell))
    return tuple(found)


def folder_of(home: Path, device: str, suite: str) -> Path:
    """Return the folder of a suite's nights on a device."""
    return home / "history" / slug(device) / slug(suite)


def save(home: Path, record: NightRecord) -> Path:
    """Write a night's file, in place of an earlier one of the same night; raises HistoryError."""
    path = folder_of(home, record.device, record.suite) / f"{slug(record.night)}.json"
    text = json.dumps(codec.encode(record), sort_keys=True, ensure_ascii=False) + "\n"
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise HistoryError(
            f"{path} cannot be written: {error.strerror}; this night will not count towards a "
            "baseline"
        ) from error
    return path


def load(home: Path, device: str, suite: str) -> tuple[tuple[NightRecord, ...], tuple[str, ...]]:
    """Return the newest nights of a suite on a device, oldest first, and why any was skipped."""
    records, skipped = _read_all(_chosen(folder_of(home, device, suite).glob("*.json")))
    same = [r for r in records if (r.device, r.suite) == (device, suite)]
    return tuple(sorted(same, key=lambda r: (r.started_at, r.night))), tuple(skipped)


def _chosen(paths: Iterable[Path]) -> list[Path]:
    """Return the files to read: a night's name begins with the day on which it began."""
    ordered = sorted(paths)
    days = {path.name[:8]: path for path in reversed(ordered[:-MAX_NIGHTS])}
    return [*sorted(days.values())[-MAX_DAYS:], *ordered[-MAX_NIGHTS:]]


def devices(home: Path, suite: str) -> tuple[str, ...]:
    """Return the devices on which a suite has nights."""
    found = []
    for folder in sorted((home / "history").glob(f"*/{slug(suite)}")):
        records, _ = _read_all(sorted(folder.glob("*.json"))[-1:])
        found += [record.device for record in records]
    return tuple(found)


def newest(home: Path) -> Iterator[NightRecord]:
    """Give the nights of all suites and devices, the newest first."""
    paths = (home / "history").glob("*/*/*.json")
    records, _ = _read_all(sorted(paths, key=lambda path: path.name)[-MAX_NIGHTS:])
    yield from sorted(records, key=lambda r: (r.started_at, r.night), reverse=True)


def minutes_in_month(home: Path, device: str, month: str, but: str = "") -> float:
    """Return the minutes that all suites' nights but one took on a device in a month, `2026-11`."""
    begins = datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).timestamp()
    paths = [
        path
        for path in (home / "history" / slug(device)).glob("*/*.json")
        # A file is never older than its night: the others need not be read.
        if path.stat().st_mtime >= begins
    ]
    records, _ = _read_all(sorted(paths))
    counted = [r for r in records if r.device == device and r.night != but]
    return sum(r.minutes for r in counted if r.started_at[:7] == month)


def _read_all(paths: Sequence[Path]) -> tuple[list[NightRecord], list[str]]:
    records, skipped = [], []
    for path in paths:
        try:
            records.append(_read(path))
        except (OSError, ValueError) as error:  # JSON's, the codec's and the decoder's are its kind
            skipped.append(f"{path} is skipped: {error}")
    return records, skipped


def _read(path: Path) -> NightRecord:
    data: Any = json.loads(path.read_text(encoding="utf-8"))
    schema = data.get("schema") if isinstance(data, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise ValueError(f"it has schema {schema}, this Headway reads {SCHEMA}: upgrade Headway")
    if schema != SCHEMA:
        raise ValueError(f"it has schema {schema!r}, this Headway reads {SCHEMA}")
    record: NightRecord = codec.decode(NightRecord, data, "night")
    day_of(record.started_at)
    return record
