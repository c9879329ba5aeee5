"""Schedules are what they are called, and the same for the same seed."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from headway import arrivals
from headway.arrivals import PROCESSES, offsets, schedule_hash

SEEDS = range(1, 6)


def gaps(times: tuple[float, ...]) -> list[float]:
    return [later - earlier for earlier, later in pairwise((0.0, *times))]


@pytest.mark.parametrize("process", PROCESSES)
def test_case_20_the_same_seed_gives_the_same_bytes(process):
    first = json.dumps(offsets(process, 5, 10.0, seed=7))
    assert json.dumps(offsets(process, 5, 10.0, seed=7)) == first
    if process != "constant":
        assert json.dumps(offsets(process, 5, 10.0, seed=8)) != first


def test_case_20_another_process_of_python_makes_the_same_schedule():
    program = (
        "import json\n"
        "from headway.arrivals import offsets\n"
        "print(json.dumps(offsets('poisson', 5, 10.0, 7)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == json.dumps(offsets("poisson", 5, 10.0, 7))


def test_case_20_a_schedule_does_not_change_between_versions():
    """A new Python or a changed formula would make old baselines a comparison of other traffic."""
    assert schedule_hash(offsets("poisson", 5, 10.0, seed=7), None) == "d303cc0c137ee5f4"


def test_case_20_the_hash_tells_schedules_apart():
    base = offsets("poisson", 5, 10.0, seed=7)
    others = [
        schedule_hash(offsets("poisson", 5, 10.0, seed=8), None),
        schedule_hash(offsets("poisson", 6, 10.0, seed=7), None),
        schedule_hash(offsets("burst", 5, 10.0, seed=7), None),
        schedule_hash((), 5),
        schedule_hash((), 6),
        schedule_hash((*base[:-1], math.nextafter(base[-1], math.inf)), None),
    ]
    assert len({schedule_hash(base, None), *others}) == len(others) + 1
    assert schedule_hash(base, None) == schedule_hash(list(base), None)


def test_case_21_constant_gaps_are_one_over_the_rate():
    assert offsets("constant", 4, 10.0, seed=1) == (0.0, 0.1, 0.2, 0.3)


@pytest.mark.parametrize("rate", [0, 0.0, -1.0, math.nan, -math.inf])
@pytest.mark.parametrize("process", PROCESSES)
def test_case_21_what_is_no_rate_is_refused(process, rate):
    with pytest.raises(ValueError, match=r"rate_per_s is .* above 0"):
        offsets(process, 4, rate, seed=1)


@pytest.mark.parametrize("process", PROCESSES)
def test_case_21_an_infinite_rate_is_all_at_once(process):
    assert offsets(process, 4, math.inf, seed=1) == (0.0,) * 4


def test_an_unknown_process_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="'weibull' is not known; allowed: poisson, gamma,"):
        offsets("weibull", 4, 1.0, seed=1)


@settings(deadline=None)
@given(
    st.sampled_from(PROCESSES),
    st.integers(0, 200),
    st.floats(1e-3, 1e6),
    st.integers(-(2**40), 2**40),
)
def test_offsets_are_finite_and_never_decrease(process, n, rate, seed):
    times = offsets(process, n, rate, seed)
    assert len(times) == n
    assert all(math.isfinite(at) and at >= 0 for at in times)
    assert list(times) == sorted(times)


@pytest.mark.parametrize("process", PROCESSES)
def test_fewer_are_a_prefix_of_more_up_to_the_last_burst(process):
    many, few = offsets(process, 100, 10.0, seed=3), offsets(process, 56, 10.0, seed=3)
    assert many[:56] == few


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("rate", [0.5, 40.0])
def test_poisson_gaps_are_exponential(rate, seed):
    drawn = gaps(offsets("poisson", 10_000, rate, seed))
    assert sum(drawn) / len(drawn) == pytest.approx(1 / rate, rel=0.04)  # 4 sigma
    assert stats.kstest(drawn, "expon", args=(0, 1 / rate)).pvalue > 1e-3


@pytest.mark.parametrize("seed", SEEDS)
def test_poisson_gaps_do_not_depend_on_the_last_one(seed):
    drawn = gaps(offsets("poisson", 10_000, 1.0, seed))
    assert abs(stats.pearsonr(drawn[:-1], drawn[1:]).statistic) < 0.04


def dispersion(times: tuple[float, ...], window_s: float) -> float:
    """Variance over mean of the counts in whole windows: 1 for Poisson, 0 for constant gaps."""
    counts = [0] * int(times[-1] / window_s)
    for at in times:
        if at < len(counts) * window_s:
            counts[int(at / window_s)] += 1
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 for count in counts) / (len(counts) - 1) / mean


@pytest.mark.parametrize("seed", SEEDS)
def test_counts_vary_as_their_process_says(seed):
    assert dispersion(offsets("poisson", 20_000, 20.0, seed), 1.0) == pytest.approx(1, abs=0.2)
    assert dispersion(offsets("constant", 20_000, 20.0, seed), 1.0) < 0.01
    # Eight at once every 0.4 s: in windows of 0.2 s there are eight or none.
    assert dispersion(offsets("burst", 20_000, 20.0, seed), 0.2) == pytest.approx(4, abs=0.1)


def test_nothing_is_rescaled_to_end_where_the_mean_would():
    last = [offsets("poisson", 400, 10.0, seed)[-1] for seed in range(400)]
    mean = sum(last) / len(last)
    spread = math.sqrt(sum((at - mean) ** 2 for at in last) / (len(last) - 1))
    # The sum of 400 gaps has a mean of 40 s and a standard deviation of 2 s.
    assert mean == pytest.approx(40, abs=0.5)
    assert spread == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("seed", SEEDS)
def test_bursts_come_at_the_mean_rate_in_groups_close_together(seed):
    size, period = arrivals.BURST_SIZE, arrivals.BURST_SIZE / 20.0
    times = offsets("burst", 10 * size, 20.0, seed)
    groups = [times[k : k + size] for k in range(0, len(times), size)]
    for number, group in enumerate(groups):
        assert number * period <= group[0] <= group[-1] <= (number + 0.1) * period
        assert len(set(group)) == size
    assert len(times) / (10 * period) == pytest.approx(20.0)


def test_arrivals_and_prompts_do_not_share_their_draws():
    assert random.Random("arrivals/poisson/7").random() != random.Random(7).random()
    assert offsets("poisson", 1, 1.0, 7) != offsets("burst", 1, 1.0, 7)
