"""What detectors are worth: outcomes counted, then rates with Clopper-Pearson intervals.

A night is the unit of a false alarm, an episode that of a detection. All counts add up, so that
pieces of work can be done anywhere, in any order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scipy import stats

from detectors.detector import NightOutcome
from detectors.injections import INJECTIONS, NONE, Injection
from detectors.layout import Layout

LEVEL = 0.95
SIZES = ("1%", "2%", "3%", "5%", "10%")
# What is more than a size: its own column in the second table.
SCENARIOS = tuple(name for name in INJECTIONS if name not in (NONE.name, *SIZES))
# "Not to be compared with what is stored": at once, or as a baseline that is recorded anew.
INCOMPARABLE = frozenset({"INCOMPATIBLE", "RECORDING"})
CANT_TELL = frozenset({"INVALID", "INCONCLUSIVE"})


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts of one detector under one injection; they add.

    `found` are episodes with a right cell called slower (or faster, where that is expected) in
    their first night, `found_in_3` within three nights, `found_ever` in any. `right` are episodes
    in which what should be said was said and nothing false was. `named` and `hit` add up, over
    first nights with an alarm, the shares of alarmed cells that are right and of right cells that
    are alarmed. `cells` are alarmed gated cells in first nights, out of `gated`.
    """

    episodes: int = 0
    nights: int = 0
    alarms: int = 0
    found: int = 0
    found_in_3: int = 0
    found_ever: int = 0
    right: int = 0
    named: float = 0.0
    hit: float = 0.0
    alarmed_first: int = 0
    cells: int = 0
    gated: int = 0
    launches: float = 0.0
    pairs: float = 0.0
    nights_with_pairs: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Tally) -> Tally:
        """Return the counts of both."""
        ours, theirs = self._numbers(), other._numbers()
        sums = {name: ours[name] + theirs[name] for name in ours}
        verdicts = Counter(self.verdicts) + Counter(other.verdicts)
        return Tally(**sums, verdicts=dict(verdicts))

    def _numbers(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__ if name != "verdicts"}


def tally(outcomes: Iterable[NightOutcome], injection: Injection, layout: Layout) -> Tally:
    """Count the outcomes of episodes."""
    episodes: dict[int, list[NightOutcome]] = {}
    for said in outcomes:
        episodes.setdefault(said.episode, []).append(said)
    total = Tally()
    for nights in episodes.values():
        total = total + _episode(sorted(nights, key=lambda o: o.night), injection, layout)
    return total


def _episode(nights: Sequence[NightOutcome], injection: Injection, layout: Layout) -> Tally:
    touched = layout.names(injection.touched(layout))
    gated = layout.names(layout.mask(layout.gated))
    faster = injection.expected == "faster"
    found = [bool((night.faster if faster else night.cells) & touched) for night in nights]
    first = nights[0]
    paired = [night.pairs for night in nights if night.pairs is not None]
    verdicts: Counter[str] = Counter()
    for night in nights:
        verdicts.update(night.verdicts)
    alarmed_right = len(first.cells & touched)
    return Tally(
        episodes=1,
        nights=len(nights),
        alarms=sum(night.alarm for night in nights),
        found=int(found[0]),
        found_in_3=int(any(found[:3])),
        found_ever=int(any(found)),
        right=int(_right(nights, any(found), injection)),
        named=alarmed_right / len(first.cells) if first.alarm else 0.0,
        hit=alarmed_right / len(touched) if first.alarm and touched else 0.0,
        alarmed_first=int(first.alarm),
        cells=len(first.cells & gated),
        gated=len(gated),
        launches=sum(night.launches for night in nights),
        pairs=sum(paired),
        nights_with_pairs=len(paired),
        verdicts=dict(verdicts),
    )


def _right(nights: Sequence[NightOutcome], found: bool, injection: Injection) -> bool:
    """Whether an episode said what it should and nothing that is false."""
    alarmed = any(night.alarm for night in nights)
    said = {word for night in nights for word in night.verdicts}
    match injection.expected:
        case "slower":
            return found
        case "faster":
            return found and not alarmed
        case "incomparable":
            # What was measured in pairs tonight is compared with itself, and may be.
            paired = any(night.pairs is not None for night in nights)
            return not alarmed and (paired or bool(said & INCOMPARABLE))
        case "failures":
            return not alarmed and "LIMIT" in said
    return not alarmed


def interval(count: int, total: int) -> tuple[float, float] | None:
    """Return the two-sided Clopper-Pearson interval of a share; None of nothing."""
    if not total:
        return None
    bounds = stats.binomtest(count, total).proportion_ci(LEVEL, "exact")
    return round(float(bounds.low), 4), round(float(bounds.high), 4)


def upper(count: int, total: int) -> float | None:
    """Return the one-sided Clopper-Pearson bound of a share: as the rule of three for none."""
    if not total:
        return None
    bounds = stats.binomtest(count, total, alternative="less").proportion_ci(LEVEL, "exact")
    return float(bounds.high)


def row(
    detector: str, sensitivity: str | None, preset: str, tallies: Mapping[str, Tally]
) -> dict[str, Any]:
    """Return the scores of one detector under one preset; None for what was not run."""
    quiet = tallies.get(NONE.name, Tally())
    bound = upper(quiet.alarms, quiet.nights)
    scores: dict[str, Any] = {
        "detector": detector,
        "preset": preset,
        "sensitivity": sensitivity,
        "nights": quiet.nights,
        "false_alarms_per_100_nights": _share(100 * quiet.alarms, quiet.nights),
        "false_alarms_upper": None if bound is None else round(100 * bound, 3),
        "cells_false": _share(quiet.cells, quiet.gated),
        "pairs_mean": _share(quiet.pairs, quiet.nights_with_pairs),
        "launches_per_night": _share(quiet.launches, quiet.nights),
    }
    for word in sorted(CANT_TELL):
        all_words = sum(quiet.verdicts.values())
        scores[f"{word.lower()}_share"] = _share(quiet.verdicts.get(word, 0), all_words)
    for size in SIZES:
        found, name = tallies.get(size, Tally()), size.replace("%", "pct")
        scores[f"found_{name}"] = _share(found.found, found.episodes)
        scores[f"found_{name}_interval"] = interval(found.found, found.episodes)
        followed = found.nights >= 3 * found.episodes
        in_3 = _share(found.found_in_3, found.episodes) if followed else None
        scores[f"found_{name}_in_3_nights"] = in_3
        scores[f"cells_found_{name}"] = _share(found.cells, found.gated)
    scores["scenarios"] = {name: _scenario(tallies[name]) for name in SCENARIOS if name in tallies}
    return scores


def _scenario(counts: Tally) -> dict[str, Any]:
    return {
        "episodes": counts.episodes,
        "right": _share(counts.right, counts.episodes),
        "right_interval": interval(counts.right, counts.episodes),
        "found": _share(counts.found, counts.episodes),
        "false_alarm_nights": _share(counts.alarms, counts.nights),
        "named": _share(counts.named, counts.alarmed_first),
        "cells_hit": _share(counts.hit, counts.alarmed_first),
    }


def _share(count: float, total: float) -> float | None:
    return round(count / total, 4) if total else None
