"""A comparison for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headway import verdict
from headway.report import text
from headway.report.comparison import Comparison, Row
from headway.report.terminal import render as render_parts
from headway.report.terminal import style_of
from headway.verdict import Verdict

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

MAX_ROWS = 60


def render(comparison: Comparison, width: int, color: bool) -> str:
    """Return a comparison as lines of at most `width` columns, with ANSI colours if `color`."""
    return render_parts(_parts(comparison), width, color)


def _parts(c: Comparison) -> Iterator[RenderableType]:
    from rich.padding import Padding
    from rich.text import Text

    def line(content: str, style: str = "") -> Text:
        return Text(text.plain(content), style=style)

    yield line(f"{c.old_night} (OLD) → {c.new_night} (NEW)")
    for note in c.notes:
        yield line(f"note: {note}", "yellow")
    for instance, changes in c.changed.items():
        yield line(f"changed in {instance}: {'; '.join(changes)}")
    if not c.changed:
        yield line("nothing that was put under test changed")
    if c.environment:
        yield line(f"the machine changed: {'; '.join(c.environment)}", "yellow")
    rows = [row for row in c.rows if row.compared and row.gated and row.unit != "1"]
    if rows:
        yield _table(rows[:MAX_ROWS])
    if len(rows) > MAX_ROWS:
        yield line(f"{len(rows) - MAX_ROWS} more rows are in the JSON")
    for group in _grouped(row for row in c.rows if row.counts and row.verdict != "PASS"):
        yield line(f"{verdict.WORDS[group[0].verdict]} {_names(group)}", _style(group[0]))
        yield Padding(line(group[0].reason), (0, 0, 0, 2))
    yield from map(line, _watched(c))
    yield Text("")
    code = c.exit_code
    yield line(c.summary, "green" if code == 0 else "bold red" if code == 1 else "yellow")
    yield line(_outcome(c, code), "bold")


def _style(row: Row) -> str:
    return style_of(row.verdict) if row.counts else ""


def _table(rows: Sequence[Row]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("case / metric", no_wrap=True, overflow="ellipsis", min_width=12)
    for name in ("OLD", "NEW", "change"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    last = ""
    for row in rows:
        if row.case.name != last:
            last = row.case.name
            table.add_row(Text(text.plain(last), style="bold"))
        table.add_row(
            Text(f"  {text.plain(row.metric)}"),
            _shown(row.old, row.unit),
            _shown(row.new, row.unit),
            text.percent(row.change),
            Text(verdict.WORDS[row.verdict], style=_style(row)),
        )
    return table


def _shown(value: float | None, unit: str | None) -> str:
    if value is None or unit is None:
        return text.NOTHING
    return (
        verdict.shown(value, unit).replace(" tokens/s", " tok/s").replace(" requests/s", " req/s")
    )


def _grouped(rows: Iterator[Row]) -> list[list[Row]]:
    """Put rows with one reason together, worst first; numbers stay with their case."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        case = None if row.verdict in ("MISSING", "INCOMPATIBLE") else row.case
        groups.setdefault((case, row.verdict, row.reason), []).append(row)
    return sorted(groups.values(), key=lambda group: verdict.ORDER.index(group[0].verdict))


def _names(group: Sequence[Row]) -> str:
    cases = list(dict.fromkeys(row.case.name for row in group))
    if len(cases) == 1:
        return f"{cases[0]} {text.few([row.metric for row in group])}"
    return f"{len(group)} cells of {text.few(cases)}"


def _watched(c: Comparison) -> Iterator[str]:
    """Say per case what moved besides the gates: it explains, and fails nothing."""
    moved: dict[str, list[str]] = {}
    for row in c.rows:
        if not row.counts and row.verdict in ("REGRESSION", "IMPROVEMENT"):
            shown = f"{row.metric} {text.percent(row.change)}"
            moved.setdefault(row.case.name, []).append(shown)
    for case, metrics in moved.items():
        yield f"watched, moved as well: {case}: {text.few(metrics, 4)}"


def _outcome(c: Comparison, code: int) -> str:
    if not c.compared:
        return "CAN'T COMPARE: no cell of OLD could be held against one of NEW."
    verdicts = [row.verdict for row in c.rows if row.counts]
    worst: Verdict = min(verdicts, key=verdict.ORDER.index, default="PASS")
    if code == 0 and worst == "INCONCLUSIVE":
        unclear = verdicts.count("INCONCLUSIVE")
        return f"Nothing got slower as far as can be seen; {unclear} cells can't tell yet."
    return f"{verdict.WORDS[worst]} (exit code {code})"
