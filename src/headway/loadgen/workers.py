"""Load from more than one core: processes that send their shares of one schedule.

A worker is told its share, says when its connections are made, and is told the time at which all
begin: one of this machine's monotonic clock, which its processes share. It measures by itself and
returns records; no latency is ever taken between two of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import struct
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from typing import Any

from headway.core import RequestError, RequestRecord
from headway.loadgen.drive import Progress
from headway.loadgen.share import Measured, Share, measure, merged, split

# From the moment that the last worker is ready to the moment that all begin.
LEAD_S = 0.1
SIZE = struct.Struct("!Q")


async def measure_with(share: Share, workers: int, progress: Progress = lambda _: None) -> Measured:
    """Send a share from so many processes; one is this one."""
    if workers == 1:
        return await measure(share, progress)
    parts = split(share, workers)
    async with _started(len(parts)) as processes:
        ready = asyncio.Barrier(len(parts) + 1)
        start: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        talks = [
            asyncio.create_task(_talk(process, part, ready, start, progress))
            for process, part in zip(processes, parts, strict=True)
        ]
        await ready.wait()
        start.set_result(time.monotonic() + LEAD_S)
        return merged(await asyncio.gather(*talks))


@contextlib.asynccontextmanager
async def _started(count: int) -> AsyncIterator[list[Process]]:
    """Start workers; none is left when the block ends, however it ends."""
    processes: list[Process] = []
    try:
        for _ in range(count):
            processes.append(
                await asyncio.create_subprocess_exec(
                    sys.executable,
                    *("-m", "headway.loadgen.worker"),
                    stdin=PIPE,
                    stdout=PIPE,
                    # A terminal's SIGINT is for us, who end them.
                    start_new_session=True,
                )
            )
        yield processes
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


async def _talk(
    process: Process,
    share: Share,
    ready: asyncio.Barrier,
    start: asyncio.Future[float],
    progress: Progress,
) -> Measured:
    """Hand a worker its share and the time to begin; return what it measured.

    The barrier is passed in any case: a worker that died keeps nobody waiting.
    """
    waited = False
    try:
        await tell(process, share)
        while True:
            kind, value = await heard(process)
            if kind == "ready":
                waited = True
                await ready.wait()
                await tell(process, await asyncio.shield(start))
            elif kind == "progress":
                progress(value)
            else:
                assert isinstance(value, Measured)
                return value
    except (asyncio.IncompleteReadError, ConnectionError):
        if not waited:
            await ready.wait()
        return _lost(share, await process.wait())


def _lost(share: Share, status: int) -> Measured:
    """Return a failure of ours for every request of a worker that died."""
    error = RequestError("client_error", f"a load worker ended with status {status}", "client")
    found = tuple(RequestRecord(r.index, 0.0, None, None, error=error) for r in share.requests)
    return Measured(0.0, found)


async def tell(process: Process, value: object) -> None:
    """Send a value to a worker."""
    assert process.stdin is not None
    process.stdin.write(framed(value))
    await process.stdin.drain()


async def heard(process: Process) -> Any:
    """Return the next thing that a worker says; raises IncompleteReadError when it has ended."""
    assert process.stdout is not None
    size = SIZE.unpack(await process.stdout.readexactly(SIZE.size))[0]
    return pickle.loads(await process.stdout.readexactly(size))


def framed(value: object) -> bytes:
    """Return a value with its length, as processes of one Headway send it to each other."""
    data = pickle.dumps(value)
    return SIZE.pack(len(data)) + data
