"""The load generator on real sockets, against scripted servers: failures, and what is counted."""

from __future__ import annotations

import asyncio
import json
import runpy
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway import loadgen, metrics, validity
from headway.core import Capabilities, Case, Level, Request, Run
from headway.transport import HttpTransport, Target

wire = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("scripted_server.py"))))


def requests(n: int, tokens: int = 2) -> list[Request]:
    return [Request(i, (10 + i, 11), tokens) for i in range(n)]


def measure(script, asked, level, *, can=None, idle_timeout_s=10.0, **options) -> Run:
    async def run() -> loadgen.Drive:
        async with wire.serving(script) as port:
            target = Target("127.0.0.1", port)
            capabilities = can or Capabilities()
            talks = loadgen.conversations(asked, loadgen.Recipient(target, "m", capabilities))
            transport = HttpTransport(target, idle_timeout_s=idle_timeout_s)
            return await loadgen.drive(talks, level, (), transport, **options)

    driven = asyncio.run(run())
    return Run(
        case=Case("a", "m", "w", level.name),
        launch=1,
        attempt=1,
        level=level,
        started_at="",
        span_s=driven.end_s - driven.start_s,
        records=loadgen.records(driven, asked),
        schedule_hash="",
        workload_hash="",
        client={},  # this machine may be busy; that is not the subject here
    )


def closed(concurrency: int, n: int) -> Level:
    return Level(f"c{concurrency}", n, concurrency=concurrency)


def one_record(script, **more):
    return measure(script, requests(1), closed(1, 1), **more).records[0]


async def answers(peer):
    while True:
        await peer.request()
        await peer.send(wire.answer("a", "b"))


def test_a_good_run_is_whole():
    run = measure(answers, requests(6), closed(2, 6))
    assert [one.error for one in run.records] == [None] * 6
    assert [one.completion_tokens for one in run.records] == [2] * 6
    assert [one.index for one in run.records] == list(range(6))
    assert validity.problems(run) == ()


def test_case_2_a_success_without_a_token_is_a_failure_and_no_sample():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *map(wire.chunk, [wire.usage(3, 2), wire.DONE]), wire.LAST)
        await peer.hung_up()

    one = one_record(script)
    assert one.error.kind == "no_token_event"
    assert "claims 2" in one.error.message
    assert (metrics.ttft_s(one), metrics.tpot_s(one)) == (None, None)


def test_case_13_an_end_marker_alone_is_a_failure_and_the_other_counts():
    async def script(peer):
        while True:
            _, body = await peer.request()
            if json.loads(body)["prompt"][0] == 10:
                await peer.send(wire.CHUNKED + wire.chunk(wire.DONE) + wire.LAST)
            else:
                await peer.send(wire.answer("a", "b"))

    run = measure(script, requests(2), closed(1, 2))
    assert [one.error.kind if one.error else None for one in run.records] == [
        "no_choices_received",
        None,
    ]
    assert metrics.success_rate(run) == 0.5
    assert [one for one in map(metrics.ttft_s, run.records) if one is not None] == [
        metrics.ttft_s(run.records[1])
    ]
    # One completed request over the span of both: never two.
    span = run.records[1].events[-1].at_s - run.records[0].due_s
    assert metrics.request_throughput(run) == pytest.approx(1 / span)


TWO = [wire.chunk(wire.token("a")), wire.chunk(wire.token("b"))]


@pytest.mark.parametrize(
    ("end", "kind"),
    [
        ("close", "truncated_stream"),
        ("reset", "connection_reset"),
        ("last chunk", "truncated_stream"),
        ("half event", "malformed_event"),
    ],
)
def test_case_14_a_stream_without_its_end_fails_and_keeps_two_tokens(end, kind):
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *TWO)
        if end == "reset":
            await asyncio.sleep(0.05)
            peer.reset()
        if end == "half event":
            await peer.send(wire.chunk(b'data: {"choi'))
        if end in ("last chunk", "half event"):
            await peer.send(wire.LAST)

    one = one_record(script)
    assert (one.error.kind, one.error.origin) == (kind, "engine")
    assert [event.text for event in one.events] == ["a", "b"]
    assert metrics.ttft_s(one) is None
    assert one.ended_s >= one.events[-1].at_s


@pytest.mark.parametrize(
    ("end", "warnings"),
    [(wire.LAST, ("missing_done",)), (b"", ("missing_done", "truncated_stream"))],
)
def test_case_14_a_finish_without_done_is_a_success_with_a_warning(end, warnings):
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *TWO, wire.chunk(wire.token("", "stop")), end)

    one = one_record(script)
    assert one.error is None
    assert one.warnings == warnings
    assert len(one.events) == 2


def test_an_error_event_is_the_cause_and_the_hang_up_its_symptom():
    async def script(peer):
        await peer.request()
        failure = wire.event({"error": {"message": "out of memory", "code": 500}})
        await peer.send(wire.CHUNKED, TWO[0], wire.chunk(failure))

    one = one_record(script)
    assert (one.error.kind, one.error.message) == ("server_error", "out of memory")
    assert len(one.events) == 1


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_stream_that_the_server_gave_up_is_a_failure(reason):
    async def script(peer):
        await peer.request()
        pieces = [wire.token("a", reason), wire.usage(1, 1), wire.DONE]
        await peer.send(wire.CHUNKED, *map(wire.chunk, pieces), wire.LAST)

    one = one_record(script)
    assert one.error.kind == "aborted"
    assert reason in one.error.message


