"""What every rendering of a report shows: rows per level, headline, problems, the next step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

from headway import stats, verdict
from headway.core import Case
from headway.report import shape, text
from headway.report.shape import CellView, Document, Key
from headway.suite import Limit
from headway.verdict import Verdict
from headway.verdict.explain import named, worse

THROUGHPUT = "output_throughput"
# Nothing in the row is bad and something held: "can't tell yet" of the whole row would mislead.
RECORDING_WORD = "OK, recording"


@dataclass(frozen=True, slots=True)
class Row:
    """One engine at one level. Latencies are medians in seconds; None where nothing was judged.

    `ratio` is output throughput over the first engine's of the level, the median over launches;
    None for the first engine itself. `required` is a limit on that ratio, as text. `against` is
    what the pairs with the reference say of the throughput, empty where there are none.
    """

    instance: str
    model: str
    output_throughput: float | None
    ratio: float | None
    required: str
    ttft_s: float | None
    tpot_s: float | None
    e2el_s: float | None
    due: int
    completed: int
    outputs: shape.Outputs | None
    verdict: Verdict
    word: str
    against: str = ""

    @property
    def success(self) -> str:
        """Return completed requests of all that were due."""
        return f"{self.completed}/{self.due}" if self.due else text.NOTHING

    @property
    def verified(self) -> str:
        """Return outputs that the reference agrees with, of all completed ones."""
        if self.outputs is None or not self.outputs.completed:
            return text.NOTHING
        return f"{self.outputs.verified}/{self.outputs.completed}"


@dataclass(frozen=True, slots=True)
class Group:
    """The engines of one workload and level, in the suite's order."""

    workload: str
    level: str
    rows: tuple[Row, ...]


def groups(document: Document) -> tuple[Group, ...]:
    """Return the table: one group per workload and level, one row per engine."""
    cells: dict[Key, dict[str, CellView]] = {}
    for cell in document.cells:
        cells.setdefault(cell.case_key, {})[cell.metric] = cell
    found: dict[tuple[str, str], list[Row]] = {}
    first: dict[tuple[str, str], Key] = {}
    for case in document.cases:
        if case.level:
            place = (case.workload, case.level)
            base = first.setdefault(place, case.key)
            row = _row(document, case, cells.get(case.key, {}), cells.get(base, {}), base)
            found.setdefault(place, []).append(row)
    return tuple(Group(*place, tuple(rows)) for place, rows in found.items())


def _row(
    document: Document,
    case: shape.CaseView,
    cells: Mapping[str, CellView],
    base: Mapping[str, CellView],
    base_key: Key,
) -> Row:
    def value(metric: str) -> float | None:
        return cells[metric].value if metric in cells else None

    first = case.key == base_key
    worst, word = _row_verdict(cells.values())
    return Row(
        instance=case.instance,
        model=case.model,
        output_throughput=value(THROUGHPUT),
        ratio=None if first else _ratio(cells.get(THROUGHPUT), base.get(THROUGHPUT)),
        required="" if first else _required(document.suite.limits, case, base_key[0]),
        ttft_s=value("ttft_p50"),
        tpot_s=value("tpot_p50"),
        e2el_s=value("e2el_p50"),
        due=sum(run.requests.due for run in case.runs),
        completed=sum(run.requests.completed for run in case.runs),
        outputs=case.outputs,
        verdict=worst,
        word=word,
        against=_against(cells.values()),
    )


def _against(cells: Collection[CellView]) -> str:
    """Say what the reference gate found: of the throughput, or the first metric it is set on."""
    for cell in sorted(cells, key=lambda cell: cell.metric != THROUGHPUT):
        for finding in cell.findings:
            if finding.pairs is not None:
                parts = [_change(cell.metric, finding), text.count(finding.pairs.used, "pair")]
                dropped = len(finding.pairs.dropped)
                parts += [f"{dropped} dropped"] if dropped else []
                return ", ".join(part for part in parts if part)
    return ""


def _change(metric: str, finding: shape.FindingView) -> str:
    if finding.worse_by is None:
        return ""
    name = "" if metric == THROUGHPUT else f"{named(metric)} "
    low, high = finding.interval or (None, None)
    between = "" if low is None or high is None else f" ({low:+.1%} to {high:+.1%})"
    return f"{name}{worse(finding.worse_by)}{between}"


def _ratio(cell: CellView | None, base: CellView | None) -> float | None:
    """Compare launch by launch, as the ratio limits do."""
    if cell is None or base is None or cell.value is None or base.value is None:
        return None
    theirs = {s.launch: s.value for s in base.samples if s.value}
    ratios = [s.value / theirs[s.launch] for s in cell.samples if s.value and theirs.get(s.launch)]
    return stats.median(ratios)


def _required(limits: Collection[Limit], case: shape.CaseView, base: str) -> str:
    on = Case(case.instance, case.model, case.workload, case.level)
    bounds = []
    for limit in limits:
        if limit.metric == THROUGHPUT and limit.over in (base, "*") and limit.covers(on):
            bounds += [] if limit.min is None else [f"min {limit.min:g}"]
            bounds += [] if limit.max is None else [f"max {limit.max:g}"]
    return ", ".join(bounds)


