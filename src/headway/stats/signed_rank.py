"""Hodges and Lehmann's estimate of a paired difference, with Wilcoxon's signed-rank interval."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def hodges_lehmann(
    differences: ArrayLike, confidence: float = 0.95
) -> tuple[float, float | None, float | None]:
    """Return the estimate and the two bounds: the median of all pairwise means, and two of them.

    The bounds exclude just those shifts that the exact signed-rank test rejects at 1 - confidence,
    two-sided. With few pairs no shift can be rejected and a bound is None (95 % takes six pairs).
    """
    x = np.asarray(differences, dtype=float)
    if x.ndim != 1 or not len(x) or not np.isfinite(x).all():
        raise ValueError("the differences must be a non-empty list of finite numbers")
    means = np.sort(walsh_averages(x))
    out = _num_excluded(len(x), 1 - confidence)
    low, high = (float(means[out - 1]), float(means[-out])) if out else (None, None)
    return float(np.median(means)), low, high


def walsh_averages(x: Array) -> Array:
    """Return the means of all pairs along the first axis, each value with itself included."""
    i, j = np.triu_indices(len(x))
    found: Array = (x[i] + x[j]) / 2
    return found


@lru_cache(maxsize=256)
def _num_excluded(n: int, alpha: float) -> int:
    """Return which pairwise mean from either end is the bound; 0 where there is none."""
    # How many of the 2^n sets of ranks have each sum: the null distribution of the statistic.
    share = np.ones(1)
    for rank in range(1, n + 1):
        share = (np.pad(share, (0, rank)) + np.pad(share, (rank, 0))) / 2
    below = np.cumsum(share)
    # The k-th smallest mean excludes the true one when the statistic is below k.
    # 1 - 0.95 is not 0.05 to the last bit, and a step of the distribution may be just there.
    return int(np.searchsorted(below, alpha / 2 * (1 + 1e-12), side="right"))
