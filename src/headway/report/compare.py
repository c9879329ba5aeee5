"""Two reports → what got slower between them. Joined by the full key of a cell, never by position.

A metric that gates in either suite decides the exit code; the others are watched, because among a
hundred percentiles of a few requests one always moved. What is missing, of another kind or wrong
fails whether it gates or not.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headway import codec, fingerprint, stats, verdict
from headway.baseline import UNITS
from headway.core import Case
from headway.report import text
from headway.report.compare_view import render
from headway.report.comparison import Comparison, Difference, Row
from headway.report.document import ReportError, metric_named, parse
from headway.report.shape import CaseView, CellView, Document, Key
from headway.suite import BaselineGate
from headway.verdict import EQUALITY, Verdict, subject

__all__ = ["Comparison", "ReportError", "Row", "compare", "render", "to_json"]

FORMAT = "headway comparison"
SCHEMA = 1
# A judgement by numbers needs a spread, and a spread needs two launches.
MIN_LAUNCHES = 2
SCALES = {unit: (unit, 1.0) for unit in UNITS} | {"ms": ("s", 1e-3), "us": ("s", 1e-6)}
ALWAYS_GATED = ("success_rate", "token_accuracy", EQUALITY)

CellKey = tuple[Key, str]


@dataclass(frozen=True, slots=True)
class _Side:
    name: str
    doc: Document
    cells: Mapping[CellKey, CellView]
    cases: Mapping[Key, CaseView]


def compare(old: Mapping[str, Any], new: Mapping[str, Any], *, strict: bool = False) -> Comparison:
    """Compare two reports; raises ReportError for what is none, or holds a cell twice.

    `strict` makes what cannot be told yet fail.
    """
    a, b = _side("OLD", old), _side("NEW", new)
    gated = {*ALWAYS_GATED, *a.doc.suite.gates, *b.doc.suite.gates}
    # The tighter of both suites: widening a tolerance must not hide what it would have shown.
    gate = BaselineGate(
        tolerance=min(a.doc.suite.tolerance, b.doc.suite.tolerance),
        resolution=min(a.doc.suite.resolution, b.doc.suite.resolution),
    )
    return Comparison(
        old_night=a.doc.night,
        new_night=b.doc.night,
        rows=tuple(_row(key, a, b, key[1] in gated, gate) for key in a.cells),
        new=tuple(f"{_case(k).name} {k[1]}" for k in b.cells if k not in a.cells),
        changed=_changed(a.doc, b.doc),
        environment=tuple(
            fingerprint.differences(a.doc.machine.environment(), b.doc.machine.environment())
        ),
        notes=tuple(_notes(a, b)),
        strict=strict,
    )


def to_json(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON values, with its counts and exit code."""
    encoded: dict[str, Any] = codec.encode(comparison)
    counts = {
        "compared": comparison.compared,
        "new": len(comparison.new),
        "missing": len(comparison.missing),
    }
    return {
        "format": FORMAT,
        "schema": SCHEMA,
        **encoded,
        "counts": counts,
        "exit_code": comparison.exit_code,
    }


def _side(name: str, document: Mapping[str, Any]) -> _Side:
    doc = parse(document, name)
    cells: dict[CellKey, CellView] = {}
    for cell in doc.cells:
        key = (cell.case_key, cell.metric)
        if key in cells:
            raise ReportError(f"{name} holds the cell {_case(key).name} {cell.metric} twice")
        cells[key] = cell
    cases: dict[Key, CaseView] = {}
    for case in doc.cases:
        if case.key in cases:
            raise ReportError(f"{name} holds the case {Case(*case.key).name} twice")
        cases[case.key] = case
    orphan = next((key for key in cells if key[0] not in cases), None)
    if orphan is not None:
        raise ReportError(f"{name} does not say what was measured as {_case(orphan).name}")
    return _Side(name, doc, cells, cases)


def _case(key: CellKey) -> Case:
    return Case(*key[0])


def _row(key: CellKey, a: _Side, b: _Side, gated: bool, gate: BaselineGate) -> Row:
    old = a.cells[key]
    new = b.cells.get(key)

    def row(name: Verdict, reason: str, **more: Any) -> Row:
        fixed = {"unit": old.unit, "compared": False} | more
        return Row(_case(key), key[1], gated=gated, verdict=name, reason=reason, **fixed)

    if new is None:
        return row("MISSING", f"{b.name} does not have it", old=old.value)
    identities = (a.cases[key[0]].identity, b.cases[key[0]].identity)
    differing = _differences(*identities)
    if differing:
        facts = "; ".join(f"{d.field}: {d.old} → {d.new}" for d in differing)
        reason = f"another thing was measured: {facts}"
        return row("INCOMPATIBLE", reason, old=old.value, new=new.value, differences=differing)
    if key[1] == EQUALITY:
        return row(new.verdict, f"{b.name}: {new.findings[0].reason}" if new.findings else "")
    unit, scales = _units(key, (a.name, old), (b.name, new))
    values = [_values(cell, scale) for cell, scale in zip((old, new), scales, strict=True)]
    before, after = stats.median(values[0]), stats.median(values[1])
    found = _unusable(old, new, values, unit, gated)
    if found is not None:
        return row(*found, unit=unit, old=before, new=after)
    judged = verdict.against(_case(key), metric_named(new, unit), values[1], values[0], gate)
    return row(
        judged.verdict,
        judged.reason,
        unit=unit,
        compared=True,
        old=before,
        new=after,
        worse_by=judged.worse_by,
        visible=judged.visible,
    )


