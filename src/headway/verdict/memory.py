"""What a judgement knows besides tonight: stored baselines, earlier nights, people's decisions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from headway import baseline, decisions, history
from headway.core import Case
from headway.decisions import Decisions
from headway.history import NightRecord
from headway.results import Results

Load = Callable[[Case], baseline.Baseline | None]


@dataclass(frozen=True, slots=True)
class Memory:
    """`nights` are nights of this suite on this device, the oldest first.

    What began with or after the night that is judged does not count, so that judging a night again
    later gives what it gave at first.
    """

    load: Load = lambda case: None
    nights: tuple[NightRecord, ...] = ()
    decisions: Decisions = ()

    def before(self, results: Results) -> tuple[NightRecord, ...]:
        """Return the nights that began before this one."""
        return tuple(
            record
            for record in self.nights
            if record.night != results.night and record.started_at < results.started_at
        )


def recall(home: Path, baselines: Path, device: str, suite: str) -> tuple[Memory, tuple[str, ...]]:
    """Read what is known of a suite on a device, each file once; and why any file is skipped."""
    nights, skipped = history.load(home, device, suite)
    decided, broken = decisions.load(baselines)
    known: dict[Case, baseline.Baseline | baseline.BaselineError | None] = {}

    def load(case: Case) -> baseline.Baseline | None:
        if case not in known:
            try:
                known[case] = baseline.load(baseline.path_of(baselines, device, case))
            except baseline.BaselineError as error:
                known[case] = error
        found = known[case]
        if isinstance(found, baseline.BaselineError):
            raise found
        return found

    return Memory(load, nights, decided), (*skipped, *broken)


def day_of(results: Results) -> date:
    """Return the day on which a night began: what `today` means to its gates."""
    return history.day_of(results.started_at)
