from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom, t, ttest_1samp, wilcoxon

from headway.stats.pairs import (
    LEAST_SD,
    hodges_lehmann,
    max_t,
    student_p,
    suspicious,
    visible,
)

values = st.lists(st.floats(-1, 1), min_size=1, max_size=10)
# Depression scores of nine patients before and after a tranquilizer (Hollander and Wolfe 1973,
# table 3.1), the example of R's wilcox.test: V = 40, p = 0.01953 one-sided.
BEFORE = [1.83, 0.50, 1.62, 2.48, 1.68, 1.88, 1.55, 3.06, 1.30]
AFTER = [0.878, 0.647, 0.598, 2.05, 1.06, 1.29, 1.06, 3.14, 1.29]


def test_the_textbooks_example():
    d = np.array(BEFORE) - np.array(AFTER)
    assert max_t(d[:, None], 0.0, seed=0, statistic="rank")[0] == pytest.approx(0.01953, abs=5e-6)
    estimate, low, high = hodges_lehmann(d, 0.95)
    assert estimate == pytest.approx(0.46)
    assert (low, high) == (pytest.approx(0.010), pytest.approx(0.786))


@pytest.mark.parametrize(("n", "confidence"), [(6, 0.95), (8, 0.9), (9, 0.99), (12, 0.95)])
def test_the_interval_holds_what_wilcoxons_test_does_not_reject(n, confidence):
    x = np.random.default_rng(n).standard_normal(n)
    _, low, high = hodges_lehmann(x, confidence)
    for bound, inward in ((low, 1), (high, -1)):
        inside, outside = (
            wilcoxon(x - (bound + step), method="exact").pvalue
            for step in (inward * 1e-9, -inward * 1e-9)
        )
        assert outside <= 1 - confidence < inside


@pytest.mark.parametrize(("n", "confidence"), [(1, 0.5), (5, 0.95), (6, 0.97), (7, 0.99)])
def test_too_few_pairs_bound_nothing(n, confidence):
    assert 2 / 2**n > 1 - confidence
    assert hodges_lehmann(range(n), confidence) == ((n - 1) / 2, None, None)
    assert hodges_lehmann(range(n + 1), confidence)[1:] == (0, n)


def test_a_confidence_that_is_just_attained_is_attained():
    for n in range(2, 12):
        assert hodges_lehmann(range(n), 1 - 2 / 2**n)[1:] == (0, n - 1)


@given(values)
def test_the_estimate_is_the_median_of_all_means_of_two(x):
    means = [(a + b) / 2 for a, b in itertools.combinations_with_replacement(x, 2)]
    assert hodges_lehmann(x)[0] == pytest.approx(np.median(means), abs=1e-12)


@given(values, st.floats(-10, 10), st.floats(0.1, 10), st.randoms())
def test_the_estimate_moves_with_the_data(x, shift, scale, draw):
    draw.shuffle(shuffled := list(x))
    before = hodges_lehmann(x)
    after = hodges_lehmann([shift + scale * v for v in shuffled])
    for a, b in zip(after, before, strict=True):
        assert a == (None if b is None else pytest.approx(shift + scale * b, abs=1e-9))
    mirrored = hodges_lehmann([-v for v in x])
    assert mirrored[0] == pytest.approx(-before[0], abs=1e-12)


@pytest.mark.parametrize("n", [6, 10, 24])
def test_the_interval_covers_the_shift_of_skewless_noise(n):
    rounds, rng = 1500, np.random.default_rng(n)
    noise = rng.standard_t(2, (rounds, n))  # heavy tails
    covered = sum(low <= 0.0 <= high for _, low, high in map(hodges_lehmann, noise))
    assert covered >= binom.ppf(1e-4, rounds, 0.95)
    # Six pairs have steps of 1/32 only: 96.9 % is next to 95.
    assert covered <= binom.ppf(1 - 1e-4, rounds, 0.97)


@pytest.mark.parametrize("x", [[], [1.0, math.nan], [[1.0]]])
def test_an_estimate_of_nothing_is_refused(x):
    with pytest.raises(ValueError, match="finite numbers"):
        hodges_lehmann(x)


