"""Where live progress goes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headway.core import Case
from headway.night.plan import PlannedLaunch


@dataclass(slots=True)
class Screen:
    """`line` stays, `status` is overwritten by the next one; `seconds_left` gives an estimate.

    `launches` is how many of each engine were planned; more may come on suspicion.
    """

    line: Callable[[str], None] = lambda _: None
    status: Callable[[str], None] = lambda _: None
    seconds_left: Callable[[], float | None] = lambda: None
    launches: int = 0

    def progress(self, planned: PlannedLaunch, case: Case, done: int, total: int) -> None:
        """Show instance, launch, level, requests and the time left."""
        left = self.seconds_left()
        text = "" if left is None else f", about {left / 60:.0f} min left"
        self.status(f"{self._where(planned, case)}: {done} of {total} requests{text}")

    def measured(self, planned: PlannedLaunch, case: Case, total: int) -> None:
        """Show a level that is done, in a line that stays."""
        self.line(f"{self._where(planned, case)}: {total} requests")

    def _where(self, planned: PlannedLaunch, case: Case) -> str:
        more = planned.launch > self.launches
        launch = f"launch {planned.launch}" + ("" if more else f" of {self.launches}")
        return f"{case.instance} {launch} {case.workload} {case.level}"
