"""Calibration kernels: fixed pieces of work that tell how fast the machine itself is just now.

    python boot.py headway.engines.calibration [--device cpu|cuda]

A line in, a line of JSON out: the seconds that each kernel took. The first line says that it is
ready, with the kernels and their sizes, or why it is not. It ends when stdin closes. Between
readings it waits for a line and takes no CPU, and nothing of its work lasts beyond its answer.

What serving tokens is made of: `matmul` (prefill), `copy` (decode, bound by memory), `launch` (the
host's work per operation) and `python` (the step loop). Each is taken from the faster of several
rounds: a single interruption does not show, what lasts does. Sizes follow from the number of cores
and the size of the last cache alone, never from how fast anything was.

On the CPU it needs numpy and holds twice the copied memory, 256 MiB as a rule (1 GiB at most); a
reading takes a quarter of a second on two cores. On a GPU it needs torch and holds twice the copied
memory there as well, 256 to 512 MiB as a rule (1 GiB at most), beside what the driver keeps for
any process; the matrices lie in the same memory.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

MIB = 1024**2
MIN_COPY_BYTES, MAX_COPY_BYTES = 128 * MIB, 512 * MIB
CACHES_PER_COPY = 4
# A product of this order takes some 15 ms on one of today's cores; every core computes one.
ORDER, MAX_CORES = 896, 16
CUDA_ORDER, CUDA_PRODUCTS, CUDA_COPIES = 4096, 2, 16
SMALL = 16
SMALL_CALLS, CUDA_LAUNCHES, LOOP_STEPS = 20_000, 2_000, 100_000
ROUNDS = 5
THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class UnavailableError(RuntimeError):
    """The kernels cannot run here; the message is one sentence."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One piece of work, the same every time; it is done when `work` returns."""

    name: str
    work: Callable[[], object]
    size: Mapping[str, int] = field(default_factory=dict)


def read(
    kernels: Sequence[Kernel], clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Return the seconds of each kernel: the second fastest of five rounds, after one to warm up.

    The kernels take turns: what disturbs the machine for a few hundredths of a second meets no
    kernel more than once or twice. Up to three slow rounds do not show, nor does one that was
    lucky: the fastest copy of all was 10 to 30 % faster than usual, now and then.
    """
    taken: dict[str, list[float]] = {kernel.name: [] for kernel in kernels}
    for _ in range(1 + ROUNDS):
        for kernel in kernels:
            started = clock()
            kernel.work()
            taken[kernel.name].append(clock() - started)
    return {name: sorted(seconds[1:])[1] for name, seconds in taken.items()}


class Crew:
    """A thread on each of some cores, which all do the same work at once when asked.

    A matrix library's own threads will not do: they wait for more work by spinning, for up to a
    fifth of a second, and two of them may share a core while another is idle, for half the speed.
    These sleep in between, and each keeps to its core.
    """

    def __init__(self, cores: Sequence[int], works: Sequence[Callable[[], object]]) -> None:
        self._begin = [threading.Semaphore(0) for _ in works]
        self._done = threading.Semaphore(0)
        for core, work, begin in zip(cores, works, self._begin, strict=True):
            threading.Thread(target=self._serve, args=(core, work, begin), daemon=True).start()

    def _serve(self, core: int, work: Callable[[], object], begin: threading.Semaphore) -> None:
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {core})  # of this thread alone
        while True:
            begin.acquire()
            work()
            self._done.release()

    def work(self) -> None:
        """Do the work once on each core; it is done when the last one is."""
        for begin in self._begin:
            begin.release()
        for _ in self._begin:
            self._done.acquire()


def cores() -> tuple[int, ...]:
    """Return the cores to watch: those that this process may use, `MAX_CORES` of them at most."""
    if hasattr(os, "sched_getaffinity"):
        usable = sorted(os.sched_getaffinity(0))
    else:
        usable = list(range(os.cpu_count() or 1))
    step = -(-len(usable) // MAX_CORES)  # spread over sockets and caches
    return tuple(usable[::step])


def last_cache_bytes(cpu: Path = Path("/sys/devices/system/cpu/cpu0")) -> int | None:
    """Return the size of a core's largest cache; None where the system does not say."""
    units = {"K": 1024, "M": MIB, "G": 1024 * MIB}
    sizes = []
    for path in cpu.glob("cache/index*/size"):
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text[:-1].isdecimal() and text[-1] in units:
            sizes.append(int(text[:-1]) * units[text[-1]])
    return max(sizes, default=None)


def copy_bytes(cache_bytes: int | None) -> int:
    """Return how much to copy, so that next to nothing of it is found in the cache."""
    wanted = CACHES_PER_COPY * (cache_bytes or 0)
    return min(max(MIN_COPY_BYTES, wanted), MAX_COPY_BYTES) // MIB * MIB


def python_loop() -> int:
    """Run the interpreter: whole numbers, a loop, and nothing else."""
    value = 0
    for step in range(LOOP_STEPS):
        value = (value * 31 + step) & 0xFFFF
    return value


def cpu_kernels() -> tuple[Kernel, ...]:
    """Return the kernels on the CPU; UnavailableError without numpy."""
    os.environ.update(dict.fromkeys(THREADS, "1"))
    try:
        import numpy as np
    except ImportError as error:
        raise UnavailableError(
            f"the calibration kernels need numpy, which {sys.executable} cannot import: {error}"
        ) from error

    num_bytes = copy_bytes(last_cache_bytes())
    source, target = np.ones(num_bytes // 8), np.ones(num_bytes // 8)
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((ORDER, ORDER), dtype=np.float32) for _ in range(2))
    products = [np.empty_like(left) for _ in cores()]
    crew = Crew(cores(), [partial(np.matmul, left, right, out=product) for product in products])
    small, result = np.ones(SMALL, np.float32), np.empty(SMALL, np.float32)

    def small_calls() -> None:
        add = np.add
        for _ in range(SMALL_CALLS):
            add(small, small, result)

    return (
        Kernel("copy", lambda: np.copyto(target, source), {"bytes": num_bytes}),
        Kernel("launch", small_calls, {"calls": SMALL_CALLS}),
        Kernel("python", python_loop, {"steps": LOOP_STEPS}),
        Kernel("matmul", crew.work, {"order": ORDER, "cores": len(products)}),
    )


def cuda_kernels(device: str) -> tuple[Kernel, ...]:
    """Return the kernels on a GPU; UnavailableError without torch or without the GPU."""
    try:
        import torch
    except ImportError as error:
        raise UnavailableError(
            f"the calibration kernels need torch on {device}, which {sys.executable} cannot "
            f"import: {error}"
        ) from error
    if not torch.cuda.is_available():
        raise UnavailableError(f"the calibration kernels find no GPU for device {device}")
    try:
        cache = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0)
        return torch_kernels(torch, device, cache, lambda: torch.cuda.synchronize(device))
    except RuntimeError as error:  # a device that is not there, or whose memory is taken
        raise UnavailableError(
            f"the calibration kernels cannot use device {device}: {str(error).splitlines()[0]}"
        ) from error


