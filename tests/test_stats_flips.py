from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, permutation_test, rankdata, wilcoxon

from headway.stats.flips import CLIP, max_t

STATISTICS = ["clipped", "mean", "rank"]
# Multiples of 1/64: sums are exact in any order, and ties are ties.
grid = st.integers(-96, 96).map(lambda k: k / 64)


@st.composite
def tables(draw, min_cells=1, max_cells=4):
    cells = draw(st.integers(min_cells, max_cells))
    rows = draw(st.lists(st.lists(grid, min_size=cells, max_size=cells), min_size=1, max_size=7))
    return np.array(rows)


def by_hand(d, shift, statistic):
    """The definition, flip by flip and cell by cell."""
    x = d - shift
    if statistic == "rank":
        scores = np.sign(x) * np.column_stack([rankdata(c) for c in np.abs(x).T])
    elif statistic == "clipped":
        scores = x.copy()
        for column in scores.T:
            limit = CLIP * np.median(np.abs(column))
            if limit > 0:
                column[:] = [min(max(v, -limit), limit) for v in column]
    else:
        scores = x

    def statistics(signs):
        spread = [math.sqrt((c**2).sum()) or 1.0 for c in scores.T]
        return [np.dot(signs, c) / s for c, s in zip(scores.T, spread, strict=True)]

    all_signs = list(itertools.product([1, -1], repeat=len(d)))
    seen = statistics(all_signs[0])
    order = sorted(range(d.shape[1]), key=lambda j: -seen[j])
    p, last = {}, 0.0
    for place, cell in enumerate(order):
        reached = [
            max(statistics(signs)[j] for j in order[place:]) >= seen[cell] - 1e-9
            for signs in all_signs
        ]
        p[cell] = last = max(last, sum(reached) / len(reached))
    return [p[j] for j in range(d.shape[1])]


@pytest.mark.parametrize("statistic", STATISTICS)
@settings(max_examples=40)
@given(d=tables(), shift=grid)
def test_it_is_the_definition(statistic, d, shift):
    found = max_t(d, shift, seed=0, statistic=statistic)
    assert found == pytest.approx(by_hand(d, shift, statistic), abs=1e-12)


@given(st.lists(grid, min_size=3, max_size=9))
def test_one_cell_is_scipys_permutation_test(values):
    expected = permutation_test(
        (values,), np.mean, permutation_type="samples", alternative="greater", vectorized=False
    )
    found = max_t(np.array(values)[:, None], 0.0, seed=0, statistic="mean")
    assert found[0] == pytest.approx(expected.pvalue, abs=1e-12)


@given(st.lists(st.integers(1, 10**6), min_size=3, max_size=12, unique=True), st.data())
def test_one_cell_by_ranks_is_wilcoxons_test(sizes, data):
    signs = data.draw(st.lists(st.sampled_from([1, -1]), min_size=len(sizes), max_size=len(sizes)))
    x = np.array(sizes, dtype=float) * signs
    expected = wilcoxon(x, alternative="greater", method="exact").pvalue
    assert max_t(x[:, None], 0.0, seed=0, statistic="rank")[0] == pytest.approx(expected)


@pytest.mark.parametrize("statistic", STATISTICS)
@given(d=tables(), shift=grid, draw=st.randoms())
def test_neither_the_order_of_pairs_nor_of_cells_matters(statistic, d, shift, draw):
    p = max_t(d, shift, seed=0, statistic=statistic)
    rows, columns = list(range(len(d))), list(range(d.shape[1]))
    draw.shuffle(rows)
    draw.shuffle(columns)
    moved = max_t(d[rows][:, columns], shift, seed=0, statistic=statistic)
    assert moved == pytest.approx(p[columns], abs=1e-12)


@pytest.mark.parametrize("statistic", STATISTICS)
@given(d=tables(), shift=grid, power=st.integers(-8, 8))
def test_the_unit_does_not_matter(statistic, d, shift, power):
    scale = 2.0**power
    p = max_t(d, shift, seed=0, statistic=statistic)
    assert max_t(scale * d, scale * shift, seed=0, statistic=statistic) == pytest.approx(p)
    # Nor does where zero is.
    assert max_t(d - shift, 0.0, seed=0, statistic=statistic) == pytest.approx(p)


@given(tables(max_cells=1), grid, grid)
def test_a_larger_shift_is_harder_to_show(d, a, b):
    low, high = sorted((a, b))
    smaller, larger = (max_t(d, shift, seed=0, statistic="mean")[0] for shift in (low, high))
    assert smaller <= larger + 1e-12


@pytest.mark.parametrize("statistic", STATISTICS)
@given(d=tables(), shift=grid, more=st.integers(0, 20))
def test_p_is_above_zero_at_most_one_and_pays_for_the_family(statistic, d, shift, more):
    p = max_t(d, shift, seed=0, statistic=statistic)
    assert ((p >= 2.0 ** -len(d)) & (p <= 1)).all()
    num = d.shape[1]
    wider = max_t(d, shift, seed=0, statistic=statistic, family=num + more)
    assert wider == pytest.approx(np.minimum(1, p * math.ceil((num + more) / num)))


@pytest.mark.parametrize("num_pairs", [3, 14, 24])
def test_what_is_sampled_is_never_zero_and_repeats_with_its_seed(num_pairs):
    d = np.full((num_pairs, 2), 5.0) + np.random.default_rng(0).standard_normal((num_pairs, 2))
    p = max_t(d, 0.0, seed=1, num_flips=5000)
    assert (p > 0).all()
    assert p.tolist() == max_t(d, 0.0, seed=1, num_flips=5000).tolist()
    if num_pairs <= 14:
        assert p == pytest.approx(2.0**-num_pairs)
    else:
        assert p.max() <= 3 / 5000


