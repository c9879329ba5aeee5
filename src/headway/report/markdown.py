"""A report as Markdown, for a CI job's summary: headline, table, causes, what ran."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from headway import verdict
from headway.report import beside, table, telemetry, text
from headway.report.document import parse
from headway.report.shape import CauseView, Document
from headway.report.table import Row
from headway.verdict import Verdict

MAX_LISTED = 50
COLUMNS = (
    "Workload",
    "Level",
    "Engine",
    "Output tok/s",
    "Ratio",
    "TTFT p50 ms",
    "TPOT p50 ms",
    "E2EL p50 ms",
    "Success",
    "Outputs verified",
    "Verdict",
)
LEFT = frozenset(("Workload", "Level", "Engine", "Against the reference", "Verdict"))
SECTIONS: Mapping[str, Collection[Verdict]] = {
    "Failures": verdict.FAILS,
    "Cannot tell": frozenset(("INCONCLUSIVE", "MUTED")),
    "Faster": frozenset(("IMPROVEMENT",)),
    "Accepted": frozenset(("PASS",)),
    "Recording": frozenset(("RECORDING",)),
    "Not judged": frozenset(("SKIPPED",)),
}
FOLDED = ("Faster", "Accepted", "Recording", "Not judged")
# Written as references, these are text wherever they stand; `_` inside a word is text anyway.
_SPECIAL = re.compile(r"[\\`*\[\]<>&|#~@$!{}]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<=:)//|www\.")


def markdown(document: Mapping[str, Any]) -> str:
    """Return a report as GitHub Markdown; raises ReportError for what is no report."""
    doc = parse(document)
    return "\n".join(_lines(doc)) + "\n"


def escape(foreign: str) -> str:
    """Return a foreign text that Markdown shows as it is: no markup, no new line, no link."""
    return _SPECIAL.sub(lambda m: "".join(f"&#{ord(c)};" for c in m[0]), text.plain(foreign))


def _lines(doc: Document) -> Iterator[str]:
    exit_code = doc.summary.exit_code
    yield f"**Headway {escape(doc.suite.name)}: {table.headline(doc)}** (exit code {exit_code})"
    yield ""
    if not doc.finished:
        yield "The night is not finished: what was not measured is missing below."
        yield ""
    yield from _table(doc)
    for line in (*beside.lines(doc), *table.replaced(doc), *table.by_text(doc)):
        yield escape(line)
        yield ""
    notices = list(table.notices(doc))
    yield from (f"- {escape(line)}" for line in notices)
    yield from [""] if notices else []
    for title, verdicts in SECTIONS.items():
        yield from _causes(title, [c for c in doc.causes if c.verdict in verdicts])
    yield from _launches(doc)
    yield from _during(doc)
    yield from _ran(doc)
    yield escape(table.next_step(doc, "RUN"))


def _table(doc: Document) -> Iterator[str]:
    groups = table.groups(doc)
    if not groups:
        yield "Nothing was measured."
        yield ""
        return
    columns = [*COLUMNS, "Against the reference"] if doc.suite.reference else COLUMNS
    yield f"| {' | '.join(columns)} |"
    yield f"| {' | '.join(':--' if name in LEFT else '--:' for name in columns)} |"
    for group in groups:
        for row in group.rows:
            cells = (escape(group.workload), escape(group.level), *_cells(row))
            cells += (escape(row.against),) if doc.suite.reference else ()
            yield f"| {' | '.join(cells)} |"
    yield ""
    first = groups[0].rows[0].instance
    yield (
        f"Medians over {text.count(doc.suite.launches, 'launch')}. "
        f"Ratio: output throughput over the first engine's of the level ({escape(first)})."
    )
    yield ""


def _cells(row: Row) -> Sequence[str]:
    ratio = text.NOTHING if row.ratio is None else f"{row.ratio:.2f}x"
    word = f"**{row.word}**" if row.verdict in verdict.FAILS else row.word
    return (
        escape(row.instance),
        text.digits(row.output_throughput),
        f"{ratio} ({row.required})" if row.required else ratio,
        text.milliseconds(row.ttft_s),
        text.milliseconds(row.tpot_s),
        text.milliseconds(row.e2el_s),
        row.success,
        row.verified,
        word,
    )


def _causes(title: str, causes: Sequence[CauseView]) -> Iterator[str]:
    """A section of causes; one that asks for nothing is folded."""
    if not causes:
        return
    folded = title in FOLDED
    head = f"{title} ({text.count(sum(len(cause.cells) for cause in causes), 'cell')})"
    yield f"<details><summary>{head}</summary>" if folded else f"### {head}"
    yield ""
    for cause in causes[:MAX_LISTED]:
        said = escape(cause.headline.removeprefix(cause.word))
        yield f"- **{cause.word}**{'' if said.startswith(':') else ' '}{said}"
        yield from (f"  - {escape(told)}" for told in cause.explanation)
    if len(causes) > MAX_LISTED:
        yield f"- and {len(causes) - MAX_LISTED} more in report.json"
    yield from ("", "</details>", "") if folded else ("",)


def _launches(doc: Document) -> Iterator[str]:
    cells = table.launch_cells(doc)
    if not cells:
        return
    yield "<details><summary>Launch times and engine steps</summary>"
    yield ""
    yield "| Engine | Metric | Median | Definition |"
    yield "| :-- | :-- | --: | :-- |"
    for cell in cells:
        shown = text.NOTHING if cell.value is None else verdict.shown(cell.value, cell.unit or "")
        names = (escape(cell.instance), escape(cell.metric))
        yield f"| {' | '.join((*names, shown, escape(cell.definition)))} |"
    yield ""
    yield "</details>"
    yield ""


def _during(doc: Document) -> Iterator[str]:
    lines = list(telemetry.by_case(doc))
    if not lines:
        return
    yield "<details><summary>What servers and GPUs said during the Runs</summary>"
    yield ""
    yield from (f"- {escape(line)}" for line in lines)
    yield ""
    yield "</details>"
    yield ""


def _ran(doc: Document) -> Iterator[str]:
    yield "<details><summary>Machine, and what ran</summary>"
    yield ""
    yield f"- machine: {escape(table.machine(doc))}"
    cores = telemetry.cores(doc)
    yield from () if cores is None else (f"- cores: {escape(cores)}",)
    yield f"- night: {escape(doc.night)}, started {escape(doc.started_at)}"
    yield f"- suite: {escape(doc.suite.name)}: {escape(doc.suite.description)}"
    commit = f", commit {escape(doc.headway.commit)}" if doc.headway.commit else ""
    yield f"- Headway {escape(doc.headway.version)}{commit}"
    for model in doc.models:
        yield f"- model {escape(model.name)}, revision {escape(model.revision)}"
    for engine in doc.instances:
        what = engine.treatment
        args = ", ".join(f"{key}={value}" for key, value in what.args.items())
        about = f"{what.kind} {what.version}, {engine.model}, {engine.dtype}"
        yield f"- engine {escape(engine.name)}: {escape(about)}" + (
            f", {escape(args)}" if args else ""
        )
    yield ""
    yield "</details>"
    yield ""
