"""What people decided about cells for a time: a slowdown that is intended, a cell not to be heard.

One small JSON file per decision below `baselines/decisions/`, so that two branches' decisions never
meet in one file. Each has a reason and a last day; after that day it does nothing.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from fnmatch import fnmatchcase
from typing import Literal

from headway.core import Case

SCHEMA = 1
Kind = Literal["accept", "mute"]


class DecisionError(ValueError):
    """What is wrong with a decision, in one sentence."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`cell` is `case:metric`, with `*` and `?` in it where it stands for several.

    `effect` is how much worse than the baseline an accepted cell may be, as a share.
    """

    schema: int
    kind: Kind
    cell: str
    reason: str
    made: str
    until: str
    issue: str | None = None
    effect: float | None = None

    def covers(self, case: Case, metric: str) -> bool:
        """Whether this decision is about a cell."""
        return fnmatchcase(f"{case.name}:{metric}", self.cell)

    def holds(self, today: date) -> bool:
        """Whether its last day has not passed."""
        return today <= date.fromisoformat(self.until)


Decisions = tuple[Decision, ...]
