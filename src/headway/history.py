"""What earlier nights measured, kept outside of any checkout: one small file per night.

`HEADWAY_HOME/history/DEVICE/SUITE/NIGHT.json`. A night's file is written whole and moved into its
place, so that neither a crash nor another writer can tear it; a night that is resumed replaces its
own file and nobody else's. A checkout may be wiped: what recorded so far is still here.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headway.baseline import Baseline
from headway.core import Case

SCHEMA = 1


class HistoryError(RuntimeError):
    """The history cannot be written; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class CellNight:
    """What a night said of one cell: its verdict, and what the record of it is good for.

    `sound` says that the sample may become part of a baseline: nothing was wrong with it but what
    the baseline itself says. `suspected` says that the baseline gate suspected it.
    """

    verdict: str
    sound: bool
    suspected: bool = False


@dataclass(frozen=True, slots=True)
class CaseNight:
    """One case in one night: the samples of its launches, in the shape a baseline stores them."""

    case: Case
    sample: Baseline
    cells: Mapping[str, CellNight] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class NightRecord:
    """One night of one suite on one device. `started_at` is UTC, so that it sorts as text."""

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
