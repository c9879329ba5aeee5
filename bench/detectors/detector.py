"""What a detector is here, and what it says of a night."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from detectors.injections import Injection
from detectors.layout import Conditions


class NotAvailable(RuntimeError):
    """A detector cannot run here, or not under these conditions; one sentence says why."""


@dataclass(frozen=True, slots=True)
class NightOutcome:
    """What a detector said of one night.

    `night` counts from the first night of the injection, within its `episode`: a clean past of its
    own, then the injection's nights. `cells` are those called slower, `faster` those called faster,
    by name (`Layout.names`). `verdicts` counts the gated cells by verdict, in Headway's codes
    (REGRESSION, PASS, INVALID, INCONCLUSIVE, INCOMPATIBLE, …); LIMIT stands for requests that
    failed. `pairs` is None for a detector without any.
    """

    episode: int
    night: int
    cells: frozenset[str]
    launches: float
    faster: frozenset[str] = frozenset()
    verdicts: Mapping[str, int] = field(default_factory=dict)
    pairs: float | None = None

    @property
    def alarm(self) -> bool:
        """Whether the night was called slower."""
        return bool(self.cells)


class Detector(Protocol):
    """Something that says of nights whether they are slower. It is sent between processes.

    Detectors of one `family` share what is drawn for them, and are run together. `most` is how many
    episodes of an injection are worth their time, None for no bound.
    """

    @property
    def name(self) -> str:
        """The name in tables."""

    @property
    def sensitivity(self) -> str | None:
        """What it was set to, where it can be set."""

    @property
    def family(self) -> str:
        """Whom it is run together with."""

    @property
    def most(self) -> int | None:
        """How many episodes of an injection are worth their time."""

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge `num_nights` episodes, each on every night that the injection lasts.

        Each is independent of the others and a function of (conditions, seed, its number) alone.
        Raises NotAvailable.
        """
