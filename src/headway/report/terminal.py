"""A report for a terminal: one table, then each cause in words, then what to do next."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headway import verdict
from headway.report import beside, table, telemetry, text
from headway.report.document import parse
from headway.report.shape import CauseView, Document
from headway.report.table import Row
from headway.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table

MAX_LISTED = 30
WIDE = 100
GREEN: tuple[Verdict, ...] = ("PASS", "IMPROVEMENT")


def terminal(document: Mapping[str, Any], width: int, color: bool, run: str = "RUN") -> str:
    """Return a report as lines of at most `width` columns, with ANSI colours if `color`.

    `run` is the run's folder, for the command that the last line names. Raises ReportError for
    what is no report.
    """
    doc = parse(document)
    return render(_parts(doc, width, run), width, color)


def render(parts: Iterator[RenderableType], width: int, color: bool) -> str:
    """Render by rich into a string: no markup, no emoji, no wish of the environment."""
    from rich.console import Console

    out = io.StringIO()
    console: Console = Console(
        file=out,
        width=max(width, 40),
        force_terminal=color,
        color_system="standard" if color else None,
        no_color=not color,
        markup=False,
        emoji=False,
        highlight=False,
        legacy_windows=False,
    )
    for part in parts:
        console.print(part)
    lines = out.getvalue().splitlines()
    return "\n".join(line if color else line.rstrip() for line in lines) + "\n"


def style_of(name: Verdict) -> str:
    """Return the rich style of a verdict."""
    if name in GREEN:
        return "green"
    return "bold red" if name in verdict.FAILS else "yellow"


def _parts(doc: Document, width: int, run: str) -> Iterator[RenderableType]:
    from rich.text import Text

    def line(content: str, style: str = "") -> Text:
        return Text(text.plain(content), style=style)

    launches = text.count(doc.suite.launches, "launch")
    models = text.few([model.name for model in doc.models])
    yield line(f"{doc.suite.name} on {models}, {launches}; {table.machine(doc)}")
    groups = table.groups(doc)
    if groups:
        yield _table(groups, width)
    yield from map(line, _launch_lines(doc))
    yield from map(line, telemetry.by_engine(doc))
    yield from map(line, beside.lines(doc))
    yield from map(line, table.against(doc))
    yield from map(line, table.replaced(doc))
    yield from map(line, table.notices(doc))
    yield from map(line, table.by_text(doc))
    yield Text("")
    yield from _causes(doc.causes)
    worst = min(doc.summary.verdicts, key=_rank, default="MISSING")
    yield line(f"{table.headline(doc)}; {_counts(doc)}", style_of(_as_verdict(worst)))
    yield line(table.next_step(doc, run), "bold")


def _rank(name: str) -> int:
    return verdict.ORDER.index(_as_verdict(name))


def _as_verdict(name: str) -> Verdict:
    return next((v for v in verdict.ORDER if v == name), "MISSING")


def _counts(doc: Document) -> str:
    s = doc.summary
    return f"{s.compared} compared, {s.recording} recording, {s.missing} missing"


def _table(groups: Sequence[table.Group], width: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    wide = width >= WIDE
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2 if wide else 1, 0, 0))
    made.add_column("level / engine", no_wrap=True, overflow="ellipsis", min_width=10)
    numbers = ["output\ntok/s", "ratio", "TTFT\np50 ms", "TPOT\np50 ms", "E2EL\np50 ms"]
    numbers += ["requests\ncompleted", "outputs\nverified"] if wide else ["outputs\nverified"]
    # Where there is little room, the name of an engine gives way first.
    for name in numbers:
        needed = max(map(len, name.splitlines()))
        made.add_column(name, justify="right", no_wrap=True, min_width=needed)
    words = (row.word for group in groups for row in group.rows)
    made.add_column("verdict", no_wrap=True, min_width=max(map(len, words), default=0))
    for group in groups:
        title = text.plain(f"{group.workload} {group.level}")
        made.add_row(Text(title, style="bold"))
        for row in group.rows:
            engine = Text(f"  {text.plain(row.instance)}")
            word = Text(row.word, style=style_of(row.verdict))
            made.add_row(engine, *_numbers(row, wide), word)
    return made


def _numbers(row: Row, wide: bool) -> list[str]:
    success = [row.success] if wide else []
    return [
        text.digits(row.output_throughput),
        "" if row.ratio is None else f"{row.ratio:.2f}x",
        text.milliseconds(row.ttft_s),
        text.milliseconds(row.tpot_s),
        text.milliseconds(row.e2el_s),
        *success,
        row.verified,
    ]


def _launch_lines(doc: Document) -> Iterator[str]:
    """One line per engine: launch time, then its steps."""
    by_instance: dict[str, list[str]] = {}
    for cell in table.launch_cells(doc):
        shown = text.NOTHING if cell.value is None else verdict.shown(cell.value, cell.unit or "")
        by_instance.setdefault(cell.instance, []).append(f"{cell.metric} {shown}")
    for instance, parts in by_instance.items():
        yield f"{instance}: {', '.join(parts)}"


def _causes(causes: Sequence[CauseView]) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    for cause in causes[:MAX_LISTED]:
        yield Text(text.plain(cause.headline), style=style_of(cause.verdict))
        for told in cause.explanation:
            yield Padding(Text(text.plain(told)), (0, 0, 0, 2))
        yield Text("")
    if len(causes) > MAX_LISTED:
        yield Text(f"and {len(causes) - MAX_LISTED} more in report.json")
