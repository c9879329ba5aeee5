"""One headline per cause: the cells of a night that say the same thing, put together.

Two dozen red cells are one slowdown more often than two dozen. Cells of one engine that got slower
together are one cause, and so is a launch that failed with all its cells, and a machine that moved
under every engine.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from headway.core import Case
from headway.decisions import cell_name
from headway.verdict.commands import ACCEPT, REPEAT
from headway.verdict.explain import SLOWER, named
from headway.verdict.finding import ORDER, WORDS, Finding, Judged, Verdict

MAX_NAMES = 3
MAX_REASON = 160
# What is wrong for every engine at once: it has no instance.
SHARED: frozenset[Verdict] = frozenset(("INVALID", "MUTED", "RECORDING"))
BUDGET = "budget"

Key = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """What one thing did to some cells. `instance` is None where it is none of the engines'.

    `verdict` is the worst of the cells'; `explanation` is that of the clearest of them, its first
    line says which cell it is and what was found there.
    """

    verdict: Verdict
    instance: str | None
    headline: str
    cells: tuple[str, ...]
    explanation: tuple[str, ...]


def causes(cells: Sequence[Judged]) -> tuple[Cause, ...]:
    """Group all cells with something to say, worst first: every one is in exactly one cause."""
    groups: dict[Key, list[Judged]] = {}
    for cell in cells:
        if cell.findings[0].verdict != "PASS":
            groups.setdefault(_key(cell), []).append(cell)
    found = [_cause(key, group) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda c: (ORDER.index(c.verdict), -len(c.cells))))


def _key(cell: Judged) -> Key:
    """Return what cells of one cause share."""
    finding, instance = cell.findings[0], cell.case.instance
    name = finding.verdict
    if name in SLOWER:
        return "slower", instance, _what_fails(finding)
    if name in ("WRONG", "IMPROVEMENT"):
        return name, instance
    if name == "INCONCLUSIVE" and finding.suspected:
        return "suspected", instance
    if name == "RECORDING":
        return name, str(bool(finding.changed))  # a new epoch, or simply not enough nights yet
    if name == "INCONCLUSIVE" and f"{BUDGET}: " in finding.reason:
        return name, BUDGET
    if name == "INCONCLUSIVE" and finding.worse_by is not None:
        return name, instance
    return name, "" if name in SHARED else instance, _kind(finding.reason)


def _what_fails(finding: Finding) -> str:
    """Tell requests that fail from speed: they are shares of requests, or keep others from it."""
    return "requests" if finding.gate == "complete" or finding.unit == "1" else "speed"


def _kind(reason: str) -> str:
    """Return a reason without what differs from launch to launch and from level to level."""
    return re.sub(r"\d[\d.,]*", "#", _first(reason).partition(": ")[0])


def _first(reason: str) -> str:
    """Return the first of several reasons, without the launch it is about."""
    return re.sub(r"^launch \d+: ", "", reason.partition(";")[0])


def _cause(key: Key, group: Sequence[Judged]) -> Cause:
    clearest = max(group, key=_clearness)
    instances = list(dict.fromkeys(cell.case.instance for cell in group))
    finding = clearest.findings[0]
    name = finding.verdict
    owned = len(instances) == 1 and name not in SHARED and BUDGET not in key
    who = f" {instances[0]}" if owned else ""
    amount = f"{len(group)} cell{'s' if len(group) > 1 else ''}"
    if not owned:
        amount += f" of {few(instances)}"
    first = f"{finding.case.name} {finding.metric}: {finding.reason}"
    told = () if name == "RECORDING" else (first, *_for_all(group, clearest))
    return Cause(
        verdict=min((cell.findings[0].verdict for cell in group), key=ORDER.index),
        instance=instances[0] if owned else None,
        headline=f"{WORDS[name]}{who}: {_saying(key, group, finding)} ({amount})",
        cells=tuple(cell_name(cell.case, cell.metric) for cell in group),
        explanation=told,
    )


def _clearness(cell: Judged) -> tuple[int, bool, float, float]:
    """Worst verdict first; then what says that requests failed, by how they did; then the one
    whose bound is farthest from no change; then the largest change."""
    finding = cell.findings[0]
    sign = -1 if finding.verdict == "IMPROVEMENT" else 1
    low, high = finding.interval or (None, None)
    near = low if sign > 0 else high
    effect = finding.worse_by
    return (
        -ORDER.index(finding.verdict),
        finding.gate == "complete",
        -1.0 if near is None else sign * near,
        -1.0 if effect is None else sign * effect,
    )


def _saying(key: Key, group: Sequence[Judged], clearest: Finding) -> str:
    """Say in a few words what happened."""
    name = clearest.verdict
    moved = name in SLOWER and _what_fails(clearest) == "speed"
    suspected = ", suspected" if "suspected" in key else ""
    if moved or name == "IMPROVEMENT" or suspected:
        parts = [_metrics(group), _changes(group), _where(group)]
        return " ".join(part for part in parts if part) + suspected
    if name == "WRONG":
        return " ".join(part for part in (_metrics(group), _where(group)) if part)
    if name == "RECORDING":
        # After the value, a reason says how far it is: "4 of 10 launches, night 2 of 5".
        texts = (cell.findings[0].reason.partition(", ")[2] for cell in group)
        return f"baselines are recorded, {few([t for t in dict.fromkeys(texts) if t], 2)}"
    reason = _first(clearest.reason)
    if BUDGET in key:
        reason = _first(clearest.reason[clearest.reason.index(BUDGET) :])
    elif name in SLOWER:
        return f"{reason}, {_where(group)}"
    elif name == "INCONCLUSIVE" and clearest.worse_by is not None:
        return f"{_metrics(group)} {_where(group)}: a change may be too small for it to see"
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} [...]"


def _metrics(group: Sequence[Judged]) -> str:
    return few([named(metric) for metric in dict.fromkeys(cell.metric for cell in group)])


def _where(group: Sequence[Judged]) -> str:
    """Name the levels; with their workload where there are several."""
    cases = list(dict.fromkeys(cell.case for cell in group if cell.case.level))
    if not cases:
        return ""
    several = len({case.workload for case in cases}) > 1
    names = [f"{case.workload} {case.level}" if several else case.level for case in cases]
    return f"at {few(list(dict.fromkeys(names)), 4)}"


def _changes(group: Sequence[Judged]) -> str:
    """Return the range of the changes; those beyond a limit only where there are no others."""
    found = [f for cell in group for f in cell.findings[:1] if f.worse_by is not None]
    compared = [f for f in found if f.gate != "limit"]
    sizes = sorted(
        f.worse_by if f.worse_by > 0 else 1 / (1 + f.worse_by) - 1
        for f in compared or found
        if f.worse_by is not None
    )
    if not sizes:
        return ""
    low, high = (f"{100 * size:.1f}" for size in (sizes[0], sizes[-1]))
    shown = f"{high}%" if low == high else f"{low}-{high}%"
    return shown if compared else f"{shown} beyond the limit"


def _for_all(group: Sequence[Judged], clearest: Judged) -> tuple[str, ...]:
    """Return the clearest cell's explanation, with commands that are about all cells.

    Accepting by a pattern accepts what is slower and nothing else; muting by one would mute all
    that it stands for, so that stays with the one cell.
    """
    case, metric = clearest.case, clearest.metric
    pattern = _pattern([cell.case for cell in group], [cell.metric for cell in group])
    wide = cell_name(case, metric) if pattern is None else shlex.quote(pattern)
    swaps = {
        ACCEPT: (cell_name(case, metric), wide),
        f"{REPEAT}headway run": (
            f" --engine {case.instance}",
            _options("engine", "instance", group),
        ),
        REPEAT: (f" --level {case.level}", _options("level", "level", group)),
    }
    return tuple(_swapped(line, swaps) for line in clearest.findings[0].explanation)


def _swapped(line: str, swaps: Mapping[str, tuple[str, str]]) -> str:
    """Replace in a line what there is to replace in lines that begin so."""
    for start, (own, for_all) in swaps.items():
        if line.startswith(start):
            line = line.replace(own, for_all)
    return line


def _options(option: str, attribute: str, group: Sequence[Judged]) -> str:
    values = dict.fromkeys(getattr(cell.case, attribute) for cell in group)
    return "".join(f" --{option} {shlex.quote(value)}" for value in values if value)


def _pattern(cases: Sequence[Case], metrics: Sequence[str]) -> str | None:
    """Return a pattern that stands for all the cells; None where it would for too much."""
    instances = {case.instance for case in cases}
    if len(instances) > 1 or not all(case.level for case in cases):
        return None
    sides = ({case.workload for case in cases}, {case.level for case in cases}, set(metrics))
    workload, level, metric = (side.pop() if len(side) == 1 else "*" for side in sides)
    return f"{instances.pop()}-{workload}-{level}:{metric}"


def few(names: Sequence[str], most: int = MAX_NAMES) -> str:
    """Join names, the first ones and how many more there are."""
    rest = len(names) - most
    shown = ", ".join(names[:most])
    return shown if rest <= 0 else f"{shown} and {rest} more"
