from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binom

from headway.stats.nights import ONE_NIGHT, SEVERAL_NIGHTS, nights

night = st.lists(st.floats(-0.5, 0.5), min_size=1, max_size=4)
anchors = st.lists(night, min_size=2, max_size=8)
recents = st.lists(night, min_size=1, max_size=5)
QUIET = [[x] for x in (-0.01, 0.0, 0.01, 0.0, 0.01, -0.01)]


def test_a_change_by_hand():
    # Medians -0.01, 0, 0.01: centre 0, s 0.01; scale for one more s · sqrt(4/3), for the mean of
    # three s · sqrt(2/3). t with two degrees of freedom: 14.0890 (0.9975), 9.9248 (0.995),
    # 4.3027 (0.975), 1.0607 (0.8).
    stored = [[-0.02, -0.01, 0.3], [0.0, -0.1, 0.1], [0.01]]
    found = nights(stored, [[0.06, 0.04, 0.05], [0.02], [0.05]])
    one, three = 0.01 * math.sqrt(4 / 3), 0.01 * math.sqrt(2 / 3)
    assert found.change == pytest.approx(0.05)
    assert found.before == pytest.approx(0.02)
    assert found.margin == pytest.approx(14.0890 * one, rel=1e-4)
    assert found.visible == pytest.approx(15.1497 * one, rel=1e-4)
    assert found.interval == pytest.approx((0.05 - 4.3027 * one, 0.05 + 4.3027 * one), abs=1e-5)
    assert found.mean_change == pytest.approx(0.04)
    assert found.mean_held == pytest.approx(0.02)
    assert found.mean_margin == pytest.approx(9.9248 * three, rel=1e-4)
    assert found.mean_visible == pytest.approx(10.9855 * three, rel=1e-4)
    assert not found.decisive
    assert not found.persistent


def test_the_floors_are_part_of_the_margins():
    found = nights(QUIET, [[0.0]], tolerance=0.5, drift_budget=0.4)
    plain = nights(QUIET, [[0.0]])
    assert (found.margin, found.mean_margin) == (0.5, 0.4)
    assert found.visible - found.margin == pytest.approx(plain.visible - plain.margin)
    assert nights(QUIET, [[0.0]], tolerance=1e-6, drift_budget=1e-6) == plain


def test_too_few_nights_say_nothing_of_several():
    found = nights(QUIET, [[0.2], [0.2]])
    assert (found.mean_change, found.mean_held, found.persistent) == (None, None, False)
    assert nights(QUIET, [[0.2]]).before is None
    assert nights(QUIET, [[0.2], [0.2]], persistence=2).persistent


@pytest.mark.parametrize(
    ("recent", "decisive", "repeated", "persistent"),
    [
        ([[0.0], [0.0], [0.2]], True, False, False),
        ([[0.0], [0.2], [0.2]], True, True, False),
        ([[0.03], [0.03], [0.03]], False, False, True),
        # One bad night, tonight or before, is no drift.
        ([[0.2], [0.0], [0.0]], False, False, False),
        ([[0.01], [0.2], [0.01]], False, False, False),
        # Two of three launches that started slow are a slow median, and no slowdown.
        ([[0.0], [0.0], [0.0, 0.08, 0.08]], False, False, False),
        ([[0.0], [0.0], [0.08, 0.08, 0.08]], True, False, False),
        # Better is not worse.
        ([[-0.2], [-0.2], [-0.2]], False, False, False),
    ],
)
def test_what_is_said_of_the_last_nights(recent, decisive, repeated, persistent):
    found = nights(QUIET, recent)
    assert 0.03 < found.margin < 0.08
    assert 0.02 < found.mean_margin < 0.03
    assert (found.decisive, found.repeated, found.persistent) == (decisive, repeated, persistent)


def test_nights_without_any_spread_leave_the_floors():
    found = nights([[1.0], [1.0]], [[1.06]], tolerance=0.05)
    assert found.margin == 0.05
    assert found.decisive
    assert not nights([[1.0], [1.0]], [[1.04]], tolerance=0.05).decisive


@given(anchors, recents, st.floats(-5, 5), st.randoms())
def test_a_change_depends_on_differences_and_not_on_order(anchor, recent, shift, draw):
    found = nights(anchor, recent)
    draw.shuffle(shuffled := [list(launches) for launches in anchor])
    for launches in shuffled:
        draw.shuffle(launches)
    moved = nights(
        [[x + shift for x in launches] for launches in shuffled],
        [[x + shift for x in launches] for launches in recent],
    )
    for name in ("change", "held", "margin", "visible", "mean_change", "mean_margin"):
        expected = getattr(found, name)
        assert getattr(moved, name) == (
            None if expected is None else pytest.approx(expected, abs=1e-9)
        )


