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
# What is so for every engine at once: it has no instance.
SHARED: frozenset[Verdict] = frozenset(("INVALID", "MUTED", "RECORDING", "SKIPPED"))
# Kinds of cause that are not a verdict.
SPEED, MEMORY, REQUESTS, BUDGET = "speed", "memory", "requests", "budget"
SUSPECTED, ACCEPTED, UNSEEN = "suspected", "accepted", "unseen"

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
    groups: dict[Key, list[Finding]] = {}
    for cell in cells:
        finding = spoken(cell)
        if finding is not None:
            groups.setdefault(_key(finding), []).append(finding)
    found = [_cause(key, group) for key, group in groups.items()]
    return tuple(sorted(found, key=lambda c: (ORDER.index(c.verdict), -len(c.cells))))


def spoken(cell: Judged) -> Finding | None:
    """Return what a cell has to say: its worst finding, or a slowdown that people accepted."""
    worst = cell.findings[0]
    if worst.verdict != "PASS":
        return worst
    return next((finding for finding in cell.findings if finding.was is not None), None)


def _key(finding: Finding) -> Key:
    """Return what cells of one cause share; first what kind of cause it is."""
    name, instance = finding.verdict, finding.case.instance
    if name in SLOWER:
        return _what_fails(finding), instance
    if name == "PASS":
        return ACCEPTED, instance
    if name in ("WRONG", "IMPROVEMENT"):
        return name, instance
    if name == "RECORDING":
        return name, str(bool(finding.changed))  # a new epoch, or simply not enough nights yet
    if name == "INCONCLUSIVE" and f"{BUDGET}: " in finding.reason:
        return (BUDGET,)
    if name == "INCONCLUSIVE" and finding.worse_by is not None:
        return SUSPECTED if finding.suspected else UNSEEN, instance
    return name, "" if name in SHARED else instance, _kind(finding.reason)


def _what_fails(finding: Finding) -> str:
    """Tell requests that fail from speed: they are shares of requests, or keep others from it."""
    if finding.gate == "complete" or finding.unit == "1":
        return REQUESTS
    return MEMORY if finding.unit == "bytes" else SPEED


def _kind(reason: str) -> str:
    """Return a reason without what differs from launch to launch and from level to level."""
    return re.sub(r"\d[\d.,]*", "#", _first(reason).partition(": ")[0])


def _first(reason: str) -> str:
    """Return the first of several reasons, without the launch it is about."""
    return re.sub(r"^launch \d+: ", "", reason.partition(";")[0])


def _cause(key: Key, group: Sequence[Finding]) -> Cause:
    clearest = max(group, key=_clearness)
    instances = list(dict.fromkeys(finding.case.instance for finding in group))
    name = clearest.verdict
    owned = len(instances) == 1 and name not in SHARED and key[0] != BUDGET
    who = f" {instances[0]}" if owned else ""
    amount = f"{len(group)} cell{'s' if len(group) > 1 else ''}"
    amount += "" if owned else f" of {few(instances)}"
    first = f"{clearest.case.name} {clearest.metric}: {clearest.reason}"
    told = () if name == "RECORDING" else (_one_line(first), *_for_all(group, clearest))
    return Cause(
        verdict=min((finding.verdict for finding in group), key=ORDER.index),
        instance=instances[0] if owned else None,
        headline=_one_line(f"{WORDS[name]}{who}: {_saying(key, group, clearest)} ({amount})"),
        cells=tuple(cell_name(finding.case, finding.metric) for finding in group),
        explanation=told,
    )


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _clearness(finding: Finding) -> tuple[int, bool, float, float]:
    """Worst verdict first; then what says that requests failed, by how they did; then the one
    whose bound is farthest from no change; then the largest change."""
    sign = -1 if finding.verdict == "IMPROVEMENT" else 1
    low, high = finding.interval or (None, None)
    near, effect = low if sign > 0 else high, finding.worse_by
    return (
        -ORDER.index(finding.verdict),
        finding.gate == "complete",
        -1.0 if near is None else sign * near,
        -1.0 if effect is None else sign * effect,
    )


