"""When a level is warm: waves of its own requests, until what they take no longer changes. Pure.

Graph capture, autotuning and compilation happen once for each shape, in the middle of whatever
comes first. So a wave has the level's own concurrency and its own prompts, and is judged by its
steps: two waves in a row with the same first token, the same gaps and about the same length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headway import metrics, stats
from headway.core import Level, Request, RequestRecord

TOKENS = 8
# Of many requests each wave is long, and their prompts are drawn before the first is sent.
MAX_WAVES, MIN_WAVES, MAX_REQUESTS = 8, 4, 512
# How much two medians, or two whole waves, may differ: a share of the larger one. What event loops
# round by is no difference, and a wave as a whole has its slowest step in it.
AGREEMENT, AGREEMENT_OF_SPANS = 0.2, 0.35
ROUNDING_S = 0.003
MOST_IN_OPEN_LOOP = 32


@dataclass(frozen=True, slots=True)
class Wave:
    """What one wave took: all of it, its median TTFT, its median gap between token events."""

    span_s: float
    ttft_s: float | None = None
    gap_s: float | None = None


def wave(span_s: float, records: Sequence[RequestRecord]) -> Wave:
    """Return what the records of a wave say."""
    ttfts = [v for v in map(metrics.ttft_s, records) if v is not None]
    gaps = [gap for record in records for gap in metrics.itl_s(record)]
    return Wave(span_s, stats.median(ttfts), stats.median(gaps))


def settled(waves: Sequence[Wave]) -> bool:
    """Whether the last two waves show the same steps, neither of them with a slow one in it."""
    if len(waves) < 2:
        return False
    one, other = waves[-2:]
    return (
        _agree(one.span_s, other.span_s, AGREEMENT_OF_SPANS)
        and _agree(one.ttft_s, other.ttft_s, AGREEMENT)
        and _agree(one.gap_s, other.gap_s, AGREEMENT)
    )


def _agree(one: float | None, other: float | None, share: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= max(ROUNDING_S, share * max(one, other))


def together(level: Level) -> int:
    """Return how many requests a wave has: a level's slots.

    In open loop as many as come in a second, which is about how many a request that takes a second
    has beside it; all that it has, at most, where they come at once.
    """
    if level.concurrency is not None:
        return level.concurrency
    rate = math.inf if level.rate_per_s is None else level.rate_per_s
    return max(1, math.ceil(min(rate, level.num_requests, MOST_IN_OPEN_LOOP)))


def num_requests(level: Level) -> int:
    """Return how many requests the longest warm-up of a level takes."""
    width = together(level)
    return width * max(MIN_WAVES, min(MAX_WAVES, MAX_REQUESTS // width))


def short(request: Request) -> Request:
    """Return a request with the prompt of a level's own that asks for little, and follows none."""
    most = TOKENS if request.max_tokens is None else min(TOKENS, request.max_tokens)
    return replace(request, max_tokens=most, session=None, turn=0)
