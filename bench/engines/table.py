"""Rows, splits of steps and goals as tables for a terminal; ratios come first."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from engines.goals import Goal

WIDTH = 180
NOTHING = "—"
Row = Mapping[str, Any]
PARTS = ("weights", "attention", "rest", "host")


def render(rows: Sequence[Row], profile: Mapping[str, Any], reached: Sequence[Goal]) -> str:
    """Return the tables: a workload each, where steps go, goals; then what went wrong."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, no_color=True, markup=False, highlight=False)
    for workload in dict.fromkeys(row["workload"] for row in rows):
        console.print(_workload(workload, [row for row in rows if row["workload"] == workload]))
    if profile:
        console.print(_profile(profile))
    if reached:
        console.print(_goals(reached))
    for line in (*_said(rows), *_unsplit(profile)):
        console.print(line, soft_wrap=True)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _workload(workload: str, rows: Sequence[Row]) -> Table:
    table = _table(f"{workload}: output tokens/s, as ratios; below them the 95 % interval")
    heads = (
        "in\nflight",
        "engine",
        "÷ vLLM",
        "÷ vLLM\nheld to 32",
        "÷ hf_naive",
        "÷ the rung\nbefore",
        "tok/s",
    )
    heads += (
        "share of\nbandwidth",
        "TPOT\nms",
        "TTFT\nms",
        "most\nrows",
        "KV\nwaste",
        "outputs\nright",
        "n",
    )
    _columns(table, heads)
    levels = dict.fromkeys(row["concurrency"] for row in rows)
    for level in levels:
        here = [row for row in rows if row["concurrency"] == level]
        for place, row in enumerate(here):
            keys = ("ratio_to_vllm", "ratio_to_vllm_32", "ratio_to_hf_naive", "ratio_to_before")
            table.add_row(
                str(level),
                row["engine"] + ("*" if row["engine"] == row["vllm"] else ""),
                *(_ranged(row, key, 2) for key in keys),
                _number(row["output_tokens_per_s"], 1),
                _ranged(row, "bandwidth_share", 2),
                _ms(row["tpot_p50_s"]),
                _ms(row["ttft_p50_s"]),
                _number(row["most_running"], 0),
                _percent(row["kv_waste"]),
                _outputs(row),
                str(row["n"]),
                end_section=place == len(here) - 1,
            )
    if any(row["vllm"] == row["engine"] for row in rows):
        table.caption = "* vLLM's faster arm, which the others are divided by\n"
        table.caption_justify = "left"
    return table


def _outputs(row: Row) -> str:
    right, wrong = row["outputs_right"], row["outputs_wrong"]
    if right is None:
        return NOTHING
    return f"{right} of {right + wrong}" if wrong else "all"


def _profile(profile: Mapping[str, Any]) -> Table:
    table = _table("where a decode step goes, of a launch that measures it and is slower for it")
    _columns(table, ("rows", "engine", "step ms", *PARTS))
    splits = [
        (split, engine)
        for engine, told in profile.items()
        for split in told.get("splits", ())
        if "error" not in split
    ]
    for split, engine in sorted(splits, key=lambda one: one[0]["rows"]):
        shares = [_percent(split.get(f"{part}_share")) for part in PARTS]
        table.add_row(str(split["rows"]), engine, _ms(split.get("wall_s")), *shares)
    return table


def _goals(reached: Sequence[Goal]) -> Table:
    table = _table("goals: the lower end of the interval counts")
    _columns(table, ("what", "is to be", "is", "lower end", "n", ""))
    table.columns[0].justify = "left"
    for goal in reached:
        said = {None: "cannot tell" if goal.value is not None else "not measured"}
        said |= {True: "reached", False: "MISSED"}
        digits = 0 if goal.bound >= 100 else 2
        bound = f"{'≥' if goal.least else '≤'} {_number(goal.bound, digits)}"
        figures = (_number(goal.value, digits), _number(goal.low, digits))
        table.add_row(goal.name, bound, *figures, str(goal.n or NOTHING), said[goal.met])
    return table


def _said(rows: Sequence[Row]) -> Iterator[str]:
    """Say what stands for what, and what went wrong, each once."""
    lines: dict[str, None] = {}
    for row in rows:
        own, level = f"c{row['concurrency']}", row["hf_naive_level"]
        if level not in (None, own):
            lines[f"÷ hf_naive at {own}: by its {level}, as it answers one request at a time"] = (
                None
            )
        for problem in row["problems"]:
            lines[f"{row['engine']}, {row['workload']} {own}: {problem}"] = None
    yield from lines


def _unsplit(profile: Mapping[str, Any]) -> Iterator[str]:
    """Say whose steps, or steps of how many rows, could not be split."""
    for engine, told in profile.items():
        if not told.get("splits"):
            yield f"{engine}: no split of its steps: {told.get('error', 'it said nothing')}"
        for split in told.get("splits", ()):
            if "error" in split:
                yield f"{engine}, {split['rows']} rows: {split['error']}"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))


def _columns(table: Table, heads: Sequence[str]) -> None:
    for head in heads:
        table.add_column(head, justify="left" if head == "engine" else "right", no_wrap=True)


def _ranged(row: Row, key: str, digits: int) -> str:
    if row[key] is None:
        return NOTHING
    low, high = row[f"{key}_low"], row[f"{key}_high"]
    between = "" if low is None else f"\n{_number(low, digits)} to {_number(high, digits)}"
    return _number(row[key], digits) + between


def _number(value: float | None, digits: int) -> str:
    return NOTHING if value is None else f"{value:,.{digits}f}"


def _ms(value_s: float | None) -> str:
    return NOTHING if value_s is None else f"{1e3 * value_s:.1f}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"