def test_a_sample_of_flips_comes_close_to_all_of_them():
    d = np.random.default_rng(3).standard_normal((15, 3)) + 0.5
    every = max_t(d, 0.0, seed=0, num_flips=2**15)
    for seed in range(3):
        some = max_t(d, 0.0, seed=seed, num_flips=20_000)
        assert some == pytest.approx(every, abs=5 * 0.5 / math.sqrt(20_000))


@pytest.mark.parametrize("statistic", STATISTICS)
def test_equal_differences_are_as_sure_as_their_number(statistic):
    # Engines in virtual time repeat themselves to the last bit.
    d = np.full((10, 6), 0.05)
    assert max_t(d, 0.02, seed=0, statistic=statistic) == pytest.approx(2.0**-10)
    assert max_t(d, 0.05, seed=0, statistic=statistic).tolist() == [1.0] * 6
    assert max_t(d, 0.06, seed=0, statistic=statistic).tolist() == [1.0] * 6
    assert max_t(-d, 0.02, seed=0, statistic=statistic).tolist() == [1.0] * 6


def test_a_majority_of_differences_equal_to_the_shift_hides_nothing():
    d = np.array([0.02] * 7 + [0.10] * 6)[:, None]
    assert max_t(d, 0.02, seed=0)[0] == pytest.approx(2.0**-6)


@pytest.mark.parametrize("statistic", STATISTICS)
def test_missing_values_are_left_out_cell_by_cell(statistic):
    rng = np.random.default_rng(1)
    d = rng.standard_normal((9, 3)) + 1
    d[7:, 1] = np.nan
    d[:, 2] = np.nan
    p = max_t(d, 0.0, seed=0, statistic=statistic)
    alone = max_t(d[:7, 1:2], 0.0, seed=0, statistic=statistic)
    assert p[2] == 1
    assert np.isfinite(p).all()
    # By itself a cell loses nothing by what another one lacks.
    assert max_t(d[:, 1:2], 0.0, seed=0, statistic=statistic) == pytest.approx(alone)
    # What has no value at all was not measured, and the family pays for it.
    family = max_t(d, 0.0, seed=0, statistic=statistic, family=3)
    assert family[:2] == pytest.approx(np.minimum(1, 2 * p[:2]))


@pytest.mark.parametrize("d", [np.empty((0, 3)), np.full((4, 3), np.nan)])
def test_nothing_measured_shows_nothing(d):
    assert max_t(d, 0.0, seed=0).tolist() == [1.0] * 3


def test_a_single_list_is_refused():
    with pytest.raises(ValueError, match=r"\[pairs, cells\]"):
        max_t(np.zeros(5), 0.0, seed=0)


def test_a_burst_hides_a_slowdown_from_the_mean_only():
    rng = np.random.default_rng(2)
    d = 0.03 + 0.005 * rng.standard_normal((24, 4))
    d[11] -= 0.9  # the reference's launch of one pair met with contention
    assert (max_t(d, 0.005, seed=0, statistic="mean") > 0.05).all()
    assert (max_t(d, 0.005, seed=0, statistic="rank") < 0.001).all()
    assert (max_t(d, 0.005, seed=0) < 0.001).all()


def test_a_burst_is_no_slowdown():
    rng = np.random.default_rng(2)
    d = 0.005 * rng.standard_normal((24, 4))
    d[[3, 11, 17]] += 0.9
    assert (max_t(d, 0.005, seed=0) > 0.05).all()


def test_a_cell_alone_is_named():
    d = 0.01 * np.random.default_rng(4).standard_normal((14, 24))
    d[:, 5] += 0.05
    p = max_t(d, 0.01, seed=0)
    assert [j for j, value in enumerate(p) if value <= 0.004] == [5]


def noise(rng, nights, pairs, cells):
    """Differences that share their launches, with bursts: one of both arms, at random."""
    shape = (nights, pairs, cells)
    common = 0.01 * rng.standard_normal((nights, pairs, 1))
    burst = (rng.random(shape) < 0.06) * rng.exponential(0.08, shape)
    sign = np.where(rng.random(shape) < 0.5, 1, -1)
    return common + 0.008 * rng.standard_normal(shape) + burst * sign


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("pairs", [8, 20])
def test_false_alarms_of_a_family_are_as_many_as_stated(statistic, pairs):
    nights, alpha = 500, 0.05
    rng = np.random.default_rng(pairs)
    alarms = sum(
        max_t(d + 0.02, 0.02, seed=night, num_flips=1000, statistic=statistic).min() <= alpha
        for night, d in enumerate(noise(rng, nights, pairs, 12))
    )
    # No more than stated, and not far fewer either (p has steps of 1/256 with 8 pairs).
    assert binom.ppf(1e-4, nights, 0.03) <= alarms <= binom.ppf(1 - 1e-4, nights, alpha)


def test_cells_that_did_not_move_are_not_blamed_beside_one_that_did():
    nights, alpha = 500, 0.05
    wrong = 0
    for d in noise(np.random.default_rng(8), nights, 8, 6):
        d[:, 0] += 0.2
        wrong += max_t(d, 0.0, seed=0)[1:].min() <= alpha
    assert wrong <= binom.ppf(1 - 1e-4, nights, alpha)
