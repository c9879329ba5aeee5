from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway import metrics, validity
from headway.core import Case, Level, RequestError, RequestRecord, Run, Slo, TokenEvent

CASE = Case("a", "fake", "w", "c1")


def answered(times, *, due_s=0.0, tokens=None, per_event=1, **changes):
    """Return a completed record with one event at each time."""
    events = tuple(TokenEvent(at_s, num_tokens=per_event) for at_s in times)
    record = RequestRecord(
        index=0,
        due_s=due_s,
        sent_s=due_s,
        ended_s=max([due_s, *times]),
        events=events,
        asked_tokens=len(times) * per_event,
        completion_tokens=tokens if tokens is not None else len(times) * per_event,
        finish_reason="length",
    )
    return dataclasses.replace(record, **changes)


def run_of(*records, concurrency: int | None = 1, rate_per_s=None):
    level = Level("c1", len(records), concurrency, rate_per_s)
    numbered = [dataclasses.replace(r, index=i) for i, r in enumerate(records)]
    return Run(CASE, 0, 1, level, "", 1.0, tuple(numbered), "s", "w")


def test_case_01_one_output_token_has_no_tpot():
    run = run_of(answered([0.1]), answered([0.2]))
    assert metrics.TABLE["tpot_p99"].of_run(run) is None
    assert metrics.TABLE["itl_p50"].of_run(run) is None


def test_case_01_an_end_before_the_first_token_makes_the_run_invalid():
    broken = answered([0.35, 0.0], ended_s=0.0)
    assert any("not in order" in reason for reason in validity.problems(run_of(broken)))


def test_case_02_a_stream_without_a_token_gives_no_latency_sample():
    r1 = answered([1.8, 1.9, 2.0])
    r2 = answered([], ended_s=2.1, tokens=2, error=RequestError("no_token_event", "usage says 2"))
    run = run_of(r1, r2)
    assert metrics.TABLE["ttft_p50"].of_run(run) == pytest.approx(1.8)
    assert metrics.TABLE["tpot_p50"].of_run(run) == pytest.approx(0.1)
    assert metrics.TABLE["e2el_p50"].of_run(run) == pytest.approx(2.0)
    assert metrics.TABLE["success_rate"].of_run(run) == 0.5


def test_case_03_the_clock_stops_at_the_last_token_not_at_the_end_of_the_stream():
    record = answered([0.200, 0.210, 0.220], ended_s=0.291)
    assert metrics.ttft_s(record) == 0.200
    assert metrics.e2el_s(record) == 0.220
    assert metrics.tpot_s(record) == pytest.approx(0.010)
    assert metrics.itl_s(record) == pytest.approx([0.010, 0.010])


def test_case_04_throughput_counts_tokens_not_events():
    times = [0.05 + 0.1 * k for k in range(10)]
    record = answered(times, per_event=4)
    assert metrics.output_tokens(record) == 40
    assert metrics.output_throughput_span(run_of(record)) == pytest.approx(40 / 0.95)
    assert metrics.tpot_s(record) == pytest.approx(0.9 / 36)


def test_case_05_a_missing_first_token_is_none_and_the_others_define_the_numbers():
    good = [answered([k + 0.1, k + 0.2], due_s=float(k)) for k in range(99)]
    missing = answered([], due_s=99.0, ended_s=101.0, tokens=0)
    run = run_of(*good, missing)
    assert metrics.ttft_s(missing) is None
    assert metrics.TABLE["ttft_p50"].of_run(run) == pytest.approx(0.1)
    assert metrics.TABLE["ttft_p99"].of_run(run) == pytest.approx(0.1)


def test_case_05_a_negative_duration_is_never_a_sample_of_a_valid_run():
    assert validity.problems(run_of(answered([0.0, 2.0], due_s=1.0)))


def test_case_15_survivors_do_not_hide_failures():
    bad = answered([], error=RequestError("http_400", "no"))
    run = run_of(*[answered([0.1, 0.5])] * 4, *[bad] * 6)
    assert metrics.TABLE["success_rate"].of_run(run) == 0.4
    assert metrics.TABLE["e2el_p50"].of_run(run) == pytest.approx(0.5)


def test_case_18_ttft_counts_from_due_and_ttft_sent_from_the_send():
    records = [answered([0.4 * (k + 1)], due_s=0.2 * k, sent_s=0.4 * k) for k in range(6)]
    assert [metrics.ttft_s(r) for r in records] == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.2, 1.4])
    assert [metrics.ttft_sent_s(r) for r in records] == pytest.approx([0.4] * 6)


