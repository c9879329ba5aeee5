"""What was read of one source, with the time of it; and all that was read around one Run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# Bytes of GPU memory by process, as the driver numbers them.
Processes = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reading:
    """What a source said at a time of the machine's monotonic clock; None: it did not answer.

    Counters are as they are read: since whenever. `processes` are those on a GPU; None where the
    driver does not name them.
    """

    at_s: float
    values: Mapping[str, float] | None
    processes: Processes | None = None


@dataclass(frozen=True, slots=True)
class Watched:
    """All readings from just before a Run to just after it, in order; GPUs by their UUIDs.

    Empty where there is nobody to ask.
    """

    server: tuple[Reading, ...] = ()
    machine: tuple[Reading, ...] = ()
    gpus: Mapping[str, tuple[Reading, ...]] = field(default_factory=dict)
