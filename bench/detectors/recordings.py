"""Real nights of equal engines, recorded once, as conditions to draw nights from.

A recording holds values per night, launch and cell, and what the calibration kernels read around
each Run; no requests, no prompts, no host name. A simulated night is one of the recorded ones drawn
at random, with its launches in their order; which arm a launch is of is up to who asks, for all of
them are of equal engines.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from detectors.injections import KERNELS_SEE, NONE, Injection
from detectors.layout import KERNELS, Array, LaunchDraw, Layout, seconds
from headway import codec
from headway.fingerprint import Machine

FOLDER = Path(__file__).resolve().parent / "recordings"
SCHEMA = 1


class RecordingError(ValueError):
    """What is wrong with a recording, in one sentence."""


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """One launch: `values` by case and metric, in their units; kernels' seconds by case and kernel.

    `before` and `after` are empty where the night had no calibration.
    """

    instance: str
    launch: int
    values: tuple[tuple[float, ...], ...]
    before: tuple[tuple[float, ...], ...] = ()
    after: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class RecordedNight:
    """One night's launches, in the order in which they ran."""

    date: str
    launches: tuple[RecordedLaunch, ...]


@dataclass(frozen=True, slots=True)
class File:
    """What a file holds. `better` says of each metric whether "higher" or "lower" is."""

    schema: int
    suite: str
    machine: Machine
    cases: tuple[str, ...]
    metrics: tuple[str, ...]
    gated: tuple[str, ...]
    better: Mapping[str, str]
    kernels: tuple[str, ...]
    nights: tuple[RecordedNight, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A recording as log badness and log kernels, each relative to its own median.

    `nights` holds, per night, [launch, case, metric], [launch, case, kernel] before and after.
    """

    name: str
    file: File
    layout: Layout
    nights: tuple[tuple[Array, Array, Array], ...]

    @property
    def launches(self) -> int | None:
        """How many launches the shortest night has."""
        return min(len(values) for values, _, _ in self.nights)

    def series(self, seed: tuple[int, ...], injection: Injection = NONE) -> RecordedSeries:
        """Return the nights of a seed, with an injection from night 0 on."""
        return RecordedSeries(self, seed, injection)


@dataclass(frozen=True, slots=True)
class RecordedSeries:
    """Nights drawn from a recording, each from its number alone."""

    recording: Recording
    seed: tuple[int, ...]
    injection: Injection

    @property
    def layout(self) -> Layout:
        """The recorded suite's."""
        return self.recording.layout

    def night(self, number: int) -> DrawnNight:
        """Return a night from its beginning."""
        rng = np.random.default_rng((*self.seed, number % 2**32))
        index = int(rng.integers(len(self.recording.nights)))
        return DrawnNight(self, number, index)


@dataclass(slots=True)
class DrawnNight:
    """One recorded night in the place of a simulated one."""

    series: RecordedSeries
    number: int
    index: int
    machine: str = field(init=False)
    driver: str = field(init=False)
    workload: str = field(init=False)
    _place: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Name what a detector may know."""
        self.machine = self.series.recording.file.machine.device
        self.driver = self.series.injection.driver_in(self.number)
        self.workload = self.series.injection.workload_in(self.number)

    def launch(self, arm: str) -> LaunchDraw:
        """Return the next recorded launch; LookupError after the last one."""
        injection, layout = self.series.injection, self.series.layout
        values, before, after = self.series.recording.nights[self.index]
        place = self._place
        if place >= len(values):
            raise LookupError(f"the recorded night has {len(values)} launches, no more")
        self._place += 1
        machine = KERNELS_SEE * injection.on_machine(self.number)
        return LaunchDraw(
            layout,
            arm,
            place,
            values[place] + injection.on(layout, self.number, arm),
            before[place] + machine,
            after[place] + machine,
            injection.failed(self.number, arm),
        )

    def calibrate(self) -> Mapping[str, float]:
        """Return what was read last: after the latest launch, or before the first one."""
        _, before, after = self.series.recording.nights[self.index]
        if not before.size:
            return {}
        logs = after[self._place - 1, -1] if self._place else before[0, 0]
        return seconds(logs + KERNELS_SEE * self.series.injection.on_machine(self.number))


def names(folder: Path = FOLDER) -> tuple[str, ...]:
    """Return the names of the recordings that there are."""
    return tuple(sorted(path.stem for path in folder.glob("*.json")))


@functools.lru_cache
def load(path: Path) -> Recording:
    """Read a recording; raises RecordingError."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordingError(f"{path} cannot be read: {error}") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != SCHEMA:
        raise RecordingError(f"{path} has schema {schema!r}; this DETBENCH reads {SCHEMA}")
    try:
        file: File = codec.decode(File, data, "recording")
    except codec.DecodeError as error:
        raise RecordingError(f"{path} is not a recording: {error}") from error
    _check(path, file)
    return Recording(path.stem, file, Layout(file.cases, file.metrics, file.gated), _logs(file))


def dump(file: File) -> str:
    """Return a file's text: a launch a line, so that it is small and still can be read."""
    data = codec.encode(file)
    nights = data.pop("nights")
    head = json.dumps(data, indent=1, ensure_ascii=False)[:-2]
    shown = [
        f'  {{"date": {json.dumps(night["date"])}, "launches": [\n   '
        + ",\n   ".join(json.dumps(launch, allow_nan=False) for launch in night["launches"])
        + "\n  ]}"
        for night in nights
    ]
    return f'{head},\n "nights": [\n' + ",\n".join(shown) + "\n ]\n}\n"


def rounded(value: float) -> float:
    """Return a value with six digits: more than a measurement has."""
    return float(f"{value:.6g}")


def _check(path: Path, file: File) -> None:
    cells = len(file.cases), len(file.metrics)
    readings = len(file.cases), len(file.kernels)
    launches = [launch for night in file.nights for launch in night.launches]
    if not all(night.launches for night in file.nights) or not launches:
        raise RecordingError(f"{path} has a night without launches")
    if set(file.better) != set(file.metrics) or set(file.better.values()) - {"higher", "lower"}:
        raise RecordingError(f"{path}: better must say higher or lower of each metric")
    for launch in launches:
        for name, wanted in (("values", cells), ("before", readings), ("after", readings)):
            table = getattr(launch, name)
            if name != "values" and not table and not file.kernels:
                continue
            if len(table) != wanted[0] or {len(row) for row in table} != {wanted[1]}:
                wrong = f"which are not {wanted[0]} rows of {wanted[1]}"
            elif not all(0 < value < math.inf for row in table for value in row):
                wrong = "which no measurement gives"
            else:
                continue
            where = f"launch {launch.launch} of {launch.instance}"
            raise RecordingError(f"{path}: {where} has {name} {wrong}")


def _logs(file: File) -> tuple[tuple[Array, Array, Array], ...]:
    """Return each night's values and readings as logs, relative to the medians of all nights."""
    # Only the kernels of the simulation are offered to detectors, so all or none.
    known = [file.kernels.index(name) for name in KERNELS if name in file.kernels]
    usable = len(known) == len(KERNELS)
    signs = np.array([1.0 if file.better[name] == "lower" else -1.0 for name in file.metrics])
    values: list[Array] = []
    before: list[Array] = []
    after: list[Array] = []
    for night in file.nights:
        values.append(signs * np.log([launch.values for launch in night.launches]))
        none = np.empty((len(night.launches), len(file.cases), 0))
        for name, kept in (("before", before), ("after", after)):
            read = [getattr(launch, name) for launch in night.launches]
            kept.append(np.log(read)[..., known] if usable else none)
    middle = np.median(np.concatenate(values), axis=0)
    usual = np.median(np.concatenate([*before, *after]), axis=(0, 1)) if usable else 0.0
    return tuple(
        (v - middle, b - usual, a - usual) for v, b, a in zip(values, before, after, strict=True)
    )