def _row_verdict(cells: Collection[CellView]) -> tuple[Verdict, str]:
    verdicts = [cell.verdict for cell in cells]
    worst: Verdict = min(verdicts, key=verdict.ORDER.index, default="MISSING")
    held = any(f.verdict == "PASS" and f.gate != "watch" for c in cells for f in c.findings)
    if worst == "RECORDING" and held:
        return worst, RECORDING_WORD
    nothing = (verdict.WATCHED, verdict.WORDS["SKIPPED"])
    watched = bool(cells) and all(cell.word in nothing for cell in cells)
    return worst, verdict.WATCHED if watched else verdict.WORDS[worst]


def headline(document: Document) -> str:
    """Return the counts by the words that people read, worst first: `1 SLOWER, 31 OK`."""
    counts = document.summary.words
    parts = [f"{counts[word]} {word}" for word in verdict.ALL_WORDS if counts.get(word)]
    return ", ".join(parts) or "nothing was judged"


def replaced(document: Document) -> Iterator[str]:
    """Say in one line which Runs were replaced, and why: a second try is never silent."""
    found = [
        f"{Case(*case.key).name} launch {run.launch} attempt {run.attempt}"
        + (f": {run.reasons[0]}" if run.reasons else "")
        for case in document.cases
        for run in case.replaced
    ]
    if found:
        was = "was" if len(found) == 1 else "were"
        yield f"{text.count(len(found), 'Run')} {was} replaced: {text.few(found)}"


def notices(document: Document) -> Iterator[str]:
    """Say of each engine in one line what is odd about it and its Runs, and fails nothing."""
    for engine in document.instances:
        said = list(engine.notices)
        for case in document.cases:
            if case.instance == engine.name:
                found = dict.fromkeys(one for run in case.runs for one in run.notices)
                said += [f"{case.workload} {case.level}: {one}" for one in found]
        if said:
            yield f"{engine.name}: {'; '.join(said)}"


def by_text(document: Document) -> Iterator[str]:
    """Say which outputs came without ids, and were verified by what their text can stand for."""
    found: dict[str, int] = {}
    for case in document.cases:
        if case.outputs is not None and case.outputs.by_text:
            found[case.instance] = found.get(case.instance, 0) + case.outputs.by_text
    for instance, outputs in found.items():
        said = f"{instance}: {text.count(outputs, 'output')} verified without ids"
        yield f"{said}, by tokens that the reference found to spell the text"


def launch_cells(document: Document) -> tuple[CellView, ...]:
    """Return the cells of launches as a whole: launch time and engine steps."""
    return tuple(cell for cell in document.cells if not cell.level)


def machine(document: Document) -> str:
    """Return the machine in one line."""
    m = document.machine
    parts = [m.device, f"{m.memory_bytes / 2**30:.0f} GiB", m.os]
    parts += [f"driver {m.gpu_driver}"] if m.gpu_driver else []
    parts += ["in a container"] if m.container else []
    return ", ".join(parts)


def against(document: Document) -> Iterator[str]:
    """Say per engine and level what the pairs with the reference say, one line each."""
    for group in groups(document):
        for row in group.rows:
            if row.against:
                where = f"{row.instance} against {document.suite.reference}"
                yield f"{where}, {group.workload} {group.level}: {row.against}"


# What the worst verdict of a night asks for, worst first.
NEXT: dict[Verdict, str] = {
    "WRONG": "outputs are wrong, so no speed counts; see the tokens named above.",
    "REGRESSION": "find what got slower, the commands above repeat it; if it is meant to be: "
    "headway baseline accept; to wait: headway baseline mute.",
    "LIMIT": "find what fails its limit; if the limit is wrong, change it in the suite; to wait: "
    "headway baseline mute.",
    "INCOMPATIBLE": "if the change is intended, delete the old baseline file and record anew: "
    "headway baseline propose {run}",
    "MISSING": "see why values are missing; the engines' logs are in the run's folder.",
    "INVALID": "the machine or the client was at fault; measure again when it is quiet.",
    "RECORDING": "record a baseline: headway baseline propose {run}",
    "INCONCLUSIVE": "more launches make smaller changes visible; headway ab compares two engines.",
    "IMPROVEMENT": "keep what was won, record it: headway baseline propose {run}",
}


def next_step(document: Document, run: str) -> str:
    """Say what to do now; `run` is the run's folder as the user would type it."""
    if not document.finished:
        return "The night is not finished: start it again and it resumes where it stopped."
    said = {name for name, count in document.summary.verdicts.items() if count}
    said |= {"RECORDING"} if document.summary.recording else set()
    worst = next((name for name in NEXT if name in said), None)
    return "Next: nothing to do." if worst is None else f"Next: {NEXT[worst].format(run=run)}"