def torch_kernels(
    torch: Any, device: str, cache_bytes: int, synchronise: Callable[[], object]
) -> tuple[Kernel, ...]:
    """Return the kernels on any device of torch's."""
    num_bytes, entries = copy_bytes(cache_bytes), CUDA_ORDER * CUDA_ORDER
    source = torch.randn(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    left, right, product = (
        part.view(CUDA_ORDER, CUDA_ORDER)
        for part in (source[:entries], source[entries : 2 * entries], target[:entries])
    )
    small = torch.zeros(SMALL, device=device)

    def copies() -> None:
        for _ in range(CUDA_COPIES):
            target.copy_(source)
        synchronise()

    def products() -> None:
        for _ in range(CUDA_PRODUCTS):
            torch.mm(left, right, out=product)
        synchronise()

    def launches() -> None:
        for _ in range(CUDA_LAUNCHES):
            small.add_(1.0)
        synchronise()

    size = {"order": CUDA_ORDER, "products": CUDA_PRODUCTS}
    # The product comes first: a GPU that was idle reaches its clocks in it.
    return (
        Kernel("matmul", products, size),
        Kernel("copy", copies, {"bytes": num_bytes, "copies": CUDA_COPIES}),
        Kernel("launch", launches, {"calls": CUDA_LAUNCHES}),
        Kernel("python", python_loop, {"steps": LOOP_STEPS}),
    )


def open_kernels(device: str) -> tuple[Kernel, ...]:
    """Return the kernels of a device, run once; UnavailableError when they cannot run."""
    kernels = cpu_kernels() if device == "cpu" else cuda_kernels(device)
    for kernel in kernels:
        kernel.work()
    # What was made until here lives as long as the process: no collection looks at it again.
    gc.collect()
    gc.disable()
    return kernels


def serve(kernels: Sequence[Kernel], device: str, lines: Iterable[str], out: TextIO) -> None:
    """Say that the kernels are ready, then answer each line by one reading of all."""
    sizes = {kernel.name: dict(kernel.size) for kernel in kernels}
    _send(out, {"ready": True, "device": device, "kernels": sizes})
    for _ in lines:
        _send(out, {"seconds": read(kernels)})


def _send(out: TextIO, message: Mapping[str, Any]) -> None:
    out.write(json.dumps(message, allow_nan=False) + "\n")
    out.flush()


def main() -> None:
    """Serve stdin until it closes; exit 1 with one sentence when the kernels cannot run."""
    parser = argparse.ArgumentParser(prog="headway.engines.calibration", description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:1 (default: cpu)")
    device = parser.parse_args().device
    if device != "cpu" and device.partition(":")[0] != "cuda":
        parser.error(f"--device must be cpu, cuda or cuda:N, not {device}")
    try:
        kernels = open_kernels(device)
    except UnavailableError as error:
        _send(sys.stdout, {"ready": False, "error": str(error)})
        sys.exit(f"headway: {error}")
    serve(kernels, device, sys.stdin, sys.stdout)


if __name__ == "__main__":
    main()
