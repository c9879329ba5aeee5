"""What one process sends, and what came of it; several processes share one schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headway import sse
from headway.arrivals import deal
from headway.core import Level, Request, RequestRecord
from headway.loadgen.conversation import conversations, in_sessions
from headway.loadgen.drive import Begin, Progress, drive
from headway.loadgen.payload import Recipient
from headway.loadgen.records import records
from headway.transport import HttpTransport


@dataclass(frozen=True, slots=True)
class Share:
    """Requests, whom they are for, and when they leave; see `drive` for `offsets_s`."""

    recipient: Recipient
    requests: tuple[Request, ...]
    level: Level
    offsets_s: tuple[float, ...] = ()
    idle_timeout_s: float = 120.0
    timeout_s: float = 3600.0
    think_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Measured:
    """What became of the requests; times count from the start that all processes share.

    `start_s` is that start on the machine's monotonic clock.
    """

    span_s: float
    records: tuple[RequestRecord, ...]
    client: dict[str, float] = field(default_factory=dict)
    start_s: float = 0.0


async def measure(
    share: Share, progress: Progress = lambda _: None, begin: Begin | None = None
) -> Measured:
    """Send a share in this process, and parse what came back."""
    transport = HttpTransport(share.recipient.target, idle_timeout_s=share.idle_timeout_s)
    driven = await drive(
        conversations(share.requests, share.recipient, share.think_s),
        share.level,
        share.offsets_s,
        transport,
        timeout_s=share.timeout_s,
        progress=progress,
        begin=begin,
    )
    found = records(driven, share.requests)
    span_s, client = driven.end_s - driven.start_s, driven.client | _seen(found)
    return Measured(span_s, found, client, driven.start_s)


def _seen(found: Sequence[RequestRecord]) -> dict[str, float]:
    """Return what the records say of the client: events read together, connections made late."""
    said = {}
    events = sum(len(one.events) for one in found)
    if events:
        said["merged_events"] = sum(sse.merged(one.events) for one in found) / events
    connects = [one.connect_s for one in found if one.connect_s is not None]
    if connects:
        said |= {"connections_made": float(len(connects)), "connect_max_s": max(connects)}
    return said


def split(share: Share, workers: int) -> tuple[Share, ...]:
    """Deal a share out to so many processes, or to as many as there is something for.

    Open loop: every N-th conversation with its own time, so that together they are the one
    schedule. Closed loop: every N-th slot, and every N-th conversation for them to take.
    """
    slots, talks = share.level.concurrency, in_sessions(share.requests)
    workers = min(workers, len(talks), *([] if slots is None else [slots]))
    parts = []
    for worker in range(workers):
        own = [one for talk in deal(talks, worker, workers) for one in talk]
        if slots is None:
            level, times = share.level, _of(own, share)
        else:
            times = deal(share.offsets_s or (0.0,) * slots, worker, workers)
            level = replace(share.level, concurrency=len(times))
        level = replace(level, num_requests=len(own))
        parts.append(replace(share, requests=tuple(own), level=level, offsets_s=tuple(times)))
    return tuple(parts)


def _of(requests: Sequence[Request], share: Share) -> Sequence[float]:
    """Return the times of some of a share's requests."""
    times_s = dict(zip(share.requests, share.offsets_s, strict=True))
    return [times_s[one] for one in requests]


def merged(parts: Sequence[Measured]) -> Measured:
    """Put the parts together: every record once, in the order of the requests.

    Of what the processes say of themselves the worst holds: each measured a part of the Run.
    """
    found = sorted((one for part in parts for one in part.records), key=lambda one: one.index)
    names = dict.fromkeys(name for part in parts for name in part.client)
    client = {}
    for name in names:
        values = [part.client[name] for part in parts if name in part.client]
        client[name] = min(values) if name == "kernel_stamps" else max(values)
    client["load_workers"] = float(len(parts))
    span_s, start_s = (max(of) for of in zip(*((p.span_s, p.start_s) for p in parts), strict=True))
    return Measured(span_s, tuple(found), client, start_s)
