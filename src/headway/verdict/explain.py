"""What a person asks of a verdict, answered once: in a test's message, in every report.

The first line is the finding's own message: effect, interval, margin. Here are the lines below it:
what changed and what did not, what moved along, how sure that is and what it cost, since when, and
what to do now. A line that has nothing to say is left out. Pure: the same night gives the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headway import calibration, fingerprint, history, pairs
from headway.core import Case
from headway.history import CaseNight, CellNight, NightRecord
from headway.results import Results
from headway.verdict import movement, subject
from headway.verdict.commands import commands
from headway.verdict.decided import COMPARING
from headway.verdict.finding import FAILS, WORDS, Finding, Judged, Verdict
from headway.verdict.memory import Memory
from headway.verdict.movement import Change, Surroundings

# The verdicts that raise questions.
EXPLAINED: frozenset[Verdict] = FAILS | {"INCONCLUSIVE", "IMPROVEMENT"}
SLOWER: frozenset[Verdict] = frozenset(("REGRESSION", "LIMIT"))
GOOD = ("PASS", "IMPROVEMENT")
MAX_REASONS = 3
# Levels are called alike when even their bounds are within this factor of each other.
ALIKE = 2.0
_ACRONYMS = ("ttft", "tpot", "itl", "e2el")


@dataclass(frozen=True, slots=True)
class _Night:
    """What is looked at to explain a cell: tonight, its other cells, and the nights before."""

    results: Results
    cells: Mapping[tuple[Case, str], Judged]
    before: Sequence[NightRecord]
    around: Callable[[Case, tuple[int, ...]], Surroundings]


@dataclass(frozen=True, slots=True)
class _Earlier:
    """One earlier night of one cell."""

    record: NightRecord
    case: CaseNight
    cell: CellNight


def explain(results: Results, cells: Sequence[Judged], memory: Memory) -> tuple[Judged, ...]:
    """Return the cells with an explanation in every finding that needs one."""
    by_name = {(cell.case, cell.metric): cell for cell in cells}
    # The cells of a case are judged by the same pairs: what those show is looked up once.
    around = functools.cache(functools.partial(movement.surroundings, results))
    night = _Night(results, by_name, memory.before(results), around)
    return tuple(
        replace(cell, findings=tuple(_explained(night, cell, f) for f in cell.findings))
        for cell in cells
    )


def named(metric: str) -> str:
    """Return a metric's name as people write it: `TTFT p50`, `output throughput`."""
    words = metric.split("_")
    return " ".join(word.upper() if word in _ACRONYMS else word for word in words)


def _explained(night: _Night, cell: Judged, finding: Finding) -> Finding:
    if finding.verdict not in EXPLAINED:
        return finding
    lines = (" ".join(line.split()) for line in _lines(night, cell, finding))
    return replace(finding, explanation=(*finding.explanation, *lines))


def _lines(night: _Night, cell: Judged, finding: Finding) -> Iterator[str]:
    yield from _differs(night, finding)
    yield from _since_good(night, finding)
    yield from _levels(night, finding)
    if finding.gate == "reference":
        yield from _pairs(night, finding)
    elif finding.gate == "baseline":
        yield from _beside(finding, _other_metrics(night, finding))
    yield from _other_gates(cell, finding)
    yield from _cost(night, finding)
    yield from _first_seen(night, finding)
    yield from commands(night.results, finding)


def _moved(finding: Finding) -> bool:
    """Whether there is a change of which one may ask what moved with it."""
    if finding.worse_by is None:
        return False
    beyond = abs(finding.worse_by) > (finding.bound or 0.0) and finding.gate == "reference"
    return finding.verdict in SLOWER | {"IMPROVEMENT"} or finding.suspected or beyond


def _differs(night: _Night, finding: Finding) -> Iterator[str]:
    """Say what was put under test and is not what it was compared with."""
    gate = night.results.suite.reference
    other = "the baseline"
    if finding.gate == "reference" and gate is not None:
        other = gate.instance
    if finding.changed:
        yield f"differs from {other}: {'; '.join(finding.changed)}"
    elif finding.gate in COMPARING and finding.worse_by is not None:
        yield f"differs from {other} in nothing that is under test"


