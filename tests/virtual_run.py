"""Runs of the load generator on virtual time against the fake engine; loaded by path."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence

from headway import loadgen
from headway.core import Case, Level, Request, Run
from headway.engines.contract import Departure, Submission
from headway.engines.fake import FakeBackend, FakePlan
from headway.engines.virtual_time import run_virtual
from headway.transport import Exchange, Target

RECIPIENT = loadgen.Recipient(Target("fake", 80), "fake")


class MemoryTransport:
    """Carries requests to a FakeBackend in the same loop, and its departures back as SSE bytes.

    `most` is how many were in flight at once, `bodies` what was asked, in order.
    """

    def __init__(self, plan: FakePlan, clock: Callable[[], float]) -> None:
        self.backend = FakeBackend(plan, clock)
        self.clock = clock
        self.bodies: list[dict[str, object]] = []
        self.in_flight = 0
        self.most = 0
        self.closed = False

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        body = json.loads(payload.partition(b"\r\n\r\n")[2])
        submission = Submission(len(self.bodies), tuple(body["prompt"]), body["max_tokens"])
        self.bodies.append(body)
        done = asyncio.Event()
        prompt, counted = len(submission.prompt_token_ids), 0
        exchange.sent_s, exchange.status = self.clock(), 200
        exchange.content_type = "text/event-stream"

        def deliver(left: Departure) -> None:
            nonlocal counted
            counted += len(left.output.token_ids)
            exchange.body.data += _events(left, prompt, counted)
            exchange.body.stamp(self.clock(), 0.0)
            if left.output.finish_reason is not None:
                exchange.ended_s = self.clock()
                done.set()

        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        try:
            self.backend.submit(submission, deliver)
            await done.wait()
        finally:
            self.in_flight -= 1
            self.backend.abort(submission.id)

    async def open(self, count: int) -> None:
        self.opened = count

    async def close(self) -> None:
        self.closed = True


def _events(left: Departure, prompt: int, counted: int) -> bytes:
    output = left.output
    if output.error is not None:
        return _event({"error": {"message": output.error}}) + b"data: [DONE]\n\n"
    ids = list(output.token_ids)
    choice = {"text": "x" * len(ids), "token_ids": ids, "finish_reason": output.finish_reason}
    stamps = {"arrived_s": left.arrived_s, "at_s": left.at_s}
    data = _event({"choices": [choice], "headway": stamps})
    if output.finish_reason is not None:
        claimed = counted if output.counted is None else output.counted
        counts = {"prompt_tokens": prompt, "completion_tokens": claimed}
        data += _event({"choices": [], "usage": counts}) + b"data: [DONE]\n\n"
    return data


def _event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def requests(n: int, prompt_tokens: int = 3, output_tokens: int = 5) -> list[Request]:
    return [
        Request(i, tuple(range(10 + i, 10 + i + prompt_tokens)), output_tokens) for i in range(n)
    ]


def closed(concurrency: int, n: int) -> Level:
    return Level(f"c{concurrency}", n, concurrency=concurrency)


def opened(n: int, rate_per_s: float = 1.0) -> Level:
    return Level("r1", n, rate_per_s=rate_per_s, arrivals="poisson")


def drive(
    plan: FakePlan,
    asked: Sequence[Request],
    level: Level,
    offsets_s: Sequence[float] = (),
    *,
    begin_s: float = 0.0,
    think_s: float = 0.0,
    wrap: Callable[[MemoryTransport], object] = lambda one: one,
    **options: object,
) -> tuple[loadgen.Drive, MemoryTransport]:
    """Drive one level on virtual time, from `begin_s` on; `wrap` may stand before the transport."""

    async def run() -> tuple[loadgen.Drive, MemoryTransport]:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(begin_s)
        transport = MemoryTransport(plan, clock)
        talks = loadgen.conversations(asked, RECIPIENT, think_s)
        driven = await loadgen.drive(
            talks, level, offsets_s, wrap(transport), clock=clock, **options
        )
        return driven, transport

    return run_virtual(run())


def measure(plan: FakePlan, asked: Sequence[Request], level: Level, offsets_s=(), **options) -> Run:
    """Drive one level and return what the night would journal of it."""
    driven, _ = drive(plan, asked, level, offsets_s, **options)
    return Run(
        case=Case("fake", "fake", "w", level.name),
        launch=1,
        attempt=1,
        level=level,
        started_at="",
        span_s=driven.end_s - driven.start_s,
        records=loadgen.records(driven, asked),
        schedule_hash="",
        workload_hash="",
        client=driven.client,
    )
