"""One keep-alive connection on a raw socket: what it reads is stamped, framed and kept.

While a Run lasts nothing is parsed but HTTP framing, by a C parser. Each read costs one system
call; the arrival is the kernel's where it stamps, else the clock's as soon as the read returns.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections.abc import Callable

import httptools

from headway.core import RequestError
from headway.stamps import ANCILLARY_BYTES, KernelStamps
from headway.transport.exchange import Exchange
from headway.transport.tls import Tls, TlsFailure

READ_BYTES = 1 << 18
Clock = Callable[[], float]


class Connection:
    """Serves one exchange at a time. `buffer` is shared: a read is used before the next one."""

    def __init__(
        self,
        sock: socket.socket,
        clock: Clock,
        stamps: KernelStamps,
        buffer: bytearray,
        tls: Tls | None = None,
    ) -> None:
        self.clock = clock
        self.exchange: Exchange | None = None
        self.open = True
        self.answered = False
        self.last_read_s = 0.0
        self._sock = sock
        self._tls = tls
        self._stamps = stamps
        self._ancillary_bytes = ANCILLARY_BYTES if stamps.on else 0
        self._view = memoryview(buffer)
        self._buffers = [buffer]
        self._loop = asyncio.get_running_loop()
        self._sized = False
        self._unsent = b""
        self._parser = httptools.HttpResponseParser(self)
        self._done: asyncio.Future[None] | None = None
        self._loop.add_reader(sock, self._readable)

    def begin(self, payload: bytes, exchange: Exchange) -> asyncio.Future[None]:
        """Send; the future is done when the response ended, or failed."""
        self.exchange, self.answered, self._sized = exchange, False, False
        self._parser = httptools.HttpResponseParser(self)
        self._done = self._loop.create_future()
        data = payload if self._tls is None else self._tls.encrypt(payload)
        exchange.sent_s = self.last_read_s = self.clock()
        if self.open:
            self._send(data)
        else:
            self._lost(None)  # it was closed while nobody used it
        return self._done

    def _send(self, data: bytes) -> None:
        waiting = bool(self._unsent)
        rest = self._unsent + data if waiting else data
        if not waiting:
            try:
                rest = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError as error:
                self._lost(error)
                return
        if rest and not waiting:
            self._loop.add_writer(self._sock, self._writable)
        self._unsent = rest

    def _writable(self) -> None:
        self._loop.remove_writer(self._sock)
        data, self._unsent = self._unsent, b""
        self._send(data)

    def _readable(self) -> None:
        try:
            if self._ancillary_bytes:
                size, ancillary, _, _ = self._sock.recvmsg_into(
                    self._buffers, self._ancillary_bytes
                )
                arrived_s = self._stamps.arrival_s(ancillary)
            else:
                size, arrived_s = self._sock.recv_into(self._view), None
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._lost(error)
            return
        now_s, exchange = self.clock(), self.exchange
        if exchange is None:
            # Nobody asked: a server's goodbye to an idle connection, say. It answers no request.
            self._idle_read(size)
            return
        if size == 0:
            self._lost(None)
            return
        if arrived_s is None or not self.last_read_s <= arrived_s <= now_s:
            # No stamp, or one that cannot be: somebody has just set the wall clock.
            self.last_read_s, lag_s = now_s, math.nan
        else:
            self.last_read_s, lag_s = arrived_s, now_s - arrived_s
        self._take(self._view[:size], exchange, lag_s)

    def _take(self, data: memoryview | bytes, exchange: Exchange, lag_s: float) -> None:
        """Frame what one read brought; its body bytes carry the read's stamp."""
        begun = len(exchange.body.data)
        self.answered = True
        try:
            self._parser.feed_data(data if self._tls is None else self._decrypted(data))
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail("malformed_http", f"the server sent malformed HTTP: {error}")
        except TlsFailure as error:
            self.fail("tls_error", str(error))
        if len(exchange.body.data) > begun:
            exchange.body.stamp(self.last_read_s, lag_s)

    def _decrypted(self, data: memoryview | bytes) -> bytes:
        assert self._tls is not None
        plain, answer, ended = self._tls.decrypt(data)
        if answer:
            self._send(answer)
        if ended:
            self._loop.call_soon(self._lost, None)
        return plain

    def _idle_read(self, size: int) -> None:
        if self._tls is not None and size:
            plain, answer, ended = self._tls.decrypt(self._view[:size])
            if not plain and not ended:
                if answer:
                    self._send(answer)
                return  # a session ticket, or a change of keys
        self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        """The parser has a header line."""
        name = name.lower()
        if name in (b"content-length", b"transfer-encoding"):
            self._sized = True
        if self.exchange is not None and name == b"content-type":
            self.exchange.content_type = value.decode("latin-1").lower()

    def on_headers_complete(self) -> None:
        """The parser has the whole head."""
        if self.exchange is not None:
            self.exchange.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """The parser has some bytes of the body; one read may bring several pieces."""
        if self.exchange is not None:
            self.exchange.body.data += body

    def on_message_complete(self) -> None:
        """The parser has the end of the answer."""
        if self._parser.get_status_code() < 200:
            return  # "100 Continue" and its like: the answer is still to come
        if not self._parser.should_keep_alive():
            self.close()
        self._finish(self.last_read_s)

    def _lost(self, error: OSError | None) -> None:
        self.close()
        if self.exchange is None:
            return
        if error is not None:
            self.fail("connection_reset", f"{type(error).__name__}: {error}")
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
        if self.open:
            self.open = False
            self._loop.remove_reader(self._sock)
            self._loop.remove_writer(self._sock)
            self._sock.close()

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
