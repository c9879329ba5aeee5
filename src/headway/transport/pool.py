"""Streaming HTTP/1.1 over as many raw connections as there are requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Protocol

from headway.core import RequestError
from headway.stamps import KernelStamps, ask
from headway.transport.connection import READ_BYTES, Connection
from headway.transport.exchange import Exchange
from headway.transport.target import Target
from headway.transport.tls import Tls

# No descriptor, no port: what this machine lacks, whatever the server does.
OURS = (errno.EMFILE, errno.ENFILE, errno.EADDRNOTAVAIL)
# Connections that are made at once, ahead of a Run: servers' queues of accepts are short.
OPENED_AT_ONCE = 32
# How often connections are looked at for silence, and the wall clock for a step.
LOOK_S = 0.1


class Transport(Protocol):
    """Whatever can carry one prepared request and say what came back."""

    async def open(self, count: int) -> None:
        """Make connections ahead; what fails here fails again, and is told, in a request."""

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        """Send and wait for the end; failures are written into the exchange, never raised."""

    async def close(self) -> None:
        """Close every idle connection."""


class HttpTransport:
    """Keep-alive connections to one target; one is made where none is idle.

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
        self.stamps = KernelStamps(clock)
        self._idle: list[Connection] = []
        self._busy: dict[Connection, None] = {}
        self._buffer = bytearray(READ_BYTES)
        self._ssl = ssl.create_default_context() if target.tls else None
        self._addresses: list[tuple[Any, ...]] = []
        self._looking: asyncio.TimerHandle | None = None
        self._looked_s = 0.0

    async def open(self, count: int) -> None:
        """Make connections ahead, some at once."""
        while len(self._idle) < count:
            more = min(OPENED_AT_ONCE, count - len(self._idle))
            made = await asyncio.gather(*(self._connect(Exchange()) for _ in range(more)))
            self._idle += [connection for connection in made if connection is not None]
            if None in made:
                return

    async def send(self, payload: bytes, exchange: Exchange) -> None:
        """Send on an idle connection or a new one; a stale idle one is replaced once."""
        while self._idle:
            connection = self._idle.pop()
            if connection.open:
                await self._exchange(connection, payload, exchange)
                error = exchange.error
                if error is None or connection.answered or error.kind == "read_timeout":
                    return
                # The server closed an idle connection as we used it: no byte of an answer was
                # read, so the request may be sent again, and the record says so.
                exchange.forget()
                break
        connection_or_none = await self._connect(exchange)
        if connection_or_none is not None:
            await self._exchange(connection_or_none, payload, exchange)

    async def _connect(self, exchange: Exchange) -> Connection | None:
        start_s = self.clock()
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                connection = await self._connected()
        except TimeoutError:
            limit = f"no connection within {self.connect_timeout_s} s"
            exchange.error = RequestError("connect_timeout", limit)
        except OSError as error:
            refused = error.errno == errno.ECONNREFUSED
            exchange.error = RequestError(
                "connection_refused" if refused else "connect_failed",
                f"{type(error).__name__}: {error}",
                "client" if error.errno in OURS else "engine",
            )
        else:
            exchange.connect_s = self.clock() - start_s
            return connection
        exchange.ended_s = self.clock()
        return None

    async def _connected(self) -> Connection:
        """Connect to the first address that takes it; raises the last one's OSError."""
        last: OSError | None = None
        if not self._addresses:
            # Once: no name is looked up while a Run lasts.
            self._addresses = await asyncio.get_running_loop().getaddrinfo(
                self.target.host, self.target.port, type=socket.SOCK_STREAM
            )
        for entry in tuple(self._addresses):
            try:
                connection = await self._connected_to(entry)
            except OSError as error:
                last = error
            else:
                # What answered once is asked first from now on.
                self._addresses.sort(key=lambda other: other is not entry)
                return connection
        raise last or OSError(f"{self.target.host} has no address")

    async def _connected_to(self, entry: tuple[Any, ...]) -> Connection:
        family, kind, protocol, _, address = entry
        with contextlib.ExitStack() as stack:
            sock = stack.enter_context(socket.socket(family, kind, protocol))
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self.stamps.on:
                ask(sock)
            await asyncio.get_running_loop().sock_connect(sock, address)
            tls = None if self._ssl is None else Tls(self._ssl, self.target.host)
            if tls is not None:
                await tls.handshake(sock)
            stack.pop_all()
            return Connection(sock, self.clock, self.stamps, self._buffer, tls)

    async def _exchange(self, connection: Connection, payload: bytes, exchange: Exchange) -> None:
        done = connection.begin(payload, exchange)
        self._busy[connection] = None
        self._look_from_now_on()
        try:
            await done
        finally:
            del self._busy[connection]
            # Cut off from outside, the answer would go on arriving: hang up, and the server knows.
            if not done.done() or done.cancelled():
                connection.abandon()
        if connection.open:
            self._idle.append(connection)

    def _look_from_now_on(self) -> None:
        if self._looking is None:
            self._looked_s = self.clock()
            self._looking = asyncio.get_running_loop().call_later(LOOK_S, self._look)

    def _look(self) -> None:
        """End what was silent for too long; look again as long as anything is in flight."""
        now_s, before_s = self.clock(), self._looked_s
        self._looking = None
        if self.stamps.on:
            self.stamps.look()
        # If we slept ourselves, what came meanwhile is still to be read.
        awake = now_s - before_s - LOOK_S < self.idle_timeout_s
        for connection in list(self._busy) if awake else ():
            if now_s - connection.last_read_s >= self.idle_timeout_s:
                connection.fail("read_timeout", f"no byte for {self.idle_timeout_s} s")
        if self._busy:
            self._look_from_now_on()

    async def close(self) -> None:
        """Close every idle connection, and look for silence no more."""
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        if self._looking is not None and not self._busy:
            self._looking.cancel()
            self._looking = None
