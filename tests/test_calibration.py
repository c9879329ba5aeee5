"""Bands, what moved and what shifted: pure functions of the kernels' seconds."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import calibration
from headway.calibration import MIN_NIGHTS, MIN_READINGS, MIN_WIDTH, NAMES, RECENT

KERNELS = tuple(NAMES)
SECONDS = {"matmul": 0.02, "copy": 0.0125, "launch": 0.007, "python": 0.0075}
seconds = st.floats(1e-6, 1e3)
# 0.99 to 1.01 of the usual time: a machine that does nothing odd.
steady = st.fixed_dictionaries({k: st.floats(0.99, 1.01) for k in KERNELS}).map(
    lambda share: {kernel: SECONDS[kernel] * share[kernel] for kernel in KERNELS}
)
any_reading = st.fixed_dictionaries(dict.fromkeys(KERNELS, seconds))
histories = st.lists(any_reading, min_size=MIN_READINGS, max_size=RECENT + 9)
quiet_histories = st.lists(steady, min_size=MIN_READINGS, max_size=RECENT + 9)


def scaled(reading, factor, *only):
    return {k: v * factor if not only or k in only else v for k, v in reading.items()}


def judge_night(readings):
    """What a night says of each Run: 8 opening readings, then one before and one after each."""
    opening = readings[:MIN_READINGS]
    around = list(zip(readings[MIN_READINGS::2], readings[MIN_READINGS + 1 :: 2], strict=False))
    said = []
    for number, pair in enumerate(around):
        earlier = [*opening, *(reading for past in around[:number] for reading in past)]
        said.append(calibration.moved(pair, calibration.bands(earlier)))
    return said


@given(histories, any_reading, any_reading, st.integers(-8, 8))
def test_a_machine_twice_as_fast_is_judged_the_same(history, before, after, power):
    factor = 2.0**power  # which scales without rounding
    known = calibration.bands(history)
    faster = calibration.bands([scaled(reading, factor) for reading in history])
    for kernel, band in known.items():
        assert faster[kernel].median == band.median * factor
        assert faster[kernel].width == pytest.approx(band.width)
    around = scaled(before, factor), scaled(after, factor)
    assert calibration.moved(around, faster) == calibration.moved((before, after), known)


@given(any_reading, st.integers(MIN_READINGS, RECENT))
def test_a_machine_that_never_changes_never_moves(reading, n):
    known = calibration.bands([reading] * n)
    assert calibration.moved((reading, reading), known) == ()
    for band in known.values():
        assert band.width == pytest.approx(MIN_WIDTH)
        assert band.n == n


@given(histories)
def test_what_equals_the_median_has_not_moved(history):
    known = calibration.bands(history)
    middle = {kernel: band.median for kernel, band in known.items()}
    assert calibration.moved((middle, middle), known) == ()
    assert all(band.low <= band.median <= band.high for band in known.values())


@given(quiet_histories, steady, st.sampled_from(KERNELS), st.sampled_from(["slower", "faster"]))
def test_a_planted_shift_is_found_and_its_kernel_named(history, reading, kernel, direction):
    # In the worst case the history says 0.99 with a MAD of 0.01: a band of 4 %, up to 1.03.
    factor = 1.10 if direction == "slower" else 0.90
    moved = calibration.moved(
        (scaled(reading, factor, kernel), scaled(SECONDS, factor, kernel)),
        calibration.bands(history),
    )
    assert any(NAMES[kernel] in said and direction in said for said in moved)
    assert all(NAMES[kernel] in said for said in moved)


def test_the_sentence():
    known = calibration.bands([SECONDS] * 12)
    slower = scaled(SECONDS, 1.072, "copy")
    assert calibration.moved((slower, slower), known) == (
        "the machine was not as it was: memory copy 7.2 % slower than its own median, band ±3.0 %",
    )


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        (1.0, 1.05, None),
        (5.0, 1.0, None),  # one of two: a moment, however bad it was
        (4.0, 0.25, None),
        (1.05, 1.40, "5.0 % slower"),  # the lesser of both is what lasted
        (0.90, 0.50, "10.0 % faster"),
    ],
)
def test_what_moved_was_so_before_and_after(before, after, says):
    known = calibration.bands([SECONDS] * MIN_READINGS)
    said = calibration.moved((scaled(SECONDS, before), scaled(SECONDS, after)), known)
    assert len(said) == (len(KERNELS) if says else 0)
    assert all(says in sentence for sentence in said)


@pytest.mark.parametrize(
    ("readings", "has"), [(0, False), (MIN_READINGS - 1, False), (MIN_READINGS, True)]
)
def test_a_few_readings_make_no_band(readings, has):
    known = calibration.bands([SECONDS] * readings)
    assert bool(known) is has
    assert bool(calibration.night_medians([SECONDS] * readings)) is has
    assert bool(calibration.moved((scaled(SECONDS, 2),) * 2, known)) is has


def test_only_kernels_that_were_read_are_judged():
    history = [{"matmul": 0.02} for _ in range(MIN_READINGS)]
    known = calibration.bands([*history, {"copy": 0.01}])
    assert set(known) == {"matmul"}
    assert calibration.moved(({"copy": 9.0}, {"copy": 9.0}), known) == ()
    assert calibration.moved(({"matmul": 9.0}, {"copy": 9.0}), known) == ()
    assert calibration.moved((), known) == ()
    assert len(calibration.moved(({"matmul": 9.0},), known)) == 1


@given(histories, histories)
def test_what_lies_far_back_does_not_count(old, recent):
    recent = (recent * RECENT)[:RECENT]
    assert calibration.bands([*old, *recent]) == calibration.bands(recent)


def test_a_noisy_kernel_gets_a_wide_band_and_the_number_is_told():
    spread = [0.9, 0.95, 1.0, 1.05, 1.1] * 4
    history = [scaled(SECONDS, share, "copy") for share in spread]
    known = calibration.bands(history)
    assert known["copy"].width == pytest.approx(0.2)
    assert calibration.moved((scaled(SECONDS, 1.19, "copy"),) * 2, known) == ()
    assert calibration.moved((scaled(SECONDS, 1.25, "copy"),) * 2, known) == (
        "the machine was not as it was: memory copy 25.0 % slower than its own median, "
        "band ±20.0 %",
    )


def test_noise_within_the_floor_flags_nothing():
    # Normal noise with a standard deviation of 1 %, independent: over 2,000 Runs of four kernels.
    draw = random.Random(1)
    readings = [
        {kernel: s * draw.gauss(1, 0.01) for kernel, s in SECONDS.items()} for _ in range(4008)
    ]
    flagged = sum(map(bool, judge_night(readings)))
    assert flagged <= 2


def test_a_shift_for_good_is_flagged_and_then_is_how_the_machine_is():
    draw = random.Random(2)
    noise = [{k: s * draw.gauss(1, 0.005) for k, s in SECONDS.items()} for _ in range(128)]
    readings = noise[:48] + [scaled(reading, 1.10, "python") for reading in noise[48:]]
    said = judge_night(readings)
    first = (48 - MIN_READINGS) // 2
    assert not any(said[:first])
    flagged = [bool(sentences) for sentences in said[first:]]
    # Half of the recent readings are new after RECENT / 2 of them: RECENT / 4 Runs.
    assert flagged[0]
    assert RECENT // 4 - 1 <= sum(flagged) <= RECENT // 4 + 1
    assert all(earlier >= later for earlier, later in pairwise(flagged))


@given(quiet_histories, st.sampled_from(KERNELS))
def test_a_night_on_another_machine_is_told(nights, kernel):
    tonight = scaled(SECONDS, 1.10, kernel)
    (said,) = calibration.shifted(tonight, nights)
    assert NAMES[kernel] in said
    assert f"of {len(nights)} nights" in said
    assert calibration.shifted({k: v * 1.0 for k, v in SECONDS.items()}, [SECONDS] * 3) == ()


def test_a_few_nights_say_nothing():
    other = scaled(SECONDS, 2)
    assert calibration.shifted(other, [SECONDS] * (MIN_NIGHTS - 1)) == ()
    assert len(calibration.shifted(other, [SECONDS] * MIN_NIGHTS)) == len(KERNELS)
    assert calibration.shifted({}, [SECONDS] * MIN_NIGHTS) == ()
    # A kernel that most of the stored nights do not know has too few of its own.
    known = [{"matmul": 0.02}, {"matmul": 0.02}, {"matmul": 0.02}, {"copy": 0.01}]
    (said,) = calibration.shifted(other, known)
    assert said == (
        "tonight's machine is not that of the stored nights: matrix product 100.0 % slower than "
        "its median of 3 nights, band ±3.0 %"
    )


def test_a_nights_median_is_over_all_of_it():
    readings = [scaled(SECONDS, share) for share in [1.0] * 51 + [1.5] * 50]
    assert calibration.night_medians(readings) == SECONDS
