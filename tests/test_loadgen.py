"""The load generator on virtual time: who is sent when, and what the records then say, exactly."""

from __future__ import annotations

import asyncio
import gc
import json
import runpy
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import arrivals, loadgen, validity
from headway.core import Capabilities, Request
from headway.engines.fake import FakePlan, fake_tokens
from headway.engines.virtual_time import run_virtual
from headway.loadgen import pacing
from headway.loadgen.pacing import pacer
from headway.metrics import (
    e2el_s,
    itl_s,
    output_tokens,
    success_rate,
    token_problems,
    tpot_s,
    ttft_s,
    ttft_sent_s,
)
from headway.transport import Body, Target

virtual = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("virtual_run.py"))))

# Multiples of 1/64 add without rounding: what is exact in the plan is exact in the records.
exact = st.integers(1, 16).map(lambda n: n / 64)
plans = st.builds(FakePlan, ttft_s=exact, itl_s=exact, prefill_s_per_token=exact)


@settings(deadline=None, max_examples=30)
@given(plans, st.integers(1, 5), st.integers(1, 12), st.integers(1, 6), st.integers(1, 4))
def test_closed_loop_gives_the_closed_form_for_every_request(plan, slots, n, outputs, prompt):
    asked = virtual.requests(n, prompt, outputs)
    driven, transport = virtual.drive(plan, asked, virtual.closed(slots, n), begin_s=2.5)
    records = loadgen.records(driven, asked)
    first_s = plan.ttft_s + prompt * plan.prefill_s_per_token
    service_s = first_s + (outputs - 1) * plan.itl_s
    assert transport.most == min(slots, n)
    assert [one.index for one in records] == list(range(n))
    for place, one in enumerate(records):
        assert one.completed
        assert one.due_s == one.sent_s == one.engine_arrived_s == place // slots * service_s
        assert ttft_s(one) == ttft_sent_s(one) == first_s
        assert e2el_s(one) == service_s
        assert one.ended_s == one.due_s + service_s
        assert tpot_s(one) == (plan.itl_s if outputs > 1 else None)
        assert itl_s(one) == [plan.itl_s] * (outputs - 1)
        assert output_tokens(one) == len(one.events) == outputs
        assert one.output_token_ids == tuple(fake_tokens(asked[place].prompt_token_ids, outputs))
        assert [event.engine_at_s for event in one.events] == [e.at_s for e in one.events]
        assert (one.warnings, token_problems(one)) == ((), [])
    assert driven.end_s - driven.start_s == -(-n // slots) * service_s


@settings(deadline=None, max_examples=30)
@given(plans, st.integers(1, 4), st.integers(2, 9))
def test_chunks_of_tokens_are_counted_as_tokens(plan, size, outputs):
    asked = virtual.requests(2, 1, outputs)
    driven, _ = virtual.drive(replace(plan, tokens_per_chunk=size), asked, virtual.closed(1, 2))
    for one in loadgen.records(driven, asked):
        ends = [min(end, outputs) for end in range(size, outputs + size, size)]
        assert [event.num_tokens for event in one.events] == [
            b - a for a, b in zip([0, *ends], ends, strict=False)
        ]
        after_first = outputs - min(size, outputs)
        assert tpot_s(one) == (plan.itl_s if after_first else None)


@pytest.mark.parametrize("process", arrivals.PROCESSES)
@pytest.mark.parametrize("slots", [1, 64])
def test_open_loop_sends_when_due_whatever_the_server_does(process, slots):
    n = 40
    offsets = arrivals.offsets(process, n, 20.0, seed=3)
    asked = virtual.requests(n)
    plan = FakePlan(ttft_s=0.3, itl_s=0.05, slots=slots)
    driven, transport = virtual.drive(plan, asked, virtual.opened(n), offsets)
    records = loadgen.records(driven, asked)
    assert [one.due_s for one in records] == list(offsets)
    assert [one.sent_s for one in records] == pytest.approx(list(offsets), abs=1e-12)
    assert all(one.sent_s >= one.due_s for one in records)
    assert all(one.completed for one in records)
    if slots == 1:
        assert transport.most > 20  # the queue is the engine's, and nobody waited to join it


def test_case_18_latency_counts_from_when_a_request_was_due():
    offsets = arrivals.offsets("constant", 6, 5.0, seed=0)
    asked = virtual.requests(6, 3, 1)
    plan = FakePlan(ttft_s=0.4, slots=1)
    driven, _ = virtual.drive(plan, asked, virtual.opened(6), offsets)
    latency = [ttft_s(one) for one in loadgen.records(driven, asked)]
    assert latency == pytest.approx([0.4, 0.6, 0.8, 1.0, 1.2, 1.4])
    assert sum(latency) / 6 == pytest.approx(0.9)


def test_an_infinite_rate_sends_all_at_once():
    asked = virtual.requests(7)
    offsets = arrivals.offsets("poisson", 7, float("inf"), seed=1)
    driven, transport = virtual.drive(FakePlan(), asked, virtual.opened(7), offsets)
    assert [one.sent_s for one in loadgen.records(driven, asked)] == [0.0] * 7
    assert transport.most == 7


def test_in_closed_loop_the_next_request_is_due_when_its_slot_is_free():
    asked = [replace(one, max_tokens=1 + 4 * one.index) for one in virtual.requests(4)]
    plan = FakePlan(ttft_s=1.0, itl_s=0.25)
    driven, _ = virtual.drive(plan, asked, virtual.closed(2, 4))
    records = loadgen.records(driven, asked)
    assert [one.due_s for one in records] == [0.0, 0.0, 1.0, 2.0]
    assert [one.ended_s for one in records] == [1.0, 2.0, 4.0, 6.0]


def test_a_level_whose_time_is_over_says_so_of_each_request():
    asked = virtual.requests(6, 1, 5)
    plan = FakePlan(ttft_s=1.0, itl_s=0.25)  # 2 s each
    driven, transport = virtual.drive(plan, asked, virtual.closed(2, 6), timeout_s=3.1)
    records = loadgen.records(driven, asked)
    kinds = [one.error.kind if one.error else None for one in records]
    assert kinds == [None, None, "level_timeout", "level_timeout", "not_sent", "not_sent"]
    assert [len(one.events) for one in records] == [5, 5, 1, 1, 0, 0]
    assert [one.ended_s for one in records] == [2.0, 2.0, None, None, None, None]
    assert [one.sent_s for one in records] == [0.0, 0.0, 2.0, 2.0, None, None]
    assert {one.error.origin for one in records if one.error} == {"engine"}
    assert records[2].error.message == "unfinished when the level's 3.1 s were over"
    assert [one.due_s for one in records[4:]] == [3.1, 3.1]
    assert transport.in_flight == 0  # those in flight were told
    assert transport.closed
    completed = sum(one.completed for one in records)
    failed = sum(one.error is not None and one.ended_s is not None for one in records)
    in_flight = sum(one.sent_s is not None and one.ended_s is None for one in records)
    assert completed + failed + in_flight == sum(one.sent_s is not None for one in records) == 4


def test_an_open_schedule_longer_than_its_level_is_no_failure_of_the_engine():
    asked = virtual.requests(4, 1, 1)
    offsets = (0.0, 1.0, 2.0, 3.0)
    driven, _ = virtual.drive(
        FakePlan(ttft_s=0.25), asked, virtual.opened(4), offsets, timeout_s=1.5
    )
    records = loadgen.records(driven, asked)
    assert [one.completed for one in records] == [True, True, False, False]
    assert [one.due_s for one in records] == list(offsets)
    assert {(one.error.kind, one.error.origin) for one in records[2:]} == {("not_sent", "client")}


class Breaking:
    """Stands before a transport; raises for every third request, before or after it was sent."""

    def __init__(self, inner, error):
        self.inner, self.error, self.count = inner, error, 0

    async def send(self, payload, exchange):
        self.count += 1
        if self.count % 3 == 0:
            exchange.sent_s = self.inner.clock()
            raise self.error
        await self.inner.send(payload, exchange)

    async def open(self, count):
        await self.inner.open(count)

    async def close(self):
        await self.inner.close()


@pytest.mark.parametrize("error", [RuntimeError("broken"), OSError(24, "files"), KeyError("k")])
def test_what_the_transport_raises_becomes_a_record_and_the_others_go_on(error):
    asked = virtual.requests(7)
    driven, _ = virtual.drive(
        FakePlan(), asked, virtual.closed(2, 7), wrap=lambda inner: Breaking(inner, error)
    )
    records = loadgen.records(driven, asked)
    failed = [one for one in records if not one.completed]
    assert [one.index for one in failed] == [2, 5]
    assert {(one.error.kind, one.error.origin) for one in failed} == {("client_error", "client")}
    assert failed[0].error.message.startswith(type(error).__name__ + ": ")
    assert all(one.ended_s is not None for one in records)


def test_engine_failures_are_the_engines_and_keep_their_words():
    asked = virtual.requests(6)
    driven, _ = virtual.drive(FakePlan(fail_every=3), asked, virtual.closed(2, 6))
    failed = [one for one in loadgen.records(driven, asked) if not one.completed]
    assert [one.index for one in failed] == [2, 5]
    assert [one.error.message for one in failed] == [
        f"fake: planted failure of request {nth}" for nth in (3, 6)
    ]
    assert {(one.error.kind, one.error.origin) for one in failed} == {("server_error", "engine")}


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("timeout_s", [60.0, 0.001])
def test_the_garbage_collector_rests_during_a_run_and_is_as_before_after_it(enabled, timeout_s):
    during = []

    def note(inner):
        class Noting(Breaking):
            async def send(self, payload, exchange):
                during.append(gc.isenabled())
                await inner.send(payload, exchange)

        return Noting(inner, None)

    try:
        (gc.enable if enabled else gc.disable)()
        virtual.drive(
            FakePlan(), virtual.requests(3), virtual.closed(1, 3), wrap=note, timeout_s=timeout_s
        )
        after = gc.isenabled()
    finally:
        gc.enable()
    assert set(during) == {False}
    assert after is enabled


def test_progress_counts_every_request_once():
    counts = []
    virtual.drive(
        FakePlan(fail_every=2), virtual.requests(5), virtual.closed(2, 5), progress=counts.append
    )
    assert counts == [1] * 5


def test_the_client_knows_its_own_lag_when_the_run_returns():
    async def run():
        transport = virtual.MemoryTransport(FakePlan(), asyncio.get_running_loop().time)
        asked = virtual.requests(3)
        payloads = [loadgen.payload(one, virtual.RECIPIENT) for one in asked]
        driven = await loadgen.drive(
            loadgen.singles(payloads), virtual.closed(1, 3), (), transport, clock=transport.clock
        )
        return dict(driven.client)  # at once: nothing is filled in later

    client = run_virtual(run())
    lags = {f"{of}_lag_p{q}_s" for of in ("loop", "read") for q in (50, 99)}
    assert set(client) == {*lags, "gc_collections", "gc_s", "kernel_stamps"}
    assert client["loop_lag_p99_s"] == pytest.approx(0.0, abs=1e-12)
    assert (client["gc_collections"], client["gc_s"]) == (0, 0)


def test_a_blocked_event_loop_shows_as_lag():
    def blocking(inner):
        class Blocking(Breaking):
            async def send(self, payload, exchange):
                await inner.send(payload, exchange)
                asyncio.get_running_loop()._now_s += (
                    0.5  # as if something had held the loop for half a second
                )

        return Blocking(inner, None)

    driven, _ = virtual.drive(FakePlan(), virtual.requests(3), virtual.closed(1, 3), wrap=blocking)
    assert driven.client["loop_lag_p99_s"] > 0.4


@pytest.mark.parametrize(
    ("can", "present", "absent"),
    [
        (Capabilities(), ["ignore_eos", "stream_options"], ["seed", "return_token_ids"]),
        (Capabilities(fields={"return_token_ids": True, "top_k": -1}), ["return_token_ids"], []),
        (Capabilities(ignore_eos="ban"), ["ignore_eos"], []),
        (Capabilities(ignore_eos="none"), ["stream_options"], ["ignore_eos"]),
        (Capabilities(salt="cache_salt"), [], ["cache_salt"]),
        (Capabilities(usage_in_stream=False), ["ignore_eos"], ["stream_options"]),
    ],
)
def test_only_fields_that_the_endpoint_understands_are_sent(can, present, absent):
    raw = loadgen.payload(Request(0, (5, 6), 7), loadgen.Recipient(Target("h", 1), "m", can))
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\n")
    assert b"authorization" not in head.lower()
    assert (fields["model"], fields["prompt"], fields["max_tokens"]) == ("m", [5, 6], 7)
    assert (fields["stream"], fields["temperature"], fields["top_p"]) == (True, 0.0, 1.0)
    assert set(present) <= set(fields)
    assert not set(absent) & set(fields)


def test_a_salt_is_sent_where_the_endpoint_has_a_field_for_it():
    for salt, name in (("cache_salt", "cache_salt"), (None, "cache_salt")):
        recipient = loadgen.Recipient(Target("h", 1), "m", Capabilities(salt=salt), salt="run 3")
        fields = json.loads(
            loadgen.payload(Request(0, (5,), 7), recipient).partition(b"\r\n\r\n")[2]
        )
        assert fields.get(name) == ("run 3" if salt else None)


def test_what_a_request_asks_for_is_sent():
    request = Request(0, (5,), 7, ignore_eos=False, temperature=0.5, top_p=0.9, seed=11)
    raw = loadgen.payload(request, loadgen.Recipient(Target("h", 1, "/api"), "m", api_key="key"))
    head, _, body = raw.partition(b"\r\n\r\n")
    fields = json.loads(body)
    assert head.startswith(b"POST /api/v1/completions HTTP/1.1\r\n")
    assert b"\r\nAuthorization: Bearer key" in head
    assert (fields["temperature"], fields["top_p"], fields["seed"]) == (0.5, 0.9, 11)
    assert "ignore_eos" not in fields


def test_a_record_says_what_was_asked_whether_it_was_sent_or_not():
    asked = [replace(one, ignore_eos=place > 0) for place, one in enumerate(virtual.requests(3, 5))]
    driven, _ = virtual.drive(FakePlan(), asked, virtual.closed(1, 3))
    driven.sent = driven.sent[:2]
    records = loadgen.records(driven, asked)
    assert [one.asked_prompt_tokens for one in records] == [5, 5, 5]
    assert [one.ignore_eos for one in records] == [False, True, True]
    assert [one.asked_tokens for one in records] == [one.max_tokens for one in asked]
    assert [one.completed for one in records] == [True, True, False]


@pytest.mark.parametrize("spill_bytes", [0, 3000, 20_000])
def test_what_lies_in_a_file_is_what_was_held_in_memory(spill_bytes):
    asked = virtual.requests(9, 3, 6)
    spilled, _ = virtual.drive(
        FakePlan(itl_s=0.01), asked, virtual.closed(3, 9), spill_bytes=spill_bytes
    )
    held, _ = virtual.drive(FakePlan(itl_s=0.01), asked, virtual.closed(3, 9))
    in_memory = [sent.exchange.body.held_bytes for sent in spilled.sent]
    assert (max(in_memory) < 400) is (spill_bytes < 4000)
    assert loadgen.records(spilled, asked) == loadgen.records(held, asked)
    assert spilled.client == held.client


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), st.floats(0, 1e9)), max_size=20))
def test_a_body_comes_back_from_its_file_as_it_went(reads):
    with tempfile.TemporaryFile(buffering=0) as file:
        bodies = []
        for _ in range(3):
            body = Body()
            for data, at_s in reads:
                body.data += data
                body.stamp(at_s, 0.25)
            body.spill(file)
            bodies.append(body)
        for body in bodies:
            assert list(body) == []
            assert list(body.whole()) == [(at_s, data) for data, at_s in reads]
            assert list(body.whole().lags_s) == [0.25] * len(reads)


