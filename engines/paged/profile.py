"""Where the time of steps goes: weights, attention, the rest of a pass, and the host around it."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Profile:
    """Adds seconds up by part. It waits for the device around each part, which costs speed."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what happens inside to a part."""
        started_s = self._now_s()
        yield
        self.seconds[name] += self._now_s() - started_s

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the same function, whose time is added to a part."""

        def run(*args: Any) -> Any:
            with self.part(name):
                return function(*args)

        return run

    def stats(self) -> dict[str, float]:
        """Return seconds since the start: whole steps, and their parts."""
        found = {name: self.seconds[name] for name in ("step", "pass", "weights", "attention")}
        rest = found["pass"] - found["weights"] - found["attention"]
        host = found["step"] - found["pass"]
        return {
            "step_s_total": found["step"],
            "weights_s_total": found["weights"],
            "attention_s_total": found["attention"],
            "rest_s_total": rest,
            "host_s_total": host,
        }

    def _now_s(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
