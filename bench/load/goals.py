"""What our client is to reach, and what it reached; of medians over rounds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

OURS = "headway"
Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Goal:
    """A bound on a figure; `value` is None where it was not measured, or has nothing beside it."""

    name: str
    unit: str
    least: bool
    bound: float
    value: float | None

    @property
    def met(self) -> bool | None:
        """Whether it was reached; None where nobody can tell."""
        if self.value is None:
            return None
        return self.value >= self.bound if self.least else self.value <= self.bound


def goals(closed: Sequence[Row], opened: Sequence[Row], event_bytes: float | None) -> list[Goal]:
    """Return every goal with what the rows say of it; an error counts whichever way it points."""

    def ours(rows: Iterable[Row], streams: int | None, name: str) -> float | None:
        found = [r for r in rows if (r["client"], r["streams"]) == (OURS, streams)]
        return abs(found[0][name]) if found and found[0].get(name) is not None else None

    def peers(streams: int, name: str) -> list[float]:
        rows = [r for r in closed if r["client"] != OURS and r["streams"] == streams]
        return [abs(r[name]) for r in rows if r.get(name) is not None]

    rate, error = ours(closed, 1024, "tokens_per_s"), ours(closed, 512, "ttft_mean_error_s")
    most, least = max(peers(1024, "tokens_per_s"), default=0), peers(512, "ttft_mean_error_s")
    return [
        Goal("tokens/s kept up at 1024 streams", "", True, 46_000, rate),
        Goal("… of the best peer's", "x", True, 2.0, _ratio(rate, most)),
        Goal("TTFT error at 512 streams, mean", "s", False, 0.010, error),
        Goal("… of the best peer's", "x", False, 0.2, _ratio(error, min(least, default=0))),
        Goal(
            *("TTFT error at 512 streams, p99", "s", False, 0.035),
            ours(closed, 512, "ttft_p99_error_s"),
        ),
        Goal(
            *("TTFT error at 64 streams, mean", "s", False, 0.002),
            ours(closed, 64, "ttft_mean_error_s"),
        ),
        Goal("ITL p99 error at 512", "s", False, 0.0015, ours(closed, 512, "itl_p99_error_s")),
        Goal(
            *("send lag p99, open loop at 200/s", "s", False, 0.001),
            ours(opened, None, "reported_send_lag_p99_s"),
        ),
        Goal("held per token event beside its payload", "bytes", False, 100, event_bytes),
    ]


def _ratio(value: float | None, other: float) -> float | None:
    return value / other if value is not None and other else None
