from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, binomtest

from headway import stats
from headway.stats import intervals

samples = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=60)


def test_importing_the_statistics_brings_in_nothing_heavy():
    code = "import sys, headway.stats; print(*[n for n in ('numpy', 'scipy') if n in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.split() == []


@pytest.mark.parametrize(
    ("n", "q", "confidence", "low", "high"),
    [
        # Sample k (from 1) is at or below the percentile with probability P(Binomial(n, q) >= k).
        (100, 50, 0.95, 40, 61),
        (100, 99, 0.95, 97, None),
        (10, 50, 0.95, 2, 9),
        (5, 50, 0.95, None, None),
        (6, 50, 0.95, 1, 6),
    ],
)
def test_a_percentile_lies_between_two_samples(n, q, confidence, low, high):
    found = intervals.percentile_interval(list(range(1, n + 1)), q, confidence)
    assert found == (low, high)
    each = (1 - confidence) / 2
    if low is not None:
        assert binom.cdf(low - 1, n, q / 100) <= each < binom.cdf(low, n, q / 100)
    if high is not None:
        assert binom.sf(high - 1, n, q / 100) <= each < binom.sf(high - 2, n, q / 100)


def test_without_samples_a_percentile_has_no_bounds():
    assert intervals.percentile_interval([], 50) == (None, None)


@pytest.mark.parametrize("q", [0, 100, -1])
def test_no_interval_of_an_impossible_percentile(q):
    with pytest.raises(ValueError, match="between 0 and 100"):
        intervals.percentile_interval([1.0, 2.0], q)


@pytest.mark.parametrize("q", [50, 90, 95, 99])
def test_the_floor_is_where_the_second_largest_bounds_the_percentile(q):
    n = stats.min_samples(q)
    # One-sided 99 % is the upper side of two-sided 98 %.
    assert intervals.percentile_interval(list(range(n)), q, 0.98)[1] == n - 2
    high = intervals.percentile_interval(list(range(n - 1)), q, 0.98)[1]
    assert high is None or high > n - 3


@given(samples, st.floats(1, 99), st.randoms())
def test_bounds_depend_on_order_of_size_only(values, q, draw):
    found = intervals.percentile_interval(values, q)
    shuffled = list(values)
    draw.shuffle(shuffled)
    assert intervals.percentile_interval(shuffled, q) == found
    ranks = [None if bound is None else sorted(values).index(bound) for bound in found]
    cubes = [v**3 for v in values]
    moved = intervals.percentile_interval(cubes, q)
    for rank, bound in zip(ranks, moved, strict=True):
        assert bound == (None if rank is None else sorted(cubes)[rank])


@pytest.mark.parametrize(("n", "q"), [(60, 50), (120, 90), (300, 97)])
def test_the_interval_covers(n, q):
    rng, rounds = np.random.default_rng(5), 600
    truth = float(np.exp(0.5 * np.sqrt(2) * _erfinv(2 * q / 100 - 1)))
    covered = 0
    for row in rng.lognormal(0, 0.5, (rounds, n)):
        low, high = intervals.percentile_interval(row.tolist(), q)
        covered += (low is None or low <= truth) and (high is None or truth <= high)
    assert covered >= binom.ppf(1e-4, rounds, 0.95)


def _erfinv(x):
    from scipy.special import erfinv

    return erfinv(x)


@pytest.mark.parametrize(
    ("over", "share", "needed"), [(0, 0.99, 459), (1, 0.99, 662), (0, 0.90, 44), (1, 0.90, 64)]
)
def test_how_many_requests_an_objective_needs(over, share, needed):
    assert intervals.requests_needed(over, share) == needed
    assert intervals.keeps_within(needed, over, share)
    assert not intervals.keeps_within(needed - 1, over, share)


@given(st.integers(0, 30), st.floats(0.5, 0.999), st.floats(0.5, 0.999))
def test_the_number_needed_is_the_smallest(over, share, confidence):
    n = intervals.requests_needed(over, share, confidence)
    assert n > over
    assert intervals.keeps_within(n, over, share, confidence)
    assert not intervals.keeps_within(n - 1, over, share, confidence)


@given(st.integers(1, 3000), st.integers(0, 40), st.sampled_from([0.9, 0.95, 0.99]))
def test_an_objective_is_met_where_clopper_and_pearson_say_so(n, over, share):
    over = min(over, n)
    test = binomtest(n - over, n, share, alternative="greater")
    assert intervals.keeps_within(n, over, share) == (test.pvalue <= 0.01)
    bound = intervals.share_within(n, over)
    assert bound == pytest.approx(test.proportion_ci(0.99).low, abs=1e-9)
    if abs(test.pvalue - 0.01) > 1e-9:
        assert (bound >= share) == intervals.keeps_within(n, over, share)


@given(st.integers(1, 3000), st.integers(0, 90), st.sampled_from([0.9, 0.95, 0.99]))
def test_an_objective_is_missed_where_the_other_tail_says_so(n, over, share):
    over = min(over, n)
    test = binomtest(over, n, 1 - share, alternative="greater")
    if abs(test.pvalue - 0.01) > 1e-9:
        assert intervals.falls_short(n, over, share) == (test.pvalue <= 0.01)
    assert not (intervals.falls_short(n, over, share) and intervals.keeps_within(n, over, share))


def test_nothing_is_said_of_no_requests():
    assert intervals.share_within(0, 0) == 0.0
    assert not intervals.keeps_within(0, 0)


@pytest.mark.parametrize(("n", "over"), [(10, 11), (10, -1), (-1, 0)])
def test_impossible_counts_are_refused(n, over):
    with pytest.raises(ValueError, match="is no count"):
        intervals.keeps_within(n, over)


def test_percent_in_the_place_of_a_share_is_refused():
    with pytest.raises(ValueError, match=r"share 99 .*0\.99, not 99"):
        intervals.requests_needed(0, 99)
