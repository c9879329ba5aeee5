"""The engine process: loads one engine and steps it while there is work.

One that works by itself, an `AsyncEngine`, is served by `async_loop` instead.

Started by the front (`process`), never by hand. Nothing is caught around `step`: an exception ends
this process, loudly, and the front answers every open request with its last line.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headway.engines.contract import AsyncEngine, Engine, Output, Submission
from headway.engines.host import async_loop
from headway.engines.host.inside import Replay
from headway.engines.host.wire import (
    Lines,
    Message,
    out_message,
    read_schedule,
    read_submission,
    ready_message,
    to_line,
)
from headway.engines.models.folder import ModelError, ModelFolder

KINDS: Mapping[str, str] = {
    "hf_naive": "headway.engines.hf:HfNaive",
    "hf_static": "headway.engines.hf:HfStatic",
    "paged": "headway.engines.paged:Paged",
    "vllm": "headway.engines.vllm.asynchronous:Vllm",
    "vllm_offline": "headway.engines.vllm.offline:VllmOffline",
}
READ_BYTES = 1 << 18
MOST_READS = 64
# How long the engine may take to end by itself after its front is gone (a step, a load).
GRACE_S = 4.0


def main() -> None:
    """Load the engine that the arguments name, and serve it until the front closes the socket."""
    parser = argparse.ArgumentParser(prog="headway.engines.host.loop")
    parser.add_argument("kind")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--model-json", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--args", default="{}")
    given = parser.parse_args()
    front = socket.socket(fileno=given.fd)
    threading.Thread(target=_end_with_front, args=(given.fd,), daemon=True).start()
    for name in (signal.SIGTERM, signal.SIGINT):
        # The front gets the same signal and ends this process; as a handler, and not ignored,
        # so that what the engine itself starts does not inherit it.
        signal.signal(name, lambda *_: None)
    try:
        folder = ModelFolder.from_json(json.loads(given.model_json))
        build = find_engine(given.kind)
        engine: Engine | AsyncEngine = build(
            folder, given.dtype, given.device, **json.loads(given.args)
        )
    except (ModelError, ValueError) as error:
        sys.exit(f"{error}")
    if isinstance(engine, AsyncEngine):
        async_loop.serve(engine, front)
        return
    front.sendall(to_line(ready_message(engine.info)))
    Loop(engine, front).run()


def find_engine(kind: str) -> Callable[..., Any]:
    """Return the class of a kind, or of `package.module:Class` seen from the current directory.

    Raises ValueError when there is none.
    """
    module_name, colon, class_name = KINDS.get(kind, kind).partition(":")
    if not colon:
        known = ", ".join([*KINDS, "fake"])
        raise ValueError(f"there is no engine kind {kind!r}: use {known}, or package.module:Class")
    if kind not in KINDS:
        sys.path.insert(0, str(Path.cwd()))
    found: Callable[..., Any] | None = getattr(
        importlib.import_module(module_name), class_name, None
    )
    if found is None:
        raise ValueError(f"module {module_name} has no class {class_name!r}")
    return found


class Loop:
    """Takes in what the front sent, steps, sends what left; arrivals and departures are stamped."""

    def __init__(self, engine: Engine, front: socket.socket) -> None:
        self._engine = engine
        self._front = front
        self._lines = Lines()
        self._arrived_s: dict[int, float] = {}
        self._replay: Replay | None = None

    def run(self) -> None:
        """Serve until the front closes the socket."""
        while (data := self._read()) is not None:
            for message in self._lines.feed(data):
                self._take(message)
            if self._engine.has_work():
                self._send_out(self._engine.step())
            if self._replay is not None:
                self._go_on_with(self._replay)

    def _read(self) -> bytes | None:
        """What is there, which may be nothing while there is work; None when the front is gone."""
        pieces: list[bytes] = []
        idle = not self._engine.has_work()
        next_s = None if self._replay is None else self._replay.next_s
        if idle and next_s is not None:
            select.select([self._front], [], [], max(0.0, next_s - time.monotonic()))
        flags = 0 if idle and next_s is None else socket.MSG_DONTWAIT
        try:
            # A burst of long prompts is more than one read holds; all of it came before this step.
            while len(pieces) < MOST_READS:
                piece = self._front.recv(READ_BYTES, flags)
                if not piece:
                    return None
                pieces.append(piece)
                flags = socket.MSG_DONTWAIT
        except BlockingIOError:
            pass  # nothing more is there
        return b"".join(pieces)

    def _take(self, message: Message) -> None:
        if "add" in message:
            self._add(message["add"])
        elif "abort" in message:
            self._arrived_s.pop(message["abort"], None)
            self._engine.abort(message["abort"])
        elif "replay" in message:
            self._replay = Replay(read_schedule(message["replay"]), time.monotonic())
        elif "stop" in message:
            if self._replay is not None:
                for id in self._replay.in_flight:
                    self._engine.abort(id)
                self._end(self._replay)
        elif "step" in message:
            self._front.sendall(to_line(self._time_step(message["step"])))
        else:
            self._front.sendall(to_line({"stats": dict(self._engine.stats())}))

    def _add(self, fields: Message) -> None:
        submission = read_submission(fields)
        self._arrived_s[submission.id] = time.monotonic()
        self._submit(submission)

    def _go_on_with(self, replay: Replay) -> None:
        """Fill the slots that are free, or answer: nothing of a replay passes through the front."""
        for submission in replay.due(time.monotonic):
            self._submit(submission)
        if replay.done:
            self._end(replay)

    def _end(self, replay: Replay) -> None:
        self._replay = None
        self._front.sendall(to_line({"replayed": replay.answer()}))

    def _submit(self, submission: Submission) -> None:
        try:
            self._engine.add(submission)
        except ValueError as error:
            self._send_out([Output(submission.id, (), "error", str(error))])

    def _time_step(self, asked: Message) -> Mapping[str, object]:
        if self._engine.has_work():
            return {"refused": "a step is timed on an idle engine; this one has work"}
        try:
            return {"seconds": self._engine.time_step(**asked)}
        except ValueError as error:
            return {"refused": str(error)}

    def _send_out(self, outputs: list[Output]) -> None:
        at_s = time.monotonic()
        if self._replay is not None:
            for output in outputs:
                self._replay.left(output, at_s)
        # An engine that works ahead may still have something for a request that was aborted.
        known = [output for output in outputs if output.id in self._arrived_s]
        if known:
            self._front.sendall(to_line(out_message(at_s, known, self._arrived_s)))
        for output in known:
            if output.finish_reason is not None:
                self._arrived_s.pop(output.id, None)


def _end_with_front(fd: int) -> None:
    """End the process when the front is gone, whatever the main thread does (loads, hangs)."""
    poller = select.poll()
    poller.register(fd, 0)  # a hang-up is reported always
    poller.poll()
    time.sleep(GRACE_S)
    os._exit(1)


if __name__ == "__main__":
    main()
