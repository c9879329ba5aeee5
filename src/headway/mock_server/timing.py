"""When each write is due: absolute times, known before the first, whatever the load. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice, repeat


@dataclass(frozen=True, slots=True)
class Timing:
    """The law of the due times, in seconds.

    The first write is due TTFT after its request was parsed, each other one ITL after the one
    before it was due. With jitter each of these gaps is multiplied by 1 + jitter × u, u uniform in
    [-1, 1), drawn in order from a generator that only (seed, number of the request) seeds.
    """

    ttft_s: float = 0.1
    itl_s: float = 0.02
    jitter: float = 0.0
    seed: int = 1

    def gaps(
        self, number: int, stall_at: int | None = None, stall_s: float = 0.0
    ) -> Iterator[float]:
        """Yield the gaps before write 0, 1, … of a request; a stall adds to that of one write."""
        bases = chain((self.ttft_s,), repeat(self.itl_s))
        gaps = self._jittered(number, bases) if self.jitter else bases
        if stall_at is None:
            return gaps
        return (gap + stall_s if k == stall_at else gap for k, gap in enumerate(gaps))

    def _jittered(self, number: int, bases: Iterator[float]) -> Iterator[float]:
        draw = random.Random(f"mock-server/{self.seed}/{number}").random
        for base in bases:
            yield base * (1.0 + self.jitter * (2.0 * draw() - 1.0))


def dues(start_s: float, gaps: Iterator[float], n: int) -> tuple[float, ...]:
    """Return the first n due times, by the additions that the server itself makes."""
    return tuple(islice(accumulate(gaps, initial=start_s), 1, n + 1))
