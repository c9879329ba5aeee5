"""When a level is warm: two waves with the same steps, and never by a slow one in the middle."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from headway.core import Level, Request, RequestRecord, TokenEvent
from headway.night.warmup import (
    AGREEMENT,
    MAX_WAVES,
    ROUNDING_S,
    TOKENS,
    Wave,
    num_requests,
    settled,
    short,
    together,
    wave,
)

seconds = st.floats(0.01, 100.0)
factors = st.floats(1.0, 1.0 + AGREEMENT / 2)
steady = st.builds(Wave, seconds, seconds, st.none() | seconds)
Slower = st.sampled_from(["span_s", "ttft_s", "gap_s"])


def scaled(one: Wave, by: float, name: str | None = None) -> Wave:
    names = ["span_s", "ttft_s", "gap_s"] if name is None else [name]
    return replace(one, **{n: v * by for n in names if (v := getattr(one, n)) is not None})


@given(st.lists(steady, max_size=5), steady, factors)
def test_two_waves_alike_are_stable_whatever_came_before(
    before: list[Wave], last: Wave, by: float
) -> None:
    assert settled([*before, last, scaled(last, by)])
    assert settled([*before, scaled(last, by), last])


@given(st.lists(steady, max_size=5), steady, Slower, st.floats(2.0, 100.0))
def test_one_figure_that_is_another_is_not_stable(
    before: list[Wave], last: Wave, name: str, by: float
) -> None:
    other = scaled(last, by, name)
    assume(other != last)
    assert not settled([*before, last, other])
    assert not settled([*before, other, last])


@given(st.lists(steady, max_size=1))
def test_one_wave_says_nothing(waves: list[Wave]) -> None:
    assert not settled(waves)


@given(steady, st.floats(1.6, 10.0), st.integers(1, MAX_WAVES - 3), st.integers(0, 5))
def test_waves_that_get_faster_are_waited_for(
    last: Wave, falls: float, num_slow: int, more: int
) -> None:
    """While each wave is much faster than the one before it, something is still compiled."""
    waves = [scaled(last, falls**k) for k in range(num_slow, 0, -1)] + [last] * (2 + more)
    stable_at = next(n for n in range(len(waves) + 1) if settled(waves[:n]))
    assert stable_at == num_slow + 2


@given(st.floats(0.0, 1e-3), st.floats(0.0, 1e-3))
def test_what_event_loops_round_by_is_no_difference(one: float, other: float) -> None:
    assert settled([Wave(0.05, one, one), Wave(0.05, other, other)])
    assert not settled([Wave(0.05, one, one), Wave(0.05, one + 2 * ROUNDING_S, one)])


def test_a_wave_is_read_off_its_records() -> None:
    records = [
        RequestRecord(k, 0.0, 0.0, 9.0, tuple(TokenEvent(at, "x") for at in times))
        for k, times in enumerate([(1.0, 1.5, 2.0), (3.0, 3.25), (2.0,)])
    ]
    assert wave(4.0, records) == Wave(4.0, 2.0, 0.5)
    assert wave(4.0, []) == Wave(4.0, None, None)
    assert settled([wave(4.0, []), wave(4.0, [])])


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (Level("c8", 64, concurrency=8), 8),
        (Level("r0.2", 64, rate_per_s=0.2, arrivals="poisson"), 1),
        (Level("r2.5", 64, rate_per_s=2.5, arrivals="poisson"), 3),
        (Level("r400", 64, rate_per_s=400.0, arrivals="poisson"), 32),
        (Level("r400", 12, rate_per_s=400.0, arrivals="poisson"), 12),
        (Level("burst", 20, arrivals="burst"), 20),
    ],
)
def test_a_wave_is_about_as_many_as_the_level_has_in_flight(level: Level, expected: int) -> None:
    assert together(level) == expected
    assert num_requests(level) == expected * MAX_WAVES


def test_of_many_requests_there_are_fewer_waves() -> None:
    for slots, waves in ((64, 8), (100, 5), (128, 4), (1024, 4)):
        assert num_requests(Level("c", slots, concurrency=slots)) == slots * waves


@given(st.integers(1, 3 * TOKENS))
def test_a_warm_up_has_the_levels_prompts_and_asks_for_little(most: int) -> None:
    own = Request(3, tuple(range(9)), most, session=1, turn=2)
    assert short(own) == Request(3, tuple(range(9)), min(most, TOKENS))
    assert short(replace(own, max_tokens=None)).max_tokens == TOKENS
