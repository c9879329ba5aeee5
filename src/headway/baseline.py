"""Stored baselines: one small JSON file per device and case, changed only by review.

A file holds the raw samples per launch of several nights, never a mean and a tolerance. Tests read
baselines and never write them; `propose` renders what a reviewer may accept.

Schema history: 1 (2026-11) first.
"""

from __future__ import annotations

import difflib
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headway import codec
from headway.core import Case
from headway.fingerprint import Treatment, slug

SCHEMA = 1
UNITS = ("s", "tokens/s", "requests/s", "tokens", "1", "bytes")


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


@dataclass(frozen=True, slots=True)
class Baseline:
    """What is stored of one case on one device."""

    schema: int
    identity: Mapping[str, str]
    environment: Mapping[str, str]
    treatment: Treatment
    cells: Mapping[str, Cell]


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
    try:
        data = json.loads(text)
        schema = data.get("schema") if isinstance(data, dict) else None
        if schema != SCHEMA:
            raise BaselineError(
                f"{path} has schema {schema!r}; this Headway reads {SCHEMA}: "
                "record it again, or use the version of Headway that wrote it"
            )
        stored: Baseline = codec.decode(Baseline, data, "baseline")
    except (json.JSONDecodeError, codec.DecodeError) as error:
        raise BaselineError(f"{path} is not a baseline: {error}") from error
    for name, cell in stored.cells.items():
        _check_cell(path, name, cell)
    return stored


def _check_cell(path: Path, name: str, cell: Cell) -> None:
    if cell.unit not in UNITS:
        allowed = ", ".join(UNITS)
        raise BaselineError(f"{path}: {name} has unit {cell.unit!r}; allowed: {allowed}")
    lowest = 0.0 if cell.unit == "1" else math.ulp(0.0)
    bad = [s.value for s in cell.samples if not lowest <= s.value < math.inf]
    if bad:
        raise BaselineError(
            f"{path}: {name} holds {bad[0]}, which no measurement gives; record it again"
        )


def dump(baseline: Baseline) -> str:
    """Return the file's text: sorted keys, one sample a line, ends in a newline."""
    return json.dumps(codec.encode(baseline), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def merge(old: Baseline | None, new: Baseline) -> Baseline:
    """Add a night's samples to what is stored; a night that is there already is replaced.

    Where the identity or the environment changed, a new epoch begins: older samples are dropped.
    """
    if old is None or (old.identity, old.environment) != (new.identity, new.environment):
        return new
    cells = dict(old.cells)
    for name, cell in new.cells.items():
        nights = {sample.night for sample in cell.samples}
        kept = (
            tuple(s for s in cells[name].samples if s.night not in nights) if name in cells else ()
        )
        cells[name] = Cell(cell.unit, cell.direction, kept + cell.samples)
    return Baseline(SCHEMA, new.identity, new.environment, new.treatment, cells)


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
