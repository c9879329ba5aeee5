"""What a judgement knows besides tonight: stored baselines, earlier nights, people's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from headway import baseline
from headway.core import Case
from headway.decisions import Decisions
from headway.history import NightRecord
from headway.results import Results

Load = Callable[[Case], baseline.Baseline | None]


@dataclass(frozen=True, slots=True)
class Memory:
    """`nights` are earlier nights of this suite on this device, the oldest first.

    What began with or after the night that is judged does not count, so that judging a night again
    later gives what it gave at first.
    """

    load: Load = lambda case: None
    nights: tuple[NightRecord, ...] = ()
    decisions: Decisions = ()

    def before(self, results: Results) -> tuple[NightRecord, ...]:
        """Return the nights that ended before this one began."""
        return tuple(
            record
            for record in self.nights
            if record.night != results.night and record.started_at < results.started_at
        )


def day_of(results: Results) -> date:
    """Return the day on which a night began: what `today` means to its gates."""
    return date.fromisoformat(results.started_at[:10])
