"""Sockets that send requests and stamp what comes back; nothing is parsed but HTTP framing.

A request is bytes before the Run starts. While it runs, each read is stamped on the monotonic
clock and its body bytes are kept; JSON, SSE and text wait until the request has ended. Sockets are
opened by us alone: no proxy variable is ever looked at.
"""

from __future__ import annotations

import asyncio
import errno
import json
import re
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import urlsplit

import httptools

from headway.core import RequestError

# No descriptor, no port: what this machine lacks, whatever the server does.
OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
PRINTABLE = re.compile(r"[!-~]*")


@dataclass(slots=True)
class Exchange:
    """One request on the wire: when it left, every timed piece of the body, how it ended.

    Times are those of `clock`. `chunks` are body bytes with the arrival of the read they came in.
    """

    sent_s: float | None = None
    connect_s: float | None = None
    ended_s: float | None = None
    status: int | None = None
    content_type: str = ""
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    error: RequestError | None = None
    retried: bool = False


class Transport(Protocol):
    """Whatever can carry one prepared request and say what came back."""

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        """Send and wait for the end; failures are written into the exchange, never raised."""

    async def close(self) -> None:
        """Close every idle connection."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, from a base URL such as `http://127.0.0.1:8000` or `https://host/api`."""

    host: str
    port: int
    path: str = ""
    tls: bool = False

    @classmethod
    def parse(cls, base_url: str) -> Target:
        """Read a base URL; raises ValueError with one sentence."""
        try:
            url = urlsplit(base_url)
            port = url.port
        except ValueError as error:
            raise ValueError(f"base_url {base_url!r} is not a URL: {error}") from error
        plain = PRINTABLE.fullmatch(base_url) and not (url.query or url.fragment or url.username)
        if url.scheme not in ("http", "https") or not url.hostname or port == 0 or not plain:
            raise ValueError(f"base_url {base_url!r} must look like http://host:port or .../path")
        port = port or (443 if url.scheme == "https" else 80)
        return cls(url.hostname, port, url.path.rstrip("/"), url.scheme == "https")

    def post(self, path: str, body: Mapping[str, object], headers: Mapping[str, str]) -> bytes:
        """Return the whole request as bytes; raises ValueError for a header that is no line."""
        for name, value in headers.items():
            if "\r" in value or "\n" in value:
                raise ValueError(f"the value of the header {name} holds a line end")
        content = json.dumps(body, separators=(",", ":")).encode()
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [
            f"POST {self.path}{path} HTTP/1.1",
            f"Host: {host}:{self.port}",
            "Content-Type: application/json",
            "Accept: text/event-stream",
            f"Content-Length: {len(content)}",
            *(f"{name}: {value}" for name, value in headers.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + content


class _Connection(asyncio.Protocol):
    """One keep-alive connection; serves one exchange at a time."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.exchange: Exchange | None = None
        self.transport: asyncio.Transport | None = None
        self.last_read_s = 0.0
        self.open = False
        self.answered = False
        self._sized = False
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.open = transport, True

    def begin(self, payload: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send; the future is done when the response ended, or failed."""
        assert self.transport is not None
        self.exchange, self.answered, self._sized = exchange, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        exchange.sent_s = self.last_read_s = self.clock()
        if self.open:
            self.transport.write(payload)
        else:
            self.connection_lost(None)  # as soon as it was made
        return self._done

    def data_received(self, data: bytes) -> None:
        if self.exchange is None:
            # Nobody asked: a server's goodbye to an idle connection, say. It answers no request.
            self.close()
            return
        self.last_read_s = self.clock()
        self.answered = True
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail("malformed_http", f"the server sent malformed HTTP: {error}")

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._sized = True
        if self.exchange is not None and name == b"content-type":
            self.exchange.content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        if self.exchange is not None:
            self.exchange.chunks.append((self.last_read_s, body))

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return  # "100 Continue" and its like: the answer is still to come
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(self.last_read_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        if self.exchange is None:
            return
        if exc is not None:
            self.fail("connection_reset", f"{type(exc).__name__}: {exc}")
        elif not self.answered:
            self.fail("no_response", "the server closed the connection without an answer")
        elif self.exchange.status is None or self._sized:
            self.fail("truncated_stream", "the server closed the connection in mid-response")
        else:
            self._finish(self.clock())  # a body without a length ends with its connection

    def fail(self, kind: str, message: str) -> None:
        """End the exchange with an error and give the connection up."""
        if self.exchange is not None and self.exchange.error is None:
            self.exchange.error = RequestError(kind, message)
        self.close()
        self._finish(self.clock())

    def close(self) -> None:
        """Give the connection up at once, with whatever still waits to be sent on it."""
        self.open = False
        if self.transport is not None:
            self.transport.abort()

    def abandon(self) -> None:
        """Give up a request that nobody waits for any more; its exchange stays as it is."""
        self.exchange = None
        self.close()

    def _finish(self, at_s: float) -> None:
        """Let go of the exchange: what comes now is not part of it."""
        if self.exchange is not None:
            self.exchange.ended_s = at_s
            self.exchange = None
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


class HttpTransport:
    """Streaming HTTP/1.1 with keep-alive; as many connections as requests in flight.

    `idle_timeout_s` bounds the silence on a connection, `connect_timeout_s` the time to open one.
    """

    def __init__(
        self,
        target: Target,
        *,
        clock: Callable[[], float] = time.monotonic,
        idle_timeout_s: float = 120.0,
        connect_timeout_s: float = 10.0,
    ) -> None:
        self.target = target
        self.clock = clock
        self.idle_timeout_s = idle_timeout_s
        self.connect_timeout_s = connect_timeout_s
        self._idle: list[_Connection] = []
        self._ssl = ssl.create_default_context() if target.tls else None

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        """Send on an idle connection or a new one; a stale idle one is replaced once."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                await self._exchange(connection, payload, exchange)
                stale = exchange.error is not None and not connection.answered
                if not stale or exchange.error is None or exchange.error.kind == "read_timeout":
                    return
                # The server closed an idle connection as we used it: no byte of an answer was
                # read, so the request may be sent again, and the record says so.
                exchange.error, exchange.ended_s, exchange.retried = None, None, True
                break
        connection_or_none = await self._connect(exchange)
        if connection_or_none is not None:
            await self._exchange(connection_or_none, payload, exchange)

    async def _connect(self, exchange: Exchange) -> _Connection | None:
        loop = asyncio.get_running_loop()
        start_s = self.clock()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: _Connection(self.clock),
                    self.target.host,
                    self.target.port,
                    ssl=self._ssl,
                )
        except TimeoutError:
            limit = f"no connection within {self.connect_timeout_s} s"
            exchange.error = RequestError("connect_timeout", limit)
        except OSError as error:
            message = f"{type(error).__name__}: {error}"
            # Of a name with several addresses, asyncio raises one error that quotes each.
            refused = f"[Errno {errno.ECONNREFUSED}]" in message
            exchange.error = RequestError(
                "connection_refused" if refused else "connect_failed",
                message,
                "client" if error.errno in OURS else "engine",
            )
        else:
            exchange.connect_s = self.clock() - start_s
            return connection
        exchange.ended_s = self.clock()
        return None

    async def _exchange(self, connection: _Connection, payload: bytes, exchange: Exchange) -> None:
        done = connection.begin(payload, exchange)
        try:
            while not done.done():
                silent_s = self.clock() - connection.last_read_s
                if silent_s >= self.idle_timeout_s:
                    connection.fail("read_timeout", f"no byte for {self.idle_timeout_s} s")
                    break
                await asyncio.wait([done], timeout=self.idle_timeout_s - silent_s)
        finally:
            # Cut off from outside, the answer would go on arriving: hang up, and the server knows.
            if not done.done():
                connection.abandon()
        if connection.open:
            self._idle.append(connection)

    async def close(self) -> None:
        """Close every idle connection."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
