"""What people decided, applied to what the gates say."""

from __future__ import annotations

from datetime import date

from headway.decisions import Decisions
from headway.verdict.finding import Judged


def apply(judged: Judged, decisions: Decisions, today: date) -> Judged:
    """Return a cell as people decided to read it until some day."""
    return judged
