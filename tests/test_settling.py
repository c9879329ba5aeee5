"""A Run is begun when the machine is as it was: what the night reads before it, and journals."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headway import calibration, night
from headway.night.session import SETTLE_S


class Readings:
    """A lab that reads what it is told, a second each; the last reading stays."""

    def __init__(self, *seconds: float) -> None:
        self.left, self.now_s = list(seconds), 0.0

    def clock(self) -> float:
        return self.now_s

    def now(self) -> str:
        return "2026-01-01T00:00:00+00:00"

    def calibrate(self) -> dict[str, float]:
        self.now_s += 1
        return {"matmul": self.left.pop(0) if len(self.left) > 1 else self.left[0]}


OPENING = [1.0] * calibration.MIN_READINGS


@pytest.fixture
def read(factory: ModuleType, tmp_path: Path) -> Any:
    def make(*seconds: float, fresh: bool = False) -> tuple[float, list[float], float]:
        """Return the reading that counts, those that were waited out, and the seconds taken."""
        lab: Any = Readings(*OPENING, *seconds)
        results = factory.make_night(kernels={})
        one = night.Night(tmp_path, results.suite, lab, results, night.Screen())
        kept = one.calibrate(fresh=fresh)["matmul"]
        waited = [c.seconds["matmul"] for c in one.results.calibrations[len(OPENING) :]]
        return kept, waited, lab.now_s - len(OPENING)

    return make


def test_a_machine_that_is_as_it_was_is_not_waited_for(read: Any) -> None:
    assert read(1.01, 2.0) == (1.01, [], 1.0)


def test_what_is_outside_its_band_for_a_moment_is_waited_out_and_journaled(read: Any) -> None:
    assert read(2.0, 0.5, 1.02, 2.0) == (1.02, [2.0, 0.5], 3.0)


def test_what_stays_outside_is_the_runs_to_say(read: Any) -> None:
    kept, waited, took_s = read(2.0)
    assert kept == 2.0
    assert waited
    assert took_s <= SETTLE_S + 1


def test_what_is_read_after_a_run_is_not_waited_for(read: Any) -> None:
    assert read(2.0, 1.0, fresh=True) == (2.0, [], 1.0)
