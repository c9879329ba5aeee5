"""Which nights become what a cell is compared with: the rules, cell by cell.

Sound nights only, on the present machine and with the present arguments, and of those the newest.
Where the engine under test changed in between, only the nights of the present one count if they
are enough, else all of them: an engine that changes every night could never be armed otherwise.
Earlier and later nights must agree within their spread; nights in which the machine was another
one are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from headway import baseline, calibration, metrics, stats
from headway.baseline import Baseline, Cell, NightFacts, Stored
from headway.fingerprint import Treatment
from headway.history import CellNight, Past
from headway.suite import BaselineGate
from headway.verdict import nightly, series

# An anchor grows by these steps of nights, then it is fixed. On a simulated shared machine 10 % are
# found the same night in 83 of 100 nights with ten stored, in 91 with twenty.
STEPS = (10, 20)
MOST_NIGHTS = STEPS[-1]
# What the baseline gate may have said of a night that extends what it compares with.
EXTENDS = frozenset(("PASS", "INCONCLUSIVE", "RECORDING"))


@dataclass(frozen=True, slots=True)
class Anchor:
    """What is to be stored of a cell, what is known of its nights, and the newest one's engine."""

    cell: Cell
    nights: Mapping[str, NightFacts]
    treatment: Treatment
    newest: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What becomes of a cell, and on what grounds. `why` is for people; None is proposed without.

    `spread` is the standard deviation between nights, `halves` the change from the earlier to the
    later nights, both as shares; None where there are too few.
    """

    why: str
    anchor: Anchor | None = None
    unit: str = ""
    launches: int = 0
    nights: int = 0
    median: float | None = None
    spread: float | None = None
    halves: float | None = None

    @property
    def proposed(self) -> bool:
        """Whether anything is to be stored."""
        return self.anchor is not None


def arm(
    name: str,
    stored: Baseline | None,
    past: Sequence[Past],
    gate: BaselineGate,
    since: str | None = None,
) -> Outcome:
    """Return what would arm a cell; `stored` is what was accepted of too few nights before."""
    everything = {p.night: p for p in _accepted(name, stored)} | {p.night: p for p in past}
    nights = sorted(everything.values(), key=lambda p: (p.started_at, p.night))
    sound = [p for p in nights if p.cell.sound and (since is None or p.started_at >= since)]
    sound = sound[-max(3 * MOST_NIGHTS, 2 * gate.min_launches) :]
    asked = series.asked_alike(sound, nights[-1].treatment) if nights else ()
    alike = _alike(asked)
    others = "".join(
        f", {count} left out: {what}"
        for count, what in (
            (len(sound) - len(asked), "the engine had other arguments"),
            (len(asked) - len(alike), "the machine was another"),
        )
        if count
    )
    chosen, engines = _of_one_engine(alike, gate)
    chosen = _newest(chosen, gate)
    facts = _facts(name, chosen)
    if not _enough(chosen, gate):
        wanted = series.least_nights(gate)
        progress = f"{facts.launches} of {gate.min_launches} launches, night {facts.nights} of"
        return replace(facts, why=f"{progress} {wanted}{others}")
    refused = _halves_disagree(facts, name, chosen, gate)
    if refused is not None:
        return refused
    return replace(facts, why=f"ready{engines}{others}", anchor=_anchor(name, chosen))


def keep(
    name: str, stored: Baseline | None, past: Sequence[Past], gate: BaselineGate
) -> Outcome | None:
    """Return what becomes of an armed cell; None for one that is not."""
    cell = stored.cells.get(name) if stored is not None else None
    if stored is None or cell is None or not series.armed(cell, gate):
        return None
    accepted = _accepted(name, stored)
    facts = _facts(name, accepted)
    machine = series.calibrations(stored, cell)
    later = series.alike(series.since(stored, cell, past), machine)
    if not later:
        return replace(facts, why="armed")
    tonight = later[-1].cell
    if tonight.gates.get("baseline") == "REGRESSION" or tonight.suspected:
        return replace(facts, why=f"armed; not proposed ({tonight.verdict}: {tonight.reason})")
    metric = metrics.ALL[name]
    compared = series.series_of(metric, cell, [p.values for p in later])
    run = nightly.improved(compared, gate) if metric.unit != "1" else 0
    if run:
        return _ratchet(name, facts, later[-run:], gate)
    more = [p for p in later if _extends(p.cell)]
    nights = [*accepted, *more][
        : max((n for n in STEPS if n <= len(accepted) + len(more)), default=0)
    ]
    if len(nights) <= len(accepted):
        return replace(facts, why="armed")
    longer = _facts(name, nights)
    refused = _halves_disagree(longer, name, nights, gate)
    if refused is not None:
        return replace(refused, why=f"armed, stays as it is: {refused.why}")
    fixed = ", and fixed from then on" if len(nights) == MOST_NIGHTS else ""
    why = f"sharper: {len(nights)} nights in place of {len(accepted)}{fixed}"
    return replace(longer, why=why, anchor=_anchor(name, nights))


def _extends(cell: CellNight) -> bool:
    return cell.sound and not cell.suspected and cell.gates.get("baseline") in EXTENDS


def _ratchet(name: str, facts: Outcome, better: Sequence[Past], gate: BaselineGate) -> Outcome:
    """Propose the nights of a confirmed improvement: they are all better than what is stored."""
    sound = [p for p in better if p.cell.sound]
    chosen = _newest(sound, gate)
    found = _facts(name, chosen)
    if not _enough(chosen, gate):
        wanted = series.least_nights(gate)
        more = f"night {len(sound)} of {wanted} of a new standard"
        return replace(facts, why=f"armed; faster, confirmed: {more}")
    refused = _halves_disagree(found, name, chosen, gate)
    if refused is not None:
        return replace(refused, why=f"armed; faster, but {refused.why}")
    assert found.median is not None
    assert facts.median is not None
    by = metrics.ALL[name].worse_by(facts.median, found.median)
    why = f"faster, confirmed: becomes the standard, from which the old one is {by:.1%} away"
    return replace(found, why=why, anchor=_anchor(name, chosen))


def _accepted(name: str, stored: Baseline | None) -> list[Past]:
    """Return what is stored of a cell as nights, the oldest first."""
    cell = stored.cells.get(name) if stored is not None else None
    if stored is None or cell is None:
        return []
    nights: dict[str, list[Stored]] = {}
    for sample in cell.samples:
        nights.setdefault(sample.night, []).append(sample)
    found = []
    for night, samples in nights.items():
        facts = stored.facts(night)
        said = CellNight("PASS", sound=True)
        at, seconds = facts.started_at or "", facts.calibration
        found.append(Past(night, at, tuple(samples), seconds, stored.treatment, said))
    return sorted(found, key=lambda p: (p.started_at, p.night))


def _alike(nights: Sequence[Past]) -> list[Past]:
    """Leave out nights whose calibration is not that of the others; no metric is looked at."""
    seconds = [p.calibration for p in nights]
    return [
        p
        for n, p in enumerate(nights)
        if not calibration.shifted(p.calibration, [s for s in seconds[:n] + seconds[n + 1 :] if s])
    ]


def _of_one_engine(nights: Sequence[Past], gate: BaselineGate) -> tuple[Sequence[Past], str]:
    """Return the nights of the present engine if they are enough, else all; and say which."""
    if not nights:
        return nights, ""
    present = [p for p in nights if p.treatment == nights[-1].treatment]
    if len(present) == len(nights):
        return nights, ""
    if _enough(present, gate):
        return present, f", of the present engine alone ({len(nights) - len(present)} others)"
    newest = _newest(nights, gate)
    kinds: list[Treatment] = []
    for p in newest:
        kinds += [] if p.treatment in kinds else [p.treatment]
    return nights, f", over {len(kinds)} states of the engine" if len(kinds) > 1 else ""


def _enough(nights: Sequence[Past], gate: BaselineGate) -> bool:
    launches = sum(len(p.values) for p in nights)
    return launches >= gate.min_launches and len(nights) >= series.least_nights(gate)


def _newest(nights: Sequence[Past], gate: BaselineGate) -> list[Past]:
    """Return the newest nights: twenty, or as many as the gate wants."""
    count = max(MOST_NIGHTS, series.least_nights(gate))
    while count < len(nights) and not _enough(nights[-count:], gate):
        count += 1
    return list(nights[-count:])


def _facts(name: str, nights: Sequence[Past]) -> Outcome:
    """Return what a reviewer should see of nights."""
    metric = metrics.ALL[name]
    medians = [m for p in nights if (m := stats.median(p.values)) is not None]
    spread = None
    compared = None
    if metric.unit != "1" and len(medians) > 1:
        logs = [math.log(m) for m in medians]
        middle = math.fsum(logs) / len(logs)
        variance = math.fsum((x - middle) ** 2 for x in logs) / (len(logs) - 1)
        spread = math.expm1(math.sqrt(variance))
        compared = baseline.halves([p.values for p in nights], 0.0)
    return Outcome(
        "",
        unit=metric.unit,
        launches=sum(len(p.values) for p in nights),
        nights=len(nights),
        median=stats.median(medians),
        spread=spread,
        halves=compared.change if compared is not None else None,
    )


def _halves_disagree(
    facts: Outcome, name: str, nights: Sequence[Past], gate: BaselineGate
) -> Outcome | None:
    if metrics.ALL[name].unit == "1":
        return None
    found = baseline.halves([p.values for p in nights], gate.drift_budget)
    if found is None or not found.disagree:
        return None
    why = (
        f"not proposed, its halves disagree: {found.change:+.1%} from the earlier to the later "
        "nights, beyond their spread; wait for more nights, or say from which night on (--since)"
    )
    return replace(facts, why=why)


def _anchor(name: str, nights: Sequence[Past]) -> Anchor:
    metric = metrics.ALL[name]
    samples = tuple(sample for p in nights for sample in p.samples)
    facts = {p.night: NightFacts(p.started_at or None, p.calibration) for p in nights}
    last = nights[-1]
    cell = Cell(metric.unit, metric.direction, samples)
    return Anchor(cell, facts, last.treatment, last.started_at)
