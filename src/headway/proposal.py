"""What earlier nights would make of the stored baselines: changes for a reviewer, nothing written.

Only sound nights are proposed: of a case whose requests all succeeded with right counts and right
outputs, and of a cell that no gate found slower. Where nothing is armed yet, the newest nights of
the present machine arm it once there are enough. What is armed stays as it is, with two exceptions:
it is extended, to ten nights and to twenty, and a confirmed improvement becomes the new standard.
It never gets looser by itself; who wants that deletes the file, and starts anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from headway import atomic, baseline, fingerprint, history
from headway.anchor import Anchor, Outcome, arm, keep
from headway.baseline import Baseline, BaselineError
from headway.core import Case
from headway.history import CaseNight, CellNight, NightRecord
from headway.suite import Suite
from headway.verdict import FAILS, MUST_HOLD, shown

# (file, old text, new text)
Change = tuple[Path, str, str]
PATCH = "baseline.patch"


@dataclass(frozen=True, slots=True)
class Row:
    """What becomes of one cell of a case, and on what grounds."""

    case: Case
    metric: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Proposal:
    """Changed files, and a row for each cell that a baseline is wanted of."""

    changes: tuple[Change, ...] = ()
    rows: tuple[Row, ...] = ()

    @property
    def proposed(self) -> tuple[Row, ...]:
        """The cells that the changes are about."""
        return tuple(row for row in self.rows if row.outcome.proposed)


def propose(
    suite: Suite, nights: Sequence[NightRecord], root: Path, since: str | None = None
) -> Proposal:
    """Return what the nights of one device, the oldest first, would make of its baselines.

    The last of them says what machine and what engine the present ones are. Nights that began
    before `since` (a day) do not count towards what is not armed yet. Raises BaselineError for a
    file that cannot be read.
    """
    changes: list[Change] = []
    rows: list[Row] = []
    for case in suite.cases():
        with_it = [record for record in nights if record.of(case) is not None]
        if with_it:
            change, found = _case(suite, case, with_it, root, since)
            changes += [] if change is None else [change]
            rows += found
    return Proposal(tuple(changes), tuple(rows))


def _case(
    suite: Suite, case: Case, nights: Sequence[NightRecord], root: Path, since: str | None
) -> tuple[Change | None, list[Row]]:
    tonight = nights[-1].of(case)
    assert tonight is not None
    path = baseline.path_of(root, nights[-1].device, case)
    old, now = baseline.load(path), tonight.sample
    wanted = [name for name in suite.baseline.metrics if name in tonight.cells]
    refused = _refused(tonight, old, path)
    if refused:
        return None, [Row(case, name, Outcome(refused)) for name in wanted]
    same = old if old is not None and old.environment == now.environment else None
    outcomes = {}
    for name in wanted:
        past = history.earlier(nights, case, name, now.identity, now.environment)
        outcomes[name] = _cell(suite, name, tonight.cells[name], past, same, since)
    anchors = {name: found.anchor for name, found in outcomes.items() if found.anchor is not None}
    rows = [Row(case, name, _anew(found, old, same)) for name, found in outcomes.items()]
    if not anchors:
        return None, rows
    new = _baseline(now, same, anchors)
    old_text = path.read_text(encoding="utf-8") if old is not None else ""
    return (path, old_text, baseline.dump(new)), rows


def _refused(tonight: CaseNight, old: Baseline | None, path: Path) -> str:
    """Say why nothing of a case is proposed, whatever its cells are; empty for no reason."""
    for name in MUST_HOLD:
        cell = tonight.cells.get(name)
        if cell is not None and cell.verdict in FAILS:
            return f"not proposed, {name} is {cell.verdict}: {cell.reason}"
    if old is not None:
        differing = fingerprint.differences(old.identity, tonight.sample.identity)
        if differing:
            return (
                f"not proposed, another thing was measured: {'; '.join(differing)}; "
                f"delete {path} to start anew"
            )
    return ""


def _cell(
    suite: Suite,
    name: str,
    tonight: CellNight,
    past: Sequence[history.Past],
    stored: Baseline | None,
    since: str | None,
) -> Outcome:
    if not tonight.sound:
        return Outcome(f"not proposed ({tonight.verdict}: {tonight.reason})")
    kept = keep(name, stored, past, suite.baseline)
    return arm(name, stored, past, suite.baseline, since) if kept is None else kept


def _anew(found: Outcome, old: Baseline | None, same: Baseline | None) -> Outcome:
    """Say so where what is proposed takes the place of what another machine measured."""
    if found.anchor is None or old is None or same is not None:
        return found
    why = f"{found.why}, in place of what was measured before the machine changed"
    return replace(found, why=why)


def _baseline(now: Baseline, same: Baseline | None, anchors: dict[str, Anchor]) -> Baseline:
    """Return the file with new anchors in it; what is not proposed anew stays as it is."""
    cells = dict(same.cells) if same is not None else {}
    known = dict(same.nights) if same is not None else {}
    newest = max(anchors.values(), key=lambda anchor: anchor.newest)
    for name, anchor in anchors.items():
        cells[name] = anchor.cell
        known |= anchor.nights
    used = {sample.night for cell in cells.values() for sample in cell.samples}
    nights = {night: facts for night, facts in known.items() if night in used}
    treatment = newest.treatment
    return Baseline(baseline.SCHEMA, now.identity, now.environment, treatment, cells, nights)


def table(rows: Sequence[Row]) -> list[str]:
    """Return the rows as lines of a table, for whoever reviews a patch."""
    head = ("cell", "launches", "nights", "median", "between nights", "halves", "")
    lines = [head]
    for row in rows:
        found = row.outcome
        lines.append(
            (
                f"{row.case.name}:{row.metric}",
                str(found.launches),
                str(found.nights),
                "" if found.median is None else shown(found.median, found.unit),
                "" if found.spread is None else f"±{found.spread:.1%}",
                "" if found.halves is None else f"{found.halves:+.1%}",
                found.why,
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(len(head) - 1)]
    return [
        "  ".join([*(text.ljust(w) for text, w in zip(line[:-1], widths, strict=True)), line[-1]])
        for line in lines
    ]


def patch_of(proposal: Proposal, where: Path) -> str:
    """Return the patch for `git apply` in a folder, with the table above it; raises BaselineError.

    git leaves out what stands above the first file.
    """
    head = "".join(f"# {line}".rstrip() + "\n" for line in table(proposal.proposed))
    return f"{head}\n{baseline.patch(proposal.changes, where)}"


def write_patch(folder: Path, proposal: Proposal, where: Path = Path()) -> str | None:
    """Write `baseline.patch` into a night's folder if anything is ready; say so in one line.

    For the end of a night: it never fails, because the night is whole without it.
    """
    if not proposal.changes:
        return None
    path = folder / PATCH
    try:
        atomic.write_text(path, patch_of(proposal, where))
    except BaselineError as error:
        return f"{path} is not written: {error}"
    except OSError as error:
        return f"{path} cannot be written: {error.strerror}"
    count = len(proposal.proposed)
    what = "a baseline of 1 cell is" if count == 1 else f"baselines of {count} cells are"
    return f"{what} ready; review and apply:  git apply {path}"
