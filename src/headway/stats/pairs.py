"""What a handful of pairs decides: differences are log-ratios [pairs, cells], positive = worse.

The looks of the reference gate: `student_p` stops after the first few pairs, `suspicious` says
which cells need more, `max_t` judges those. `visible` plans.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats as distributions
from scipy.optimize import brentq
from scipy.special import ndtr

from headway.stats.flips import Statistic, max_t
from headway.stats.signed_rank import hodges_lehmann, walsh_averages
from headway.stats.summary import student

__all__ = [
    "Statistic",
    "hodges_lehmann",
    "max_t",
    "student_p",
    "suspicious",
    "visible",
]

Array = NDArray[np.float64]
Answers = NDArray[np.bool_]
# No engine repeats itself more closely than this. A few pairs that happen to agree (a coarse clock,
# a virtual one) are no proof of a spread of zero.
LEAST_SD = 5e-4
# Into how many equal parts a distribution is cut to average over it.
GRID = 2000
# A cell goes on when its estimate reaches this share of the margin.
SUSPICION = 1.0


def student_p(d: ArrayLike, margin: float, *, family: int) -> Array:
    """Return each cell's p against being worse by no more than `margin`, for the whole family.

    Five pairs have 32 sign flips: no p small enough for a family. So this is Student's t, over the
    family by Bonferroni: an early stop for what is far beyond the margin, not a sharp test. It is 1
    for a cell with fewer than two values.
    """
    d = np.asarray(d, dtype=float)
    n = (~np.isnan(d)).sum(axis=0)
    enough = n >= 2
    d, n = np.where(enough, d, 0.0), np.where(enough, n, 2)
    sd = np.maximum(np.nanstd(d, axis=0, ddof=1), LEAST_SD)
    t = (np.nanmean(d, axis=0) - margin) / sd * np.sqrt(n)
    p: Array = np.where(enough, np.minimum(family * distributions.t.sf(t, n - 1), 1.0), 1.0)
    return p


def suspicious(d: ArrayLike, margin: float, *, share: float = SUSPICION) -> Answers:
    """Return which cells a first look leaves in doubt: estimated at `share` of the margin or more.

    Loose on purpose: a false suspicion costs pairs, a missed one the finding. The estimate is
    Hodges and Lehmann's, which one contended launch of five does not carry off. On a simulated
    shared machine a cell that is 2 points beyond the margin passes 98 times in 100 or more.
    Unchanged suites of 24 cells do in 8 of 100 nights with a margin of 2 %, 44 with 1 %, 72 with
    0.5 %; at half the share in 45, 75 and 84, and no more of what could be found was.
    """
    d = np.asarray(d, dtype=float)
    empty = np.isnan(d).all(axis=0)
    estimate = np.nanmedian(walsh_averages(np.where(empty, -np.inf, d)), axis=0)
    found: Answers = estimate >= share * margin
    return found


def visible(
    sd: float,
    pairs: int,
    *,
    alpha: float,
    power: float = 0.8,
    margin: float = 0.0,
    family: int = 1,
) -> float | None:
    """Return the change that is found with probability `power`; None from fewer than two pairs.

    `sd` is that of one pair's difference. The gate is taken for Student's t against `margin` at
    `alpha` over the family by Bonferroni, as `student_p` is. `max_t` needs some more with
    few pairs (0.7 instead of 0.8 with 12 in plain normal noise), less where the sd is a few bursts,
    and finds nothing with fewer pairs than log2(1 / alpha), whatever this says.
    """
    if pairs < 2:
        return None
    return margin + _visible_t(pairs - 1, alpha / family, power) * sd / math.sqrt(pairs)


@lru_cache(maxsize=256)
def _visible_t(df: int, alpha: float, power: float) -> float:
    """Return the mean, in standard errors, that a t test at alpha finds with that power.

    The noncentral t distribution by averaging over the sample's standard deviation: scipy's own
    gives warnings or never returns at the quantiles that few pairs and a large family need.
    """
    critical = -student(alpha, df)
    shares = (np.arange(GRID) + 0.5) / GRID
    thresholds = critical * np.sqrt(distributions.chi2.ppf(shares, df) / df)

    def excess(shift: float) -> float:
        return float(ndtr(shift - thresholds).mean()) - power

    return float(brentq(excess, 0.0, thresholds.max() + 10.0))
