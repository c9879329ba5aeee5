"""What people decided about cells for a time: a slowdown that is intended, a cell not to be heard.

One small JSON file per decision in the folder `decisions` of the baselines, so that two branches'
decisions never meet in one file. Each has a reason and a last day; after it, it does nothing.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date, timedelta
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from headway import atomic, codec
from headway.core import Case
from headway.fingerprint import slug

SCHEMA = 1
FOLDER = "decisions"
# A decision that outlives its reason hides what it was not made for.
MAX_DAYS = 180
Kind = Literal["accept", "mute"]


class DecisionError(ValueError):
    """What is wrong with a decision, in one sentence."""


@dataclass(frozen=True, slots=True)
class Decision:
    """`cell` is `case:metric`, with `*` and `?` in it where it stands for several.

    `effects` holds, for each cell whose slowdown is accepted (`case:metric`, patterns as well), by
    how much worse than what it is compared with it may be, as a share. `made` and `until` are days.
    """

    schema: int
    kind: Kind
    cell: str
    reason: str
    made: str
    until: str
    issue: str | None = None
    effects: Mapping[str, float] = field(default_factory=dict)

    @property
    def last_day(self) -> date:
        """The last day on which it holds."""
        return date.fromisoformat(self.until)

    @property
    def said(self) -> str:
        """What a person should read beside a verdict that it changed."""
        issue = f" ({self.issue})" if self.issue else ""
        return f"until {self.until}: {self.reason}{issue}"

    def holds(self, today: date) -> bool:
        """Whether its last day has not passed."""
        return today <= self.last_day

    def covers(self, case: Case, metric: str) -> bool:
        """Whether this decision is about a cell."""
        return stands_for(self.cell, case, metric)

    def accepted(self, case: Case, metric: str) -> float | None:
        """Return by how much worse a cell may be; None where nothing was accepted of it."""
        if self.kind != "accept" or not self.covers(case, metric):
            return None
        name = cell_name(case, metric)
        found = [effect for key, effect in self.effects.items() if fnmatchcase(name, key)]
        return max(found, default=None)


Decisions = tuple[Decision, ...]


def stands_for(pattern: str, case: Case, metric: str) -> bool:
    """Whether a pattern is about a cell."""
    return fnmatchcase(cell_name(case, metric), pattern)


def cell_name(case: Case, metric: str) -> str:
    """Return a cell as people write it: `hf_static-w32_12-c4:tpot_p50`."""
    return f"{case.name}:{metric}"


def check_cell(pattern: str) -> None:
    """Refuse what names no cell; raises DecisionError."""
    case, colon, metric = pattern.partition(":")
    if not (case and colon and metric) or ":" in metric:
        raise DecisionError(
            f"cell is {pattern!r}; it must be CASE:METRIC, as in 'hf_static-w32_12-*:tpot_p50' "
            "(* and ? stand for any letters)"
        )


def check(decision: Decision, today: date) -> None:
    """Refuse a decision that should not be made; raises DecisionError."""
    _check_shape(decision)
    day = decision.last_day
    if day < today:
        raise DecisionError(f"until is {decision.until}, which has passed; today is {today}")
    if day > today + timedelta(days=MAX_DAYS):
        latest = today + timedelta(days=MAX_DAYS)
        raise DecisionError(
            f"until is {decision.until}; at most {MAX_DAYS} days from today, {latest}: what holds "
            "for longer belongs into the baseline"
        )


def _check_shape(decision: Decision) -> None:
    check_cell(decision.cell)
    if not decision.reason.strip():
        raise DecisionError("reason is empty; say why, for whoever reads it next month")
    for name in ("made", "until"):
        try:
            date.fromisoformat(getattr(decision, name))
        except ValueError as error:
            value = getattr(decision, name)
            raise DecisionError(f"{name} is {value!r}; it must be a day, 2026-12-31") from error
    for name, effect in decision.effects.items():
        if not 0 < effect < math.inf:
            raise DecisionError(f"effects.{name} is {effect:g}; it must be above 0")
    if decision.kind == "accept" and not decision.effects:
        raise DecisionError("effects is empty: nothing is accepted")


def save(root: Path, decision: Decision) -> Path:
    """Write a decision's file below the baselines; raises DecisionError."""
    text = json.dumps(codec.encode(decision), indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    mark = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"{decision.until}-{decision.kind}-{slug(decision.cell)[:60]}-{mark}.json"
    path = root / FOLDER / name
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise DecisionError(f"{path} cannot be written: {error.strerror}") from error
    return path


def paths(root: Path) -> list[Path]:
    """Return the files of all decisions."""
    return sorted((root / FOLDER).glob("*.json"))


def load(root: Path) -> tuple[Decisions, tuple[str, ...]]:
    """Return every decision, and one sentence for each file that is none and does nothing."""
    found, broken = [], []
    for path in paths(root):
        try:
            found.append(read(path))
        except DecisionError as error:
            broken.append(str(error))
    return tuple(found), tuple(broken)


def read(path: Path) -> Decision:
    """Read one decision; raises DecisionError, which begins with the file."""
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        schema = data.get("schema") if isinstance(data, dict) else None
        if isinstance(schema, int) and schema > SCHEMA:
            raise DecisionError(
                f"has schema {schema}, this Headway reads {SCHEMA}: upgrade Headway"
            )
        if schema != SCHEMA:
            raise DecisionError(f"has schema {schema!r}, this Headway reads {SCHEMA}")
        decision: Decision = codec.decode(Decision, data, "decision")
        _check_shape(decision)
    except DecisionError as error:
        raise DecisionError(f"{path}: {error}") from error
    except (OSError, ValueError) as error:  # JSON's and the decoder's are its kind
        raise DecisionError(f"{path} is not a decision: {error}") from error
    return decision