def _known(night: _Night, finding: Finding) -> list[_Earlier]:
    """Return what earlier nights said of this cell, the oldest first."""
    found = []
    for record in night.before:
        case = record.of(finding.case)
        cell = case.cells.get(finding.metric) if case is not None else None
        if case is not None and cell is not None:
            found.append(_Earlier(record, case, cell))
    return found


def _said(cell: CellNight, finding: Finding) -> str:
    return cell.gates.get(finding.gate, cell.verdict)


def _since_good(night: _Night, finding: Finding) -> Iterator[str]:
    """Say what changed since the last good night, and what did not."""
    earlier = reversed(_known(night, finding))
    good = next((e for e in earlier if _said(e.cell, finding) in GOOD), None)
    known = finding.case.model in night.results.models
    if good is None or not known or finding.verdict == "IMPROVEMENT":
        return
    results, then = night.results, good.case.sample
    day = history.day_of(good.record.started_at)
    tables = [subject.flat(t) for t in (then.treatment, _treatment(results, finding.case))]
    around = (
        ("environment", then.environment, results.machine.environment()),
        ("model and prompts", then.identity, subject.identity_of(results, finding.case)),
    )
    changed = fingerprint.differences(tables[0], tables[1])
    same = []
    for name, before, now in around:
        differing = fingerprint.differences(before, now)
        changed += differing
        same += [] if differing else [name]
    what = "; ".join(changed) or "nothing that is under test changed"
    yield f"since the last good night, {day}: {what}"
    if finding.gate != "reference":  # pairs say more of the machine than two nights can
        tonight = calibration.night_medians(results.readings())
        kernels = {
            calibration.NAMES.get(name, name): tonight[name] / seconds - 1
            for name, seconds in good.record.calibration.items()
            if name in tonight
        }
        yield from _unchanged(f"as on {day}", same, kernels)


def _treatment(results: Results, case: Case) -> fingerprint.Treatment:
    return subject.treatment_of(results, case.instance)


def _unchanged(when: str, same: Sequence[str], kernels: Mapping[str, float]) -> Iterator[str]:
    """Say what did not change; a kernel's figure speaks for itself."""
    said = [f"{when}: {', '.join(same)}"] if same else []
    if kernels:
        figures = ", ".join(f"{name} {_signed(change)}" for name, change in kernels.items())
        said.append(f"calibration kernels: {figures}")
    if said:
        yield "; ".join(said)


def _levels(night: _Night, finding: Finding) -> Iterator[str]:
    """Say which other levels of the same workload moved in the same direction."""
    found = list(_other_levels(night, finding))
    if not found:
        return
    if finding.gate == "limit":
        broken = [other.case.level for other in found if other.verdict == "LIMIT"]
        held = [other.case.level for other in found if other.verdict == "PASS"]
        parts = [f"its limit is broken at {', '.join(broken)} too"] if broken else []
        parts += [f"it holds at {', '.join(held)}"] if held else []
        if parts and finding.verdict == "LIMIT":
            yield "; ".join(parts)
        return
    mine = _change(finding.case.level, finding)
    changes = [c for f in found if (c := _change(f.case.level, f)) is not None]
    if mine is not None and changes and _moved(finding):
        said = _sorted_out("same direction at", "not at", changes, mine.worse_by)
        meaning = _meaning(mine, _by_load(night, finding.case, [mine, *changes]))
        if said:
            yield f"{said}{': ' if meaning else ''}{meaning}"


def _other_levels(night: _Night, finding: Finding) -> Iterator[Finding]:
    mine = finding.case
    for (case, metric), cell in night.cells.items():
        same = (case.instance, case.model, case.workload, metric)
        if case.level and case != mine and same == (*_place(mine), finding.metric):
            # The worst of several findings of a gate comes first.
            yield from [f for f in cell.findings if f.gate == finding.gate][:1]


def _place(case: Case) -> tuple[str, str, str]:
    return case.instance, case.model, case.workload


