"""A benchmark per cell for pytest-benchmark, on a clock that goes forward by what was simulated.

Run by `real_tools` in a pytest session of its own, which decides on what pytest-benchmark measures.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

# Name of the benchmark → seconds of each of its rounds.
CELLS: dict[str, list[float]] = json.loads(
    Path(os.environ["DETBENCH_CELLS"]).read_text(encoding="utf-8")
)
_spent_s = [0.0]


def now() -> float:
    """Return the simulated time; `--benchmark-timer` names this function."""
    return _spent_s[0]


def spend(seconds: float) -> None:
    """Let time pass."""
    _spent_s[0] += seconds


@pytest.mark.parametrize("cell", CELLS)
def test_cell(benchmark: Any, cell: str) -> None:
    """Take as long as the cell took, once per launch."""
    rounds = CELLS[cell]
    left = iter(rounds)
    benchmark.pedantic(lambda: spend(next(left)), rounds=len(rounds))
