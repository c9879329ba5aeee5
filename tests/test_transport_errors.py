"""Every way in which a request can fail has a kind of its own, and keeps what had arrived."""

from __future__ import annotations

import asyncio
import errno
import runpy
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from headway.transport import Exchange, HttpTransport, Target

wire = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("scripted_server.py"))))


async def ask(target: Target, **limits: float) -> Exchange:
    transport = HttpTransport(target, **{"idle_timeout_s": 10.0, **limits})
    exchange = Exchange()
    await transport.send(target.post("/v1/completions", {}, {}), exchange)
    await transport.close()
    return exchange


def outcome(script, **limits) -> Exchange:
    async def run() -> Exchange:
        async with wire.serving(script) as port:
            return await ask(Target("127.0.0.1", port), **limits)

    return asyncio.run(run())


def body_of(exchange: Exchange) -> bytes:
    return bytes(exchange.body.data)


TWO = [wire.chunk(wire.token("a")), wire.chunk(wire.token("b"))]


def test_case_14_an_orderly_close_in_mid_stream_is_truncated_and_keeps_two_tokens():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *TWO)

    exchange = outcome(script)
    assert exchange.error.kind == "truncated_stream"
    assert exchange.error.origin == "engine"
    assert body_of(exchange) == wire.token("a") + wire.token("b")
    assert exchange.ended_s >= exchange.body.arrived_s[-1]


def test_case_14_a_reset_in_mid_stream_names_the_exception_and_keeps_two_tokens():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *TWO)
        await asyncio.sleep(0.05)
        peer.reset()

    exchange = outcome(script)
    assert exchange.error.kind == "connection_reset"
    assert "ConnectionResetError" in exchange.error.message
    assert body_of(exchange) == wire.token("a") + wire.token("b")


def test_a_body_shorter_than_stated_is_truncated():
    async def script(peer):
        await peer.request()
        await peer.send(wire.HEAD + b"Content-Length: 1000\r\n\r\n" + wire.token("a"))

    assert outcome(script).error.kind == "truncated_stream"


@pytest.mark.parametrize("begun", [b"HTTP/1.1 20", wire.HEAD])
def test_a_close_inside_the_head_is_truncated(begun):
    async def script(peer):
        await peer.request()
        await peer.send(begun)

    exchange = outcome(script)
    assert exchange.error.kind == "truncated_stream"
    assert exchange.status is None


def test_a_close_without_a_byte_is_no_response():
    async def script(peer):
        await peer.request()

    exchange = outcome(script)
    assert exchange.error.kind == "no_response"
    assert not exchange.retried
    assert exchange.ended_s >= exchange.sent_s


def test_a_server_that_hangs_up_at_once_is_no_answer():
    async def script(peer):
        return

    assert outcome(script).error.kind in ("no_response", "connection_reset")


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x16\x03\x01\x02\x00",
        wire.CHUNKED + b"zz\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
    ids=["ssh", "tls", "chunk_size", "upgrade", "two_lengths"],
)
def test_what_is_no_http_is_malformed(garbage):
    async def script(peer):
        await peer.request()
        await peer.send(garbage)
        await peer.hung_up()

    exchange = outcome(script)
    assert exchange.error.kind == "malformed_http"
    assert exchange.error.message.startswith("the server sent malformed HTTP: ")


def test_case_16_silence_is_a_read_timeout_that_names_its_limit():
    async def script(peer):
        await peer.request()
        await peer.hung_up()

    exchange = outcome(script, idle_timeout_s=0.1)
    assert (exchange.error.kind, exchange.error.message) == ("read_timeout", "no byte for 0.1 s")
    assert exchange.error.origin == "engine"
    assert exchange.ended_s - exchange.sent_s >= 0.1


def test_case_17_silence_after_a_token_ends_when_it_was_noticed_and_keeps_the_token():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, TWO[0])
        await peer.hung_up()

    exchange = outcome(script, idle_timeout_s=0.1)
    assert exchange.error.kind == "read_timeout"
    assert body_of(exchange) == wire.token("a")
    # The slot was busy until now: the next request of the slot is due then, not at the last byte.
    assert exchange.ended_s - exchange.body.arrived_s[-1] >= 0.1