stamps = st.lists(st.floats(0, 100), min_size=1, max_size=30).map(sorted)


@given(stamps, st.floats(0, 10))
def test_gaps_sum_to_e2el_minus_ttft(times, due_s):
    record = answered([due_s + t for t in times], due_s=due_s)
    ttft, e2el = metrics.ttft_s(record), metrics.e2el_s(record)
    assert math.fsum(metrics.itl_s(record)) == pytest.approx(e2el - ttft, abs=1e-9)
    assert 0 <= ttft <= e2el


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(sorted), max_size=12))
def test_union_length_equals_brute_force(spans):
    covered = {second for start, end in spans for second in range(start, end)}
    assert metrics.union_length([(float(a), float(b)) for a, b in spans]) == len(covered)


def test_the_steady_window_leaves_out_ramp_and_tail():
    # Two slots, four requests of one second each, the second slot half a second later.
    starts = [0.0, 0.5, 1.0, 1.5]
    records = [answered([s + 0.25, s + 0.5, s + 0.75, s + 1.0], due_s=s, sent_s=s) for s in starts]
    run = run_of(*records, concurrency=2)
    assert metrics.steady_window(run) == (0.5, 2.0)
    # Until 2.0: 2 of the first, 4 of the second, 4 of the third, 2 of the fourth.
    assert metrics.output_throughput(run) == pytest.approx(12 / 1.5)


def test_too_short_a_window_has_no_throughput():
    # One request a slot: the first slot is dry as soon as the first of them ends.
    records = [answered([1.0 + 0.1 * k]) for k in range(4)]
    assert metrics.output_throughput(run_of(*records, concurrency=4)) is None


def test_decode_throughput_counts_overlapping_time_once():
    records = [answered([0.0, 0.5, 1.0]), answered([0.5, 1.0, 1.5]), answered([9.0, 10.0])]
    assert metrics.decode_throughput(run_of(*records)) == pytest.approx(5 / 2.5)


def test_undefined_is_none_for_every_metric_of_a_run_in_which_all_failed():
    bad = answered([], ended_s=None, completion_tokens=None, error=RequestError("x", "y"))
    run = run_of(bad, bad)
    values = {name: metric.of_run(run) for name, metric in metrics.TABLE.items()}
    assert values.pop("success_rate") == 0.0
    assert set(values.values()) == {None}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"completion_tokens": 5}, "usage says 5"),
        ({"asked_tokens": 2}, "at most 2"),
        ({"asked_tokens": 9}, "3 of 9 tokens"),
    ],
)
def test_token_counts_that_disagree_are_named(changes, word):
    events = tuple(TokenEvent(0.1 * k, token_ids=(k,), num_tokens=1) for k in range(3))
    record = answered([0.1, 0.2, 0.3], events=events, **changes)
    assert any(word in problem for problem in metrics.token_problems(record))
    assert metrics.token_accuracy(run_of(record)) == 0.0


@given(st.floats(0.1, 10), st.floats(0.1, 10))
def test_worse_by_knows_the_direction(value, than):
    higher, lower = metrics.TABLE["output_throughput"], metrics.TABLE["ttft_p50"]
    assert (higher.worse_by(value, than) > 0) == (than / value > 1)
    assert (lower.worse_by(value, than) > 0) == (value / than > 1)


def test_every_metric_says_what_it_is():
    for name, metric in metrics.ALL.items():
        assert metric.name == name
        assert metric.definition
        assert metric.unit in ("s", "tokens/s", "requests/s", "tokens", "1", "bytes", "J/token")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, None),
        ({"finish_reason": "stop"}, None),
        ({"asked_tokens": 4, "finish_reason": "stop"}, "3 of 4 tokens came, yet it was to go on"),
        ({"asked_tokens": 4, "finish_reason": "stop", "ignore_eos": False}, None),
        ({"asked_tokens": 4, "ignore_eos": False}, "yet it ended for length"),
        ({"prompt_tokens": 8, "asked_prompt_tokens": 8}, None),
        ({"prompt_tokens": 9, "asked_prompt_tokens": 8}, "usage says 9 prompt tokens, 8 ids were"),
        ({"prompt_tokens": None, "asked_prompt_tokens": 8}, None),
        ({"prompt_tokens": 9, "asked_prompt_tokens": 0}, None),
    ],
)
def test_counts_are_held_against_what_was_asked(changes, problem):
    found = metrics.token_problems(answered([0.1, 0.2, 0.3], **changes))
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_what_nobody_counted_is_not_accurate():
    events = tuple(TokenEvent(at_s, text="x") for at_s in (0.1, 0.2))
    blind = answered([0.1, 0.2], events=events, completion_tokens=None)
    assert metrics.token_problems(blind) == ["neither ids nor usage say how many tokens came"]
    assert metrics.token_accuracy(run_of(blind)) == 0.0
    for name in ("output_throughput_span", "decode_throughput_span", "tokens_per_event"):
        assert metrics.TABLE[name].of_run(run_of(blind)) is None


