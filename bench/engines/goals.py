"""What our engine is to reach, and what it reached; the lower end of an interval counts. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

OURS, WITHOUT_KERNELS = "graphs", "graphs_torch"
WORKLOAD = "w128_64"
# The least ratio, by requests in flight.
CPU_VLLM = {1: 1.6, 8: 1.4, 32: 1.2}
CPU_VLLM_WITHOUT_KERNELS = {1: 1.1, 8: 0.85, 32: 0.9}
CPU_NAIVE = {1: 1.4, 8: 6.0, 32: 9.0}
GPU_NAIVE = {1: 2.0, 8: 10.0}
BANDWIDTH_SHARE = 0.7
MOST_LINES = 2000
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure. `value` is None where it was not measured, `low` also where one launch
    alone was: then nobody can tell."""

    name: str
    least: bool
    bound: float
    value: float | None
    low: float | None
    n: int = 0

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None where nobody can tell."""
        if self.low is None:
            return None
        return self.low >= self.bound if self.least else self.low <= self.bound


def goals(rows: Sequence[Row], device: str, lines: int | None = None) -> list[Goal]:
    """Return the goals of a device (`cpu` or `cuda`) with what the rows say of each."""
    found = [*(_cpu(rows) if device == "cpu" else _ratios(rows, OURS, "hf_naive", GPU_NAIVE))]
    found.append(
        _goal(rows, OURS, 1, "bandwidth_share", BANDWIDTH_SHARE, "share of the memory bandwidth")
    )
    known = None if lines is None else float(lines)
    return [
        *found,
        Goal("lines of the engine's code, Python and C++", False, MOST_LINES, known, known),
    ]


def _cpu(rows: Sequence[Row]) -> Iterator[Goal]:
    yield from _ratios(rows, OURS, "vllm", CPU_VLLM)
    yield from _ratios(rows, WITHOUT_KERNELS, "vllm", CPU_VLLM_WITHOUT_KERNELS)
    yield from _ratios(rows, OURS, "hf_naive", CPU_NAIVE)


def _ratios(
    rows: Sequence[Row], engine: str, over: str, bounds: Mapping[int, float]
) -> Iterator[Goal]:
    for level, bound in bounds.items():
        yield _goal(rows, engine, level, f"ratio_to_{over}", bound, f"÷ {over}, output tok/s")


def _goal(rows: Sequence[Row], engine: str, level: int, key: str, bound: float, what: str) -> Goal:
    wanted = (engine, WORKLOAD, level)
    mine = [r for r in rows if (r["engine"], r["workload"], r["concurrency"]) == wanted]
    value, low, n = (mine[0][key + end] if mine else None for end in ("", "_low", "_n"))
    return Goal(f"{engine} {what}, {level} in flight", True, bound, value, low, n or 0)


def engine_lines(folder: Path) -> int | None:
    """Return how many lines the engine's code has; None where there is none."""
    files = [path for path in folder.rglob("*") if path.suffix in (".py", ".cpp", ".h", ".cu")]
    counts = [len(path.read_text(encoding="utf-8").splitlines()) for path in files]
    return sum(counts) if counts else None
