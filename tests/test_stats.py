from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from headway import stats

samples = st.lists(st.floats(-1e6, 1e6, allow_nan=False), min_size=1, max_size=40)
qs = st.floats(1, 99.999)


@given(samples, qs)
def test_percentile_equals_numpy(values, q):
    assert stats.percentile(values, q) == pytest.approx(np.percentile(values, q), abs=1e-6)


@given(samples, qs, qs)
def test_percentile_is_monotone_and_bounded(values, a, b):
    low, high = sorted((a, b))
    found = stats.percentile(values, low), stats.percentile(values, high)
    assert min(values) <= found[0] <= found[1] <= max(values)


@given(samples, qs, st.randoms())
def test_percentile_does_not_depend_on_the_order(values, q, draw):
    shuffled = list(values)
    draw.shuffle(shuffled)
    assert stats.percentile(shuffled, q) == stats.percentile(values, q)


@pytest.mark.parametrize("values", [[10, 20, 30], [30, 10, 20]])
def test_case_06_p99_of_three_is_interpolated_in_any_order(values):
    assert stats.percentile(values, 99) == pytest.approx(29.8)


@pytest.mark.parametrize("q", [1, 50, 90, 99, 99.9])
def test_case_06_a_single_sample_is_every_percentile(q):
    assert stats.percentile([575], q) == 575


@pytest.mark.parametrize("q", [0.99, 0, -1, 100, 101])
def test_case_06_a_fraction_or_an_impossible_percentile_is_refused(q):
    with pytest.raises(ValueError, match=r"99, not 0\.99"):
        stats.percentile([10, 20, 30], q)


def test_case_01_an_empty_list_gives_none_never_zero():
    assert stats.percentile([], 50) is None
    assert stats.median([]) is None
    assert stats.mean([]) is None


@pytest.mark.parametrize(("q", "n"), [(50, 11), (90, 64), (95, 130), (99, 662)])
def test_min_samples(q, n):
    assert stats.min_samples(q) == n
    # Its own definition: the second largest of n is above the percentile with 99 % confidence.
    assert binom.cdf(1, n, 1 - q / 100) <= 0.01 < binom.cdf(1, n - 1, 1 - q / 100)


@pytest.mark.parametrize("n", [3, 10])
def test_a_fresh_sample_passes_the_margin_about_once_in_a_hundred(n):
    draw, rounds = random.Random(7), 4000
    passed = 0
    for _ in range(rounds):
        seen = [draw.lognormvariate(3, 0.02) for _ in range(n)]
        found = stats.predict_log(seen)
        passed += math.log(draw.lognormvariate(3, 0.02)) > found.center + found.margin
    # The centre is a median, which varies a little more than the mean that the formula is of.
    assert binom.ppf(1e-4, rounds, 0.009) <= passed <= binom.ppf(1 - 1e-4, rounds, 0.012)


def test_a_prediction_by_hand():
    # s = 1 / sqrt(2); t(0.99, 1) = 31.8205, t(0.8, 1) = 1.3764; scale = s * sqrt(1 + 1/2).
    found = stats.predict_log([1.0, math.e])
    assert found.center == pytest.approx(0.5)
    assert found.margin == pytest.approx(31.8205 * math.sqrt(0.75), rel=1e-4)
    assert found.visible == pytest.approx((31.8205 + 1.3764) * math.sqrt(0.75), rel=1e-4)


@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=12), st.floats(0.01, 100))
def test_a_prediction_does_not_depend_on_the_unit(values, scale):
    one, other = stats.predict_log(values), stats.predict_log([v * scale for v in values])
    assert other.margin == pytest.approx(one.margin, abs=1e-6)
    assert other.center == pytest.approx(one.center + math.log(scale), abs=1e-9)
    assert one.visible >= one.margin


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 0.0], [1.0, -1.0]])
def test_a_prediction_without_spread_or_sign_is_refused(values):
    with pytest.raises(ValueError, match="two or more positive samples"):
        stats.predict_log(values)