def test_a_slow_stream_is_not_silent():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED)
        for _ in range(12):
            await asyncio.sleep(0.05)
            await peer.send(wire.chunk(b": keepalive\n\n"))
        await peer.send(wire.chunk(wire.token("a")), wire.LAST)
        await peer.hung_up()

    assert outcome(script, idle_timeout_s=0.5).error is None


def test_an_http_error_keeps_its_body():
    async def script(peer):
        await peer.request()
        await peer.send(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 7\r\n\r\nunknown")
        await peer.hung_up()

    exchange = outcome(script)
    assert (exchange.status, exchange.error, body_of(exchange)) == (400, None, b"unknown")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_port_without_a_listener_is_refused(host):
    exchange = asyncio.run(ask(Target(host, wire.free_port())))
    assert exchange.error.kind == "connection_refused"
    assert exchange.error.origin == "engine"
    assert (exchange.sent_s, exchange.connect_s) == (None, None)
    assert exchange.ended_s is not None


def test_a_connection_that_is_not_made_in_time_is_a_connect_timeout():
    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        address = full.getsockname()
        fillers = [socket.socket() for _ in range(4)]
        try:
            for one in fillers:
                one.setblocking(False)
                one.connect_ex(address)
            exchange = asyncio.run(ask(Target(*address), connect_timeout_s=0.2))
        finally:
            for one in fillers:
                one.close()
    assert exchange.error.kind == "connect_timeout"
    assert exchange.error.message == "no connection within 0.2 s"


@pytest.mark.parametrize(
    ("error", "kind", "origin"),
    [
        (OSError(errno.EMFILE, "no luck"), "connect_failed", "client"),
        (OSError(errno.EADDRNOTAVAIL, "no luck"), "connect_failed", "client"),
        (OSError(errno.EHOSTUNREACH, "no luck"), "connect_failed", "engine"),
    ],
)
def test_what_this_machine_lacks_is_not_the_engines_failure(error, kind, origin, monkeypatch):
    async def run() -> Exchange:
        async def fail(*args, **more):
            raise error

        monkeypatch.setattr(asyncio.get_running_loop(), "sock_connect", fail, raising=False)
        return await ask(Target("127.0.0.1", 1))

    said = asyncio.run(run()).error
    assert (said.kind, said.origin, said.message) == (kind, origin, f"OSError: {error}")


def test_tls_is_spoken_to_https():
    first_bytes = []

    async def script(peer):
        first_bytes.append(await peer._reader.read(3))

    async def run() -> Exchange:
        async with wire.serving(script) as port:
            return await ask(Target("127.0.0.1", port, tls=True))

    exchange = asyncio.run(run())
    assert exchange.error.kind == "connect_failed"
    assert first_bytes == [b"\x16\x03\x01"]  # a TLS handshake, not a request in clear


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/", Target("127.0.0.1", 8000)),
        ("http://Example.org", Target("example.org", 80)),
        ("https://host/api/", Target("host", 443, "/api", True)),
        ("https://host:1/a/b", Target("host", 1, "/a/b", True)),
        ("http://[::1]:9", Target("::1", 9)),
    ],
)
def test_a_base_url_is_read(url, target):
    assert Target.parse(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:8000",
        "ftp://host",
        "http://",
        "http://:80",
        "http://host:x",
        "http://host:65536",
        "http://host:0",
        "http://[::1",
        "http://host/a b",
        "http://host/a\r\nX: y",
        "http://hôst",
        "http://user:secret@host",
        "http://host?x=1",
        "http://host#x",
    ],
)
def test_what_is_no_base_url_is_refused_and_quoted(url):
    with pytest.raises(ValueError, match=r"^base_url ") as caught:
        Target.parse(url)
    assert repr(url) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_request_is_whole_and_its_path_begins_with_the_bases():
    headers = {"Authorization": "Bearer k"}
    raw = Target("::1", 9, "/api").post("/v1/completions", {"a": "é"}, headers)
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /api/v1/completions HTTP/1.1"
    assert "Host: [::1]:9" in lines
    assert "Authorization: Bearer k" in lines
    assert f"Content-Length: {len(body)}" in lines
    assert body == b'{"a":"\\u00e9"}'


@pytest.mark.parametrize("key", ["k\n", "k\r\nX: y"])
def test_a_key_with_a_line_end_is_refused_and_not_shown(key):
    with pytest.raises(ValueError, match="Authorization") as caught:
        Target("h", 1).post("/", {}, {"Authorization": key})
    assert "k" not in str(caught.value).replace("line", "").split()
