"""A cell's stored nights and the nights since: what the baseline gate holds against each other."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway import calibration, stats
from headway.baseline import Baseline, Cell
from headway.fingerprint import Treatment
from headway.history import Past
from headway.metrics import Metric
from headway.suite import BaselineGate

if TYPE_CHECKING:
    from headway.stats.nights import Change

Logs = tuple[tuple[float, ...], ...]


def badness(metric: Metric, values: Sequence[float]) -> tuple[float, ...]:
    """Return logarithms that are higher the worse a value is; of nothing at all a very high one."""
    sign = 1 if metric.direction == "lower" else -1
    return tuple(sign * math.log(max(value, math.ulp(0.0))) for value in values)


@dataclass(frozen=True, slots=True)
class Series:
    """Stored nights, and the nights since, tonight last: the badness of each one's launches."""

    anchor: Logs
    recent: Logs

    def change(self, gate: BaselineGate, persistence: int | None = None) -> Change:
        """Return how much worse the last nights are than the stored ones."""
        from headway.stats.nights import nights

        return nights(
            self.anchor,
            self.recent,
            tolerance=math.log1p(gate.tolerance),
            drift_budget=math.log1p(gate.drift_budget),
            persistence=gate.persistence if persistence is None else persistence,
        )

    def flipped(self) -> Series:
        """Return the series in which better is worse."""
        anchor, recent = (
            tuple(tuple(-x for x in night) for night in side) for side in (self.anchor, self.recent)
        )
        return Series(anchor, recent)

    def changes(self) -> list[float]:
        """Return each recent night's change by itself."""
        center = stats.mean([_median(night) for night in self.anchor])
        assert center is not None
        return [_median(night) - center for night in self.recent]

    def run(self, beyond: float = 0.0) -> int:
        """Return how many nights in a row, tonight the last, are worse by more than this."""
        changes = self.changes()
        held = next((n for n, c in enumerate(reversed(changes)) if c <= beyond), len(changes))
        return held


def series_of(metric: Metric, cell: Cell, recent: Sequence[Sequence[float]]) -> Series:
    """Return the series of a stored cell and recent nights' values, tonight's last."""
    anchor = tuple(badness(metric, values) for values in cell.by_night().values())
    return Series(anchor, tuple(badness(metric, values) for values in recent))


def since(stored: Baseline, cell: Cell, past: Sequence[Past]) -> tuple[Past, ...]:
    """Return the nights after the stored ones."""
    anchor = cell.by_night()
    last = max((stored.facts(night).started_at or "" for night in anchor), default="")
    return tuple(p for p in past if p.night not in anchor and p.started_at > last)


def alike(past: Sequence[Past], known: Sequence[Mapping[str, float]]) -> tuple[Past, ...]:
    """Return the nights in which the calibration kernels took what they took in known ones."""
    return tuple(p for p in past if not calibration.shifted(p.calibration, known))


def asked_alike(past: Sequence[Past], engine: Treatment) -> tuple[Past, ...]:
    """Return the nights in which the engine was asked for with the same arguments.

    Versions and commits may change every night; arguments change because somebody tries something.
    """
    asked = (engine.args, engine.env)
    return tuple(p for p in past if (p.treatment.args, p.treatment.env) == asked)


def calibrations(stored: Baseline, cell: Cell) -> list[Mapping[str, float]]:
    """Return what the calibration kernels took in the stored nights, where they were read."""
    facts = (stored.facts(night).calibration for night in cell.by_night())
    return [seconds for seconds in facts if seconds]


def vouched(tonight: Mapping[str, float], known: Sequence[Mapping[str, float]]) -> bool:
    """Whether some kernel was read tonight, and often enough before to tell a bad night by it."""
    return any(
        sum(kernel in seconds for seconds in known) >= calibration.MIN_NIGHTS for kernel in tonight
    )


def armed(cell: Cell | None, gate: BaselineGate) -> bool:
    """Whether enough is stored for the gate to speak."""
    if cell is None:
        return False
    return len(cell.samples) >= gate.min_launches and cell.num_nights >= least_nights(gate)


def least_nights(gate: BaselineGate) -> int:
    """Return how many nights arm a gate: one cannot show a spread between nights."""
    return max(gate.min_nights, 2)


def _median(night: Sequence[float]) -> float:
    value = stats.median(night)
    assert value is not None
    return value
