"""Stored baselines: one small JSON file per device and case, changed only by review.

A file holds the raw samples per launch of several nights, never a mean and a tolerance. Tests read
baselines and never write them; `headway.proposal` says what a reviewer may accept.

Schema history: 1 (2026-11) first; 2 (2026-11) what is known of each night, one sample a line.
"""

from __future__ import annotations

import difflib
import io
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headway import codec, stats
from headway.core import Case
from headway.fingerprint import Treatment, slug

SCHEMA = 2
UNITS = ("s", "tokens/s", "requests/s", "tokens", "1", "bytes", "J/token")


class BaselineError(ValueError):
    """What is wrong with a baseline file, in one sentence."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One launch's value of one metric, and the night it was measured in."""

    night: str
    launch: int
    value: float


@dataclass(frozen=True, slots=True)
class Cell:
    """The samples of one metric."""

    unit: str
    direction: str
    samples: tuple[Stored, ...]

    @property
    def num_nights(self) -> int:
        """How many nights the samples come from."""
        return len({sample.night for sample in self.samples})

    def by_night(self) -> dict[str, list[float]]:
        """Return each night's values, one per launch: a night is what varies by itself."""
        nights: dict[str, list[float]] = {}
        for sample in self.samples:
            nights.setdefault(sample.night, []).append(sample.value)
        return nights


@dataclass(frozen=True, slots=True)
class NightFacts:
    """What is known of a stored night; nothing of those that schema 1 stored.

    `calibration` holds the night's median of each calibration kernel, in seconds.
    """

    started_at: str | None = None
    calibration: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is stored of one case on one device. `treatment` is that of its newest night."""

    schema: int
    identity: Mapping[str, str]
    environment: Mapping[str, str]
    treatment: Treatment
    cells: Mapping[str, Cell]
    nights: Mapping[str, NightFacts] = field(default_factory=dict)

    def facts(self, night: str) -> NightFacts:
        """Return what is known of a night."""
        return self.nights.get(night) or NightFacts()

    @property
    def newest(self) -> tuple[str, str]:
        """When its newest night began, and that night's name; of two unknown ones by name."""
        names = {s.night for cell in self.cells.values() for s in cell.samples}
        return max(((self.facts(name).started_at or "", name) for name in names), default=("", ""))


def path_of(root: Path, device: str, case: Case) -> Path:
    """Return the file of a case: `root/DEVICE/INSTANCE-WORKLOAD-LEVEL-MODEL.json`."""
    return root / slug(device) / f"{slug(case.name)}-{slug(case.model)}.json"


def load(path: Path) -> Baseline | None:
    """Read a file; None when there is none. Raises BaselineError for one that cannot be used."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise BaselineError(f"{path} cannot be read: {error}") from error
    return parse(text, str(path))


def parse(text: str, where: str) -> Baseline:
    """Return the baseline in a text; raises BaselineError, which begins with `where`."""
    try:
        data = json.loads(text, object_pairs_hook=_unrepeated)
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise BaselineError(
                f"{where} has schema {schema}; this Headway reads up to {SCHEMA}: upgrade Headway"
            )
        if schema not in (1, SCHEMA) or isinstance(schema, bool):
            raise BaselineError(
                f"{where} has schema {schema!r}; this Headway reads 1 to {SCHEMA}: "
                "it is no baseline; record it again"
            )
        if schema == 1 and "nights" in data:
            raise codec.DecodeError("baseline.nights is not known in schema 1")
        stored: Baseline = replace(codec.decode(Baseline, data, "baseline"), schema=SCHEMA)
    except (json.JSONDecodeError, codec.DecodeError) as error:
        raise BaselineError(f"{where} is not a baseline: {error}") from error
    for name, cell in stored.cells.items():
        _check_cell(where, name, cell)
    for name, facts in stored.nights.items():
        if not all(0 < seconds < math.inf for seconds in facts.calibration.values()):
            raise BaselineError(
                f"{where}: night {name} has a calibration that takes no time; remove it"
            )
    return stored


def _unrepeated(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Refuse a key that stands twice, of which JSON readers silently drop one."""
    made = dict(pairs)
    if len(made) < len(pairs):
        ((key, _), *_) = Counter(key for key, _ in pairs).most_common(1)
        raise codec.DecodeError(f"{key!r} stands twice in one table")
    return made


