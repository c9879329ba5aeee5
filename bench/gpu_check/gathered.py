"""What workers said, as rows with ratios and shares; and the goals that they are held to. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

NAIVE, OURS, HOST_MODEL = "hf_naive", "graphs", "synthetic:qwen2.5_1.5b"
NAIVE_RATIO = {1: 2.0, 8: 10.0}
BANDWIDTH_SHARE, HOST_SHARE = 0.7, 0.10
FIGURES = (
    *("output_tokens_per_s", "tpot_p50_s", "decode_step_s", "gpu_busy_s", "host_share"),
    *("ended", "window_s", "cut", "preemptions", "chunked", "most_rows", "kv_waste"),
    *("gpu_memory_bytes", "skipped", "error"),
)
Row = dict[str, Any]


def gather(
    said: Sequence[Mapping[str, Any]],
    models: Iterable[str],
    levels: Mapping[str, Sequence[int]],
    rates: Mapping[str, Any],
    ended: Mapping[str, str],
) -> dict[str, Any]:
    """Return all that is known; a cell that nobody spoke of says why, and figures are None."""
    cells = {_key(one): one for one in said if one["what"] == "cell"}
    bytes_of = {one["model"]: one["step_bytes"] for one in said if one["what"] == "weights"}
    rows = []
    for model in models:
        here = [(level, engine) for engine, own in levels.items() for level in own]
        for level, engine in sorted(here, key=lambda one: one[0]):
            cell = cells.get((model, engine, level))
            if cell is None:
                cell = {"skipped": ended.get(engine, "its process said nothing of it")}
            row: Row = {"engine": engine, "model": model, "concurrency": level}
            row |= {name: cell.get(name) for name in FIGURES}
            row["ratio_to_hf_naive"] = _ratio(row, cells.get((model, NAIVE, _naive(levels, level))))
            row["bandwidth_share"] = _share(row, bytes_of.get(model), rates)
            rows.append(row)
    built = [one for one in said if one["what"] == "built"]
    return {
        "rows": rows,
        "tokens": [dict(one) for one in said if one["what"] == "tokens"],
        "splits": [dict(one) for one in said if one["what"] == "split"],
        "rates": dict(rates),
        "settings": {f"{one['engine']} {one['model']}": one["settings"] for one in built},
        "ended": dict(ended),
    }


def _key(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["model"], cell["engine"], cell["concurrency"]


def _naive(levels: Mapping[str, Sequence[int]], level: int) -> int:
    """Return the level of hf_naive that stands for one: its own, or the highest one with a queue.

    An engine that answers one request at a time is as fast however many wait.
    """
    own = levels.get(NAIVE, ())
    return level if level in own else max((n for n in own if 1 < n <= level), default=level)


def _ratio(row: Row, naive: Mapping[str, Any] | None) -> float | None:
    """Return how many times as fast as hf_naive; None where one of both is not known."""
    mine = row["output_tokens_per_s"]
    theirs = None if naive is None else naive.get("output_tokens_per_s")
    return mine / theirs if mine and theirs else None


def _share(row: Row, step_bytes: int | None, rates: Mapping[str, Any]) -> float | None:
    """Return the share of the measured bandwidth that weights take of a step at 1 in flight."""
    bandwidth, tpot_s = rates.get("bandwidth_bytes_per_s"), row["tpot_p50_s"]
    if row["concurrency"] != 1 or not step_bytes or not bandwidth or not tpot_s:
        return None
    share: float = step_bytes / tpot_s / bandwidth
    return share


def goals(rows: Sequence[Row], device: str) -> list[Row]:
    """Return the goals of a GPU with what was reached, of each model; none on a CPU."""
    found: list[Row] = []
    for model in dict.fromkeys(row["model"] for row in rows) if device != "cpu" else ():
        ours = {r["concurrency"]: r for r in rows if (r["model"], r["engine"]) == (model, OURS)}
        for level, bound in NAIVE_RATIO.items():
            what = f"{model}: {OURS} ÷ {NAIVE}, {level} in flight"
            found.append(_goal(what, True, bound, ours.get(level, {}).get("ratio_to_hf_naive")))
        one = ours.get(1, {})
        what = f"{model}: share of the memory bandwidth, 1 in flight"
        found.append(_goal(what, True, BANDWIDTH_SHARE, one.get("bandwidth_share")))
        if model == HOST_MODEL:
            what = f"{model}: share of a decode step in which the GPU waits, 1 in flight"
            found.append(_goal(what, False, HOST_SHARE, one.get("host_share")))
    return found


def _goal(name: str, least: bool, bound: float, value: float | None) -> Row:
    met = None if value is None else value >= bound if least else value <= bound
    return {"name": name, "least": least, "bound": bound, "value": value, "met": met}
