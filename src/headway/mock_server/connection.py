"""One client's connection: bytes in, with the kernel's stamps, and HTTP requests out of them."""

from __future__ import annotations

import contextlib
import socket
import ssl
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httptools

if TYPE_CHECKING:
    from headway.mock_server.stream import Stream

SO_TIMESTAMPNS = 35  # Linux; the socket module does not name it
READ_BYTES = 256 * 1024
MOST_BODY_BYTES = 64 * 1024 * 1024
MOST_PIPELINED = 64
NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_STAMP = struct.Struct("@ll")
_RESET = struct.pack("ii", 1, 0)


class BadRequest(Exception):
    """What came in is no HTTP request that can be served, in one sentence."""


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request as it came in; `arrived_s` is the kernel's stamp of its last bytes."""

    method: str
    path: str
    body: bytes
    keep_alive: bool
    arrived_s: float | None


class Connection:
    """A non-blocking socket and the parser on it. `accepted_s` is when accept returned.

    `pending` bytes wait for room in the socket, then `then` is called with the moment before the
    last of them was taken. `busy` while a request is answered, `stream` if it is for completions.
    """

    __slots__ = (
        "_body",
        "_body_bytes",
        "_parser",
        "_stamp_s",
        "_url",
        "accepted_s",
        "busy",
        "number",
        "open",
        "pending",
        "send",
        "sock",
        "stream",
        "then",
        "waiting",
    )

    def __init__(self, sock: socket.socket, number: int, accepted_s: float) -> None:
        self.sock = sock
        self.send: Callable[[bytes], int] = sock.send
        self.number = number
        self.accepted_s = accepted_s
        self.open = True
        self.busy = False
        self.stream: Stream | None = None
        self.pending = b""
        self.then: Callable[[float], None] | None = None
        self.waiting: deque[HttpRequest] = deque()
        self._parser = httptools.HttpRequestParser(self)
        self._stamp_s: float | None = None
        self.on_message_begin()

    def read(self) -> bool:
        """Read what is there into `waiting`; False when the client has closed.

        Raises BadRequest, and OSError when the connection is broken.
        """
        try:
            while data := self._receive():
                self._feed(data)
                if not isinstance(self.sock, ssl.SSLSocket):
                    return True  # epoll says so if there is more; TLS may hold it back
        except NOT_NOW:
            return True
        return False

    def _receive(self) -> bytes:
        if isinstance(self.sock, ssl.SSLSocket):
            return self.sock.recv(READ_BYTES)
        data, controls, _, _ = self.sock.recvmsg(READ_BYTES, socket.CMSG_SPACE(_STAMP.size))
        self._stamp_s = None
        for level, kind, value in controls:
            if level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS:
                seconds, nanoseconds = _STAMP.unpack(value[: _STAMP.size])
                # The kernel stamps in wall time. In this order what time passes between the two
                # readings makes the stamp earlier, never later than it was.
                now_ns, wall_ns = time.monotonic_ns(), time.time_ns()
                stamp_ns = seconds * 1_000_000_000 + nanoseconds
                self._stamp_s = (now_ns - (wall_ns - stamp_ns)) / 1e9
        return data

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadRequest(f"this is not HTTP/1.1: {error}") from error
        if self._body_bytes > MOST_BODY_BYTES:
            raise BadRequest(f"the body holds more than {MOST_BODY_BYTES} bytes")
        if len(self.waiting) > MOST_PIPELINED:
            raise BadRequest(f"more than {MOST_PIPELINED} requests are pipelined")

    def on_message_begin(self) -> None:
        """Start a request (called by the parser, like all that follow)."""
        self._url = b""
        self._body: list[bytes] = []
        self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        """Collect the target, which may come in parts."""
        self._url += url

    def on_body(self, body: bytes) -> None:
        """Collect the body."""
        self._body.append(body)
        self._body_bytes += len(body)

    def on_message_complete(self) -> None:
        """Queue the request."""
        self.waiting.append(
            HttpRequest(
                method=self._parser.get_method().decode("latin-1"),
                path=self._url.partition(b"?")[0].decode("latin-1"),
                body=b"".join(self._body),
                keep_alive=self._parser.should_keep_alive(),
                arrived_s=self._stamp_s,
            )
        )
        self._body = []

    def close(self, reset: bool = False) -> None:
        """Close at once; what the kernel has taken still leaves, unless it is a reset."""
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        self.open, self.stream, self.then, self._parser = False, None, None, None
        self.waiting.clear()
        with contextlib.suppress(OSError):
            self.sock.close()
