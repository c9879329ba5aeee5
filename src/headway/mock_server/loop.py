"""The loop: one thread, one epoll, one heap of due times.

A token costs one look at the clock, one `send` and one step of the heap; its bytes were encoded
before. When the loop falls behind, it writes as soon as it can, earliest due first.
"""

from __future__ import annotations

import math
import select
import socket
import ssl
import time
from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from typing import Protocol

from headway.mock_server.connection import NOT_NOW, SO_TIMESTAMPNS, BadRequest, Connection
from headway.mock_server.stream import Stream
from headway.mock_server.timer import Timer

# So close before a due time the loop looks again and again: waking up takes about as long.
SPIN_S = 50e-6
# After so many writes or accepts in a row the other has its turn.
MOST_WRITES = 256
MOST_ACCEPTS = 8
MOST_EVENTS = 64
Then = Callable[[float], None]


class Handler(Protocol):
    """Whoever answers: told what the loop saw, and what has become due."""

    def serve(self, connection: Connection) -> None:
        """Requests wait, unless one is being answered."""

    def refuse(self, connection: Connection, message: str) -> None:
        """Bytes came that are no request; nothing can follow them."""

    def cut_off(self, stream: Stream) -> None:
        """The fault of a stream is due."""

    def done(self, stream: Stream) -> None:
        """The last token of a stream was written."""

    def gone(self, stream: Stream) -> None:
        """The client has left in mid-answer, and the connection is closed already."""


class Loop:
    """Serves a listening socket until it is told to stop; raises OSError where it cannot."""

    def __init__(
        self, handler: Handler, listener: socket.socket, tls: ssl.SSLContext | None = None
    ) -> None:
        self._handler = handler
        self._tls = tls
        self._listener = listener
        listener.setblocking(False)
        # What is accepted inherits both. The kernel starts to stamp some time after the first
        # socket asked for it, so it is asked before anybody connects.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listener.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._timer = Timer()
        self._epoll = select.epoll()
        self._epoll.register(listener, select.EPOLLIN)
        self._epoll.register(self._timer.fd, select.EPOLLIN | select.EPOLLET)
        self._connections: dict[int, Connection] = {}
        self._accepted = 0
        self._heap: list[tuple[float, int, Stream]] = []
        self._timer_s = 0.0

    def run(self, wake: socket.socket, stopping: Callable[[], bool]) -> None:
        """Serve until `stopping` says so; `wake` becomes readable when a signal came."""
        self._epoll.register(wake, select.EPOLLIN)
        while not stopping():
            self._write_due()
            for fd, events in self._epoll.poll(self._timeout_s(), MOST_EVENTS):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == wake.fileno():
                    wake.recv(64)
                elif (connection := self._connections.get(fd)) is not None:
                    self._ready(connection, events)
                self._write_due()

    def _timeout_s(self) -> float:
        """Return 0 when a write is due at once, else -1, with the timer set."""
        if not self._heap:
            return -1.0
        due_s = self._heap[0][0]
        if due_s - time.monotonic() <= SPIN_S:
            return 0.0
        if due_s != self._timer_s and due_s != math.inf:
            self._timer.set(due_s - SPIN_S / 2)  # surely within the spin when it wakes
            self._timer_s = due_s
        return -1.0

    def _write_due(self) -> None:
        heap, clock = self._heap, time.monotonic
        for _ in range(MOST_WRITES):
            if not heap:
                return
            due_s, number, stream = heap[0]
            now_s = clock()
            if due_s > now_s:
                return
            if stream.ended is not None:
                heappop(heap)
                continue
            if stream.left == 0:
                heappop(heap)
                self._handler.cut_off(stream)
                continue
            data = next(stream.chunks)
            try:
                sent = stream.connection.send(data)
            except NOT_NOW:
                sent = 0
            except OSError:
                heappop(heap)
                self.lose(stream.connection)
                continue
            if sent < len(data):
                heappop(heap)
                stream.blocked_bytes += len(data) - sent
                self._wait(stream.connection, data[sent:], self._then_next(stream, due_s))
                continue
            stream.writes.append(now_s)
            stream.left -= 1
            if stream.left or stream.cut_off:
                heapreplace(heap, (due_s + next(stream.gaps), number, stream))
            else:
                heappop(heap)
                self._handler.done(stream)

    def _then_next(self, stream: Stream, due_s: float) -> Then:
        """Return what follows a write that had to wait for room."""

        def written(now_s: float) -> None:
            stream.writes.append(now_s)
            stream.left -= 1
            self.schedule(stream, due_s)

        return written

    def schedule(self, stream: Stream, before_s: float) -> None:
        """Put the write after the one that was due at `before_s` in its place."""
        if stream.left or stream.cut_off:
            heappush(self._heap, (before_s + next(stream.gaps), stream.number, stream))
        else:
            self._handler.done(stream)

    def _accept(self) -> None:
        for _ in range(MOST_ACCEPTS):
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return  # nobody waits any more, or the one who did has left
            accepted_s = time.monotonic()
            sock.setblocking(False)
            if self._tls is not None:
                sock = self._tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
            self._accepted += 1
            self._connections[sock.fileno()] = Connection(sock, self._accepted, accepted_s)
            self._epoll.register(sock, select.EPOLLIN)

    def _ready(self, connection: Connection, events: int) -> None:
        try:
            if events & select.EPOLLOUT:
                self.send(connection, connection.pending, connection.then)
            if connection.open and events & ~select.EPOLLOUT and not connection.read():
                self.lose(connection)
        except BadRequest as error:
            self._handler.refuse(connection, str(error))
        except OSError:
            self.lose(connection)
        self._handler.serve(connection)

    def send(self, connection: Connection, data: bytes, then: Then | None) -> None:
        """Send now, or as the socket empties; then call `then` with the moment before the send."""
        now_s = time.monotonic()
        try:
            sent = connection.send(data)
        except NOT_NOW:
            sent = 0
        except OSError:
            self.lose(connection)
            return
        if sent < len(data):
            if connection.stream is not None and not connection.pending:
                connection.stream.blocked_bytes += len(data) - sent
            self._wait(connection, data[sent:], then)
            return
        if connection.pending:
            connection.pending, connection.then = b"", None
            self._epoll.modify(connection.sock, select.EPOLLIN)
        if then is not None:
            then(now_s)

    def _wait(self, connection: Connection, rest: bytes, then: Then | None) -> None:
        connection.pending, connection.then = rest, then
        self._epoll.modify(connection.sock, select.EPOLLIN | select.EPOLLOUT)

    def lose(self, connection: Connection) -> None:
        """Close a connection whose client is gone, and say so of its stream."""
        stream = connection.stream
        self.drop(connection)
        if stream is not None:
            self._handler.gone(stream)

    def drop(self, connection: Connection, reset: bool = False) -> None:
        """Close a connection at once, if it is open."""
        if connection.open:
            del self._connections[connection.sock.fileno()]
            self._epoll.unregister(connection.sock)
            connection.close(reset)

    def close(self) -> None:
        """Close everything."""
        for connection in list(self._connections.values()):
            self.drop(connection)
        self._listener.close()
        self._epoll.close()
        self._timer.close()