def _check_cell(where: str, name: str, cell: Cell) -> None:
    if cell.unit not in UNITS:
        allowed = ", ".join(UNITS)
        raise BaselineError(f"{where}: {name} has unit {cell.unit!r}; allowed: {allowed}")
    lowest = 0.0 if cell.unit == "1" else math.ulp(0.0)
    bad = [s.value for s in cell.samples if not lowest <= s.value < math.inf]
    if bad:
        raise BaselineError(
            f"{where}: {name} holds {bad[0]}, which no measurement gives; record it again"
        )
    seen = Counter((s.night, s.launch) for s in cell.samples)
    for (night, launch), count in seen.items():
        if count > 1:
            raise BaselineError(
                f"{where}: {name} holds launch {launch} of night {night} {count} times; keep one"
            )


def dump(baseline: Baseline) -> str:
    """Return the file's text: sorted keys, one sample a line, ends in a newline.

    So two branches' changes to different cells are changes of different lines.
    """
    cells = {
        name: replace(cell, samples=tuple(sorted(cell.samples, key=lambda s: (s.night, s.launch))))
        for name, cell in baseline.cells.items()
    }
    return "\n".join(_lines(codec.encode(replace(baseline, cells=cells)), 0)) + "\n"


def _lines(value: Any, depth: int) -> list[str]:
    """Write JSON with a line for each innermost list or table, and for each scalar outside one."""
    entries: list[tuple[str, Any]]
    if isinstance(value, dict) and depth < 3:
        entries = [(f"{_json(key)}: ", item) for key, item in sorted(value.items())]
        opening, closing = "{", "}"
    elif isinstance(value, list) and depth < 4:
        entries = [("", item) for item in value]
        opening, closing = "[", "]"
    else:
        return [_json(value)]
    if not entries:
        return [opening + closing]
    lines = [opening]
    for number, (key, item) in enumerate(entries, 1):
        first, *rest = _lines(item, depth + 1)
        comma = "" if number == len(entries) else ","
        inner = [f"{key}{first}", *rest]
        lines += [f" {line}" for line in (*inner[:-1], inner[-1] + comma)]
    return [*lines, closing]


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)


@dataclass(frozen=True, slots=True)
class Halves:
    """The earlier and the later nights of a cell: their geometric means, and their agreement.

    `disagree` says that the later ones differ by more than their spread explains.
    """

    first: float
    second: float
    disagree: bool

    @property
    def change(self) -> float:
        """By what share the later nights are above the earlier ones."""
        return self.second / self.first - 1


# How rarely halves that are alike may be told apart: a refusal costs one more night, no more.
HALVES = 0.05


def halves(nights: Sequence[Sequence[float]], allowed: float) -> Halves | None:
    """Compare the earlier with the later nights, each a list of positive values.

    By Student's test on the nights' medians, with as much as `allowed` between them for granted;
    None for fewer than two nights.
    """
    if len(nights) < 2:
        return None
    logs = [math.log(value) for night in nights if (value := stats.median(night))]
    half = len(logs) // 2
    sides = logs[:half], logs[half:]
    means = [math.fsum(side) / len(side) for side in sides]
    squares = math.fsum((x - m) ** 2 for side, m in zip(sides, means, strict=True) for x in side)
    difference, degrees = abs(means[1] - means[0]), len(logs) - 2
    disagree = False
    if degrees and difference > math.log1p(allowed):
        scale = math.sqrt(squares / degrees * (1 / len(sides[0]) + 1 / len(sides[1])))
        disagree = difference > stats.student(1 - HALVES / 2, degrees) * scale
    return Halves(math.exp(means[0]), math.exp(means[1]), disagree)


