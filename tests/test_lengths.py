"""Lengths follow the laws that they are said to follow, within bounds."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from headway import codec
from headway.lengths import (
    FIVE_PROMPTS,
    MIXTURES,
    Length,
    Lognormal,
    Part,
    Trace,
    Uniform,
    bounds,
    draw,
    draw_pair,
    said,
    scaled,
    scaled_part,
    scaled_trace,
)

SEEDS = range(1, 6)


def drawn(law, n=5_000, seed=1):
    source = random.Random(seed)
    return [draw(law, source) for _ in range(n)]


@st.composite
def lognormals(draw_from):
    low, high = sorted(draw_from(st.tuples(st.integers(1, 10_000), st.integers(1, 10_000))))
    median = draw_from(st.floats(low, high))
    return Lognormal(median, draw_from(st.floats(0.01, 5)), low, high)


@st.composite
def uniforms(draw_from):
    low, high = sorted(draw_from(st.tuples(st.integers(1, 10_000), st.integers(1, 10_000))))
    return Uniform(low, high)


laws = st.one_of(st.integers(1, 10_000), uniforms(), lognormals())


@given(laws, st.integers())
def test_lengths_are_whole_and_within_their_bounds(law, seed):
    low, high = bounds(law)
    for length in drawn(law, 20, seed):
        assert type(length) is int
        assert low <= length <= high
    assert drawn(law, 20, seed) == drawn(law, 20, seed)


def test_a_fixed_length_is_that_and_takes_nothing_from_the_source():
    source = random.Random(1)
    assert draw(7, source) == 7
    assert source.random() == random.Random(1).random()


@pytest.mark.parametrize("seed", SEEDS)
def test_uniform_lengths_are_each_as_likely_with_both_ends(seed):
    lengths = drawn(Uniform(3, 12), 10_000, seed)
    counts = [lengths.count(length) for length in range(3, 13)]
    assert sum(counts) == 10_000
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    "law",
    [
        Lognormal(3_000.0, 0.6, 1, 10**9),
        Lognormal(3_000.0, 1.0, 2_000, 9_000),
        Lognormal(2_000.0, 0.5, 2_000, 20_000),
    ],
)
def test_lognormal_lengths_are_normal_in_their_logarithm_between_the_bounds(law, seed):
    lengths = drawn(law, 4_000, seed)
    ends = [math.log(end / law.median) / law.sigma for end in (law.min, law.max)]
    z = [math.log(length / law.median) / law.sigma for length in lengths]
    # A token in thousands is all that rounding moves.
    assert stats.kstest(z, stats.truncnorm(*ends).cdf).pvalue > 1e-3
    assert stats.kstest([one * 1.2 for one in z], stats.truncnorm(*ends).cdf).pvalue < 0.05


def test_nothing_piles_up_at_the_bounds_of_a_lognormal():
    law = Lognormal(1_000.0, 1.0, 800, 1_200)
    lengths = drawn(law, 5_000)
    assert max(lengths.count(800), lengths.count(1_200)) < 50


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mixture_has_its_shares_and_keeps_lengths_together(seed):
    parts = (Part(16, 1, 1.0), Part(64, 2, 2.0), Part(Uniform(100, 200), 3, 5.0))
    source = random.Random(seed)
    pairs = [draw_pair(parts, source) for _ in range(8_000)]
    counts = [sum(output == k for _, output in pairs) for k in (1, 2, 3)]
    assert stats.chisquare(counts, [1_000, 2_000, 5_000]).pvalue > 1e-3
    assert {prompt for prompt, output in pairs if output == 2} == {64}
    assert all(100 <= prompt <= 200 for prompt, output in pairs if output == 3)


def test_the_five_lengths_are_as_likely_each_with_budgets_from_64_to_256():
    source = random.Random(3)
    pairs = [draw_pair(MIXTURES["five"], source) for _ in range(10_000)]
    counts = [sum(prompt == length for prompt, _ in pairs) for length in FIVE_PROMPTS]
    assert sum(counts) == 10_000
    assert FIVE_PROMPTS == (16, 64, 256, 1024, 4096)
    assert stats.chisquare(counts).pvalue > 1e-3
    budgets = [budget for _, budget in pairs]
    assert (min(budgets), max(budgets)) == (64, 256)


def test_a_quarter_of_the_five_lengths():
    small = [scaled_part(part, 0.25) for part in MIXTURES["five"]]
    assert [part.prompt_tokens for part in small] == [4, 16, 64, 256, 1024]
    assert {part.output_tokens for part in small} == {Uniform(16, 64)}


@given(laws, st.floats(0.001, 10))
def test_a_scaled_law_has_scaled_bounds_and_can_be_drawn(law, scale):
    low, high = bounds(scaled(law, scale))
    assert (low, high) == tuple(max(1, round(end * scale)) for end in bounds(law))
    assert all(low <= length <= high for length in drawn(scaled(law, scale), 5))
    assert scaled(law, 1.0) == law


def test_a_scaled_trace_keeps_its_times():
    trace = Trace("t.csv", (0.0, 2.5), (100, 1), (8, 3))
    assert scaled_trace(trace, 0.25) == Trace("t.csv", (0.0, 2.5), (25, 1), (2, 1))


@given(laws)
def test_a_law_survives_its_journal(law):
    assert codec.decode(Length, codec.encode(law)) == law


def test_a_law_is_written_for_a_person():
    assert said(128) == "128"
    assert said(Uniform(8, 64)) == "8 to 64"
    assert said(Lognormal(20.0, 0.5, 8, 64)) == "8 to 64 (median 20, sigma 0.5)"
