"""A cell whose baseline gate is not armed yet: how far it is, and whether somebody is late."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date, timedelta

from headway import history
from headway.baseline import Baseline, Cell
from headway.history import Past
from headway.suite import BaselineGate
from headway.verdict.finding import Verdict
from headway.verdict.series import armed, least_nights

PROPOSE = "headway baseline propose"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Tonight, and what is stored; `epoch` says what of the machine changed since it was."""

    night: str
    launches: int
    today: date
    stored: Baseline | None
    cell: Cell | None
    epoch: tuple[str, ...]


def waiting(
    tonight: Waiting, past: Sequence[Past], gate: BaselineGate
) -> tuple[Verdict, str, bool]:
    """Return RECORDING or MISSING, why, and whether the gate was armed before.

    What counts is what is stored, what the history holds and tonight, each night once.
    """
    sound = [p for p in past if p.cell.sound]
    counts = {p.night: len(p.values) for p in sound} | {tonight.night: tonight.launches}
    days = [p.day for p in sound]
    if tonight.cell is not None and tonight.stored is not None and not tonight.epoch:
        for night, values in tonight.cell.by_night().items():
            counts[night] = len(values)
            started_at = tonight.stored.facts(night).started_at
            days += [] if started_at is None else [history.day_of(started_at)]
    launches, nights, wanted = sum(counts.values()), len(counts), least_nights(gate)
    ready = launches >= gate.min_launches and nights >= wanted
    due = bool(tonight.epoch) and armed(tonight.cell, gate)
    first = min(days, default=tonight.today)
    late = tonight.today - first > timedelta(days=gate.arm_within_days)
    if ready and late:
        reason = (
            f"{launches} launches over {nights} nights are recorded since {first}, and no baseline "
            f"was accepted within {gate.arm_within_days} days: {PROPOSE}, review the patch and "
            "commit it, or mute the cell"
        )
        return "MISSING", _anew(tonight) + reason, due
    if ready:
        progress = f"{launches} launches over {nights} nights, ready: accept it ({PROPOSE})"
    else:
        progress = f"{launches} of {gate.min_launches} launches, night {nights} of {wanted}"
    return "RECORDING", _anew(tonight) + progress, due


def _anew(tonight: Waiting) -> str:
    if not tonight.epoch:
        return ""
    changed = "; ".join(tonight.epoch)
    return f"a new epoch, the machine changed: {changed}; pairs with a reference carry on; "