def merge(ours: Baseline | None, theirs: Baseline, base: Baseline | None = None) -> Baseline:
    """Return the union of two files by cell, night and launch, whichever comes first.

    What one side dropped of their common `base` stays dropped. Where identity or environment
    differ a new epoch begins: the one with the newer nights is kept, alone. Raises BaselineError
    for one launch with two values, and for two epochs of which neither is the newer.
    """
    if ours is None:
        return theirs
    if _epoch(ours) != _epoch(theirs):
        return _newer(ours, theirs, "another machine or another thing was measured")
    if base is not None and _epoch(base) != _epoch(ours):
        base = None
    names = sorted({*ours.cells, *theirs.cells})
    cells = {name: _merge_cell(name, ours, theirs, base) for name in names}
    last = ours
    if ours.treatment != theirs.treatment:
        last = _newer(ours, theirs, "their newest night is the same one, but not its engine")
    kept = {s.night for cell in cells.values() for s in cell.samples}
    # What only one of them knows of a night is kept: schema 1 knew nothing.
    nights = {
        name: max((side.facts(name) for side in (ours, theirs)), key=_how_much)
        for name in sorted(kept & {*ours.nights, *theirs.nights})
    }
    filled = {name: cell for name, cell in cells.items() if cell.samples}
    return Baseline(SCHEMA, ours.identity, ours.environment, last.treatment, filled, nights)


def _epoch(baseline: Baseline) -> tuple[Mapping[str, str], Mapping[str, str]]:
    return baseline.identity, baseline.environment


def _how_much(facts: NightFacts) -> tuple[int, str, list[tuple[str, float]]]:
    return len(facts.calibration), facts.started_at or "", sorted(facts.calibration.items())


def _newer(ours: Baseline, theirs: Baseline, what: str) -> Baseline:
    if ours.newest == theirs.newest:
        raise BaselineError(f"they cannot be merged: {what}, and neither is the newer; keep one")
    return max(ours, theirs, key=lambda b: b.newest)


def _merge_cell(name: str, ours: Baseline, theirs: Baseline, base: Baseline | None) -> Cell:
    cells = [side.cells.get(name) for side in (ours, theirs, base) if side is not None]
    known = [cell for cell in cells if cell is not None]
    kinds = {(cell.unit, cell.direction) for cell in known}
    if len(kinds) > 1:
        raise BaselineError(f"they cannot be merged: {name} has two units, {sorted(kinds)}")
    mine, other, common = (
        {(s.night, s.launch): s for s in cell.samples} if cell is not None else {}
        for cell in (*cells, None)[:3]
    )
    merged = []
    for key in sorted({*mine, *other}):
        found = [side[key] for side in (mine, other) if key in side]
        if key in common and len(found) == 1:
            continue  # the other side dropped it
        if found[0] != found[-1]:
            raise BaselineError(
                f"they cannot be merged: {name} of launch {key[1]} in night {key[0]} is "
                f"{found[0].value:g} in one and {found[1].value:g} in the other; keep one"
            )
        merged.append(found[0])
    return replace(known[0], samples=tuple(merged))


def patch(changes: Sequence[tuple[Path, str, str]], root: Path) -> str:
    """Render (file, old text, new text) as one patch for `git apply` in the folder `root`.

    Without git's own headers, whose paths count from the top of the repository wherever git
    stands. Raises BaselineError for a file that lies elsewhere: git would not write it.
    """
    pieces: list[str] = []
    for path, old, new in changes:
        if not path.resolve().is_relative_to(root.resolve()):
            raise BaselineError(f"{path} is not below {root.resolve()}: start in a folder above it")
        name = path.resolve().relative_to(root.resolve()).as_posix()
        source = f"a/{name}" if old else "/dev/null"
        # Only "\n" ends a line for git; str.splitlines would also split at U+2028 in a name.
        before, after = io.StringIO(old).readlines(), io.StringIO(new).readlines()
        lines = difflib.unified_diff(before, after, source, f"b/{name}")
        pieces += (x if x.endswith("\n") else f"{x}\n\\ No newline at end of file\n" for x in lines)
    return "".join(pieces)
