"""Beside the table: what HTTP costs, how engines of one kind differ, which ones are left out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from headway import fingerprint, stats
from headway.report import text
from headway.report.shape import CaseView, CellView, Document, InstanceView, Key
from headway.verdict import subject

COST = "protocol_cost"
INSIDE = "inside_output_throughput"
MAX_DIFFERENCES = 12


def lines(doc: Document) -> Iterator[str]:
    """Return all of them."""
    yield from protocol(doc)
    yield from differing(doc)
    yield from left_out(doc)


def protocol(doc: Document) -> Iterator[str]:
    """Say per engine that was replayed inside what HTTP costs, at which level."""
    costs = {cell.case_key: cell for cell in doc.cells if cell.metric == COST}
    for instance in doc.instances:
        cases = [case for case in doc.cases if case.instance == instance.name]
        found = [said for case in cases for said in _cost(doc, case, costs)]
        if found:
            yield f"{instance.name}: HTTP costs, of output throughput, {', '.join(found)}"
        failed = sum(run.engine.get("inside_failed", 0.0) > 0 for c in cases for run in c.runs)
        if failed:
            runs = text.count(sum(len(case.runs) for case in cases), "Run")
            yield f"{instance.name}: of {runs}, {failed} could not be replayed without HTTP"


def _cost(doc: Document, case: CaseView, costs: Mapping[Key, CellView]) -> Iterator[str]:
    cost = costs.get(case.key)
    inside = stats.median([run.engine[INSIDE] for run in case.runs if INSIDE in run.engine])
    if cost is not None and cost.value is not None and inside is not None:
        several = len({c.workload for c in doc.cases if c.level}) > 1
        where = f"{case.workload} {case.level}" if several else case.level
        yield f"{cost.value:.1%} at {where} ({text.digits(inside)} tok/s without it)"


def differing(doc: Document) -> Iterator[str]:
    """Say what was put under test otherwise in each engine than in the first of its kind.

    Or than in the reference, where that is of its kind.
    """
    first: dict[str, InstanceView] = {}
    reference = [one for one in doc.instances if one.name == doc.suite.reference]
    for one in (*reference, *doc.instances):
        other = first.setdefault(one.treatment.kind, one)
        changes = _changes(other, one)
        if other is not one and changes:
            yield f"{one.name} against {other.name}: {text.few(changes, MAX_DIFFERENCES)}"


def _changes(old: InstanceView, new: InstanceView) -> list[str]:
    """Return what differs; a setting that only repeats an argument is no second difference."""
    before, after = (
        {"model": i.model, "dtype": i.dtype, **subject.flat(i.treatment)} for i in (old, new)
    )
    for name in old.treatment.args.keys() & new.treatment.args.keys():
        sides = (before, after)
        if all(side.get(f"settings.{name}") == side[f"args.{name}"] for side in sides):
            for side in sides:
                del side[f"settings.{name}"]
    return fingerprint.differences(before, after)


def left_out(doc: Document) -> Iterator[str]:
    """Say which optional engines are not there, and why."""
    for name, why in doc.suite.left_out.items():
        yield f"left out: {name}: {why}"
