"""What a night will do, and in which order: a pure function of the suite.

Outer loop launches, inner loop instances in seeded random order, so that what is compared is
interleaved; every second launch turns the order of the one before it around, so that none is always
first. Within a launch the levels come in rotating order, for the same reason. Launch k of a
candidate and launch k of the reference are pair k: the same prompts at the same times.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from headway.core import Case
from headway.suite import Suite

# Launch numbers count from 1; launch 0 warms up, and primes compile caches.
PRIMING = 0


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One life of an engine, and the cases measured in it, in order."""

    instance: str
    launch: int
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """`instance-launch`."""
        return f"{self.instance}-{self.launch}"


def order(suite: Suite, instances: Collection[str] | None = None) -> tuple[PlannedLaunch, ...]:
    """Return the launches that every night has, in the order in which they are measured."""
    names = [i.name for i in suite.instances if instances is None or i.name in instances]
    cases = {name: [c for c in suite.cases() if c.instance == name] for name in names}
    return tuple(_order(suite, cases, range(1, suite.launches + 1)))


def more_pairs(suite: Suite, cases: Mapping[str, Collection[Case]]) -> tuple[PlannedLaunch, ...]:
    """Return the launches of the second look; `cases` says which of each instance it takes."""
    gate = suite.reference
    if gate is None or not cases:
        return ()
    wanted = {name: [c for c in suite.cases() if c in own] for name, own in cases.items()}
    return tuple(_order(suite, wanted, range(suite.launches + 1, gate.max_pairs + 1)))


def _order(
    suite: Suite, cases: Mapping[str, list[Case]], launches: Iterable[int]
) -> Iterator[PlannedLaunch]:
    for launch in launches:
        names = [instance.name for instance in suite.instances]
        random.Random(f"order/{suite.seed}/{(launch + 1) // 2}").shuffle(names)
        if launch % 2 == 0:
            names.reverse()
        for name in (name for name in names if name in cases):
            own = cases[name]
            turn = (launch - 1) % len(own)
            yield PlannedLaunch(name, launch, tuple(own[turn:] + own[:turn]))
