"""What a comparison of two reports is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headway import verdict
from headway.core import Case
from headway.verdict import EQUALITY, Verdict


@dataclass(frozen=True, slots=True)
class Difference:
    """One fact in which two results are of different things."""

    field: str
    old: str
    new: str


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of both reports. `old` and `new` are medians over launches, in `unit`.

    `compared` says that the two were held against each other; `gated` that it may fail.
    """

    case: Case
    metric: str
    unit: str | None
    gated: bool
    compared: bool
    verdict: Verdict
    reason: str
    old: float | None = None
    new: float | None = None
    worse_by: float | None = None
    visible: float | None = None
    differences: tuple[Difference, ...] = ()

    @property
    def change(self) -> float | None:
        """Return new / old - 1, whichever direction is better; None where there is no ratio."""
        return self.new / self.old - 1 if self.new is not None and self.old else None

    @property
    def not_comparable(self) -> bool:
        """Whether both reports have the cell and it still could not be held against itself."""
        return not self.compared and self.metric != EQUALITY and self.verdict != "MISSING"

    @property
    def counts(self) -> bool:
        """Whether the row's verdict is part of the outcome."""
        return self.gated or self.verdict in ("MISSING", "INCOMPATIBLE", "WRONG")

    @property
    def line(self) -> str:
        """Return the row in one line, the verdict first."""
        return f"{self.verdict} {self.case.name} {self.metric}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything that two reports say of each other.

    `rows` holds every cell of OLD; `new` names the cells that only NEW has. `changed` is what was
    put under test and differs, by instance; `environment` is what differs around it.
    """

    old_night: str
    new_night: str
    rows: tuple[Row, ...]
    new: tuple[str, ...]
    changed: Mapping[str, tuple[str, ...]]
    environment: tuple[str, ...]
    notes: tuple[str, ...]
    strict: bool = False

    @property
    def compared(self) -> int:
        """How many cells were held against each other."""
        return sum(row.compared for row in self.rows)

    @property
    def missing(self) -> tuple[str, ...]:
        """Name the cells that OLD has and NEW has not."""
        return tuple(f"{r.case.name} {r.metric}" for r in self.rows if r.verdict == "MISSING")

    @property
    def summary(self) -> str:
        """Return the counts that are always printed."""
        other = sum(row.not_comparable for row in self.rows)
        counts = f"{self.compared} compared, {len(self.new)} new, {len(self.missing)} missing"
        return f"{counts}, {other} not comparable"

    @property
    def exit_code(self) -> int:
        """Return 0 good, 1 slower, wrong or missing, 3 cannot tell: also when nothing compared."""
        rows = [row for row in self.rows if row.counts]
        outcomes = [(row.verdict, row.verdict in verdict.WAITS) for row in rows]
        code = verdict.exit_code(outcomes, self.strict)
        return code or (0 if self.compared else 3)
