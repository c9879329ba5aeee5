"""Rows as tables for a terminal; milliseconds here, where people read."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from load.goals import Goal

WIDTH = 150
Row = Mapping[str, Any]


def render(closed: Sequence[Row], opened: Sequence[Row]) -> str:
    """Return the tables: closed loop, what the server added, open loop; then what went wrong."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, no_color=True, markup=False, highlight=False)
    if any(row["n"] for row in closed):
        console.print(_closed(closed))
        console.print(_beside(closed, "medians over rounds", TRUE_AND_REPORTED))
        console.print(_beside(closed, "what the server added before it had parsed", DELAYS))
    if any(row["n"] for row in opened):
        console.print(_opened(opened))
    for row in (*closed, *opened):
        load = "open loop" if row["streams"] is None else f"{row['streams']} streams"
        for problem in row["problems"]:
            console.print(f"{row['client']}, {load}: {problem}", soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def render_goals(reached: Sequence[Goal]) -> str:
    """Return the table of goals."""
    out = io.StringIO()
    table = _table("goals of ours")
    _columns(table, ("what", "is to be", "is", ""))
    table.columns[0].justify = "left"
    for goal in reached:
        said = {None: "not measured", True: "met", False: "MISSED"}[goal.met]
        bound = f"{'≥' if goal.least else '≤'} {_in(goal, goal.bound)}"
        table.add_row(goal.name, bound, _in(goal, goal.value), said)
    Console(file=out, width=WIDTH, no_color=True, markup=False, highlight=False).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _in(goal: Goal, value: float | None) -> str:
    if value is None:
        return "—"
    if goal.unit == "s":
        return f"{value * 1e3:.2f} ms"
    return f"{value:,.0f} {goal.unit}".rstrip() if value >= 10 else f"{value:.2f} {goal.unit}"


def _closed(rows: Sequence[Row]) -> Table:
    table = _table(
        "one core each; errors are reported − true; medians, below them lowest to highest round"
    )
    heads = (
        "streams",
        "client",
        "tokens/s",
        "TTFT mean\nerror ms",
        "TTFT p99\nerror ms",
        "ITL p99\nerror ms",
        "peak con-\ncurrency",
        "CPU s per\n100k tokens",
        "rounds",
    )
    _columns(table, heads)
    for row in _by_load(rows):
        table.add_row(
            str(row["streams"]),
            row["client"] + ("" if row["itl_of"] == "gaps" else "*"),
            _ranged(row, "tokens_per_s", _count),
            _ranged(row, "ttft_mean_error_s", _ms),
            _ranged(row, "ttft_p99_error_s", _ms),
            _ranged(row, "itl_p99_error_s", _ms),
            _ranged(row, "peak_concurrency", _count),
            _ranged(row, "cpu_s_per_100k_tokens", _two),
            _rounds(row),
        )
    if any(row["itl_of"] == "requests" for row in rows):
        table.caption = "* its ITL is a mean per request, and held against that"
        table.caption_justify = "left"
    return table


TRUE_AND_REPORTED = {
    "TTFT mean ms\ntrue": "ttft_mean_s",
    "\nreported": "reported_ttft_mean_s",
    "TTFT p99 ms\ntrue": "ttft_p99_s",
    " \nreported": "reported_ttft_p99_s",
    "ITL p99 ms\ntrue": "itl_p99_s",
    "  \nreported": "reported_itl_p99_s",
    "requests\nserved": "requests",
    "   \nreported": "reported_requests",
    "    \nfailed": "reported_failures",
}
DELAYS = {
    "accept delay ms\nmean": "accept_delay_mean_s",
    "\np99": "accept_delay_p99_s",
    "parse delay ms\nmean": "parse_delay_mean_s",
    " \np99": "parse_delay_p99_s",
}


def _beside(rows: Sequence[Row], title: str, columns: Mapping[str, str]) -> Table:
    table = _table(title)
    _columns(table, ("streams", "client", *columns))
    for row in _by_load(rows):
        if row["n"]:
            cells = [
                (_ms if name.endswith("_s") else _count)(row.get(name)) for name in columns.values()
            ]
            table.add_row(str(row["streams"]), row["client"], *cells)
    return table


def _opened(rows: Sequence[Row]) -> Table:
    table = _table("open loop, Poisson: how late requests left, as the client says; ms")
    _columns(table, ("client", "p50", "p99", "requests", "rounds"))
    for row in rows:
        if row["n"]:
            lags = [_ms(row.get(f"reported_send_lag_p{q}_s")) for q in (50, 99)]
            table.add_row(row["client"], *lags, _count(row.get("requests")), _rounds(row))
    return table


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))


def _columns(table: Table, heads: Sequence[str]) -> None:
    for head in heads:
        table.add_column(head, justify="left" if head == "client" else "right", no_wrap=True)


def _by_load(rows: Sequence[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: int(row["streams"]))


def _ranged(row: Row, name: str, write: Callable[[float | None], str]) -> str:
    text, low, high = (write(row.get(name + end)) for end in ("", "_min", "_max"))
    return text if low == high else f"{text}\n{low} to {high}"


def _rounds(row: Row) -> str:
    if not row["n"]:
        return "—"
    total = row["n"] + len(row["problems"])
    return str(row["n"]) if row["n"] == total else f"{row['n']} of {total}"


def _ms(value_s: float | None) -> str:
    return "—" if value_s is None else f"{1000 * value_s:.1f}"


def _count(value: float | None) -> str:
    return "—" if value is None else f"{value:,.0f}"


def _two(value: float | None) -> str:
    return "—" if value is None else f"{value:.2f}"
