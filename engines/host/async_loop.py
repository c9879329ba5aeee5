"""The engine process of an engine that works by itself, in an event loop (`contract.AsyncEngine`).

It is stamped like one that is stepped: arrivals where a request is handed over, departures where
tokens leave the engine's stream. Nothing but a refusal is caught: any other exception ends this
process, loudly, and the front answers every open request with its last line.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import time
from collections.abc import Callable, Coroutine

from headway.engines.contract import AsyncEngine, Departure, Output, Submission
from headway.engines.host.inside import Schedule, replay
from headway.engines.host.wire import (
    Message,
    Receiver,
    out_message,
    read_schedule,
    read_submission,
    ready_message,
    to_line,
)

Deliver = Callable[[Departure], None]
# How long an engine may take to let go of what it still serves.
PARTING_S = 1.0


def loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """Return what makes the fastest event loop there is; None for Python's own."""
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def serve(engine: AsyncEngine, front: socket.socket) -> None:
    """Serve until the front closes the socket; ends the process when the engine does."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        cause = runner.run(AsyncLoop(engine).run(front))
    if cause is not None:
        sys.exit(cause)


class AsyncLoop:
    """Hands over what the front sent, and sends what left."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._serving: dict[int, asyncio.Task[None]] = {}
        self._asked: set[asyncio.Task[None]] = set()
        self._replay: asyncio.Task[None] | None = None

    async def run(self, front: socket.socket) -> str | None:
        """Serve; return why the engine ended by itself, or None when the front is gone."""
        loop = asyncio.get_running_loop()
        self._broken: asyncio.Future[None] = loop.create_future()
        gone: asyncio.Future[None] = loop.create_future()
        ending: asyncio.Task[str] | None = None
        try:
            try:
                info = await self._engine.start()
            except ValueError as error:
                return str(error)
            ending = loop.create_task(self._engine.ended())
            front.setblocking(False)
            receiver = Receiver(self._take, lambda: gone.set_result(None))
            self._front, _ = await loop.create_connection(lambda: receiver, sock=front)
            self._front.write(to_line(ready_message(info)))
            await asyncio.wait((gone, ending, self._broken), return_when=asyncio.FIRST_COMPLETED)
            if self._broken.done():
                self._broken.result()
            return ending.result() if ending.done() else None
        finally:
            # There is nobody left to read what is still served: each is let go, as by an abort.
            tasks = [*self._serving.values(), *self._asked, *([ending] if ending else [])]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks, timeout=PARTING_S)
            await self._engine.close()

    def _take(self, message: Message) -> None:
        if "add" in message:
            self._submit(read_submission(message["add"]), self._send)
        elif "abort" in message:
            self._abort(message["abort"])
        elif "replay" in message:
            self._replay = self._ask(self._tell_replay(read_schedule(message["replay"])))
        elif "stop" in message:
            if self._replay is not None and not self._replay.done():
                self._replay.cancel()
                self._front.write(to_line({"replayed": {}}))  # the front waits for one line
        elif "step" in message:
            refused = "this engine decides itself when it does a step: none can be timed"
            self._front.write(to_line({"refused": refused}))
        else:
            self._ask(self._tell_stats())

    def _submit(self, submission: Submission, deliver: Deliver) -> None:
        task = self._start(self._serve(submission, deliver, time.monotonic()))
        self._serving[submission.id] = task
        task.add_done_callback(lambda _: self._serving.pop(submission.id, None))

    def _abort(self, submission_id: int) -> None:
        if (serving := self._serving.get(submission_id)) is not None:
            serving.cancel()

    def _ask(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = self._start(work)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        return task

    def _start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._check)
        return task

    def _check(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _serve(self, submission: Submission, deliver: Deliver, arrived_s: float) -> None:
        def leave(output: Output) -> None:
            deliver(Departure(output, time.monotonic(), arrived_s))

        try:
            async with contextlib.aclosing(self._engine.generate(submission)) as outputs:
                async for output in outputs:
                    leave(output)
        except ValueError as error:
            leave(Output(submission.id, (), "error", str(error)))

    def _send(self, departure: Departure) -> None:
        output, arrived_s = departure.output, {departure.output.id: departure.arrived_s}
        self._front.write(to_line(out_message(departure.at_s, [output], arrived_s)))

    async def _tell_replay(self, schedule: Schedule) -> None:
        answer = await replay(schedule, self._submit, self._abort, time.monotonic)
        self._front.write(to_line({"replayed": answer}))

    async def _tell_stats(self) -> None:
        self._front.write(to_line({"stats": dict(await self._engine.stats())}))