def with_slo(run, **limits):
    return dataclasses.replace(run, level=dataclasses.replace(run.level, slo=Slo(**limits)))


def test_goodput_counts_what_kept_within_every_limit():
    good = answered([0.1, 0.2, 0.3])
    late = answered([0.5, 0.6, 0.7])
    slow = answered([0.1, 0.9, 1.7])
    failed = answered([0.1, 0.2], error=RequestError("x", "y"))
    run = run_of(good, late, slow, failed, answered([0.1, 0.15, 0.2], ended_s=2.0))
    run = with_slo(run, ttft_s=0.2, tpot_s=0.2)
    # Two of five, of three tokens each, and the last completion is at 2 s.
    assert metrics.goodput(run) == pytest.approx(2 / 2.0)
    assert metrics.token_goodput(run) == pytest.approx(6 / 2.0)
    assert metrics.goodput(with_slo(run, e2el_s=0.25)) == pytest.approx(1 / 2.0)
    assert metrics.goodput(with_slo(run, ttft_s=0.01)) == 0.0
    assert metrics.token_goodput(with_slo(run, ttft_s=0.01)) == 0.0


def test_goodput_is_none_without_an_slo_or_without_an_answer():
    bad = answered([], error=RequestError("x", "y"))
    assert metrics.goodput(run_of(answered([0.1]))) is None
    assert metrics.goodput(with_slo(run_of(bad), ttft_s=1.0)) is None


@given(st.floats(0.001, 2), st.floats(0.001, 2))
def test_a_request_of_one_token_cannot_break_a_limit_on_tpot(ttft, limit):
    run = with_slo(run_of(answered([ttft])), tpot_s=limit)
    assert metrics.goodput(run) == pytest.approx(1 / ttft)


def test_requests_are_per_span_to_the_last_completion():
    run = run_of(answered([0.5, 1.0], ended_s=2.0), answered([0.5, 1.5], ended_s=4.0))
    assert metrics.request_throughput(run) == pytest.approx(2 / 4.0)
    # Tokens end with the last token event; the first of each request is no decoding.
    assert metrics.output_throughput_span(run) == pytest.approx(4 / 1.5)
    assert metrics.decode_throughput_span(run) == pytest.approx(2 / 1.5)


def test_an_event_of_no_token_is_not_counted_as_one():
    times = [0.0, 0.5, 1.0]
    events = (TokenEvent(0.0, "x", num_tokens=0), *(TokenEvent(t, num_tokens=2) for t in times[1:]))
    record = answered(times, events=events, completion_tokens=4)
    assert metrics.tpot_s(record) == pytest.approx(1.0 / 4)
    assert metrics.decode_throughput(run_of(record)) == pytest.approx(4.0)


@pytest.mark.parametrize("per_event", [1, 3])
def test_tokens_per_event(per_event):
    run = run_of(answered([0.1, 0.2], per_event=per_event), answered([0.1], per_event=per_event))
    assert metrics.tokens_per_event(run) == per_event


def test_tokens_without_a_count_are_spread_evenly_over_their_events():
    events = tuple(TokenEvent(at, "x") for at in (1.0, 2.0, 3.0))
    record = RequestRecord(0, 0.0, 0.0, 4.0, events, completion_tokens=6)
    assert metrics.run.tokens_between([record], 1.0, 3.0) == 4
    counted = dataclasses.replace(record, events=(TokenEvent(2.0, "x", (7, 8), 2),))
    assert metrics.run.tokens_between([record, counted], 0.0, 9.0) == 8
    nobody_knows = dataclasses.replace(record, completion_tokens=None)
    assert metrics.run.tokens_between([nobody_knows], 0.0, 9.0) is None
    assert metrics.run.tokens_between([nobody_knows], 3.0, 9.0) == 0
