"""Tonight against stored nights: what one night shows alone, and what several show together.

One night alone is a regression beyond what nights do to each other and beyond the tolerance, where
the calibration kernels vouch for the machine; where they do not, two such nights, or one far beyond
what a bad night does. Smaller changes are one when they persist.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headway import stats
from headway.baseline import Cell
from headway.history import Past
from headway.metrics import Metric
from headway.suite import BaselineGate
from headway.verdict.finding import Finding, Verdict, shown
from headway.verdict.series import Series, series_of

if TYPE_CHECKING:
    from headway.stats.nights import Change

# What a bad night of a shared machine does at most: beyond it no calibration need vouch for it.
LARGE = 0.30


@dataclass(frozen=True, slots=True)
class Tonight:
    """One cell tonight, what is stored of it, and the nights since the stored ones.

    `vouched` says that the calibration kernels would have shown a bad night of the machine.
    """

    metric: Metric
    gate: BaselineGate
    values: Sequence[float]
    cell: Cell
    since: Sequence[Past]
    vouched: bool

    @property
    def series(self) -> Series:
        """Stored nights, the nights since, and tonight."""
        return series_of(self.metric, self.cell, [*(p.values for p in self.since), self.values])


@dataclass(frozen=True, slots=True)
class _Said:
    """What the nights amount to. `change` and `margin` are the log-ratios that decided it."""

    verdict: Verdict
    change: float
    margin: float
    more: str = ""
    suspected: bool = False


def judge_nights(tonight: Tonight, finding: Callable[..., Finding]) -> Finding:
    """Judge tonight by the stored nights; `finding` makes a finding of verdict and reason."""
    compared = tonight.series
    change = compared.change(tonight.gate)
    said = (
        _slower(tonight, compared, change)
        or _faster(tonight, compared)
        or _neither(tonight.gate, change)
    )
    low, high = (math.expm1(bound) for bound in change.interval)
    value = stats.median(tonight.values)
    assert value is not None
    sign = 1 if tonight.metric.direction == "lower" else -1
    center = math.exp(math.log(value) - sign * change.change)
    reason = (
        f"{shown(value, tonight.metric.unit)}, {_worse(change.change)} than the baseline's "
        f"{shown(center, tonight.metric.unit)} ({tonight.cell.num_nights} nights; 95% interval "
        f"{low:+.1%} to {high:+.1%} worse; margin {math.expm1(change.margin):.1%}){said.more}"
    )
    return finding(
        said.verdict,
        reason,
        worse_by=math.expm1(said.change),
        bound=math.expm1(said.margin),
        visible=math.expm1(change.visible),
        interval=(low, high),
        suspected=said.suspected,
        explanation=(_sight(tonight, change),),
    )


def _worse(change: float) -> str:
    """Return a change as a person says it: a log-ratio of -0.05 is 5 % better."""
    size = math.expm1(abs(change))
    return f"{size:.1%} {'worse' if change >= 0 else 'better'}"


def _sight(tonight: Tonight, change: Change) -> str:
    alone = math.expm1(change.visible)
    if not tonight.vouched:
        alone = max(alone, LARGE)
    several = math.expm1(change.mean_visible)
    nights = tonight.gate.persistence
    return f"it sees {alone:.1%} in one night, {several:.1%} over {nights} nights"


def _slower(tonight: Tonight, compared: Series, change: Change) -> _Said | None:
    """Return the regression that the nights show, or the suspicion of one."""
    from headway.stats.nights import HELD

    gate, enough = tonight.gate, tonight.gate.persistence
    if change.decisive and (tonight.vouched or change.change > math.log1p(LARGE)):
        return _Said("REGRESSION", change.change, change.margin)
    if change.repeated:
        return _Said("REGRESSION", change.change, change.margin, "; so it was the night before")
    if change.persistent:
        assert change.mean_change is not None
        run = compared.run(HELD * change.mean_margin)
        night = f"{run} of {enough}" if run == enough else f"{run}"
        mean, margin = math.expm1(change.mean_change), math.expm1(change.mean_margin)
        more = (
            f"; persists: night {night}, {mean:.1%} worse over {enough} nights, margin {margin:.1%}"
        )
        return _Said("REGRESSION", change.mean_change, change.mean_margin, more)
    if change.decisive:
        more = "; suspected, night 1 of 2: no calibration tells it from a bad night of the machine"
        return _Said("INCONCLUSIVE", change.change, change.margin, more, suspected=True)
    for nights in range(min(enough - 1, len(compared.recent)), 0, -1):
        several = compared.change(gate, nights)
        if several.persistent:
            assert several.mean_change is not None
            more = f"; suspected, night {nights} of {enough}"
            found = several.mean_change, several.mean_margin
            return _Said("INCONCLUSIVE", *found, more, suspected=True)
    return None


def _faster(tonight: Tonight, compared: Series) -> _Said | None:
    change = compared.flipped().change(tonight.gate)
    if not (change.decisive or change.persistent):
        return None
    run = improved(compared, tonight.gate)
    more = f"; confirmed: night {run}" if run else "; another night would confirm it"
    return _Said("IMPROVEMENT", -change.change, change.margin, more)


def improved(compared: Series, gate: BaselineGate) -> int:
    """Return how many nights in a row, tonight the last, were better; 0 until it is confirmed."""
    from headway.stats.nights import HELD

    flipped = compared.flipped()
    change = flipped.change(gate)
    if not (change.repeated or change.persistent):
        return 0
    return flipped.run(HELD * min(change.margin, change.mean_margin))


def _neither(gate: BaselineGate, change: Change) -> _Said:
    if min(change.margin, change.mean_margin) > math.log1p(gate.resolution):
        seen = math.expm1(min(change.visible, change.mean_visible))
        more = f"; it cannot see less than {seen:.1%}"
        return _Said("INCONCLUSIVE", change.change, change.margin, more)
    if change.interval[0] > 0 and change.change > math.log1p(gate.tolerance):
        # What is worse than ever before is not fine because nights differ by as much.
        more = "; more than the tolerance, and not beyond what nights differ by"
        return _Said("INCONCLUSIVE", change.change, change.margin, more)
    return _Said("PASS", change.change, change.margin)


def surroundings(tonight: Tonight, found: Finding, past: Sequence[Past]) -> tuple[str, ...]:
    """Return what a person asks next of the nights: since when, and how good it ever was.

    `past` holds the last months' nights on a machine like tonight's, the stored ones among them.
    """
    lines = []
    slow = found.suspected or found.verdict == "REGRESSION"
    run = tonight.series.run()
    if slow and run > 1:
        first = tonight.since[-(run - 1)].day
        lines.append(f"worse than the baseline in every night since {first}, {run} nights")
    lines += _best(tonight, past)
    return tuple(lines)


def _best(tonight: Tonight, past: Sequence[Past]) -> list[str]:
    """Say how far tonight is from the best of the last months: a fact, and no verdict."""
    metric, value = tonight.metric, stats.median(tonight.values)
    medians = [(m, p) for p in past if (m := stats.median(p.values))]
    if not medians or not value:
        return []
    pick = min if metric.direction == "lower" else max
    best, night = pick(medians, key=lambda pair: pair[0])
    if metric.worse_by(value, best) <= 0:
        return ["tonight is the best night in 90 days"]
    return [
        f"best night in 90 days: {shown(best, metric.unit)} on {night.day}, "
        f"tonight is {metric.worse_by(value, best):.1%} worse"
    ]