def test_an_answer_that_is_no_stream_is_named_and_quoted():
    async def script(peer):
        await peer.request()
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 14\r\n\r\n"
        await peer.send(head + b'{"choices":[]}')

    one = one_record(script)
    assert one.error.kind == "not_a_stream"
    assert one.error.message == 'the answer is application/json, no event stream: {"choices":[]}'


async def refuses_ignore_eos(peer):
    while True:
        _, body = await peer.request()
        if "ignore_eos" in json.loads(body):
            refusal = b'{"error":{"message":"unknown field ignore_eos"}}'
            await peer.send(
                b"HTTP/1.1 400 Bad Request\r\nContent-Length: %d\r\n\r\n" % len(refusal) + refusal
            )
        else:
            await peer.send(wire.answer("a", "b"))


def test_case_15_a_refused_field_fails_with_the_servers_words():
    run = measure(refuses_ignore_eos, requests(4), closed(2, 4))
    assert {one.error.kind for one in run.records} == {"http_400"}
    assert all("unknown field ignore_eos" in one.error.message for one in run.records)
    assert all(one.error.origin == "engine" for one in run.records)
    assert metrics.success_rate(run) == 0.0


def test_case_15_a_field_that_is_not_understood_is_not_sent():
    can = Capabilities(ignore_eos="none")
    run = measure(refuses_ignore_eos, requests(4), closed(2, 4), can=can)
    assert metrics.success_rate(run) == 1.0


def test_case_16_a_retry_is_a_warning_of_its_record():
    async def script(peer):
        await peer.request()
        await peer.send(wire.answer("a", "b"))
        if peer.number == 1:
            await peer.request()
            return
        await peer.hung_up()

    first, second = measure(script, requests(2), closed(1, 2)).records
    assert (first.error, first.warnings) == (None, ())
    assert (second.error, second.warnings) == (None, ("retried",))


@pytest.mark.parametrize("concurrency", [1, 3])
def test_case_17_a_stream_that_stalls_ends_the_run_and_keeps_its_token(concurrency):
    async def script(peer):
        while True:
            _, body = await peer.request()
            if json.loads(body)["prompt"][0] == 12:
                await peer.send(wire.CHUNKED, TWO[0])
                await peer.hung_up()
                return
            await peer.send(wire.answer("a", "b"))

    run = measure(script, requests(3), closed(concurrency, 3), idle_timeout_s=0.5)
    good, stalled = run.records[:2], run.records[2]
    assert [one.completed for one in good] == [True, True]
    assert stalled.error.kind == "read_timeout"
    assert "0.5 s" in stalled.error.message
    assert [event.text for event in stalled.events] == ["a"]
    assert (metrics.ttft_s(stalled), metrics.success_rate(run)) == (None, 2 / 3)


def test_after_a_stall_the_next_request_is_due_when_the_slot_was_given_up():
    async def script(peer):
        _, body = await peer.request()
        if json.loads(body)["prompt"][0] == 10:
            await peer.send(wire.CHUNKED, TWO[0])
        else:
            await peer.send(wire.answer("a", "b"))
        await peer.hung_up()

    stalled, following = measure(script, requests(2), closed(1, 2), idle_timeout_s=0.5).records
    assert stalled.error.kind == "read_timeout"
    assert following.due_s == stalled.ended_s
    assert following.due_s - stalled.events[0].at_s >= 0.5
    assert following.completed


def test_a_level_that_is_over_hangs_up_on_what_is_in_flight():
    gone = []

    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, TWO[0])
        await peer.hung_up()
        gone.append(peer.number)

    async def run():
        async with wire.serving(script) as port:
            target = Target("127.0.0.1", port)
            asked = requests(3)
            talks = loadgen.conversations(asked, loadgen.Recipient(target, "m"))
            driven = await loadgen.drive(
                talks, closed(2, 3), (), HttpTransport(target), timeout_s=0.5
            )
            while len(gone) < 2:
                await asyncio.sleep(0.005)
            return loadgen.records(driven, asked)

    records = asyncio.run(asyncio.wait_for(run(), 10))
    kinds = [one.error.kind for one in records]
    assert kinds == ["level_timeout", "level_timeout", "not_sent"]
    assert [len(one.events) for one in records] == [1, 1, 0]


@dataclass
class Gate:
    """A server that answers nobody until `most` requests are with it at once."""

    most: int
    here: int = 0
    peak: int = 0
    full: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, peer):
        while True:
            await peer.request()
            self.here += 1
            self.peak = max(self.peak, self.here)
            if self.here >= self.most:
                self.full.set()
            await self.full.wait()
            await asyncio.sleep(0.01)  # one more than allowed would be seen now
            self.here -= 1
            await peer.send(wire.answer("a", "b"))


def test_case_19_as_many_are_in_flight_as_were_asked_for_and_no_more():
    gate = Gate(128)
    started = time.monotonic()
    run = measure(gate, requests(256), closed(128, 256), timeout_s=60.0)
    assert gate.peak == 128
    assert metrics.success_rate(run) == 1.0
    assert time.monotonic() - started < 60  # and nobody waited for the level's end
    assert not [text for text in validity.problems(run) if "in flight at once" in text]
