"""What a night will do, and in which order: a pure function of the suite.

Outer loop launches, inner loop instances in seeded random order, so that what is compared is
interleaved; every second launch turns the order of the one before it around, so that none is always
first. Within a launch the levels come in rotating order, for the same reason.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headway.core import Case
from headway.suite import Suite


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
    """Return every launch of a night, in the order in which it is measured."""
    return tuple(_order(suite, instances))


def _order(suite: Suite, instances: Collection[str] | None) -> Iterator[PlannedLaunch]:
    cases = suite.cases()
    for launch in range(1, suite.launches + 1):
        names = [instance.name for instance in suite.instances]
        random.Random(f"order/{suite.seed}/{(launch + 1) // 2}").shuffle(names)
        if launch % 2 == 0:
            names.reverse()
        if instances is not None:
            names = [name for name in names if name in instances]
        for name in names:
            own = [case for case in cases if case.instance == name]
            turn = (launch - 1) % len(own)
            yield PlannedLaunch(name, launch, tuple(own[turn:] + own[:turn]))
