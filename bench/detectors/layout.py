"""What a simulated suite measures, and what one launch, or one reading of the machine, gave.

Values are log badness: the log of how much worse a cell is than its usual, positive = worse, for
throughputs and latencies alike. Calibration kernels are the same: log of how much slower.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, np.dtype[np.float64]]
Mask = np.ndarray[Any, np.dtype[np.bool_]]

# What a kernel usually takes, in seconds: only so that a simulated reading looks like a real one.
KERNELS = {"matmul": 0.020, "copy": 0.040, "launch": 0.010, "python": 0.008}
WORKLOADS = ("chat", "code")
LEVELS = ("c1", "c4", "c16", "c64")
GATED = ("output_throughput", "ttft_p50", "tpot_p50")
TAIL = "ttft_p99"
HIGHER_IS_BETTER = frozenset({"output_throughput", "output_throughput_span", "decode_throughput"})


@dataclass(frozen=True, slots=True)
class Layout:
    """Cases and metrics: the axes of every array of values. `gated` are the metrics of the suite.

    A case is `workload-level`; the metrics that are not gated are for detectors that watch more.
    """

    cases: tuple[str, ...]
    metrics: tuple[str, ...]
    gated: tuple[str, ...] = GATED

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of one launch's values."""
        return len(self.cases), len(self.metrics)

    def mask(
        self, metrics: Iterable[str] | None = None, levels: Iterable[str] | None = None
    ) -> Mask:
        """Return which cells have one of these metrics and levels; None stands for all."""
        chosen = np.ones(self.shape, bool)
        if metrics is not None:
            chosen &= np.array([name in set(metrics) for name in self.metrics])[None, :]
        if levels is not None:
            wanted = set(levels)
            chosen &= np.array([case.rpartition("-")[2] in wanted for case in self.cases])[:, None]
        return chosen

    def names(self, mask: Mask) -> frozenset[str]:
        """Return the names of the cells in a mask: `case metric`."""
        return frozenset(
            f"{self.cases[case]} {self.metrics[metric]}" for case, metric in np.argwhere(mask)
        )


SIMULATED = Layout(
    tuple(f"{workload}-{level}" for workload in WORKLOADS for level in LEVELS), (*GATED, TAIL)
)


@dataclass(frozen=True, slots=True)
class RunDraw:
    """One case in one launch: log badness by metric, kernels' seconds before and after it."""

    values: Mapping[str, float]
    calibration: tuple[Mapping[str, float], ...]
    failed: float


@dataclass(frozen=True, slots=True)
class LaunchDraw:
    """One launch: `values` [case, metric], `before` and `after` [case, kernel], all in logs.

    `failed` is the share of requests that fail in each Run. `place` counts the launches of the
    night, whichever arm they are of. The kernels are empty where a recording has none.
    """

    layout: Layout
    arm: str
    place: int
    values: Array
    before: Array
    after: Array
    failed: float = 0.0

    def run(self, case: str) -> RunDraw:
        """Return what one case of the launch looked like."""
        row = self.layout.cases.index(case)
        values = zip(self.layout.metrics, map(float, self.values[row]), strict=True)
        around = tuple(seconds(logs[row]) for logs in (self.before, self.after) if logs.size)
        return RunDraw(dict(values), around, self.failed)


def seconds(logs: Array) -> dict[str, float]:
    """Return kernels' seconds for their logs."""
    return {
        name: usual * math.exp(float(log))
        for (name, usual), log in zip(KERNELS.items(), logs, strict=True)
    }


class Night(Protocol):
    """One night of one machine, asked launch by launch in the order in which they run.

    `machine`, `driver` and `workload` are labels: what a detector may know of what changed.
    """

    number: int
    machine: str
    driver: str
    workload: str

    def launch(self, arm: str) -> LaunchDraw:
        """Run the next launch of the night; LookupError where a recording has no more."""

    def calibrate(self) -> Mapping[str, float]:
        """Read the kernels' seconds between launches; empty where there are none."""


class Series(Protocol):
    """The nights of one suite on its machines. Night numbers below 0 are the clean past.

    Any night can be asked for, in any order and as often as wanted: it is always the same one.
    """

    @property
    def layout(self) -> Layout:
        """The cells."""

    def night(self, number: int) -> Night:
        """Return a night from its beginning."""


class Conditions(Protocol):
    """What nights are drawn from: a noise preset, or a recording of real ones."""

    def __hash__(self) -> int:
        """Draws are kept by what they are drawn from."""

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def launches(self) -> int | None:
        """How many launches a night has; None for as many as are asked for."""

    @property
    def layout(self) -> Layout:
        """The cells."""

    def series(self, seed: tuple[int, ...], injection: Any) -> Series:
        """Return the nights of a seed, with an injection from night 0 on."""
