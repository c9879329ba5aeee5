"""What a handful of pairs decides: differences are log-ratios [pairs, cells], positive = worse.

The looks of the reference gate: `far_beyond` stops after the first few pairs, `suspicious` says
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
# Into how many equal parts a distribution is cut to average over it.
GRID = 2000
# A cell goes on when its estimate reaches this share of the margin. Half of it finds no more and
# takes more pairs (see `suspicious`).
SUSPICION = 1.0


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
    found: Answers = enough & (t > distributions.t.isf(alpha / family, n - 1))
    return found


def suspicious(d: ArrayLike, margin: float, *, share: float = SUSPICION) -> Answers:
    """Return which cells a first look leaves in doubt: estimated at `share` of the margin or more.

    Loose on purpose: a false suspicion costs pairs, a missed one costs the finding.
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
    `alpha` over the family by Bonferroni: what `far_beyond` is; for cells that hang together and
    for noise with bursts `max_t` sees a little less than this.
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
    critical = float(distributions.t.isf(alpha, df))
    shares = (np.arange(GRID) + 0.5) / GRID
    thresholds = critical * np.sqrt(distributions.chi2.ppf(shares, df) / df)

    def excess(shift: float) -> float:
        return float(ndtr(shift - thresholds).mean()) - power

    return float(brentq(excess, 0.0, thresholds.max() + 10.0))
