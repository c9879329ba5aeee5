"""The journal: what a night measured, on disk as soon as it was measured.

One JSON object a line, `{"type": …, "data": …}`, the first of type `night`. Append only; each line
is synced, so a crash costs at most the Run that was being measured. A last line without its end is
what a crash leaves, and is dropped.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway import codec
from headway.core import Calibration, LaunchRecord, Run, StepTiming, Verification
from headway.fingerprint import Machine
from headway.results import Generated, ModelFacts, Results, Written
from headway.suite import Suite

SCHEMA = 1
NAME = "journal.jsonl"


class JournalError(RuntimeError):
    """A journal cannot be read or written; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first line: what this night is. `key` names what must be equal to carry it on.

    `commits` names what engines are built from whose source is another commit, by instance.
    """

    schema: int
    night: str
    key: str
    started_at: str
    suite: Suite
    machine: Machine
    models: Mapping[str, ModelFacts]
    commit: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    commits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Expected:
    """What a session set out to measure: (instance, launch, case name)."""

    cells: tuple[tuple[str, int, str], ...]


@dataclass(frozen=True, slots=True)
class End:
    """Everything that was to be measured has been."""

    at: str


_TYPES: dict[str, Any] = {
    "night": Header,
    "expected": Expected,
    "run": Run,
    "launch": LaunchRecord,
    "step": StepTiming,
    "verification": Verification,
    "generated": Generated,
    "calibration": Calibration,
    "written": Written,
    "end": End,
}
_NAMES = {kind: name for name, kind in _TYPES.items()}


def append(folder: Path, *items: Any) -> None:
    """Add items and sync them to the disk; raises JournalError."""
    text = "".join(
        json.dumps({"type": _NAMES[type(item)], "data": codec.encode(item)}, allow_nan=False) + "\n"
        for item in items
    )
    path = folder / NAME
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # Unbuffered: what a full disk refused must not be tried again when the file is closed.
        with path.open("ab", buffering=0) as file:
            start = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(text.encode())
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.ftruncate(file.fileno(), start)  # no half line for the next one to join
                raise
    except OSError as error:
        raise JournalError(
            f"{path} cannot be written: {error.strerror}; what was measured before it is kept"
        ) from error


def read(folder: Path) -> tuple[Header, Results]:
    """Read a night; raises JournalError for what is not one."""
    path = folder / NAME
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path} cannot be read: {error.strerror}") from error
    items = list(_items(path, raw))
    if not items or not isinstance(items[0], Header):
        raise JournalError(f"{path} does not begin with a night: it is no journal of Headway")
    return items[0], _results(items)


def peek(folder: Path) -> tuple[str, bool]:
    """Return (key, whether it reached its end) without reading what was measured."""
    path = folder / NAME
    try:
        with path.open("rb") as file:
            first = json.loads(file.readline())
            file.seek(max(0, path.stat().st_size - 4096))
            last = file.read().rstrip().rpartition(b"\n")[2]
        return first["data"]["key"], last.startswith(b'{"type": "end"')
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path} is no journal of Headway: {error}") from error


def mend(folder: Path) -> None:
    """Drop what a crash left of a last line, so that a resumed night can go on after it."""
    path = folder / NAME
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if whole != len(raw):
        with path.open("r+b") as file:
            file.truncate(whole)


def _items(path: Path, raw: bytes) -> list[Any]:
    items = []
    lines = raw.split(b"\n")
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is torn
        try:
            entry = json.loads(line)
            kind = _TYPES[entry["type"]]
            if kind is Header and entry["data"].get("schema") != SCHEMA:
                found = entry["data"].get("schema")
                raise JournalError(f"{path} has schema {found!r}; this Headway reads {SCHEMA}")
            items.append(codec.decode(kind, entry["data"], f"line {number}"))
        except (ValueError, KeyError, TypeError) as error:
            raise JournalError(f"{path} line {number} is broken: {error}") from error
    return items


def _results(items: list[Any]) -> Results:
    header = items[0]
    expected: dict[tuple[str, int, str], None] = {}
    for item in items:
        if isinstance(item, Expected):
            expected |= dict.fromkeys(item.cells)
    return Results(
        night=header.night,
        suite=header.suite,
        machine=header.machine,
        started_at=header.started_at,
        finished=any(isinstance(item, End) for item in items),
        models=header.models,
        expected=tuple(expected),
        commit=header.commit,
        commits=header.commits,
        runs=tuple(item for item in items if isinstance(item, Run)),
        launches=tuple(item for item in items if isinstance(item, LaunchRecord)),
        steps=tuple(item for item in items if isinstance(item, StepTiming)),
        verifications={item.key: item for item in items if isinstance(item, Verification)},
        generated=tuple(item for item in items if isinstance(item, Generated)),
        calibrations=tuple(item for item in items if isinstance(item, Calibration)),
        written={item.key: item for item in items if isinstance(item, Written)},
    )


_ATTRIBUTES = {
    Run: "runs",
    LaunchRecord: "launches",
    StepTiming: "steps",
    Generated: "generated",
    Calibration: "calibrations",
}


def with_items(results: Results, items: Sequence[Any]) -> Results:
    """Return results with more items, as reading the journal again would give."""
    verified = {item.key: item for item in items if isinstance(item, Verification)}
    if verified:
        results = replace(results, verifications={**results.verifications, **verified})
    for item in items:
        if not isinstance(item, Verification):
            results = _with_item(results, item)
    return results


def _with_item(results: Results, item: Any) -> Results:
    if isinstance(item, Expected):
        cells = dict.fromkeys((*results.expected, *item.cells))
        return replace(results, expected=tuple(cells))
    if isinstance(item, End):
        return replace(results, finished=True)
    if isinstance(item, Written):
        return replace(results, written={**results.written, item.key: item})
    attribute = _ATTRIBUTES[type(item)]
    more: dict[str, Any] = {attribute: (*getattr(results, attribute), item)}
    return replace(results, **more)