def _by_load(night: _Night, case: Case, changes: Sequence[Change]) -> list[Change]:
    """Return a change per level of a workload, the lightest load first; none if one is missing.

    None where the levels are of several kinds: a rate that moves is neither lighter nor heavier.
    """
    by_name = {change.name: change for change in changes}
    levels = night.results.suite.workload(case.workload).levels
    kinds = {(level.closed, level.arrivals, level.stages) for level in levels}
    if len(kinds) > 1 or not {level.name for level in levels} <= set(by_name):
        return []
    ordered = sorted(levels, key=lambda level: level.concurrency or level.rate_per_s or 0.0)
    return [by_name[level.name] for level in ordered]


def _change(name: str, finding: Finding) -> Change | None:
    """Return what a finding says of a change; None where it says nothing of its bounds."""
    if finding.worse_by is None or finding.interval is None:
        return None
    low, high = finding.interval
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return Change(name, finding.worse_by, low, high)


def _sorted_out(moved: str, still: str, changes: Sequence[Change], effect: float) -> str:
    """Say what certainly moved with an effect and what certainly did not."""
    parts = []
    for words, goes in ((moved, True), (still, False)):
        found = [f"{c.name} ({worse(c.worse_by)})" for c in changes if c.goes_with(effect) is goes]
        parts += [f"{words} {', '.join(found)}"] if found else []
    return "; ".join(parts)


def _meaning(mine: Change, by_load: Sequence[Change]) -> str:
    """Say what the levels together mean, where that is certain."""
    if not by_load:
        return ""
    effect = mine.worse_by
    goes = [c.goes_with(effect) for c in by_load]
    if goes.count(True) == 1 and goes.count(False) == len(goes) - 1 and len(goes) > 2:
        return "at this level only"
    sizes = [abs(c.worse_by) for c in by_load]
    bounds = sorted(abs(bound) for c in by_load for bound in (c.low, c.high))
    if all(goes) and bounds[-1] <= ALIKE * bounds[0]:
        return "about the same at all levels"
    first, last = by_load[0], by_load[-1]
    apart = first.high < last.low if effect > 0 else last.high < first.low
    if None not in goes and sizes == sorted(sizes) and apart:
        return "it grows with load"
    return ""


def _pairs(night: _Night, finding: Finding) -> Iterator[str]:
    """Say what the pairs show besides: the machine, what moved along, where the time went."""
    results, case = night.results, finding.case
    seen = movement.seen_pairs(results, case, finding.metric)
    used = movement.used_pairs(seen)
    around = night.around(case, used)
    if around.same_prompts:
        yield "the same for both: prompts, arrivals"
    yield from _machine(around.kernels, finding.worse_by if _moved(finding) else None)
    if _moved(finding):
        yield from _beside(finding, [c for c in around.changes if c.name != finding.metric])
        yield from _where_the_time_went(finding, around)
    lost = seen.lost[case, finding.metric]
    if lost:
        more = f"; and {len(lost) - MAX_REASONS} more" if len(lost) > MAX_REASONS else ""
        yield f"dropped: {'; '.join(lost[:MAX_REASONS])}{more}"


def _machine(kernels: Sequence[Change], effect: float | None) -> Iterator[str]:
    """Say whether the calibration kernels moved with an effect; they know nothing of an engine."""
    if not kernels:
        return
    said: dict[bool | None, list[str]] = {}
    for kernel in kernels:
        goes = None if effect is None else kernel.goes_with(effect)
        said.setdefault(goes, []).append(f"{kernel.name} {_signed(kernel.worse_by)}")
    figures = {goes: ", ".join(texts) for goes, texts in said.items()}
    if effect is None:
        yield f"calibration kernels: {figures[None]}"
    elif set(figures) == {False}:
        yield f"not the machine, its calibration kernels: {figures[False]}"
    else:
        words = {True: "moved with it", False: "did not", None: "cannot be told"}
        parts = [f"{figures[goes]} {words[goes]}" for goes in words if goes in figures]
        yield f"the machine's calibration kernels: {'; '.join(parts)}"


