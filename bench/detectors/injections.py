"""What is done to an engine or a machine from night 0 on, and what a detector should say of it.

Effects are relative: 0.05 makes a latency 1.05 times as long, and a throughput 1/1.05 of what it
was. Only the arm `candidate` is changed, except where the machine or the workload is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from detectors.layout import GATED, TAIL, Array, Layout, Mask

CANDIDATE = "candidate"
REFERENCE = "reference"
# How much of what a machine does to engines shows in the calibration kernels.
KERNELS_SEE = 0.8
# What should be said: nothing; slower; faster; that tonight cannot be compared with what is stored;
# that requests fail.
Expected = Literal["quiet", "slower", "faster", "incomparable", "failures"]


@dataclass(frozen=True, slots=True)
class Injection:
    """A change from night 0 on, judged on `lasts` nights.

    `effect` is on the candidate's cells of these metrics and levels (None: all); with `daily` it is
    added once more every night. `machine` is on everything that runs on the machine, kernels
    included; with `one_night` in night 0 only. `prompts` is on both arms, from another workload.
    `failures` is the share of the candidate's requests that fail.
    """

    name: str
    expected: Expected
    effect: float = 0.0
    metrics: tuple[str, ...] | None = None
    levels: tuple[str, ...] | None = None
    lasts: int = 3
    daily: bool = False
    machine: float = 0.0
    one_night: bool = False
    driver: bool = False
    prompts: float = 0.0
    failures: float = 0.0

    def touched(self, layout: Layout) -> Mask:
        """Return the cells that the candidate's own change is on."""
        mask = layout.mask(self.metrics, self.levels)
        return mask if self.effect else np.zeros_like(mask)

    def on(self, layout: Layout, number: int, arm: str) -> Array:
        """Return what is added to an arm's log badness in a night, the machine's part included."""
        added = np.full(layout.shape, self.on_machine(number))
        if number >= 0:
            added += math.log1p(self.prompts)
            if arm == CANDIDATE:
                times = number + 1 if self.daily else 1
                added[self.touched(layout)] += times * math.log1p(self.effect)
        return added

    def on_machine(self, number: int) -> float:
        """Return what is added to everything on the machine in a night."""
        struck = number == 0 if self.one_night else number >= 0
        return math.log1p(self.machine) if struck else 0.0

    def failed(self, number: int, arm: str) -> float:
        """Return the share of an arm's requests that fail in a night."""
        return self.failures if number >= 0 and arm == CANDIDATE else 0.0

    def driver_in(self, number: int) -> str:
        """Return the driver that the machine has in a night."""
        return "590.10" if self.driver and number >= 0 else "580.95"

    def workload_in(self, number: int) -> str:
        """Return a name for the prompts of a night: it changes with them."""
        return "prompts-2" if self.prompts and number >= 0 else "prompts-1"


NONE = Injection("none", "quiet", lasts=1)
_THROUGHPUT = ("output_throughput",)
_LIST = (
    NONE,
    *(Injection(f"{percent}%", "slower", percent / 100) for percent in (1, 2, 3, 5, 10)),
    Injection("tail", "slower", 0.20, metrics=(TAIL,)),
    Injection("one_level", "slower", 0.05, levels=("c64",)),
    Injection("one_metric", "slower", 0.05, metrics=("ttft_p50", TAIL)),
    Injection("drift", "slower", 0.003, lasts=10, daily=True),
    Injection("bad_night", "quiet", machine=0.15, one_night=True),
    Injection("driver_slower", "incomparable", machine=0.02, driver=True),
    Injection("driver_faster", "incomparable", machine=-0.02, driver=True),
    # Tokens of requests that failed are not served: so much throughput is gone, and no latency.
    Injection("failures", "failures", 0.01, metrics=_THROUGHPUT, failures=0.01),
    Injection("workload", "incomparable", prompts=0.08),
    Injection("improvement", "faster", -0.05),
)
INJECTIONS: dict[str, Injection] = {injection.name: injection for injection in _LIST}
assert all(set(i.metrics or ()) <= {*GATED, TAIL} for i in _LIST)
