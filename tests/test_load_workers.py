"""Several processes share one schedule: nothing is sent twice, nothing is lost, none is left."""

from __future__ import annotations

import asyncio
import json
import os
import runpy
import signal
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import loadgen, transport
from headway.core import Level, Request, RequestError, RequestRecord
from headway.loadgen import workers
from headway.transport import Target

wire = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("scripted_server.py"))))
ANYWHERE = Target("127.0.0.1", 1)


def share(level: Level, offsets_s=(), target: Target = ANYWHERE, tokens: int = 2) -> loadgen.Share:
    asked = [Request(i, (10 + i, 11), tokens) for i in range(level.num_requests)]
    recipient = loadgen.Recipient(target, "m")
    return loadgen.Share(recipient, tuple(asked), level, tuple(offsets_s), 10.0, 30.0)


def closed(slots: int, n: int) -> Level:
    return Level(f"c{slots}", n, concurrency=slots)


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 9), st.integers(1, 40), st.integers(1, 6))
def test_the_parts_of_a_closed_loop_are_the_whole(slots, n, count):
    begins = tuple(0.01 * slot for slot in range(slots))
    whole = share(closed(slots, n), begins)
    parts = loadgen.split(whole, count)
    assert len(parts) == min(count, slots, n)
    assert sum(part.level.concurrency for part in parts) == slots
    assert sorted(at_s for part in parts for at_s in part.offsets_s) == list(begins)
    assert Counter(one for part in parts for one in part.requests) == Counter(whole.requests)
    for part in parts:
        assert part.level.num_requests == len(part.requests)
        assert part.level.concurrency == len(part.offsets_s)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 100), min_size=1, max_size=40).map(sorted), st.integers(1, 6))
def test_the_parts_of_an_open_loop_are_the_whole_schedule(offsets_s, count):
    whole = share(Level("r1", len(offsets_s), rate_per_s=1.0, arrivals="poisson"), offsets_s)
    sent = [
        (one.index, at_s)
        for part in loadgen.split(whole, count)
        for one, at_s in zip(part.requests, part.offsets_s, strict=True)
    ]
    assert sorted(sent) == list(enumerate(offsets_s))


def test_of_what_workers_say_of_themselves_the_worst_holds():
    parts = [
        loadgen.Measured(1.0, (RequestRecord(1, 0.0, 0.0, 1.0),), {"a": 1.0, "kernel_stamps": 1.0}),
        loadgen.Measured(2.0, (RequestRecord(0, 0.0, 0.0, 2.0),), {"a": 3.0, "kernel_stamps": 0.5}),
    ]
    whole = loadgen.merged(parts)
    assert (whole.span_s, [one.index for one in whole.records]) == (2.0, [0, 1])
    assert whole.client == {"a": 3.0, "kernel_stamps": 0.5, "load_workers": 2.0}


class Counting:
    """A server that notes what was asked of it, and from how many connections."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.connections: set[int] = set()

    async def __call__(self, peer):
        while True:
            _, body = await peer.request()
            self.connections.add(peer.number)
            self.asked.append(json.loads(body)["prompt"][0] - 10)
            await peer.send(wire.answer("a", "b"))


def measured(server, level, offsets_s, count, during=None):
    async def run():
        async with wire.serving(server) as port:
            whole = share(level, offsets_s, Target("127.0.0.1", port))
            done = []
            task = asyncio.create_task(loadgen.measure_with(whole, count, done.append))
            if during is not None:
                await during()
            return await task, done

    return transport.run(run())


@pytest.mark.parametrize("count", [1, 3])
def test_a_closed_loop_over_processes_sends_each_request_once(count):
    server = Counting()
    whole, done = measured(server, closed(4, 14), (), count)
    assert sorted(server.asked) == list(range(14))
    assert [one.index for one in whole.records] == list(range(14))
    assert [one.error for one in whole.records] == [None] * 14
    assert sum(one.completion_tokens for one in whole.records) == 28
    assert len(server.connections) == 4
    assert sum(done) == 14
    assert whole.client.get("load_workers", 1.0) == count


def test_an_open_loop_over_processes_keeps_one_schedule():
    offsets_s = [0.02 * k for k in range(12)]
    level = Level("r50", 12, rate_per_s=50.0, arrivals="constant")
    whole, _ = measured(Counting(), level, offsets_s, 3)
    assert [one.due_s for one in whole.records] == pytest.approx(offsets_s, abs=1e-9)
    assert all(one.sent_s >= one.due_s for one in whole.records)


def children() -> list[int]:
    """Processes of ours that are load workers."""
    found = []
    for entry in Path(f"/proc/{os.getpid()}/task").iterdir():
        found += map(int, (entry / "children").read_text().split())
    return [
        pid
        for pid in found
        if b"headway.loadgen.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


async def silent(peer):
    await peer.request()
    await peer.hung_up()


def test_a_worker_that_dies_fails_its_own_requests_and_is_no_fault_of_the_engine():
    async def kill_one():
        while len(children()) < 2:
            await asyncio.sleep(0.05)
        os.kill(children()[0], signal.SIGKILL)

    whole, _ = measured(Counting(), closed(2, 6), (), 2, kill_one)
    failed = [one.error for one in whole.records if one.error is not None]
    assert len(failed) == 3
    said = "a load worker ended with status -9"
    assert set(failed) == {RequestError("client_error", said, "client")}
    assert children() == []


def test_whoever_stops_waiting_leaves_no_worker():
    async def run():
        async with wire.serving(silent) as port:
            whole = share(closed(2, 2), (), Target("127.0.0.1", port))
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(3.0):
                    await loadgen.measure_with(whole, 2)

    transport.run(run())
    assert children() == []


def test_a_worker_ends_with_its_parent():
    async def run():
        async with workers._started(1) as (process,):
            await workers.tell(process, share(closed(1, 1), (), Target("127.0.0.1", 1)))
            assert (await workers.heard(process))[0] == "ready"
            process.stdin.close()
            return await asyncio.wait_for(process.wait(), 10)

    assert transport.run(run()) == 1
