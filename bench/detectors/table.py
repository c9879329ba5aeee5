"""Scores as tables for a terminal."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from detectors.scores import SCENARIOS

WIDTH = 140
HEADS = {"improvement": "improve-\nment"}


def render(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return two tables per preset: sizes of slowdowns, then everything else."""
    out = io.StringIO()
    console = Console(file=out, width=WIDTH, no_color=True, markup=False, highlight=False)
    for preset in dict.fromkeys(row["preset"] for row in rows):
        own = [row for row in rows if row["preset"] == preset]
        console.print(_sizes(preset, [row for row in own if "not_run" not in row]))
        if any(row["scenarios"] for row in own):
            console.print(_scenarios(preset, own))
        for row in own:
            if "not_run" in row:
                console.print(f"{_label(row)}: {row['not_run']}")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _sizes(preset: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title=f"{preset}: alarms", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1)
    )
    table.add_column("detector", no_wrap=True)
    table.add_column("set to", no_wrap=True, min_width=6)
    columns = (
        "false alarms\n/100 nights",
        "upper",
        "2 %",
        "3 %",
        "5 %",
        "10 %",
        "5 % in\n3 nights",
        "can't\ntell",
        "launches\na night",
        "pairs",
        "nights",
    )
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cant = (row["inconclusive_share"] or 0.0) + (row["invalid_share"] or 0.0)
        table.add_row(
            row["detector"],
            row["sensitivity"] or "",
            _number(row["false_alarms_per_100_nights"], 1),
            _number(row["false_alarms_upper"], 1),
            *(_percent(row[f"found_{size}pct"]) for size in (2, 3, 5, 10)),
            _percent(row["found_5pct_in_3_nights"]),
            _percent(cant),
            _number(row["launches_per_night"], 1),
            _number(row["pairs_mean"], 1),
            str(row["nights"]),
        )
    return table


def _scenarios(preset: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(
        title=f"{preset}: how often the right thing was said",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    table.add_column("detector", no_wrap=True)
    for name in SCENARIOS:
        table.add_column(HEADS.get(name, name.replace("_", "\n")), justify="right", no_wrap=True)
    for row in rows:
        said = [row["scenarios"].get(name, {}).get("right") for name in SCENARIOS]
        if any(share is not None for share in said):
            table.add_row(_label(row), *map(_percent, said))
    return table


def _label(row: Mapping[str, Any]) -> str:
    return f"{row['detector']} {row['sensitivity'] or ''}".rstrip()


def _number(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def _percent(share: float | None) -> str:
    return "—" if share is None else f"{100 * share:.0f} %"
