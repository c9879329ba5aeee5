"""Throughput of virtual Runs is the closed form of the fake engine, and such Runs are valid."""

from __future__ import annotations

import itertools
import runpy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headway import arrivals, metrics, validity
from headway.engines.fake import FakePlan

virtual = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("virtual_run.py"))))

exact = st.integers(1, 16).map(lambda n: n / 64)


@settings(deadline=None, max_examples=30)
@given(exact, exact, st.integers(1, 6), st.integers(2, 6), st.integers(0, 5), st.integers(2, 6))
def test_a_constant_service_gives_slots_times_tokens_per_service(
    ttft_s, itl_s, slots, rounds, rest, outputs
):
    n = slots * rounds + rest % slots
    plan = FakePlan(ttft_s=ttft_s, itl_s=itl_s)
    run = virtual.measure(plan, virtual.requests(n, 3, outputs), virtual.closed(slots, n))
    service_s = ttft_s + (outputs - 1) * itl_s
    # A rest of requests leaves slots dry: the window ends where the full rounds do.
    assert metrics.steady_window(run) == (0.0, rounds * service_s)
    assert metrics.output_throughput(run) == pytest.approx(slots * outputs / service_s)
    assert metrics.decode_throughput(run) == pytest.approx(
        n * (outputs - 1) / (-(-n // slots) * (outputs - 1) * itl_s)
    )
    assert metrics.success_rate(run) == metrics.token_accuracy(run) == 1.0
    assert validity.problems(run) == ()


@settings(deadline=None, max_examples=30)
@given(
    st.builds(
        FakePlan,
        ttft_s=st.sampled_from([1e-9, 0.0001, 0.25]),
        itl_s=exact,
        jitter_s=exact,
        seed=st.integers(0, 99),
        tokens_per_chunk=st.integers(1, 4),
        slots=st.integers(1, 8),
    ),
    st.integers(1, 6),
    st.integers(4, 7),
    st.lists(st.integers(1, 6), min_size=1, max_size=7),
)
@example(FakePlan(ttft_s=1e-9, itl_s=0.02), 5, 5, [2, 1, 1])
def test_no_honest_run_is_invalid(plan, slots, rounds, lengths):
    n = slots * rounds
    asked = [
        replace(one, max_tokens=length)
        for one, length in zip(virtual.requests(n), itertools.cycle(lengths), strict=False)
    ]
    run = virtual.measure(plan, asked, virtual.closed(slots, n))
    assert validity.problems(run) == ()


@pytest.mark.parametrize("ttft_s", [0.0, 0.001])
@pytest.mark.parametrize("outputs", [1, 2, 16])
@pytest.mark.parametrize("itl_s", [0.0, 0.010])
def test_a_first_token_cheaper_than_the_others_is_no_impossible_throughput(ttft_s, outputs, itl_s):
    plan = FakePlan(ttft_s=ttft_s or 1e-6, itl_s=itl_s)
    run = virtual.measure(plan, virtual.requests(16, 3, outputs), virtual.closed(4, 16))
    assert validity.problems(run) == ()


@pytest.mark.parametrize("fault", ["fail_every", "short_output_every", "lie_usage_every"])
def test_faults_of_the_engine_leave_a_run_valid_and_count_against_it(fault):
    plan = FakePlan(ttft_s=0.25, itl_s=0.125, **{fault: 4})
    run = virtual.measure(plan, virtual.requests(16), virtual.closed(2, 16))
    assert validity.problems(run) == ()
    rates = (metrics.success_rate(run), metrics.token_accuracy(run))
    assert rates == ((0.75, 1.0) if fault == "fail_every" else (1.0, 0.75))


def test_a_stalled_request_is_a_level_timeout_and_the_rest_is_judged():
    plan = FakePlan(ttft_s=0.25, itl_s=0.125, stall_request=3)
    run = virtual.measure(plan, virtual.requests(8), virtual.closed(2, 8), timeout_s=30.0)
    (stalled,) = [one for one in run.records if not one.completed]
    assert (stalled.error.kind, len(stalled.events)) == ("level_timeout", 2)
    assert validity.problems(run) == ()
    assert metrics.success_rate(run) == 7 / 8


@pytest.mark.parametrize("process", arrivals.PROCESSES)
def test_open_loop_runs_are_valid_below_and_above_saturation(process):
    for rate in (0.5, 50.0):
        offsets = arrivals.offsets(process, 40, rate, seed=5)
        level = virtual.opened(40, rate)
        run = virtual.measure(FakePlan(ttft_s=0.25, slots=1), virtual.requests(40), level, offsets)
        assert metrics.steady_window(run) is None
        assert validity.problems(run) == ()


def test_an_infinite_rate_is_a_valid_run():
    offsets = arrivals.offsets("poisson", 8, float("inf"), seed=1)
    level = replace(virtual.opened(8), rate_per_s=float("inf"))
    run = virtual.measure(FakePlan(), virtual.requests(8), level, offsets)
    late = [replace(one, sent_s=0.0005, engine_arrived_s=0.0005) for one in run.records]
    assert validity.problems(replace(run, records=tuple(late))) == ()


@pytest.mark.parametrize(("slots", "n"), [(4, 7), (8, 8)])
def test_a_window_that_is_mostly_edge_is_none_or_whole_rounds(slots, n):
    plan = FakePlan(ttft_s=0.5, itl_s=0.125)
    run = virtual.measure(plan, virtual.requests(n), virtual.closed(slots, n))
    assert metrics.steady_window(run) == (0.0, 1.0)
    assert metrics.output_throughput(run) == pytest.approx(slots * 5 / 1.0)


def test_littles_law_holds_in_the_window():
    plan = FakePlan(ttft_s=0.5, itl_s=0.125, slots=2)  # four in flight, two of them served
    run = virtual.measure(plan, virtual.requests(24), virtual.closed(4, 24))
    start, end = metrics.steady_window(run)
    done = [one for one in run.records if start < one.ended_s <= end]
    rate = len(done) / (end - start)
    steady = [one.ended_s - one.due_s for one in run.records[4:-4]]
    assert rate * sum(steady) / len(steady) == pytest.approx(4)
    assert metrics.output_throughput(run) == pytest.approx(2 * 5 / 1.0)
