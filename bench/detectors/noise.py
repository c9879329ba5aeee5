"""Noise of machines as presets, and nights drawn from it.

A cell's log badness in a launch is a sum of draws: one a night, common to everything; drift within
the night, a first-order autoregression over consecutive launches; one a launch; one a Run (a case
in a launch), common to its metrics; one of its own. Both arms share what is the night's and the
machine's, and each of their launches has a start of its own.

The calibration kernels see a share of what the machine does (night, drift, bursts that last), and
have noise of their own. They see nothing of a start, a short burst, or an engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from detectors.injections import KERNELS_SEE, NONE, Injection
from detectors.layout import KERNELS, SIMULATED, TAIL, Array, LaunchDraw, Layout, seconds

RHO = 0.9
CELL_SD = 0.002
# A p99 of some five hundred requests: its own noise, in a launch of an unchanged engine.
TAIL_SD = 0.035
CALIBRATION_SD = 0.005
BURST_MEAN = 0.08
BAD_NIGHT = (0.05, 0.30)


@dataclass(frozen=True, slots=True)
class Preset:
    """Standard deviations in log units, and how often the worse things happen.

    `burst` is the share of Runs with an exponential delay on top (`bursts_last`: it goes on before
    and after the Run, where the kernels see it), `bad_night` the share of nights that are uniformly
    5 to 30 % slower, `slow_start` the share of launches that are slower by `slow_by`. A fleet has
    `units` machines, one of which, drawn at random, runs the night.
    """

    name: str
    night: float
    start: float
    drift: float
    run: float
    burst: float = 0.0
    bad_night: float = 0.0
    bursts_last: bool = False
    slow_start: float = 0.0
    slow_by: float = 0.06
    units: int = 1
    unit: float = 0.0

    @property
    def launches(self) -> int | None:
        """As many as are asked for."""
        return None

    @property
    def layout(self) -> Layout:
        """The simulated suite's."""
        return SIMULATED

    def series(self, seed: tuple[int, ...], injection: Injection = NONE) -> SimulatedSeries:
        """Return the nights of a seed, with an injection from night 0 on."""
        rng = np.random.default_rng((*seed, 0))
        offsets = tuple(float(draw) for draw in self.unit * rng.standard_normal(self.units))
        return SimulatedSeries(self, seed, injection, offsets)


_SHARED: dict[str, Any] = {
    "night": 0.02,
    "start": 0.007,
    "drift": 0.006,
    "run": 0.006,
    "burst": 0.03,
    "bad_night": 0.02,
}
DEDICATED = Preset("dedicated", night=0.003, start=0.002, drift=0.001, run=0.002)
SHARED = Preset("shared", **_SHARED)
HOSTILE = Preset("hostile", **_SHARED | {"night": 0.05, "burst": 0.10}, bursts_last=True)
BIMODAL = Preset("bimodal", **_SHARED, slow_start=0.10)
FLEET = Preset("fleet", **_SHARED, units=4, unit=0.03)
PRESETS = {preset.name: preset for preset in (DEDICATED, SHARED, HOSTILE, BIMODAL, FLEET)}


def nights(
    preset: Preset, seed: int, injection: Injection = NONE, *, first: int = 0
) -> Iterator[SimulatedNight]:
    """Yield the nights of a seed without end, from number `first` on (below 0: the clean past)."""
    series = preset.series((seed,), injection)
    number = first
    while True:
        yield series.night(number)
        number += 1


@dataclass(frozen=True, slots=True)
class SimulatedSeries:
    """The nights of one seed: each is drawn from its number alone."""

    preset: Preset
    seed: tuple[int, ...]
    injection: Injection
    offsets: tuple[float, ...]

    @property
    def layout(self) -> Layout:
        """The simulated suite's."""
        return SIMULATED

    def night(self, number: int) -> SimulatedNight:
        """Return a night from its beginning."""
        return SimulatedNight(self, number)


@dataclass(slots=True)
class SimulatedNight:
    """One night. Launches are drawn in order: drift goes on from each to the next."""

    series: SimulatedSeries
    number: int
    machine: str = field(init=False)
    driver: str = field(init=False)
    workload: str = field(init=False)
    _launches: np.random.Generator = field(init=False, repr=False)
    _readings: np.random.Generator = field(init=False, repr=False)
    _night: float = field(init=False)
    _unit: float = field(init=False)
    _drift: float = field(init=False)
    _place: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        """Draw what the whole night has in common."""
        preset, injection = self.series.preset, self.series.injection
        key = (*self.series.seed, 1, self.number % 2**32)
        self._launches, self._readings = (np.random.default_rng((*key, of)) for of in (0, 1))
        normals, uniforms = self._launches.standard_normal(2), self._launches.random(3)
        unit = int(uniforms[0] * preset.units)
        self._unit = self.series.offsets[unit]
        self._drift = preset.drift * float(normals[0])
        self._night = preset.night * float(normals[1]) + injection.on_machine(self.number)
        if uniforms[1] < preset.bad_night:
            low, high = BAD_NIGHT
            self._night += low + (high - low) * float(uniforms[2])
        self.machine = f"unit-{unit}"
        self.driver = injection.driver_in(self.number)
        self.workload = injection.workload_in(self.number)

    def launch(self, arm: str) -> LaunchDraw:
        """Run the next launch of the night."""
        preset, injection, rng = self.series.preset, self.series.injection, self._launches
        num_cases, num_metrics = SIMULATED.shape
        # Each launch takes equally many draws, whatever the preset, the arm or the injection: what
        # is compared between them has the same luck.
        normals = rng.standard_normal(2 + num_cases * (1 + num_metrics + 2 * len(KERNELS)))
        uniforms, exponentials = rng.random(1 + num_cases), rng.standard_exponential(num_cases)
        if self._place:
            fresh = preset.drift * float(normals[0])
            self._drift = RHO * self._drift + (1 - RHO**2) ** 0.5 * fresh
        start = preset.start * normals[1] + preset.slow_by * (uniforms[0] < preset.slow_start)
        run, cell, kernels = np.split(normals[2:], (num_cases, num_cases * (1 + num_metrics)))
        burst = preset.burst and BURST_MEAN * exponentials * (uniforms[1:] < preset.burst)
        machine = self._night + self._drift
        values = cell.reshape(SIMULATED.shape) * _CELL_SDS
        values += (preset.run * run + burst)[:, None] + (machine + self._unit + start)
        # The machine's part of the injection is in the night already.
        values += injection.on(SIMULATED, self.number, arm) - injection.on_machine(self.number)
        seen = np.full(num_cases, KERNELS_SEE * machine)
        seen += KERNELS_SEE * burst * preset.bursts_last
        read = seen[:, None, None] + CALIBRATION_SD * kernels.reshape(num_cases, 2, len(KERNELS))
        place, self._place = self._place, self._place + 1
        failed = injection.failed(self.number, arm)
        return LaunchDraw(SIMULATED, arm, place, values, read[:, 0], read[:, 1], failed)

    def calibrate(self) -> Mapping[str, float]:
        """Read the kernels' seconds between launches; the launches' luck is the same after it."""
        noise = CALIBRATION_SD * self._readings.standard_normal(len(KERNELS))
        logs: Array = KERNELS_SEE * (self._night + self._drift) + noise
        return seconds(logs)


_CELL_SDS: Array = np.array([TAIL_SD if m == TAIL else CELL_SD for m in SIMULATED.metrics])
