"""TLS over a raw socket: stamps are of ciphertext, which is decrypted as it comes."""

from __future__ import annotations

import asyncio
import socket
import ssl

RECORD_BYTES = 1 << 14


class TlsFailure(Exception):
    """What the server sent cannot be decrypted; the message is one sentence."""


class Tls:
    """One connection's session, between bytes on the wire and bytes of HTTP."""

    def __init__(self, context: ssl.SSLContext, host: str) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._session = context.wrap_bio(self._incoming, self._outgoing, server_hostname=host)

    async def handshake(self, sock: socket.socket) -> None:
        """Shake hands on a connected socket; raises OSError, which ssl.SSLError is one of."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                self._session.do_handshake()
                done = True
            except ssl.SSLWantReadError:
                done = False
            if self._outgoing.pending:
                await loop.sock_sendall(sock, self._outgoing.read())
            if done:
                return
            data = await loop.sock_recv(sock, RECORD_BYTES)
            if not data:
                raise ConnectionResetError("the server hung up in the TLS handshake")
            self._incoming.write(data)

    def encrypt(self, data: bytes) -> bytes:
        """Return what goes on the wire for some bytes of a request."""
        self._session.write(data)
        return self._outgoing.read()

    def decrypt(self, data: memoryview | bytes) -> tuple[bytes, bytes, bool]:
        """Return (plain bytes, what TLS itself answers, whether the server said goodbye)."""
        self._incoming.write(data)
        plain, ended = bytearray(), False
        try:
            while piece := self._session.read(RECORD_BYTES):
                plain += piece
            ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            ended = True
        except ssl.SSLError as error:
            raise TlsFailure(f"TLS broke: {error.reason or error}") from error
        return bytes(plain), self._outgoing.read(), ended