def _saying(key: Key, group: Sequence[Finding], clearest: Finding) -> str:
    """Say in a few words what happened."""
    kind, what, where = key[0], _metrics(group), _where(group)
    if kind in (SPEED, MEMORY, SUSPECTED, ACCEPTED, "IMPROVEMENT"):
        said = " ".join(part for part in (what, _changes(group), where) if part)
        return f"{said}, {kind}" if kind in (SUSPECTED, ACCEPTED) else said
    if kind == "WRONG":
        return f"{what} {where}".strip()
    if kind == UNSEEN:
        return f"{what} {where}: a change may be too small for it to see"
    if kind == "RECORDING":
        # After the value, a reason says how far it is: "4 of 10 launches, night 2 of 5".
        texts = (finding.reason.partition(", ")[2] for finding in group)
        return f"baselines are recorded, {few([t for t in dict.fromkeys(texts) if t], 2)}"
    reason = clearest.reason
    reason = _first(reason[reason.index(f"{BUDGET}: ") :] if kind == BUDGET else reason)
    shown = reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]} [...]"
    return f"{shown}, {where}" if kind == REQUESTS else shown


def _metrics(group: Sequence[Finding]) -> str:
    return few([named(metric) for metric in dict.fromkeys(finding.metric for finding in group)])


def _where(group: Sequence[Finding]) -> str:
    """Name the levels; with their workload where there are several."""
    cases = list(dict.fromkeys(finding.case for finding in group if finding.case.level))
    if not cases:
        return ""
    several = len({case.workload for case in cases}) > 1
    names = [f"{case.workload} {case.level}" if several else case.level for case in cases]
    return f"at {few(list(dict.fromkeys(names)), 4)}"


def _changes(group: Sequence[Finding]) -> str:
    """Return the range of the changes; those beyond a limit only where there are no others."""
    found = [(f.gate, f.worse_by) for f in group if f.worse_by is not None]
    compared = [change for gate, change in found if gate != "limit"]
    sizes = sorted(
        change if change > 0 else 1 / (1 + change) - 1
        for change in compared or [change for _, change in found]
    )
    if not sizes:
        return ""
    low, high = (f"{100 * size:.1f}" for size in (sizes[0], sizes[-1]))
    shown = f"{high}%" if low == high else f"{low}-{high}%"
    return shown if compared else f"{shown} beyond the limit"


def _for_all(group: Sequence[Finding], clearest: Finding) -> tuple[str, ...]:
    """Return the clearest cell's explanation, with commands that are about all cells.

    Accepting by a pattern accepts what is slower and nothing else; muting by one would mute all
    that it stands for, so that stays with the one cell.
    """
    case, cases = clearest.case, [finding.case for finding in group]
    own = cell_name(case, clearest.metric)
    pattern = _pattern(cases, [finding.metric for finding in group])
    wide = own if pattern is None else shlex.quote(pattern)
    engines, levels = ([getattr(c, n) for c in cases] for n in ("instance", "level"))
    swaps = {
        ACCEPT: (own, wide),
        f"{REPEAT}headway run": (f" --engine {case.instance}", _options("engine", engines)),
        REPEAT: (f" --level {case.level}", _options("level", levels)),
    }
    return tuple(_swapped(line, swaps) for line in clearest.explanation)


def _swapped(line: str, swaps: Mapping[str, tuple[str, str]]) -> str:
    """Replace in a line what there is to replace in lines that begin so."""
    for start, (own, for_all) in swaps.items():
        if line.startswith(start):
            line = line.replace(own, for_all)
    return line


def _options(option: str, values: Sequence[str]) -> str:
    return "".join(f" --{option} {shlex.quote(value)}" for value in dict.fromkeys(values) if value)


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