def _differences(old: Mapping[str, str], new: Mapping[str, str]) -> tuple[Difference, ...]:
    return tuple(
        Difference(name, old.get(name, "absent"), new.get(name, "absent"))
        for name in sorted({*old, *new})
        if old.get(name) != new.get(name)
    )


def _units(key: CellKey, *sides: tuple[str, CellView]) -> tuple[str, tuple[float, float]]:
    """Return the common unit and what brings each side to it; refuses what has none."""
    found = []
    for name, cell in sides:
        where = f"{name}: {_case(key).name} {key[1]}"
        if cell.unit is None or cell.direction is None:
            raise ReportError(f"{where} has no unit or direction, so it cannot be compared")
        if cell.unit not in SCALES:
            allowed = ", ".join(SCALES)
            raise ReportError(f"{where} has unit {cell.unit!r}; allowed: {allowed}")
        found.append((*SCALES[cell.unit], cell.direction))
    (unit, scale, direction), (other, other_scale, other_direction) = found
    if unit != other or direction != other_direction:
        raise ReportError(
            f"{_case(key).name} {key[1]} is in {unit} ({direction} is better) in {sides[0][0]} "
            f"and in {other} ({other_direction} is better) in {sides[1][0]}"
        )
    return unit, (scale, other_scale)


def _values(cell: CellView, scale: float) -> list[float]:
    """Return a cell's samples; none where it could not be judged in its own night."""
    if cell.value is None:
        return []
    return [s.value * scale for s in cell.samples if s.value is not None]


def _unusable(
    old: CellView, new: CellView, values: Sequence[Sequence[float]], unit: str, gated: bool
) -> tuple[Verdict, str] | None:
    """Return why two cells cannot be held against each other."""
    before, after = values
    if not after and (before or gated):
        name: Verdict = new.verdict if new.verdict in verdict.FAILS else "MISSING"
        return name, f"NEW: {_why(new)}"
    if not before:
        why = f"OLD: {_why(old)}"
        return ("MISSING", why) if gated else ("INCONCLUSIVE", why)
    if unit != "1" and old.direction == "higher" and min(before) == 0:
        # A goodput may be 0, and of 0 there is no percentage.
        name = "INCONCLUSIVE" if any((*before, *after)) else "PASS"
        return name, f"OLD holds {verdict.shown(0.0, unit)}, and no ratio to it can be judged"
    if unit != "1" and not min(before) > 0:
        shown = verdict.shown(min(before), unit)
        return "INCOMPATIBLE", f"invalid baseline: OLD holds {shown}; record it again"
    if len(before) >= MIN_LAUNCHES:
        return None
    worst = min if old.direction == "higher" else max
    if unit == "1" and worst(*after, *before) not in before:
        return None
    shown = f"{verdict.shown(before[0], unit)} → {verdict.shown(stats.median(after), unit)}"
    return "INCONCLUSIVE", f"{shown}; OLD has one launch, and no spread can be seen in one"


def _why(cell: CellView) -> str:
    return cell.findings[0].reason if cell.findings else "it has no value"


def _changed(old: Document, new: Document) -> dict[str, tuple[str, ...]]:
    """Return what was put under test and differs, by instance."""
    before = {i.name: i for i in old.instances}
    changed: dict[str, tuple[str, ...]] = {}
    for instance in new.instances:
        if instance.name in before:
            flat = (_flat(before[instance.name].treatment), _flat(instance.treatment))
            differing = fingerprint.differences(*flat)
            if differing:
                changed[instance.name] = tuple(differing)
    return changed


def _flat(treatment: fingerprint.Treatment) -> dict[str, object]:
    return {"kind": treatment.kind, **subject.flat(treatment)}


def _notes(a: _Side, b: _Side) -> list[str]:
    """Return what a reader should know before believing a comparison."""
    notes = []
    if a.doc.night == b.doc.night:
        notes.append("OLD and NEW are the same night")
    for side in (a, b):
        if not side.doc.finished:
            notes.append(f"{side.name} is of a night that was not finished")
    wrong = [_case(k).name for k, cell in a.cells.items() if cell.verdict == "WRONG"]
    if wrong:
        notes.append(f"the outputs of OLD were wrong in {text.few(wrong)}")
    gone = {_case(k).name for k in a.cells if k not in b.cells}
    come = sorted({_case(k).name for k in b.cells if k not in a.cells})
    for name in sorted(gone):
        close = difflib.get_close_matches(name, come, 1)
        if close:
            notes.append(f"{name} is missing and {close[0]} is new: was it renamed?")
    return notes
