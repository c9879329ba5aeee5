"""What a handful of pairs decides: differences are log-ratios [pairs, cells], positive = worse.

The looks of the reference gate: `far_beyond` stops after the first few pairs, `suspicious` says
which cells need more, `max_t` judges those. `visible` plans.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as distributions

from headway.stats.flips import Statistic, max_t, with_pooled
from headway.stats.signed_rank import hodges_lehmann, walsh_averages

__all__ = [
    "Statistic",
    "far_beyond",
    "hodges_lehmann",
    "max_t",
    "suspicious",
    "visible",
    "with_pooled",
]

Array = NDArray[np.float64]
Answers = NDArray[np.bool_]
# No engine repeats itself more closely than this. A few pairs that happen to agree (a coarse clock,
# a virtual one) are no proof of a spread of zero.
LEAST_SD = 5e-4
# A cell goes on when its estimate reaches this share of the margin.
SUSPICION = 0.5


def far_beyond(d: ArrayLike, margin: float, *, alpha: float, family: int) -> Answers:
    """Return which cells a few pairs show to be worse by more than `margin`.

    Five pairs have 32 sign flips: no p small enough for a family. So this is Student's t, at
    `alpha` over the family by Bonferroni: an early stop for what is obvious, not a sharp test.
    """
    d = np.asarray(d, dtype=float)
    n = (~np.isnan(d)).sum(axis=0)
    enough = n >= 2
    d, n = np.where(enough, d, 0.0), np.where(enough, n, 2)
    sd = np.maximum(np.nanstd(d, axis=0, ddof=1), LEAST_SD)
    t = (np.nanmean(d, axis=0) - margin) / sd * np.sqrt(n)
    return cast(Answers, enough & (t > distributions.t.isf(alpha / family, n - 1)))


def suspicious(d: ArrayLike, margin: float, *, share: float = SUSPICION) -> Answers:
    """Return which cells a first look leaves in doubt: estimated at `share` of the margin or more.

    Loose on purpose: a false suspicion costs pairs, a missed one costs the finding.
    """
    d = np.asarray(d, dtype=float)
    empty = np.isnan(d).all(axis=0)
    estimate = np.nanmedian(walsh_averages(np.where(empty, -np.inf, d)), axis=0)
    return cast(Answers, estimate >= share * margin)
