"""Which cores are the client's, and which the engines': neither is to disturb the other."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# With fewer, an engine would lose more than it gains.
MIN_CORES = 4
SYSTEM = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a night. Both empty: client and engines share all that there are."""

    client: tuple[int, ...] = ()
    engine: tuple[int, ...] = ()


def parted(
    cores: Collection[int], load_workers: int, siblings: Collection[Collection[int]] = ()
) -> Cores:
    """Give the client a core for each load worker and one more, the engines the others.

    Whole cores: `siblings` are the threads of one (none: each is one). The client gets no more
    than half of all, else nothing is parted.
    """
    rest = set(cores)
    groups = [sorted(rest & set(group)) for group in siblings]
    known = {core for group in groups for core in group}
    groups += [[core] for core in rest - known]
    client: list[int] = []
    for group in sorted((group for group in groups if group), reverse=True):
        if len(client) <= load_workers:
            client += group
    if len(rest) < MIN_CORES or 2 * len(client) > len(rest):
        return Cores()
    return Cores(tuple(sorted(client)), tuple(sorted(rest - set(client))))


def parted_here(load_workers: int) -> Cores:
    """Part the cores that this process may use; not where the system cannot say or do it."""
    if not hasattr(os, "sched_getaffinity"):
        return Cores()
    cores = os.sched_getaffinity(0)
    return parted(cores, load_workers, {_siblings(core) for core in cores})


def _siblings(core: int, system: Path = SYSTEM) -> frozenset[int]:
    """Return the threads of the core that one of them is of."""
    try:
        text = (system / f"cpu{core}" / "topology" / "thread_siblings_list").read_text()
    except OSError:
        return frozenset((core,))
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return frozenset(found)


@contextlib.contextmanager
def kept_to(cores: Sequence[int]) -> Iterator[None]:
    """Keep this process, and what it starts meanwhile, to some cores (none: leave it alone)."""
    before = {} if not cores else {tid: _affinity(tid) for tid in _threads()}
    try:
        for tid in before:
            _keep(tid, cores)
        yield
    finally:
        for tid, old in before.items():
            _keep(tid, old)


def _threads() -> list[int]:
    try:
        return [int(path.name) for path in Path("/proc/self/task").iterdir()]
    except OSError:
        return [0]


def _affinity(tid: int) -> Sequence[int]:
    try:
        return sorted(os.sched_getaffinity(tid))
    except OSError:
        return ()


def _keep(tid: int, cores: Sequence[int]) -> None:
    # A thread may have ended meanwhile.
    with contextlib.suppress(OSError, ValueError):
        os.sched_setaffinity(tid, cores)