def test_slots_begin_when_they_are_to():
    asked = virtual.requests(6)
    driven, transport = virtual.drive(
        FakePlan(ttft_s=0.1, itl_s=0.1), asked, virtual.closed(3, 6), [0.0, 0.05, 0.2]
    )
    due_s = [one.due_s for one in loadgen.records(driven, asked)]
    assert due_s[:3] == pytest.approx([0.0, 0.05, 0.2], abs=1e-9)
    assert transport.opened == 3


def test_a_pacer_wakes_in_time_and_never_early():
    async def run():
        late = []
        with pacer(time.monotonic) as pace:
            begun = time.monotonic()
            for number in range(40):
                due_s = begun + 0.0033 * number
                await pace.until(due_s)
                late.append(time.monotonic() - due_s)
        return late

    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            late = runner.run(run())
        assert min(late) >= 0
        assert statistics.median(late) < 0.05


def test_without_a_timer_of_its_own_a_pacer_is_no_earlier(monkeypatch):
    monkeypatch.setattr(pacing, "_timer", lambda: None)
    test_a_pacer_wakes_in_time_and_never_early()


class Refusing:
    """Answers with statuses in their order, the last one for ever; 200 is the fake engine's."""

    def __init__(self, inner, statuses, said=b"unknown field"):
        self.inner, self.statuses, self.said, self.count = inner, list(statuses), said, 0

    async def send(self, payload, exchange):
        status = self.statuses[min(self.count, len(self.statuses) - 1)]
        self.count += 1
        if status == 200:
            await self.inner.send(payload, exchange)
            return
        await asyncio.sleep(0.125)
        exchange.sent_s = exchange.ended_s = self.inner.clock()
        exchange.status = status
        exchange.body.data += self.said
        exchange.body.stamp(self.inner.clock(), 0.0)

    async def open(self, count):
        await self.inner.open(count)

    async def close(self):
        await self.inner.close()


