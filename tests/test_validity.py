"""What makes a Run invalid is found and said in one sentence; slow or wrong is not invalid."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from headway import metrics, validity
from headway.core import Case, Level, RequestError, RequestRecord, Run, TokenEvent

TTFT_S, TPOT_S, TOKENS, SLOTS = 0.0625, 0.015625, 16, 4
SERVICE_S = TTFT_S + (TOKENS - 1) * TPOT_S


def answered(
    index: int, due_s: float, tpot_s: float = TPOT_S, late_s: float = 0.0
) -> RequestRecord:
    sent_s = due_s + late_s
    times = [sent_s + TTFT_S + k * tpot_s for k in range(TOKENS)]
    return RequestRecord(
        index=index,
        due_s=due_s,
        sent_s=sent_s,
        ended_s=times[-1],
        events=tuple(TokenEvent(at, "x", (k,), 1, at) for k, at in enumerate(times)),
        asked_tokens=TOKENS,
        completion_tokens=TOKENS,
        finish_reason="length",
        engine_arrived_s=sent_s,
    )


def run_of(records, level: Level | None = None, **changes: object) -> Run:
    level = level or Level("c4", len(records), concurrency=SLOTS)
    span_s = max(one.ended_s or 0.0 for one in records)
    run = Run(Case("a", "m", "w", level.name), 1, 1, level, "", span_s, tuple(records), "", "")
    return replace(run, **changes)


def good(n: int = 16) -> list[RequestRecord]:
    return [answered(k, k // SLOTS * SERVICE_S) for k in range(n)]


def change(place: int, **changes: object) -> Run:
    """A good Run with one record changed."""
    records = good()
    records[place] = replace(records[place], **changes)
    return run_of(records)


def only(run: Run) -> str:
    """Return the one sentence that is said."""
    found = validity.problems(run)
    assert len(found) == 1, found
    return found[0]


def test_a_good_run_has_no_problem():
    assert validity.problems(run_of(good())) == ()
    assert validity.problems(run_of(good(), client={"loop_lag_p99_s": 0.003})) == ()


@pytest.mark.parametrize("records", [good()[:15], [*good(), answered(16, 4 * SERVICE_S)]])
def test_a_missing_or_surplus_record_is_found(records):
    level = Level("c4", 16, concurrency=SLOTS)
    assert only(run_of(records, level)) == f"{len(records)} records of 16 requests"


def test_two_records_of_one_request_are_found():
    assert only(change(3, index=2)) == "two records carry the same request number"


def test_a_request_without_an_outcome_is_found():
    text = only(change(15, ended_s=None))
    assert text == "request 15 neither ended nor failed"


def test_a_failure_of_the_client_is_found_and_quoted():
    error = RequestError("client_error", "OSError: too many files", "client")
    text = only(change(5, error=error))
    assert text == "the client failed on request 5: OSError: too many files"


def test_failures_of_the_engine_are_no_problem():
    for error in (RequestError("http_500", "x"), RequestError("read_timeout", "x")):
        assert validity.problems(change(5, error=error)) == ()
    cut = {"ended_s": None, "error": RequestError("level_timeout", "x")}
    assert validity.problems(change(15, **cut)) == ()


def shifted(record: RequestRecord, place: int, at_s: float) -> tuple[TokenEvent, ...]:
    events = list(record.events)
    events[place] = replace(events[place], at_s=at_s, engine_at_s=None)
    return tuple(events)


@pytest.mark.parametrize(
    "changes",
    [
        {"sent_s": -0.001},
        {"sent_s": 0.07, "engine_arrived_s": None},
        {"events": shifted(good()[0], 0, -0.5)},
        {"events": shifted(good()[0], 3, 0.0)},
        {"ended_s": 0.2},
        {"due_s": 0.001},
    ],
    ids=["sent", "sent_after_token", "first_event", "event", "end", "due"],
)
def test_stamps_that_run_backwards_are_found(changes):
    text = only(change(0, **changes))
    assert text == "request 0: its stamps are not in order (due, sent, events, end)"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_stamp_that_is_no_number_is_found(value):
    run = run_of(good(), span_s=1.0)
    records = [replace(run.records[0], due_s=value), *run.records[1:]]
    assert "request 0: a time stamp is not a finite number" in validity.problems(
        replace(run, records=tuple(records))
    )


def test_gaps_that_do_not_sum_to_the_rest_of_the_latency_are_found(monkeypatch):
    monkeypatch.setattr(metrics, "itl_s", lambda record: [TPOT_S] * (TOKENS - 2))
    text = only(run_of(good()[:1], Level("c1", 1, concurrency=1)))
    assert text.startswith("request 0: the gaps sum to ")


def test_a_token_that_arrived_before_it_left_the_engine_is_found():
    events = list(good()[2].events)
    events[4] = replace(events[4], engine_at_s=events[4].at_s + 0.002)
    text = only(change(2, events=tuple(events)))
    assert text == "request 2: a token arrived 0.002000 s before it left the engine"


def test_a_request_that_arrived_before_it_was_sent_is_found():
    text = only(change(2, engine_arrived_s=-0.5))
    assert text == "request 2: it arrived at the engine 0.500000 s before it was sent"


def test_engine_stamps_out_of_order_are_found():
    events = list(good()[2].events)
    events[4] = replace(events[4], engine_at_s=events[2].engine_at_s)
    assert (
        only(change(2, events=tuple(events))) == "request 2: the engine's stamps are not in order"
    )


def test_engine_stamps_are_not_asked_for():
    bare = [
        replace(
            one,
            engine_arrived_s=None,
            events=tuple(replace(event, engine_at_s=None) for event in one.events),
        )
        for one in good()
    ]
    assert validity.problems(run_of(bare)) == ()


def test_more_in_flight_than_asked_for_is_found():
    records = [*good(), answered(16, SERVICE_S / 2)]
    text = only(run_of(records, Level("c4", 17, concurrency=SLOTS)))
    assert text == "5 requests were in flight at once, 4 were asked for"


def test_an_impossible_throughput_is_found():
    """1,520 tokens/s at 16 in flight with a TPOT of 12.8 ms; 1,250 is possible."""
    tokens, tpot_s, really = 256, 0.0128, 20
    service_s = really * tokens / 1520
    ttft_s = service_s - (tokens - 1) * tpot_s
    records = []
    for place in range(4 * really):
        due_s = place // really * service_s
        times = [due_s + ttft_s + k * tpot_s for k in range(tokens)]
        events = tuple(TokenEvent(at, "x", None, 1) for at in times)
        records.append(RequestRecord(place, due_s, due_s, times[-1], events, tokens, 1, tokens))
    honest = run_of(records, Level("c20", 80, concurrency=really))
    assert metrics.output_throughput(honest) == pytest.approx(1520)
    assert validity.problems(honest) == ()
    assert validity.problems(run_of(records, Level("c16", 80, concurrency=16))) == (
        "20 requests were in flight at once, 16 were asked for",
        "1520.0 tokens/s with 16 in flight and a TPOT of 12.80 ms: at most 1250.0 is possible",
    )


def test_one_problem_of_many_records_is_one_sentence():
    records = [replace(one, sent_s=-1.0) for one in good()]
    order = [text for text in validity.problems(run_of(records)) if "stamps" in text]
    assert order == [
        "request 0: its stamps are not in order (due, sent, events, end) (and 15 more)"
    ]


CLIENT = {
    "loop_lag_p99_s": 0.004,
    "read_lag_p99_s": 0.004,
    "kernel_stamps": 1.0,
    "cpu_share": 0.6,
    "gc_s": 0.0,
}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, None),
        # A quarter of the typical TTFT, which is 62.5 ms here.
        ({"loop_lag_p99_s": 0.015, "read_lag_p99_s": 0.015}, None),
        ({"loop_lag_p99_s": 0.080}, "the client woke up late by 80.0 ms (p99); beyond 16 ms"),
        ({"read_lag_p99_s": 0.060}, "what arrived waited 60.0 ms (p99); beyond 16 ms"),
        # Merged by a server that writes so, or by a client that was too late to tell: ITL 15.6 ms.
        ({"merged_events": 0.9}, None),
        # Without stamps of the kernel's, being late is in every stamp.
        ({"kernel_stamps": 0.0, "loop_lag_p99_s": 0.009}, None),
        ({"kernel_stamps": 0.0, "loop_lag_p99_s": 0.011}, "the client woke up late by 11.0 ms"),
        ({"cpu_share": 0.94}, None),
        ({"cpu_share": 0.97}, "the client took 97% of a core"),
        ({"gc_s": 0.004}, None),
        ({"gc_s": 0.040}, "the client collected garbage for 40 ms of 1.2 s"),
    ],
)
def test_a_client_that_measures_itself_is_found(changes, said):
    found = validity.problems(run_of(good(), client={**CLIENT, **changes}))
    assert len(found) == (said is not None)
    if said is not None:
        assert found[0].startswith(said)


def test_events_that_a_late_client_read_together_are_found():
    slow = [answered(k, k // SLOTS * 15.0, tpot_s=0.002) for k in range(16)]
    late = {**CLIENT, "loop_lag_p99_s": 0.009}
    assert validity.problems(run_of(slow, client={**late, "merged_events": 0.09})) == ()
    text = only(run_of(slow, client={**late, "merged_events": 0.35}))
    assert text.startswith("35% of the events were read together with an earlier one")


@pytest.mark.parametrize(("ttft_s", "most"), [(0.004, 10), (5.0, 50)])
def test_how_late_a_client_may_be_has_bounds(ttft_s, most):
    records = []
    for one in good():
        shift = ttft_s - TTFT_S
        events = tuple(replace(e, at_s=e.at_s + shift, engine_at_s=None) for e in one.events)
        records.append(replace(one, events=events, ended_s=events[-1].at_s, engine_arrived_s=None))
    found = validity.problems(run_of(records, client={**CLIENT, "read_lag_p99_s": 0.060}))
    assert [text for text in found if f"beyond {most} ms" in text]


@pytest.mark.parametrize(("gap_s", "found"), [(0.0, False), (0.02, False), (0.1, True)])
def test_slots_that_wait_for_the_client_are_not_concurrency(gap_s, found):
    period_s = SERVICE_S + gap_s
    first = [answered(k, 0.0) for k in range(SLOTS)]
    later = [answered(k, k // SLOTS * period_s - gap_s, late_s=gap_s) for k in range(SLOTS, 32)]
    records = [*first, *later]
    texts = validity.problems(run_of(records))
    average = [text for text in texts if "in flight on average, 4 were asked for" in text]
    assert bool(average) is found


def test_slots_that_think_do_not_wait():
    records = [answered(k, k // SLOTS * (SERVICE_S + 1.0)) for k in range(32)]
    assert validity.problems(run_of(records)) == ()


@pytest.mark.parametrize(
    ("late_s", "said"), [(0.0, ()), (0.001, ()), (0.004, ("p50",)), (0.5, ("p50", "p99"))]
)
def test_late_sends_are_found_by_what_they_add(late_s, said):
    level = Level("r1", 16, rate_per_s=1.0, arrivals="constant")
    records = [answered(k, float(k), late_s=late_s) for k in range(16)]
    found = validity.problems(run_of(records, level))
    assert len(found) == len(said)
    for text, q in zip(found, said, strict=True):
        assert text.startswith(f"requests left {late_s * 1e3:.1f} ms after they were due ({q})")


def test_a_schedule_that_was_not_kept_is_found():
    level = Level("r1", 16, rate_per_s=1.0, arrivals="constant")
    # Each leaves later than the one before: what a client does that cannot make the rate.
    records = [answered(k, float(k), late_s=0.1 * k) for k in range(16)]
    found = validity.problems(run_of(records, level))
    assert "the schedule took 16.500 s instead of 15.000 s" in found


@pytest.mark.parametrize("due_s", [0.0, 0.0001])
def test_a_short_schedule_is_not_late_by_a_millisecond(due_s):
    level = Level("rinf", 16, rate_per_s=1e6, arrivals="constant")
    records = [answered(k, k * due_s / 16, late_s=0.001) for k in range(16)]
    assert validity.problems(run_of(records, level)) == ()


def test_validity_is_blind_to_speed_and_wrong_counts():
    slow = [answered(k, k // SLOTS * (TTFT_S + 15 * 5.0), tpot_s=5.0) for k in range(16)]
    wrong = [replace(one, completion_tokens=3, finish_reason="stop") for one in slow]
    assert validity.problems(run_of(slow)) == ()
    assert validity.problems(run_of(wrong)) == ()
