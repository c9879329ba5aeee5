"""How fast this machine reads memory and multiplies matrices: the bounds of a decode step.

    python engines/boot.py rates [--device cpu|cuda]     (with bench/ in PYTHONPATH)

One line of JSON. On the CPU the reading needs numpy, and everything on a GPU needs torch: what is
not there leaves its figure None.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

from headway.engines.calibration import Crew, cores

MIB = 1024**2
# Of each core: two arrays, each larger than the part of a last cache that a core has.
CPU_ARRAY_BYTES = 96 * MIB
GPU_COPY_BYTES = 1024 * MIB
CPU_ORDER, GPU_ORDER = 2048, 8192
ROUNDS = 60


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes a second that all cores read together (a GPU: that a copy reads and writes), and
    multiplications and additions a second of a square bf16 matrix product."""

    device: str
    bandwidth_bytes_per_s: float | None
    matrix_flops: float | None


def measure(device: str) -> Rates:
    """Measure this machine; what cannot be measured is None."""
    if device == "cpu":
        return Rates(device, _cpu_bandwidth(), _matrix_rate(device, CPU_ORDER))
    return Rates(device, _gpu_bandwidth(device), _matrix_rate(device, GPU_ORDER))


def best_s(work: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Return the seconds of the fastest of several rounds, after one to warm up: a bound."""
    taken = []
    for _ in range(1 + rounds):
        started_s = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started_s)
    return min(taken[1:])


def _cpu_bandwidth() -> float | None:
    try:
        import numpy as np
    except ImportError:
        return None
    count, places = CPU_ARRAY_BYTES // 4, cores()
    pairs = [[np.full(count, value, np.float32) for value in (1.0, 0.5)] for _ in places]
    crew = Crew(places, [partial(np.dot, *pair) for pair in pairs])
    return 2 * CPU_ARRAY_BYTES * len(places) / best_s(crew.work)


def _gpu_bandwidth(device: str) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    source = torch.ones(GPU_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize()

    return 2 * GPU_COPY_BYTES / best_s(copy)


def _matrix_rate(device: str, order: int) -> float | None:
    try:
        import torch
    except ImportError:
        return None
    left, right = (torch.randn(order, order, device=device).bfloat16() for _ in range(2))

    def product() -> None:
        torch.mm(left, right)
        if device != "cpu":
            torch.cuda.synchronize()

    return 2 * float(order) ** 3 / best_s(product)


def main(argv: Sequence[str]) -> int:
    """Print the rates as one line of JSON."""
    parser = argparse.ArgumentParser(prog="rates", description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args(argv)
    # A matrix library's own threads would wait by spinning, and share cores with ours.
    if given.device == "cpu" and "numpy" not in sys.modules:
        os.environ["OPENBLAS_NUM_THREADS"] = "1"
    sys.stdout.write(json.dumps(asdict(measure(given.device)), allow_nan=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
