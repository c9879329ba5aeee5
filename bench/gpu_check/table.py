"""What was found out as plain tables; nothing that would have to be installed is needed. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

NOTHING = "—"
Row = Mapping[str, Any]
PARTS = ("weights", "attention", "rest", "host")


def render(found: Mapping[str, Any]) -> str:
    """Return the tables: tokens, speeds, where steps go, goals; then what failed or was skipped."""
    rates = found["rates"]
    bandwidth, matrix = rates.get("bandwidth_bytes_per_s"), rates.get("matrix_flops")
    lines = [f"{found['device_name']}; torch {found['torch'] or NOTHING}"]
    lines.append(
        f"measured: {_number(bandwidth, 1e-9, 0)} GB/s of memory, "
        f"{_number(matrix, 1e-12, 1)} TFLOP/s of bf16 products"
    )
    lines += ["", *_grid(("tokens of", "in", "right", ""), map(_tokens, found["tokens"]))]
    for model in dict.fromkeys(row["model"] for row in found["rows"]):
        rows = [row for row in found["rows"] if row["model"] == model]
        lines += ["", f"{model}", *_grid(SPEEDS, map(_speed, rows))]
    if found["splits"]:
        lines += ["", "where a decode step goes, by launches that measure it", *_splits(found)]
    heads = ("goal", "is to be", "is", "")
    lines += ["", *_grid(heads, map(_goal, found["goals"]))]
    return "\n".join([*lines, "", *_said(found)]).rstrip() + "\n"


SPEEDS = (
    *("in flight", "engine", "÷ hf_naive", "tok/s", "TPOT ms", "step ms", "of bandwidth"),
    *("waits for host", "most rows", "GiB", ""),
)


def _speed(row: Row) -> tuple[str, ...]:
    return (
        str(row["concurrency"]),
        row["engine"],
        _number(row["ratio_to_hf_naive"], 1, 2),
        _number(row["output_tokens_per_s"], 1, 0),
        _number(row["tpot_p50_s"], 1e3, 2),
        _number(row["decode_step_s"], 1e3, 2),
        _percent(row["bandwidth_share"]),
        _percent(row["host_share"]),
        _number(row["most_rows"], 1, 0),
        _number(row["gpu_memory_bytes"], 2**-30, 1),
        row["skipped"] or row["error"] or ("time was up" if row["cut"] else ""),
    )


def _tokens(told: Row) -> tuple[str, ...]:
    if told.get("error"):
        return told["engine"], told["dtype"], NOTHING, told["error"]
    right = told["outputs"] - told["wrong"]
    said = told["first_wrong"] or ""
    return told["engine"], told["dtype"], f"{right} of {told['outputs']}", said


def _splits(found: Mapping[str, Any]) -> Iterator[str]:
    heads = ("rows", "engine", "step ms", *PARTS)
    rows = [
        (
            str(split.get("rows", NOTHING)),
            split["engine"],
            _number(split.get("wall_s"), 1e3, 2),
            *(_percent(split.get(f"{part}_share")) for part in PARTS),
        )
        for split in found["splits"]
    ]
    yield from _grid(heads, rows)


def _goal(goal: Row) -> tuple[str, ...]:
    said = {None: "not measured", True: "reached", False: "MISSED"}[goal["met"]]
    sign = "≥" if goal["least"] else "≤"
    return goal["name"], f"{sign} {goal['bound']:g}", _number(goal["value"], 1, 2), said


NAMED = ("attention", "kernels", "decode_step", "max_num_seqs", "num_blocks")


def _said(found: Mapping[str, Any]) -> Iterator[str]:
    for who, settings in found["settings"].items():
        named = [f"{name} {settings[name]}" for name in NAMED if name in settings]
        yield f"{who}: {', '.join(named)}"
    for engine, why in found["ended"].items():
        yield f"{engine}: {why}"
    for split in found["splits"]:
        if split.get("error"):
            yield f"{split['engine']}: no split of its steps: {split['error']}"
    yield f"{found['seconds']:.0f} s in all"


def _grid(heads: Sequence[str], rows: Any) -> Iterator[str]:
    """Yield lines of columns as wide as they must be, the last one left as it is."""
    lines = [tuple(heads), *rows]
    widths = [max(len(line[k]) for line in lines) for k in range(len(heads) - 1)]
    for line in lines:
        cells = (
            cell.ljust(width) if k == 0 or heads[k] in ("engine", "in") else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line[:-1], widths, strict=True))
        )
        yield "  ".join([*cells, line[-1]]).rstrip()


def _number(value: float | None, scale: float, digits: int) -> str:
    return NOTHING if value is None else f"{value * scale:,.{digits}f}"


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{100 * share:.0f} %"
