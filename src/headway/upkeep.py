"""Where every stored baseline stands, and what is wrong with the files that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from headway import baseline, decisions, metrics
from headway.anchor import Outcome
from headway.baseline import Baseline, BaselineError
from headway.core import Case
from headway.decisions import Decision, DecisionError, Decisions, cell_name, stands_for
from headway.fingerprint import slug
from headway.history import CellNight, NightRecord
from headway.proposal import Row, propose
from headway.results import applies
from headway.suite import BaselineGate, Suite
from headway.verdict import EQUALITY
from headway.verdict.decided import COMPARING
from headway.verdict.series import armed

# A decision that ends within so many days should be thought of again.
SOON_DAYS = 14


@dataclass(frozen=True, slots=True)
class Standing:
    """One cell: what is stored or recorded of it, and what people decided about it."""

    row: Row
    decided: tuple[str, ...] = ()


def standing(
    suite: Suite,
    nights: Sequence[NightRecord],
    root: Path,
    device: str,
    decided: Decisions,
    today: date,
) -> list[Standing]:
    """Return every cell that a suite wants a baseline of, on one device.

    Raises BaselineError for a file that cannot be read.
    """
    known = {(row.case, row.metric): row for row in propose(suite, nights, root).rows}
    found = []
    for case in suite.cases():
        stored = baseline.load(baseline.path_of(root, device, case))
        for name in suite.baseline.metrics:
            if applies(suite, case, metrics.ALL[name]):
                row = known.get((case, name)) or Row(case, name, _stored(stored, name, suite))
                found.append(Standing(row, tuple(_said(decided, case, name, today))))
    return found


def _stored(stored: Baseline | None, name: str, suite: Suite) -> Outcome:
    """Return what stands in a file of which this machine has no history."""
    cell = stored.cells.get(name) if stored is not None else None
    if cell is None:
        return Outcome("nothing is recorded yet")
    why = "armed" if armed(cell, suite.baseline) else "too little is stored"
    return Outcome(why, unit=cell.unit, launches=len(cell.samples), nights=cell.num_nights)


def _said(decided: Decisions, case: Case, name: str, today: date) -> Iterator[str]:
    for decision in decided:
        if not decision.covers(case, name):
            continue
        effect = decision.accepted(case, name)
        if decision.kind == "accept" and effect is None:
            continue
        what = "muted" if effect is None else f"up to {effect:.1%} worse accepted"
        left = (decision.last_day - today).days
        if left < 0:
            yield f"EXPIRED: {what} {decision.said}"
        else:
            yield f"{what} {decision.said}" + (f" ({left} days left)" if left <= SOON_DAYS else "")


def problems(root: Path, suites: Sequence[Suite], today: date) -> list[str]:
    """Return one sentence for everything that is wrong with the files below a folder.

    `suites` are all that may want what is stored: a file that none of them wants is wrong.
    """
    found: list[str] = []
    cases = {case: suite for suite in suites for case in suite.cases()}
    seen: dict[tuple[tuple[str, str], ...], Path] = {}
    for path in sorted(root.glob("*/*.json")):
        if path.parent == root / decisions.FOLDER:
            continue
        try:
            stored = baseline.load(path)
        except BaselineError as error:
            found.append(str(error))
            continue
        assert stored is not None
        same = seen.setdefault(tuple(sorted(stored.identity.items())), path)
        if same != path:
            found.append(f"{path} holds what {same} holds as well; keep one")
        found += _problems_of(path, stored, cases)
    return [*found, *_decision_problems(root, cases, today)]


def _problems_of(path: Path, stored: Baseline, cases: Mapping[Case, Suite]) -> Iterator[str]:
    device = stored.identity.get("device", "")
    if slug(device) != path.parent.name:
        yield f"{path} is of the device {device!r}; it belongs into the folder {slug(device)}"
    root = path.parent.parent
    owner = next((c for c in cases if baseline.path_of(root, device, c).name == path.name), None)
    if owner is None:
        yield f"{path} is of no case of any suite; delete it, or give the suite it belongs to"
        return
    gate = cases[owner].baseline
    for name, cell in stored.cells.items():
        if name not in gate.metrics:
            yield f"{path}: {name} is no metric of [baseline] in {cases[owner].name}; delete it"
        elif cell.unit != "1":
            yield from _disagreement(path, stored, name, gate)


def _disagreement(path: Path, stored: Baseline, name: str, gate: BaselineGate) -> Iterator[str]:
    nights = stored.cells[name].by_night()
    order = sorted(nights, key=lambda night: (stored.facts(night).started_at or "", night))
    halves = baseline.halves([nights[night] for night in order], gate.drift_budget)
    if halves is not None and halves.disagree:
        yield (
            f"{path}: the halves of {name} disagree, {halves.change:+.1%} from the earlier to the "
            "later nights; delete it and record it again"
        )


def _decision_problems(root: Path, cases: Mapping[Case, Suite], today: date) -> Iterator[str]:
    for path in decisions.paths(root):
        try:
            decision = decisions.read(path)
        except DecisionError as error:
            yield str(error)
            continue
        if not decision.holds(today):
            yield f"{path} has expired on {decision.until} and does nothing; delete it"
        elif not _covers_any(decision, cases):
            yield f"{path}: {decision.cell} is no cell of any suite; delete it"


def _covers_any(decision: Decision, cases: Mapping[Case, Suite]) -> bool:
    """Whether a decision is about anything; a metric may be one that a launch as a whole has."""
    wholes = {Case(c.instance, c.model, "", "") for c in cases}
    names = (*metrics.ALL, EQUALITY)
    return any(decision.covers(case, name) for case in (*cases, *wholes) for name in names)


def slowdowns(nights: Iterable[NightRecord], pattern: str) -> dict[str, float]:
    """Return by how much the cells of a pattern are slower in the newest night that has any.

    `nights` come newest first. Raises DecisionError where there is nothing to accept.
    """
    for record in nights:
        cells = [
            (cell_name(night.case, name), cell)
            for night in record.cases
            for name, cell in night.cells.items()
            if stands_for(pattern, night.case, name)
        ]
        if cells:
            slower = {name: effect for name, cell in cells if (effect := _slower_by(cell)) > 0}
            return _not_empty(slower, pattern, record.night)
    raise DecisionError(
        f"no night in the history of this machine has a cell {pattern}; say which night by --run, "
        "or how much worse it may be by --effect 8%"
    )


def _slower_by(cell: CellNight) -> float:
    """Return by how much worse the gates that compare found a cell; 0 where none called it so."""
    said = cell.gates
    waits = "baseline" if cell.suspected else ""
    gates = [g for g in COMPARING if said.get(g) == "REGRESSION" or g == waits]
    return max((cell.effects[gate] for gate in gates if gate in cell.effects), default=0.0)


def slowdowns_of_report(document: Mapping[str, Any], pattern: str) -> dict[str, float]:
    """Return the same from a night's report.json."""
    slower: dict[str, float] = {}
    for cell in document["cells"]:
        case = Case(cell["instance"], cell["model"], cell["workload"], cell["level"])
        for finding in cell["findings"] if stands_for(pattern, case, cell["metric"]) else ():
            effect, name = finding["worse_by"], cell_name(case, cell["metric"])
            if finding["gate"] in COMPARING and finding["verdict"] == "REGRESSION" and effect:
                slower[name] = max(effect, slower.get(name, 0.0))
    return _not_empty(slower, pattern, document["night"])


def _not_empty(slower: dict[str, float], pattern: str, night: str) -> dict[str, float]:
    if not slower:
        raise DecisionError(
            f"nothing that {pattern} stands for is slower in night {night}: there is nothing to "
            "accept"
        )
    return slower
