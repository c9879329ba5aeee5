"""A raw loopback server whose every byte a test decides; loaded by path, as no test module is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

Script = Callable[["Peer"], Awaitable[None]]

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def token(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}]})


def usage(prompt: int, output: int) -> bytes:
    counts = {"prompt_tokens": prompt, "completion_tokens": output}
    return event({"choices": [], "usage": counts})


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST = chunk(b"")


def answer(*texts: str) -> bytes:
    """A whole good answer, chunked: one event a text, then the usage and the end."""
    pieces = [token(text) for text in texts]
    pieces += [token("", "length"), usage(1, len(texts)), DONE]
    return CHUNKED + b"".join(map(chunk, pieces)) + LAST


class Peer:
    """One connection, from the server's side."""

    def __init__(
        self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.number = number
        self._reader = reader
        self._writer = writer

    async def request(self) -> tuple[bytes, bytes]:
        """Return (head, body) of the next request; raises IncompleteReadError at the end."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        lines = [line.partition(b":") for line in head.lower().split(b"\r\n")]
        length = next(int(value) for name, _, value in lines if name == b"content-length")
        return head, await self._reader.readexactly(length)

    async def send(self, *pieces: bytes) -> None:
        """Send pieces so that each is a read of its own, as far as loopback allows."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0.004)

    def reset(self) -> None:
        """Close with a TCP reset."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, linger
        )
        self._writer.transport.abort()

    async def hung_up(self) -> None:
        """Wait until the client is gone."""
        with contextlib.suppress(OSError):
            while await self._reader.read(1000):
                pass


@contextlib.asynccontextmanager
async def serving(script: Script, host: str = "127.0.0.1") -> AsyncIterator[int]:
    """Run a script for each connection; yields the port. What a script raises, the test sees."""
    peers: list[asyncio.Task[None]] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        peers.append(task)
        try:
            await script(Peer(len(peers), reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the client hung up, or the test is over
        finally:
            writer.close()

    server = await asyncio.start_server(accept, host, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in peers:
            task.cancel()
        await asyncio.gather(*peers, return_exceptions=True)


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
