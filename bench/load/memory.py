"""What our client's transport holds in memory for a token event, beside the bytes that came."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from dataclasses import dataclass
from pathlib import Path

from headway import loadgen
from headway.core import Capabilities, Level
from headway.transport import HttpTransport, Target
from headway.workload import Prompts, Vocabulary, make_requests
from load.server import MODEL, serving


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
    folder: Path, *, streams: int = 16, requests: int = 64, output_tokens: int = 64, core: int = 0
) -> Held:
    """Drive a mock server on a core in closed loop and return what that left in memory.

    Every allocation of Python's is traced, which slows the client: a measurement of memory only.
    """
    prompts = Prompts("memory", 16, output_tokens)
    asked = make_requests(prompts, requests, 0, 1, Vocabulary(128, tuple(range(8))))
    level = Level("memory", requests, concurrency=streams)
    with serving(core, folder) as server:
        target = Target.parse(server.base_url)
        can = Capabilities(ids_out=False)
        payloads = [loadgen.payload(request, MODEL, target, can) for request in asked]
        gc.collect()
        tracemalloc.start()
        try:
            before, _ = tracemalloc.get_traced_memory()
            driven = asyncio.run(loadgen.drive(payloads, level, (), HttpTransport(target)))
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    payload = sum(len(piece) for sent in driven.sent for _, piece in sent.exchange.chunks)
    events = sum(len(record.events) for record in loadgen.records(driven, asked))
    return Held(events, after - before, payload)
