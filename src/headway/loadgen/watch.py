"""What the load generator knows about itself while it runs: how late it wakes, what it costs."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass, field

from headway import stats
from headway.transport import Body

LAG_PERIOD_S = 0.02


@dataclass(slots=True)
class Watch:
    """Seconds of this process between start and end, and how late its event loop woke up."""

    clock: Callable[[], float]
    late_s: list[float] = field(default_factory=list)
    collections: int = 0
    collecting_s: float = 0.0
    cpu_s: float = 0.0
    span_s: float = 0.0
    _collecting: float = 0.0

    def figures(self, bodies: Iterable[Body]) -> dict[str, float]:
        """Return what belongs to a Run: see `core.Run.client`."""
        found = {"cpu_share": self.cpu_s / self.span_s} if self.span_s > 0 else {}
        found |= {"gc_collections": float(self.collections), "gc_s": self.collecting_s}
        found |= _percentiles("loop_lag", [max(0.0, late) for late in self.late_s], (50, 99))
        return found | _reads(bodies)

    async def _sample(self) -> None:
        while True:
            due_s = self.clock() + LAG_PERIOD_S
            await asyncio.sleep(LAG_PERIOD_S)
            self.late_s.append(self.clock() - due_s)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting = time.monotonic()
        else:
            self.collections += 1
            self.collecting_s += time.monotonic() - self._collecting


def _reads(bodies: Iterable[Body]) -> dict[str, float]:
    """Return how long what had arrived waited to be read, and how much of it the kernel stamped."""
    lags = [lag_s for body in bodies for lag_s in body.whole().lags_s]
    known = [lag_s for lag_s in lags if not math.isnan(lag_s)]
    share = {"kernel_stamps": len(known) / len(lags)} if lags else {}
    return _percentiles("read_lag", known, (50, 99)) | share


def _percentiles(name: str, values: list[float], qs: Iterable[int]) -> dict[str, float]:
    found = {f"{name}_p{q}_s": stats.percentile(values, q) for q in qs}
    return {key: value for key, value in found.items() if value is not None}


@contextlib.asynccontextmanager
async def watching(clock: Callable[[], float]) -> AsyncIterator[Watch]:
    """Watch this process, with its garbage collector off: collecting takes tens of milliseconds."""
    watch = Watch(clock)
    with _no_garbage_collection():
        gc.callbacks.append(watch._on_gc)
        lag = asyncio.create_task(watch._sample())
        cpu_s, start_s = time.process_time(), clock()
        try:
            yield watch
        finally:
            if clock is time.monotonic:  # of virtual time, no share is the CPU's
                watch.span_s, watch.cpu_s = clock() - start_s, time.process_time() - cpu_s
            gc.callbacks.remove(watch._on_gc)
            lag.cancel()
            await asyncio.wait([lag])


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
