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
from headway.arrivals import PROCESSES, deal, in_stages, offsets, schedule, schedule_hash
from headway.core import Level, Stage
from headway.lengths import Trace
from headway.workload import Prompts, Vocabulary, make_requests, workload_hash

SEEDS = range(1, 6)
RAMP = (Stage(1.0, 60.0, 20.0),)
STAGES = (Stage(4.0, 25.0), Stage(0.0, 10.0), Stage(0.0, 20.0, 12.0), Stage(12.0, 30.0, 3.0))


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


def test_case_20_workers_share_one_schedule_and_have_different_parts_of_it():
    whole = offsets("poisson", 103, 10.0, seed=7)
    parts = [deal(whole, worker, 4) for worker in range(4)]
    assert parts == [deal(offsets("poisson", 103, 10.0, seed=7), worker, 4) for worker in range(4)]
    assert len({json.dumps(part) for part in parts}) == 4
    assert sorted(at for part in parts for at in part) == list(whole)


@given(st.integers(0, 50), st.integers(1, 9))
def test_every_item_is_dealt_to_one_worker(n, workers):
    hands = [deal(range(n), worker, workers) for worker in range(workers)]
    assert sorted(item for hand in hands for item in hand) == list(range(n))
    assert max(map(len, hands)) - min(map(len, hands)) <= 1
    # Round by round, the hands are the order that was dealt.
    assert [hands[k % workers][k // workers] for k in range(n)] == list(range(n))


@pytest.mark.parametrize(("worker", "workers"), [(-1, 2), (2, 2), (0, 0)])
def test_a_worker_that_is_none_is_refused(worker, workers):
    with pytest.raises(ValueError, match=f"worker {worker} of {workers}"):
        deal(range(5), worker, workers)


@pytest.mark.parametrize("burstiness", [0, 0.0, -1.0, math.nan, -math.inf])
def test_case_21_what_is_no_burstiness_is_refused(burstiness):
    for make in (
        lambda: offsets("gamma", 4, 10.0, 1, burstiness),
        lambda: in_stages("gamma", RAMP, 1, burstiness),
    ):
        with pytest.raises(ValueError, match=r"burstiness is .*; it must be at least 0.001"):
            make()


def test_case_21_infinite_burstiness_is_constant_gaps():
    assert offsets("gamma", 4, 10.0, 1, math.inf) == (0.0, 0.1, 0.2, 0.3)
    assert in_stages("gamma", RAMP, 1, math.inf) == in_stages("constant", RAMP, 1)


@pytest.mark.parametrize("burstiness", [0.05, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("seed", SEEDS)
def test_gamma_gaps_have_the_shape_and_the_mean_that_were_asked(burstiness, seed):
    drawn = gaps(offsets("gamma", 10_000, 40.0, seed, burstiness))
    spread = 1 / math.sqrt(burstiness * len(drawn))  # of the mean, as a share of it
    assert sum(drawn) / len(drawn) == pytest.approx(1 / 40, rel=4 * spread)
    law = stats.gamma(burstiness, scale=1 / (40 * burstiness))
    # Gaps of a very bursty process are below what a double's sum can tell from nothing.
    told = [gap for gap in drawn if gap > 1e-9]
    low = law.cdf(1e-9)
    assert stats.kstest(told, lambda x: (law.cdf(x) - low) / (1 - low)).pvalue > 1e-3
    assert stats.kstest(told, "expon", args=(0, 1 / 40)).pvalue < 1e-3 or burstiness == 1.0


def test_case_21_the_mean_gap_stays_for_any_burstiness():
    for burstiness in (0.5, 1.0, 2.0, 10.0):
        assert offsets("gamma", 10_000, 10.0, 7, burstiness)[-1] / 10_000 == pytest.approx(
            0.1, rel=0.03
        )


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_counts_of_a_gamma_process_disperse_by_its_burstiness(burstiness):
    """In long windows variance over mean of the counts is the squared variation of the gaps."""
    times = offsets("gamma", 200_000, 100.0, 3, burstiness)
    assert dispersion(times, 5.0) == pytest.approx(1 / burstiness, rel=0.35)


def expected_until(stages, at):
    """Arrivals expected until a time: the area below straight lines, cut at that time."""
    total = start = 0.0
    for stage in stages:
        a, b = stage.rate_per_s, stage.rate_per_s if stage.to_per_s is None else stage.to_per_s
        within = min(max(at - start, 0.0), stage.seconds)
        total += within * (a + (a + (b - a) * within / stage.seconds)) / 2
        start += stage.seconds
    return total


@pytest.mark.parametrize("stages", [RAMP, STAGES, (Stage(20.0, 50.0, 0.0),)])
def test_stages_are_the_inhomogeneous_poisson_process_of_their_rate(stages):
    """Rescaled by the mean function, its gaps are exponential of mean 1, and independent."""
    rescaled = []
    for seed in range(40):
        times = [expected_until(stages, at) for at in in_stages("poisson", stages, seed)]
        rescaled += gaps(tuple(times))
    assert len(rescaled) > 5_000
    # The gap that the end cuts off is missing: the longer ones are a little rarer, 1 in 300.
    assert stats.kstest(rescaled, "expon").pvalue > 1e-3
    assert abs(stats.pearsonr(rescaled[:-1], rescaled[1:]).statistic) < 0.04
    # The test can fail: arrivals at the mean rate throughout are not those of a ramp.
    flat = offsets("poisson", 5_000, 10.5, 1)
    wrong = gaps(tuple(expected_until((Stage(1.0, flat[-1], 20.0),), at) for at in flat))
    assert stats.kstest(wrong, "expon").pvalue < 1e-3


@pytest.mark.parametrize("stages", [RAMP, STAGES])
def test_the_count_of_stages_is_drawn_and_varies_as_poissons_does(stages):
    counts = [len(in_stages("poisson", stages, seed)) for seed in range(400)]
    mean = sum(counts) / len(counts)
    right = expected_until(stages, 1e9)
    assert mean == pytest.approx(right, abs=4 * math.sqrt(right / 400))
    variance = sum((count - mean) ** 2 for count in counts) / (len(counts) - 1)
    assert variance / mean == pytest.approx(1, abs=0.3)


def test_a_constant_process_in_stages_comes_at_each_whole_number_expected():
    times = in_stages("constant", STAGES, 1)
    assert len(times) == math.ceil(expected_until(STAGES, 1e9))
    assert [expected_until(STAGES, at) for at in times] == pytest.approx(list(range(len(times))))
    assert in_stages("constant", (Stage(10.0, 0.4),), 1) == pytest.approx((0.0, 0.1, 0.2, 0.3))


stage = st.builds(
    Stage,
    st.floats(0, 50),
    st.floats(0.01, 20),
    st.one_of(st.none(), st.floats(0, 50)),
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PROCESSES),
    st.lists(stage, min_size=1, max_size=4),
    st.integers(0, 2**40),
    st.floats(0.1, 10),
)
def test_offsets_in_stages_are_in_order_and_within_them(process, stages, seed, burstiness):
    times = in_stages(process, stages, seed, burstiness)
    assert list(times) == sorted(times)
    assert all(0 <= at <= sum(one.seconds for one in stages) * (1 + 1e-12) for at in times)
    assert times == in_stages(process, stages, seed, burstiness)


def test_a_stage_that_is_none_is_refused():
    for bad in (Stage(-1.0, 1.0), Stage(1.0, 1.0, math.nan), Stage(math.inf, 1.0)):
        with pytest.raises(ValueError, match="they must be 0 or above"):
            in_stages("poisson", [bad], 1)
    for seconds in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"lasts .* it must be above 0"):
            in_stages("poisson", [Stage(1.0, seconds)], 1)


@pytest.mark.parametrize(
    ("process", "of_rate", "of_stages"),
    [
        ("gamma", "7288a734933525f8", "0cb639617f006ee6"),
        ("poisson", "d303cc0c137ee5f4", "2a43db390dd7b9df"),
    ],
)
def test_these_schedules_do_not_change_between_versions_either(process, of_rate, of_stages):
    assert schedule_hash(offsets(process, 5, 10.0, 7, 0.5), None) == of_rate
    assert schedule_hash(in_stages(process, RAMP, 7, 0.5), None) == of_stages


def test_a_level_with_a_number_gets_other_times_in_every_launch():
    level = Level("r10", 20, rate_per_s=10.0, arrivals="gamma", burstiness=0.5)
    assert schedule(level, 7, 1) == schedule(level, 7, 1)
    assert len({schedule(level, seed, launch) for seed in (7, 8) for launch in (1, 2)}) == 4
    assert schedule(level, 7, 1) == offsets("gamma", 20, 10.0, 7001, 0.5)


def test_a_level_with_a_duration_gets_the_same_in_every_launch():
    level = Level("ramp", 0, rate_per_s=10.5, arrivals="poisson", stages=RAMP)
    assert schedule(level, 7, 1) == schedule(level, 7, 2) == in_stages("poisson", RAMP, 7)
    assert schedule(level, 8, 1) != schedule(level, 7, 1)


def test_a_trace_is_sent_when_it_was_or_so_many_times_as_fast():
    trace = Trace("t.csv", (0.0, 1.0, 1.0, 4.5), (1, 2, 3, 4), (5, 6, 7, 8))
    level = Level("replay", 4, rate_per_s=1.0, arrivals="replay", speed=1.0)
    assert schedule(level, 7, 1, trace) == trace.times_s
    fast = Level("replay_x2", 4, rate_per_s=2.0, arrivals="replay", speed=2.0)
    assert schedule(fast, 7, 3, trace) == (0.0, 0.5, 0.5, 2.25)
    with pytest.raises(ValueError, match="there is none"):
        schedule(level, 7, 1)


def test_closed_loop_has_no_schedule_but_its_slots_begin_one_after_the_other():
    assert schedule(Level("c4", 16, concurrency=4, fill_s=0.3), 7, 1) == ()
    assert arrivals.slot_offsets(4, 0.3) == pytest.approx((0.0, 0.1, 0.2, 0.3))
    assert arrivals.slot_offsets(1, 0.3) == (0.0,)
    assert arrivals.default_fill_s(1) == 0
    assert arrivals.default_fill_s(8) == pytest.approx(0.035)
    assert arrivals.default_fill_s(1024) == 1.0
    filled = [schedule_hash((), 8), schedule_hash((), 8, 0.035), schedule_hash((), 8, 0.1)]
    assert len(set(filled)) == 3


def test_the_seed_of_arrivals_is_not_that_of_prompts():
    """Other prompts come at the same times, and the same prompts at other times."""
    level = Level("r10", 5, rate_per_s=10.0, arrivals="poisson")

    def sent(prompt_seed, arrival_seed):
        made = make_requests(Prompts("w", 8, 4), 5, 1, prompt_seed, Vocabulary(100))
        return workload_hash(made), schedule_hash(schedule(level, arrival_seed, 1), None)

    (prompts, times), others = sent(1, 1), (sent(2, 1), sent(1, 2))
    assert [prompts == p for p, _ in others] == [False, True]
    assert [times == t for _, t in others] == [True, False]


def test_arrivals_and_prompts_do_not_share_their_draws():
    assert random.Random("arrivals/poisson/7").random() != random.Random(7).random()
    assert offsets("poisson", 1, 1.0, 7) != offsets("burst", 1, 1.0, 7)