def _other_metrics(night: _Night, finding: Finding) -> list[Change]:
    """Return what the same gate says of the other metrics of the case."""
    found = []
    for (case, metric), cell in night.cells.items():
        if case == finding.case and metric != finding.metric:
            said = (_change(metric, f) for f in cell.findings if f.gate == finding.gate)
            found += [change for change in said if change is not None]
    return found


def _beside(finding: Finding, changes: Sequence[Change]) -> Iterator[str]:
    if _moved(finding) and finding.worse_by is not None:
        shown = [replace(change, name=named(change.name)) for change in changes]
        said = _sorted_out("moved with it:", "did not:", shown, finding.worse_by)
        if said:
            yield said


def _where_the_time_went(finding: Finding, around: Surroundings) -> Iterator[str]:
    """Split what TTFT and TPOT gained or lost, where they moved."""
    effect = finding.worse_by or 0.0
    moved = {change.name for change in around.changes if change.goes_with(effect)}
    for metric, (total, parts) in around.parts.items():
        if parts and metric in moved | {finding.metric}:
            said = ", ".join(f"{name} {_ms(value)}" for name, value in parts.items())
            yield f"of {named(metric)}'s {_ms(total)}: {said}"


def _other_gates(cell: Judged, finding: Finding) -> Iterator[str]:
    """Let the other gates on this cell speak where they fail, or compare it with something."""
    for other in cell.findings:
        compares = other.gate in COMPARING and other.worse_by is not None
        if other is not finding and (compares or other.verdict in FAILS):
            yield f"the {other.gate} gate says {WORDS[other.verdict]}: {other.reason}"


def _cost(night: _Night, finding: Finding) -> Iterator[str]:
    """Say how sure it is besides what the message says, and what it took to know."""
    results, instance = night.results, finding.case.instance
    gate, budget = results.suite.reference, results.suite.budget
    compared = {instance}
    if finding.gate == "reference" and gate is not None:
        compared.add(gate.instance)
        size = len(pairs.family(results.suite, instance))
        yield (
            f"tested as one of a family of {size} cells, with a chance of {gate.alpha:.1%} of a "
            "false SLOWER in a night"
        )
    minutes = results.measured_s(compared) / 60
    if finding.worse_by is not None and minutes > 0:
        cost = budget.cost(minutes)
        money = "" if cost is None else f", {cost:.2f} at {budget.price_per_hour:g} an hour"
        time = f"{minutes:.1f} minutes" if minutes >= 2 else f"{minutes * 60:.0f} seconds"
        yield f"measured for {time}{money}"


def _first_seen(night: _Night, finding: Finding) -> Iterator[str]:
    """Say since when it has been so without a break, as far as nights are known."""
    known = _known(night, finding)
    if not known or not (finding.verdict in FAILS or finding.suspected):
        return
    slower = finding.verdict in SLOWER or finding.suspected

    def as_tonight(earlier: _Earlier) -> bool:
        said = _said(earlier.cell, finding)
        return (said in SLOWER or earlier.cell.suspected) if slower else said == finding.verdict

    run = next((n for n, e in enumerate(reversed(known)) if not as_tonight(e)), len(known))
    if not run:
        yield f"first seen tonight; the last night before was {_day(known[-1])}"
    elif run == len(known):
        yield f"seen in every night that is known, since {_day(known[0])}: {run + 1} nights"
    else:
        yield f"first seen on {_day(known[-run])}, night {run + 1} in a row"


def _day(earlier: _Earlier) -> str:
    return history.day_of(earlier.record.started_at).isoformat()


def _signed(change: float) -> str:
    return f"{change:+.1%}".replace("-0.0%", "+0.0%")


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:+.2f} ms".replace("-0.00", "+0.00")


def worse(change: float) -> str:
    """Return a change as a person says it; a log-ratio of -0.05 is 5 % better."""
    size = change if change >= 0 else 1 / (1 + change) - 1
    shown = f"{size:.1%}"
    return shown if shown == "0.0%" else f"{shown} {'worse' if change >= 0 else 'better'}"
