"""Bounds on percentiles and on shares of requests that hold for any distribution."""

from __future__ import annotations

import math
from collections.abc import Sequence

from scipy import stats as distributions


def percentile_interval(
    samples: Sequence[float], q: float, confidence: float = 0.95
) -> tuple[float | None, float | None]:
    """Return two of the samples that have the q-th percentile between them, by counting alone.

    A side that so few samples cannot bound is None: 100 samples have no upper bound of p99. The
    samples must be independent; requests that share a launch are nearly so at best.
    """
    if not 0 < q < 100:
        raise ValueError(f"percentile {q} must lie between 0 and 100")
    if not samples:
        return None, None
    found = distributions.quantile_test(list(samples), q=samples[0], p=q / 100)
    low, high = found.confidence_interval(confidence_level=confidence)
    return (None if math.isnan(low) else float(low), None if math.isnan(high) else float(high))


def share_within(num_requests: int, num_over: int, confidence: float = 0.99) -> float:
    """Return the share of requests that is within a limit at least, with that confidence.

    Clopper and Pearson's lower bound, from `num_over` requests over the limit.
    """
    _check(num_requests, num_over)
    if not num_requests:
        return 0.0
    found = distributions.binomtest(num_requests - num_over, num_requests, alternative="greater")
    return float(found.proportion_ci(confidence, method="exact").low)


def keeps_within(
    num_requests: int, num_over: int, share: float = 0.99, confidence: float = 0.99
) -> bool:
    """Whether one may say with that confidence that at least this share is within a limit.

    True when so few requests over the limit were no more probable than 1 - confidence if only
    `share` of all were within it.
    """
    _check(num_requests, num_over)
    _check_shares(share, confidence)
    return bool(distributions.binom.cdf(num_over, num_requests, 1 - share) <= 1 - confidence)


def falls_short(
    num_requests: int, num_over: int, share: float = 0.99, confidence: float = 0.99
) -> bool:
    """Whether one may say with that confidence that less than this share is within a limit."""
    _check(num_requests, num_over)
    _check_shares(share, confidence)
    return bool(distributions.binom.sf(num_over - 1, num_requests, 1 - share) <= 1 - confidence)


def requests_needed(num_over: int = 0, share: float = 0.99, confidence: float = 0.99) -> int:
    """Return how many requests it takes to say so, when `num_over` of them are over the limit.

    459 of which none is over, 662 with one, for 99 % of requests with 99 % confidence.
    """
    _check_shares(share, confidence)
    low, high = num_over, max(1, 2 * num_over)  # low is too few
    while not keeps_within(high, num_over, share, confidence):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        if keeps_within(middle, num_over, share, confidence):
            high = middle
        else:
            low = middle
    return high


def _check(num_requests: int, num_over: int) -> None:
    if not 0 <= num_over <= num_requests:
        raise ValueError(f"{num_over} of {num_requests} requests over a limit is no count")


def _check_shares(share: float, confidence: float) -> None:
    for name, value in (("share", share), ("confidence", confidence)):
        if not 0 < value < 1:
            raise ValueError(f"{name} {value} must lie between 0 and 1 (0.99, not 99)")
