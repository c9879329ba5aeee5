"""Change points by Apache Otava, with its defaults. Runs in Otava's own environment.

One JSON object a line in, cell → values (higher is worse); one a line out, cell → [[index of the
first value after the change, relative change], …].
"""

from __future__ import annotations

import json
import sys

from otava.series import Metric, Series


def points(cells: dict[str, list[float]]) -> dict[str, list[tuple[int, float]]]:
    """Return each cell's change points."""
    length = len(next(iter(cells.values())))
    metrics = {cell: Metric(direction=-1) for cell in cells}
    series = Series("detbench", None, list(range(length)), metrics, dict(cells), {})
    found = series.analyze().change_points
    return {
        cell: [(int(point.index), point.forward_change_percent() / 100) for point in found[cell]]
        for cell in cells
    }


for line in sys.stdin:
    sys.stdout.write(json.dumps(points(json.loads(line))) + "\n")
