"""Sign flips: one test for a whole family of cells that share the launches they were measured in.

Were there no change, candidate and reference could swap places in any pair: the pair's differences
would change sign, all cells together. Flipping whole pairs therefore shows what the largest
statistic of the family does by chance, whatever the noise and however the cells hang together.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.stats import rankdata

Array = NDArray[np.float64]
Statistic = Literal["clipped", "mean", "rank"]
# Up to here every combination of signs is tried; beyond, a sample of them is.
ALL_FLIPS = 2**14
# A difference counts for no more than this many times its cell's median distance from the shift.
CLIP = 1.5
# Statistics (they have unit variance) that differ by less are equal: the order of a sum is no test.
TIE = 1e-9


def max_t(
    d: ArrayLike,
    shift: float,
    *,
    seed: int,
    num_flips: int = 20_000,
    family: int | None = None,
    statistic: Statistic = "clipped",
) -> Array:
    """Return each cell's p for "its differences lie above `shift`", adjusted for the family.

    `d` is [pairs, cells], NaN where a pair lacks a cell. `family` is how many cells the suite
    tests: where fewer were measured, p is multiplied by the ratio, rounded up, so that measuring
    only some of them earns nothing. For improvements call it with `-d`.

    All combinations of signs are tried up to 14 pairs (exact), `num_flips` seeded ones beyond; the
    signs as observed are among them, so that p is never 0. Cells are rejected one after the other
    (step-down): the p of a cell is the share of flips in which any cell no more extreme than it
    reaches its statistic, and no less than the p of the cell before.

    The statistic is a sum of scores of d - shift over its standard deviation under flips. With
    the differences as scores (`mean`) it orders flips as Student's t does, with their signed ranks
    (`rank`) it is Wilcoxon's. Bursts of contention hide a slowdown from the mean; from ranks, few
    pairs do, because within a family of cells many flips tie at the top. Differences cut off at
    `CLIP` times their median size (`clipped`) have neither fault. The limit depends on sizes alone,
    which no flip changes, so the test stays exact. Found by mean / rank / the larger of the two,
    flips paying for the choice / clipped, in 100 simulated nights of 24 cells at an error of 0.004:
    one level of eight 3 % slower, shared machine, 24 pairs, margin 0.5 %: 75 / 92 / 93 / 97;
    one level 5 % slower, 10 pairs, margin 2 %: 63 / 9 / 58 / 67;
    one level 3 % slower, dedicated machine, 12 pairs, margin 0.5 %: 100 / 58 / 100 / 100;
    all levels 2 % slower, slow starts one in ten, 24 pairs, margin 0.5 %: 41 / 48 / 48 / 55.
    """
    d = np.asarray(d, dtype=float)
    if d.ndim != 2:
        raise ValueError(f"differences must be an array [pairs, cells], not {d.ndim}-dimensional")
    num_measured = int((~np.isnan(d)).any(axis=0).sum())
    if not num_measured:
        return np.ones(d.shape[1])
    t = sign_flips(len(d), seed, num_flips) @ _scores(d - shift, statistic)
    weight = math.ceil(max(1.0, (family or num_measured) / num_measured))
    p: Array = np.minimum(1.0, _step_down(t) * weight)
    return p


def sign_flips(num_pairs: int, seed: int, num_flips: int) -> Array:
    """Return rows of signs, the first one all +1: every combination if few, else a sample."""
    if 2**num_pairs <= max(ALL_FLIPS, num_flips):
        bits = np.arange(2**num_pairs)[:, None] >> np.arange(num_pairs) & 1
    else:
        bits = np.random.default_rng(seed).integers(0, 2, (num_flips, num_pairs))
        bits[0] = 0
    signs: Array = 1.0 - 2.0 * bits.astype(float)
    return signs


def _scores(x: Array, statistic: Statistic) -> Array:
    """Return scores whose sum has unit variance under flips; 0 for a missing value."""
    if statistic == "rank":
        size = rankdata(np.abs(x), axis=0, nan_policy="omit")
        scores = np.sign(x) * size
    else:
        scores = x
    if statistic == "clipped":
        limit = CLIP * _column_median(np.abs(x))
        # Where half of the differences are the shift to the last bit there is no scale to clip at.
        limit = np.where(limit > 0, limit, np.inf)
        scores = np.clip(x, -limit, limit)
    scores = np.nan_to_num(scores, nan=0.0)
    norm = np.sqrt((scores**2).sum(axis=0))
    scaled: Array = scores / np.where(norm > 0, norm, 1.0)
    return scaled


def _column_median(x: Array) -> Array:
    """Return the median of what is there in each column; 0 of nothing."""
    empty = np.isnan(x).all(axis=0)
    found: Array = np.nanmedian(np.where(empty, 0.0, x), axis=0)
    return found


def _step_down(t: Array) -> Array:
    """Return p of each column of t [flips, cells]; its first row is what was observed."""
    order = np.argsort(-t[0], kind="stable")
    # Column j: the largest statistic among the cells from the j-th most extreme on.
    rivals = np.maximum.accumulate(t[:, order[::-1]], axis=1)[:, ::-1]
    reached = (rivals >= t[0, order] - TIE).mean(axis=0)
    p: Array = np.empty(len(order))
    p[order] = np.maximum.accumulate(reached)
    return p