def refused(statuses, level, offsets=()):
    asked, made = virtual.requests(level.num_requests), []

    def wrap(inner):
        made.append(Refusing(inner, statuses))
        return made[0]

    driven, _ = virtual.drive(FakePlan(), asked, level, offsets, wrap=wrap)
    return driven, loadgen.records(driven, asked), made[0].count


@pytest.mark.parametrize("slots", [1, 3])
def test_case_15_a_server_that_refuses_everything_is_not_asked_for_ever(slots):
    driven, records, asked = refused([400], virtual.closed(slots, 40))
    # What is in flight when that is clear still ends.
    assert 2 * slots <= asked <= 3 * slots - 1
    assert driven.stopped == f"all of the first {2 * slots} answers were 400 unknown field"
    kinds = [one.error.kind for one in records]
    assert kinds == ["http_400"] * asked + ["stopped"] * (40 - asked)
    assert {one.error.origin for one in records} == {"engine"}
    assert all(one.error.message == driven.stopped for one in records[asked:])
    assert success_rate(virtual_run(driven, records)) == 0.0


def virtual_run(driven, records):
    run = virtual.measure(FakePlan(), virtual.requests(1), virtual.closed(1, 1))
    return replace(run, level=driven.level, records=records)


def test_case_15_an_open_loop_stops_as_well_and_the_run_is_the_engines_failure():
    level = virtual.opened(40, 10.0)
    driven, records, asked = refused([422], level, [0.1 * k for k in range(40)])
    assert 16 <= asked <= 18
    assert [one.error.kind for one in records[asked:]] == ["stopped"] * (40 - asked)
    assert {one.error.origin for one in records} == {"engine"}
    assert driven.end_s - driven.start_s < 2.0
    assert not any("the client" in one for one in validity.problems(virtual_run(driven, records)))


@pytest.mark.parametrize(
    "statuses",
    [
        [429],  # busy: it may yet answer
        [503],
        [400, 200, 400],  # it took one
        [400, 500],  # not the same
        [200, 400],
        [400, 400, 400, 200],
    ],
)
def test_a_level_is_not_stopped_while_the_server_may_yet_answer(statuses):
    driven, records, asked = refused(statuses, virtual.closed(2, 12))
    assert driven.stopped is None
    assert asked == 12
    assert not [one for one in records if one.error and one.error.kind == "stopped"]
