"""What is answered to whom: requests in, answers and planned faults out."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import headway
from headway import atomic, codec
from headway.mock_server import asked as asks
from headway.mock_server.connection import Connection, HttpRequest
from headway.mock_server.dialects import Answer, Writer, compact, error_of
from headway.mock_server.loop import Loop
from headway.mock_server.plan import Plan
from headway.mock_server.stream import JSON, STREAM_HEAD, Stream, head_of
from headway.mock_server.timing import Timing
from headway.mock_server.truth import Ended

BAD_CHUNK = b"zz\r\ndata: {}\n\n\r\n"
ENDPOINTS = {"/v1/completions": False, "/v1/chat/completions": True}


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server plays, and where its log goes (None: it has none)."""

    writer: Writer
    timing: Timing
    plan: Plan
    log: Path | None = None


class Server:
    """Answers on a listening socket until it is told to stop; `streams` are all its requests."""

    def __init__(
        self, settings: Settings, listener: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self.settings = settings
        self.streams: list[Stream] = []
        self._loop = Loop(self, listener, tls)

    def run(self, wake: socket.socket, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping` says so; `wake` becomes readable when a signal came."""
        self._loop.run(wake, stopping)
        for stream in self.streams:
            if stream.ended is None:
                self._end(stream, "stopped")
        self._loop.close()

    def serve(self, connection: Connection) -> None:
        """Answer the next request that waits, if none is being answered."""
        while connection.open and not connection.busy and connection.waiting:
            connection.busy = True
            request = connection.waiting.popleft()
            chat = ENDPOINTS.get(request.path)
            if chat is None or request.method != "POST":
                self._answer_plainly(connection, request)
            else:
                self._take(connection, request, chat)

    def _take(self, connection: Connection, request: HttpRequest, chat: bool) -> None:
        """Number a request for completions, and begin its answer."""
        refusal: asks.RefusedError | None = None
        try:
            asked = asks.parse(chat, request.body)
        except asks.RefusedError as error:
            refusal = error
        stream = Stream(
            number=len(self.streams) + 1,
            chat=chat,
            connection=connection,
            keep_alive=request.keep_alive,
            arrived_s=request.arrived_s,
            parsed_s=time.monotonic(),
        )
        self.streams.append(stream)
        connection.stream = stream
        if refusal is not None:
            self._end(stream, "refused")
            body = compact(error_of(refusal.status, refusal.message))
            self._reply(connection, refusal.status, body, stream.keep_alive)
            return
        stream.answer = Answer(self.settings.writer, asked, stream.number, stream.parsed_s)
        stream.fault = self.settings.plan.find(stream.number, asked)
        stream.prepare(self.settings.timing)
        self._begin(stream)

    def _begin(self, stream: Stream) -> None:
        assert stream.answer is not None
        fault, connection = stream.fault, stream.connection
        if fault is not None and fault.status is not None:
            told = compact(error_of(fault.status, fault.message))
            self._end(stream, "fault")
            body = told if fault.body is None else fault.body.encode()
            self._reply(connection, fault.status, body, stream.keep_alive)
        elif fault is not None and fault.kind == "no_answer":
            pass  # nothing is due, until the client gives up
        elif fault is not None and fault.kind in ("reset", "close") and fault.after_tokens is None:
            self._end(stream, "fault")
            self._loop.drop(connection, reset=fault.kind == "reset")
        elif stream.answer.asked.stream:
            head = STREAM_HEAD + stream.answer.early()
            self._loop.send(
                connection, head, lambda _: self._loop.schedule(stream, stream.parsed_s)
            )
        else:
            self._loop.schedule(stream, stream.parsed_s)

    def cut_off(self, stream: Stream) -> None:
        """Do what was planned in place of the write that is due now."""
        assert stream.answer is not None
        assert stream.fault is not None
        connection, kind = stream.connection, stream.fault.kind
        streamed = stream.answer.asked.stream
        message = stream.fault.message

        def ended(_: float) -> None:
            self._end(stream, "fault")
            if kind == "error_event" and stream.keep_alive:
                self._free(connection)
            else:
                self._loop.drop(connection)

        if kind == "reset":
            self._end(stream, "fault")
            self._loop.drop(connection, reset=True)
        elif kind == "close":
            ended(0.0)
        elif kind == "bad_chunk":
            self._loop.send(connection, (b"" if streamed else STREAM_HEAD) + BAD_CHUNK, ended)
        elif streamed:
            self._loop.send(connection, stream.answer.error(message), ended)
        else:
            self._end(stream, "fault")
            self._reply(connection, 500, compact(error_of(500, message)), stream.keep_alive)

    def _answer_plainly(self, connection: Connection, request: HttpRequest) -> None:
        """Answer what is not about completions, and stands in no log."""
        model, created = self.settings.writer.model, self.settings.writer.created
        asked, status, kind = (request.method, request.path), 200, JSON
        if asked in (("GET", "/health"), ("GET", "/ping")):
            body = b""
        elif asked == ("GET", "/v1/models"):
            card = {"id": model, "object": "model", "created": created, "owned_by": "headway"}
            # `root` is where vllm bench serve looks for a tokenizer that nobody named.
            body = compact({"object": "list", "data": [{**card, "root": model}]})
        elif asked == ("GET", "/version"):
            body = compact({"version": f"headway {headway.__version__}"})
        elif asked == ("GET", "/metrics"):
            kind = "text/plain; version=0.0.4"
            body = b"# TYPE mock_requests_total counter\n"
            body += b"mock_requests_total %d\n" % len(self.streams)
        elif asked == ("POST", "/mock/log"):
            status, told = self._log_now()
            body = compact(told)
        else:
            status, body = 404, compact(error_of(404, f"there is no {' '.join(asked)} here"))
        self._reply(connection, status, body, request.keep_alive, kind)

    def _log_now(self) -> tuple[int, dict[str, object]]:
        if self.settings.log is None:
            return 400, error_of(400, "the server was started without --log")
        running = sum(stream.ended is None for stream in self.streams)
        if running:
            return 409, error_of(409, f"{running} requests are being answered: ask again later")
        try:
            self.write_log()
        except OSError as error:
            return 500, error_of(500, f"{self.settings.log}: {error.strerror}")
        return 200, {"log": str(self.settings.log), "requests": len(self.streams)}

    def write_log(self) -> None:
        """Write every request's record, if there is a log to write; raises OSError."""
        if self.settings.log is not None:
            records = (stream.record(self.settings.timing) for stream in self.streams)
            lines = (json.dumps(codec.encode(record)) + "\n" for record in records)
            atomic.write_lines(self.settings.log, lines)

    def refuse(self, connection: Connection, message: str) -> None:
        """Answer bytes that are no request; in the middle of an answer there is no place for it."""
        if connection.busy:
            self._loop.lose(connection)
        else:
            connection.busy = True
            connection.waiting.clear()
            self._reply(connection, 400, compact(error_of(400, message)), keep_alive=False)

    def _reply(
        self,
        connection: Connection,
        status: int,
        body: bytes,
        keep_alive: bool,
        kind: str = JSON,
    ) -> None:
        after = self._free if keep_alive else self._loop.drop
        head = head_of(status, len(body), kind, keep_alive)
        self._loop.send(connection, head + body, lambda _: after(connection))

    def done(self, stream: Stream) -> None:
        """Note that all of an answer was written."""
        self._end(stream, "done")
        if stream.keep_alive:
            self._free(stream.connection)
        else:
            self._loop.drop(stream.connection)

    def _free(self, connection: Connection) -> None:
        connection.busy = False
        self.serve(connection)

    def _end(self, stream: Stream, ended: Ended) -> None:
        stream.end(ended, time.monotonic())
        stream.connection.stream = None

    def gone(self, stream: Stream) -> None:
        """Note that the client of a stream has left."""
        self._end(stream, "client_gone")
