"""The engine process as the front sees it: started, talked to, noticed when it dies, reaped."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headway.core import EngineInfo
from headway.engines.contract import Departure, Output, Phase, Submission
from headway.engines.host.inside import Schedule
from headway.engines.host.wire import (
    Message,
    Receiver,
    add_message,
    read_departures,
    read_info,
    replay_message,
    to_line,
)

Deliver = Callable[[Departure], None]

# The engine process ends itself within its own grace (`loop`); one that does not is killed.
STOP_S = 5.0
STDERR_S = 1.0


class ProcessBackend:
    """Implements `contract.Backend` with a process of its own, started with `command --fd N`."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._open: dict[int, tuple[Deliver, float]] = {}
        self._controls: deque[asyncio.Future[float]] = deque()
        self._replays: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._stats: deque[asyncio.Future[Mapping[str, float]]] = deque()
        self._last_line = ""
        self._closing = False

    async def start(self) -> EngineInfo:
        """Start the process and wait until it has loaded; RuntimeError says why it did not."""
        loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[EngineInfo] = loop.create_future()
        self._cause: asyncio.Future[str] = loop.create_future()
        ours, theirs = socket.socketpair()
        reader, writer = os.pipe()
        with theirs:
            # A pipe of our own: asyncio's would let `wait` go on until everything that the process
            # started has closed it, too.
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                "--fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stderr=writer,
            )
        os.close(writer)
        said = asyncio.StreamReader()
        pipe, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(said), os.fdopen(reader, "rb")
        )
        self._watching = loop.create_task(self._watch(self._process, said, pipe))
        transport, _ = await loop.create_connection(lambda: Receiver(self._take), sock=ours)
        self._transport = transport
        return await self._ready

    def submit(self, submission: Submission, deliver: Deliver) -> None:
        """Hand a request over."""
        self._open[submission.id] = (deliver, asyncio.get_running_loop().time())
        self._send(add_message(submission))

    def abort(self, submission_id: int) -> None:
        """Stop working on a request."""
        if self._open.pop(submission_id, None) is not None:
            self._send({"abort": submission_id})

    async def control(self, phase: Phase, batch: int, length: int) -> float:
        """Time one step in the engine process."""
        if self._cause.done():
            raise RuntimeError(self._cause.result())
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._controls.append(future)
        self._send({"step": {"phase": phase, "batch": batch, "length": length}})
        return await future

    async def replay(self, schedule: Schedule) -> dict[str, Any]:
        """Have the engine process serve a schedule by itself."""
        if self._cause.done():
            raise RuntimeError(self._cause.result())
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replays.append(future)
        self._send(replay_message(schedule))
        try:
            return await future
        except asyncio.CancelledError:
            self._send({"stop": True})  # it answers all the same
            raise

    async def stats(self) -> Mapping[str, float]:
        """Ask the engine process; it answers between two steps."""
        if self._cause.done():
            return {}
        future: asyncio.Future[Mapping[str, float]] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send({"stats": True})
        return await future

    async def ended(self) -> str:
        """Return why the process ended, when nobody asked it to."""
        return await asyncio.shield(self._cause)

    async def close(self) -> None:
        """Close the socket, which ends the process; kill it where that takes too long."""
        self._closing = True
        if self._transport is not None:
            self._transport.close()
        if self._process is None or self._watching is None:
            return
        try:
            await asyncio.wait_for(self._process.wait(), STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await self._watching

    def _send(self, message: Mapping[str, object]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(to_line(message))

    def _take(self, message: Message) -> None:
        if "out" in message:
            for departure in read_departures(message):
                self._deliver(departure)
        elif "ready" in message:
            self._ready.set_result(read_info(message["ready"]))
        elif "seconds" in message:
            self._controls.popleft().set_result(message["seconds"])
        elif "refused" in message:
            self._controls.popleft().set_exception(ValueError(message["refused"]))
        elif "replayed" in message:
            future = self._replays.popleft()
            if not future.done():  # nobody waits for one that was stopped
                future.set_result(message["replayed"])
        else:
            self._stats.popleft().set_result(message["stats"])

    def _deliver(self, departure: Departure) -> None:
        output = departure.output
        entry = self._open.get(output.id)
        if entry is None:
            return  # aborted here, and not yet there
        if output.finish_reason is not None:
            del self._open[output.id]
        entry[0](departure)

    async def _watch(
        self,
        process: asyncio.subprocess.Process,
        said: asyncio.StreamReader,
        pipe: asyncio.BaseTransport,
    ) -> None:
        """Wait for the end of the process, and tell everyone who waits for it."""
        reading = asyncio.create_task(self._pass_stderr_on(said))
        status = await process.wait()
        # What the process started may keep its stderr open; its last line is there by now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, STDERR_S)
        pipe.close()
        if not self._closing:
            self._fail_all(status)

    def _fail_all(self, status: int) -> None:
        while_loading = "" if self._ready.done() else " while loading"
        cause = f"engine process ended with status {status}{while_loading}: {self._last_line}"
        self._cause.set_result(cause)
        if not self._ready.done():
            self._ready.set_exception(RuntimeError(cause))
        now_s = asyncio.get_running_loop().time()
        for id, (deliver, submitted_s) in list(self._open.items()):
            deliver(Departure(Output(id, (), "error", cause), now_s, submitted_s))
        self._open.clear()
        for control in self._controls:
            control.set_exception(RuntimeError(cause))
        for replay in self._replays:
            if not replay.done():
                replay.set_exception(RuntimeError(cause))
        for stats in self._stats:
            stats.set_result({})

    async def _pass_stderr_on(self, said: asyncio.StreamReader) -> None:
        rest = b""
        while data := await said.read(1 << 16):
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
            rest = (rest + data)[-4096:]
            lines = [line for line in rest.decode("utf-8", "replace").splitlines() if line.strip()]
            self._last_line = lines[-1].strip() if lines else self._last_line
