"""A small HTTP/1.1 server: an asyncio Protocol around the httptools parser.

Its own, and no framework: what the protocol costs is something Headway measures, so the front
does nothing that it does not need. A reply is written in the callback that produced it; every
write of a stream is one HTTP chunk and one `transport.write`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast

import httptools

from headway.engines.host.openai import error_body

MOST_HEADER_BYTES = 64 * 1024
MOST_PIPELINED = 16
# How long a refused client may go on sending: closing at once would reset the connection, and the
# reason would be lost with it.
LINGER_S = 1.0
# A client that lets this much pile up unread is gone or hostile.
MOST_UNREAD_BYTES = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as it came in; `refusal` is (status, sentence) where it can't be served."""

    method: str
    path: str
    body: bytes
    keep_alive: bool
    chunked: bool
    refusal: tuple[int, str] | None = None


Handler = Callable[[HttpRequest, "Reply"], None]


class Reply:
    """The way back for one request: `send` once, or `start`, `write` …, `end`.

    After the client is gone everything here does nothing; `on_disconnect` is called once.
    """

    def __init__(self, connection: Connection, request: HttpRequest) -> None:
        self._connection = connection
        self._request = request
        self._head = b""
        self._keep_alive = request.keep_alive
        self.on_disconnect: Callable[[], None] | None = None
        self.started = False

    def send(
        self,
        status: int,
        body: bytes,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Answer at once with a whole body."""
        sizes = {"Content-Type": content_type, "Content-Length": str(len(body))}
        self.started = True
        self._connection.write(self._status_line(status, {**sizes, **(headers or {})}) + body)
        self._connection.replied(self._keep_alive)

    def refuse(self, status: int, message: str, param: str | None = None, **headers: str) -> None:
        """Answer with an error in OpenAI's shape; `Retry_After` stands for Retry-After."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        self.send(status, error_body(status, message, param), headers=named)

    def start(self, content_type: str) -> None:
        """Begin a stream; its head leaves together with the first piece."""
        headers = {"Content-Type": content_type, "Cache-Control": "no-cache"}
        if self._request.chunked:
            headers["Transfer-Encoding"] = "chunked"
        else:
            self._keep_alive = False  # before HTTP/1.1 only the end of the connection ends a body
        self.started = True
        self._head = self._status_line(200, headers)

    def write(self, *pieces: bytes) -> None:
        """Send pieces of a stream: a chunk each, one write for all."""
        self._connection.write(self._framed(pieces))

    def end(self, *pieces: bytes, keep_alive: bool = True) -> None:
        """Send the last pieces and end the stream; without `keep_alive` the connection too."""
        last = b"0\r\n\r\n" if self._request.chunked else b""
        self._connection.write(self._framed(pieces) + last)
        self._connection.replied(self._keep_alive and keep_alive)

    def _framed(self, pieces: tuple[bytes, ...]) -> bytes:
        head, self._head = self._head, b""
        if not self._request.chunked:
            return b"".join((head, *pieces))
        return b"".join((head, *(b"%x\r\n%b\r\n" % (len(p), p) for p in pieces)))

    def _status_line(self, status: int, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if not self._keep_alive:
            lines.append("Connection: close")
        return "\r\n".join([*lines, "", ""]).encode("latin-1")


class Connection(asyncio.Protocol):
    """One client connection; requests that are pipelined are answered one after the other."""

    def __init__(self, handler: Handler, open_ones: set[Connection], most_body_bytes: int) -> None:
        self._handler = handler
        self._open_ones = open_ones
        self._most_body_bytes = most_body_bytes
        self._parser = httptools.HttpRequestParser(self)
        self._transport: asyncio.Transport | None = None
        self._waiting: deque[HttpRequest] = deque()
        self._reply: Reply | None = None
        self._refused = False
        self._begin()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take a new client in."""
        # uvloop's transports have the methods of asyncio's, but are none of its classes.
        self._transport = tcp = cast(asyncio.Transport, transport)
        self._open_ones.add(self)
        tcp.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        tcp.set_write_buffer_limits(high=MOST_UNREAD_BYTES)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell the reply in progress that nobody reads it any more."""
        self._open_ones.discard(self)
        self._transport = None
        self._waiting.clear()
        if self._reply is not None and self._reply.on_disconnect is not None:
            self._reply.on_disconnect()
        self._reply = None

    def pause_writing(self) -> None:
        """Drop a client that does not read."""
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close once what was written has left."""
        if self._transport is not None:
            self._transport.close()

    def data_received(self, data: bytes) -> None:
        """Parse, then serve: the handler never runs inside the parser, which hides exceptions."""
        if self._refused:
            return
        try:
            self._parser.feed_data(data)
            self._count_headers(len(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._refuse(400, f"this is not HTTP: {error}")
        self._serve_next()

    def write(self, data: bytes) -> None:
        """Send bytes, unless the client is gone."""
        if data and self._transport is not None:
            self._transport.write(data)

    def replied(self, keep_alive: bool) -> None:
        """End the reply in progress, and serve the next request."""
        self._reply = None
        if keep_alive:
            self._serve_next()
        else:
            self._waiting.clear()
            self._close_kindly() if self._refused else self.close()
            self._refused = True

    def _serve_next(self) -> None:
        while self._reply is None and self._waiting and self._transport is not None:
            request = self._waiting.popleft()
            reply = self._reply = Reply(self, request)
            if request.refusal is not None:
                reply.refuse(*request.refusal)
            else:
                self._handler(request, reply)

    def _close_kindly(self) -> None:
        if self._transport is not None and self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S, self.close)

    def _refuse(self, status: int, message: str) -> None:
        if not self._refused:
            self._refused = True
            self._waiting.append(HttpRequest("", "", b"", False, False, (status, message)))

    # What follows is called by the parser.

    def _begin(self) -> None:
        self._url = b""
        self._header_bytes = 0
        self._in_headers = False
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_message_begin(self) -> None:
        """Start a new request."""
        self._begin()
        self._in_headers = True

    def on_url(self, url: bytes) -> None:
        """Collect the target, which may come in parts."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Look at the few headers that matter here."""
        lowered = name.lower()
        if lowered == b"expect" and value.lower() == b"100-continue":
            if self._reply is None and not self._waiting:  # not into the answer before it
                self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif lowered == b"content-length" and value.isdigit():
            self._check_body(int(value))

    def on_headers_complete(self) -> None:
        """Stop counting headers."""
        self._in_headers = False

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body_bytes += len(body)
        self._check_body(self._body_bytes)
        if not self._refused:
            self._body.append(body)

    def on_message_complete(self) -> None:
        """Queue the request."""
        if self._refused:
            return
        if self._parser.should_upgrade():
            self._refuse(400, "there is no other protocol than HTTP/1.1 to upgrade to")
            return
        if len(self._waiting) >= MOST_PIPELINED:
            self._refuse(429, f"more than {MOST_PIPELINED} requests are pipelined on a connection")
            return
        self._waiting.append(
            HttpRequest(
                method=self._parser.get_method().decode("latin-1"),
                path=self._url.split(b"?", 1)[0].decode("latin-1"),
                body=b"".join(self._body),
                keep_alive=self._parser.should_keep_alive(),
                chunked=self._parser.get_http_version() == "1.1",
            )
        )

    def _count_headers(self, size: int) -> None:
        self._header_bytes += size if self._in_headers else 0
        if self._header_bytes > MOST_HEADER_BYTES:
            self._refuse(431, f"the headers hold more than {MOST_HEADER_BYTES} bytes")

    def _check_body(self, size: int) -> None:
        if size > self._most_body_bytes:
            self._refuse(413, f"the body holds more than {self._most_body_bytes} bytes")