@given(st.lists(st.lists(st.floats(-0.2, 0.2), min_size=3, max_size=3), min_size=2, max_size=8))
def test_students_p_is_over_the_family(rows):
    d = np.array(rows)
    found = student_p(d, 0.02, family=24)
    for cell, answer in zip(d.T, found, strict=True):
        if cell.std(ddof=1) > LEAST_SD:
            p = ttest_1samp(cell, 0.02, alternative="greater").pvalue
            assert answer == pytest.approx(min(24 * p, 1.0))


@pytest.mark.parametrize("pairs", [5, 6])
def test_equal_differences_are_not_taken_for_certainty(pairs):
    reach = t.isf(0.001 / 24, pairs - 1) * LEAST_SD / math.sqrt(pairs)
    d = np.tile([0.02 + 0.9 * reach, 0.02 + 1.1 * reach, 0.05, 0.0], (pairs, 1))
    found = student_p(d, 0.02, family=24) <= 0.001
    assert found.tolist() == [False, True, True, False]


def test_few_values_say_nothing():
    d = np.array([[0.5, np.nan, 0.5], [np.nan, np.nan, 0.5], [np.nan, np.nan, 0.5]])
    p = student_p(d, 0.02, family=3)
    assert p[:2].tolist() == [1.0, 1.0]
    assert p[2] <= 0.01
    assert suspicious(d, 0.02).tolist() == [True, False, True]


def test_suspicion_looks_at_the_robust_estimate():
    quiet, slow = [0.001, -0.002, 0.0, 0.003, 0.9], [0.03, 0.028, 0.035, 0.031, -0.9]
    d = np.column_stack([quiet, slow, [-v for v in slow]])
    assert suspicious(d, 0.02).tolist() == [False, True, False]
    assert suspicious(d, 0.10, share=0.2).tolist() == [False, True, False]
    assert hodges_lehmann(slow)[0] >= 0.02


@given(
    st.lists(st.lists(st.floats(-1, 1), min_size=2, max_size=2), min_size=2, max_size=6),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
)
def test_a_wider_margin_answers_yes_no_more_often(rows, a, b):
    low, high = sorted((a, b))
    for test in (suspicious, lambda d, m: student_p(d, m, family=2) <= 0.05):
        assert (test(rows, low) >= test(rows, high)).all()


@pytest.mark.parametrize(
    ("pairs", "alpha", "family"), [(5, 0.001, 24), (12, 0.004, 24), (3, 0.1, 1)]
)
def test_what_is_visible_is_found_four_times_out_of_five(pairs, alpha, family):
    rounds, sd = 4000, 0.01
    shift = visible(sd, pairs, alpha=alpha, power=0.8, margin=0.02, family=family)
    noise = sd * np.random.default_rng(pairs).standard_normal((pairs, rounds))
    found = (student_p(shift + noise, 0.02, family=family) <= alpha).sum()
    assert binom.ppf(1e-4, rounds, 0.8) <= found <= binom.ppf(1 - 1e-4, rounds, 0.8)


def test_what_is_visible_is_nearly_what_flips_find():
    rounds, found = 200, 0
    shift = visible(0.01, 24, alpha=0.004, margin=0.01, family=24)
    rng = np.random.default_rng(9)
    for seed in range(rounds):
        d = 0.01 * rng.standard_normal((24, 24))
        d[:, 7] += shift
        found += max_t(d, 0.01, seed=seed, num_flips=4000)[7] <= 0.004
    assert binom.ppf(1e-4, rounds, 0.7) <= found <= binom.ppf(1 - 1e-4, rounds, 0.85)


@given(st.integers(2, 40), st.floats(1e-4, 0.2), st.integers(1, 50))
def test_more_pairs_and_smaller_families_see_more(pairs, alpha, family):
    seen = visible(0.01, pairs, alpha=alpha, margin=0.02, family=family)
    assert seen > 0.02
    assert visible(0.01, pairs + 1, alpha=alpha, margin=0.02, family=family) < seen
    assert visible(0.01, pairs, alpha=alpha, margin=0.02, family=family + 1) > seen
    assert visible(0.01, pairs, alpha=alpha, power=0.9, margin=0.02, family=family) > seen
    assert visible(0.02, pairs, alpha=alpha, family=family) == pytest.approx(2 * (seen - 0.02))


@pytest.mark.parametrize("pairs", [0, 1])
def test_nothing_is_visible_without_a_spread(pairs):
    assert visible(0.01, pairs, alpha=0.05) is None