@given(anchors, recents, st.floats(0, 0.3))
def test_a_slower_night_is_worse(anchor, recent, more):
    before = nights(anchor, recent)
    after = nights(anchor, [*recent[:-1], [x + more for x in recent[-1]]])
    assert after.change == pytest.approx(before.change + more, abs=1e-9)
    assert after.margin == before.margin
    assert after.decisive >= before.decisive
    assert before.visible >= before.margin >= 0
    assert before.interval[0] <= before.change <= before.interval[1]


@pytest.mark.parametrize(
    ("anchor", "recent"), [([[0.0]], [[0.0]]), ([], [[0.0]]), ([[0.0], [0.1]], [])]
)
def test_too_little_to_compare_is_refused(anchor, recent):
    with pytest.raises(ValueError, match="two stored nights or more and tonight"):
        nights(anchor, recent)


def test_a_night_without_launches_is_refused():
    with pytest.raises(ValueError, match="without launches"):
        nights([[0.0], []], [[0.0]])


@pytest.mark.parametrize("n", [5, 10])
def test_an_unchanged_cell_passes_as_rarely_as_stated(n):
    rounds, rng = 4000, np.random.default_rng(n)
    alone = together = covered = 0
    for medians in 0.02 * rng.standard_normal((rounds, n + 3)):
        found = nights([[x] for x in medians[:n]], [[x] for x in medians[n:]])
        alone += found.change > found.margin
        together += found.mean_change > found.mean_margin
        covered += found.interval[0] <= 0 <= found.interval[1]
    for passed, level in ((alone, ONE_NIGHT), (together, SEVERAL_NIGHTS), (covered, 0.95)):
        assert binom.ppf(1e-4, rounds, level) <= passed <= binom.ppf(1 - 1e-4, rounds, level)


@pytest.mark.parametrize("n", [5, 10])
def test_what_is_visible_passes_four_times_out_of_five(n):
    rounds, rng = 1500, np.random.default_rng(n)
    alone = together = 0
    for medians in 0.02 * rng.standard_normal((rounds, n + 3)):
        stored = [[x] for x in medians[:n]]
        spread = 0.02 / np.std(medians[:n], ddof=1)  # the truth, in place of the estimate
        probe = nights(stored, [[0.0]])
        one = probe.margin + (probe.visible - probe.margin) * spread
        some = probe.mean_margin + (probe.mean_visible - probe.mean_margin) * spread
        alone += nights(stored, [[medians[n] + one]]).change > probe.margin
        found = nights(stored, [[x + some] for x in medians[n:]])
        together += found.mean_change > probe.mean_margin
    for passed in (alone, together):
        # t's 80 % point is a little beyond the normal one, which the truth has.
        assert binom.ppf(1e-4, rounds, 0.78) <= passed <= binom.ppf(1 - 1e-4, rounds, 0.84)


def suites(seed, num_suites, num_nights):
    """Badness [suite, night, launch, cell] of a shared machine whose bad nights were left out."""
    rng = np.random.default_rng(seed)
    shape = (num_suites, num_nights, 3)
    common = 0.02 * rng.standard_normal((num_suites, num_nights, 1)) + 0.009 * rng.standard_normal(
        shape
    )
    runs = (*shape, 8)
    burst = (rng.random(runs) < 0.03) * rng.exponential(0.08, runs)
    run = common[..., None] + 0.006 * rng.standard_normal(runs) + burst
    cells = run[..., None] + 0.002 * rng.standard_normal((*runs, 3))
    return cells.reshape(*shape, 24)


def alarms(badness, num_stored, first):
    """Whether any cell of a suite is alarmed, night by night from `first` on."""
    found = []
    for last in range(first, badness.shape[0]):
        changes = [
            nights(
                cell[:num_stored],
                cell[last - 2 : last + 1],
                tolerance=math.log(1.05),
                drift_budget=math.log(1.03),
            )
            for cell in np.moveaxis(badness, -1, 0).tolist()
        ]
        found.append(any(c.decisive or c.persistent for c in changes))
    return found


def test_a_suite_of_24_cells_seldom_alarms_and_finds_what_it_says():
    quiet = [night for suite in suites(1, 60, 15) for night in alarms(suite, 10, 12)]
    # 1 in 100 nights; 60 histories of three nights each are not 180 independent nights.
    assert sum(quiet) <= binom.ppf(1 - 1e-3, 60, 0.03)
    shifts = {0.05: [], 0.10: []}
    for change, hits in shifts.items():
        slow = suites(2, 50, 15)
        slow[:, 12:] += math.log1p(change)
        hits += [alarms(suite, 10, 12) for suite in slow]
    within_three = sum(any(night) for night in shifts[0.05])
    same_night = sum(night[0] for night in shifts[0.10])
    assert within_three >= binom.ppf(1e-3, 50, 0.68)
    assert same_night >= binom.ppf(1e-3, 50, 0.80)


def test_a_single_bad_night_is_forgotten():
    bad = suites(3, 20, 15)
    bad[:, 12] += 0.2
    found = [alarms(suite, 10, 12) for suite in bad]
    assert sum(night[0] for night in found) >= 19  # nothing tells it from a regression by itself
    assert sum(night[1] or night[2] for night in found) <= 2
