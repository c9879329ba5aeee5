"""What our client's transport holds in memory for a token event, beside the bytes that came."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

from headway import loadgen, transport
from headway.core import Capabilities, Level
from headway.transport import HttpTransport, Target
from headway.workload import Prompts, Vocabulary, make_requests
from load.server import MODEL, serving

CAN = Capabilities(ids_out=False)


@dataclass(frozen=True, slots=True)
class Held:
    """After a drive, and before anything is parsed: what is allocated that was not before.

    `payload_bytes` are the response bodies as they came.
    """

    events: int
    held_bytes: int
    payload_bytes: int

    @property
    def overhead_per_event_bytes(self) -> float:
        """What is held beside the payload, per token event."""
        return (self.held_bytes - self.payload_bytes) / self.events


def held(
    folder: Path,
    *,
    streams: int = 16,
    requests: int = 64,
    output_tokens: int = 64,
    core: int = 0,
    spill_bytes: int = loadgen.SPILL_BYTES,
) -> Held:
    """Drive a mock server on a core in closed loop and return what that left in memory.

    Every allocation of Python's is traced, which slows the client: a measurement of memory only.
    """
    prompts = Prompts("memory", 16, output_tokens)
    asked = make_requests(prompts, requests, 0, 1, Vocabulary(128, tuple(range(8))))

    def drive(base_url: str, count: int = requests) -> loadgen.Drive:
        target = Target.parse(base_url)
        recipient = loadgen.Recipient(target, MODEL, CAN)
        talks = loadgen.conversations(asked[:count], recipient)
        level = Level("memory", count, concurrency=streams)
        return transport.run(
            loadgen.drive(talks, level, (), HttpTransport(target), spill_bytes=spill_bytes)
        )

    with serving(core, folder) as server:
        # A wave without looking: what is imported and cached on the way is no event's.
        drive(server.base_url, streams)
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            driven = drive(server.base_url)
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    payload = sum(len(sent.exchange.body.whole().data) for sent in driven.sent)
    events = sum(len(record.events) for record in loadgen.records(driven, asked))
    return Held(events, after - before, payload)
