"""Sockets send, stamp and keep: against a loopback server whose every byte is scripted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import runpy
import socket
import ssl
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import trustme
from hypothesis import given, settings
from hypothesis import strategies as st

from headway import stamps as stamps_module
from headway.stamps import KernelStamps
from headway.transport import Body, Exchange, HttpTransport, Target
from headway.transport.tls import Tls, TlsFailure

wire = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("scripted_server.py"))))


def body_of(exchange: Exchange) -> bytes:
    return bytes(exchange.body.data)


def send_all(script, n=1, *, host="127.0.0.1", name=None, pause_s=0.0, body=None, **limits):
    """Send n requests one after another on one transport and return their exchanges."""

    async def run() -> list[Exchange]:
        async with wire.serving(script, host) as port:
            target = Target(name or host, port)
            transport = HttpTransport(target, **{"idle_timeout_s": 10.0, **limits})
            exchanges = []
            for number in range(n):
                if number:
                    await asyncio.sleep(pause_s)
                exchanges.append(Exchange())
                payload = target.post("/v1/completions", body or {"n": number}, {})
                await transport.send(payload, exchanges[-1])
            await transport.close()
            return exchanges

    return asyncio.run(run())


async def good(peer):
    """Answer every request of a connection alike."""
    while True:
        await peer.request()
        await peer.send(wire.answer("a", "b"))


def test_a_chunked_stream_is_kept_read_by_read():
    pieces = [wire.token("a"), wire.token("b"), wire.token("", "length"), wire.DONE]

    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, *map(wire.chunk, pieces), wire.LAST)

    (exchange,) = send_all(script)
    assert exchange.error is None
    assert exchange.status == 200
    assert exchange.content_type == "text/event-stream"
    assert body_of(exchange) == b"".join(pieces)
    assert not exchange.retried


def test_stamps_are_of_reads_and_in_order():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED)
        # Two events in one read, then one split over two reads.
        await peer.send(wire.chunk(wire.token("a")) + wire.chunk(wire.token("b")))
        late = wire.chunk(wire.token("c"))
        await peer.send(late[:20], late[20:], wire.LAST)

    clock = itertools.count()  # strictly increasing: two stamps are equal only if it was read once
    (exchange,) = send_all(script, clock=lambda: float(next(clock)), idle_timeout_s=1e9)
    stamps = [at_s for at_s, _ in exchange.body]
    assert len(stamps) == 3
    assert exchange.sent_s < stamps[0] < stamps[1] < stamps[2] < exchange.ended_s
    first = next(iter(exchange.body))[1]
    assert first == wire.token("a") + wire.token("b")


def test_the_end_is_stamped_by_the_read_that_ended_it():
    async def script(peer):
        await peer.request()
        await peer.send(wire.answer("a"))
        await peer.hung_up()

    (exchange,) = send_all(script)
    assert exchange.body.arrived_s[-1] == exchange.ended_s


def test_a_body_of_stated_length_ends_with_it():
    async def script(peer):
        body = wire.token("a") + wire.DONE
        await peer.request()
        await peer.send(wire.HEAD + b"Content-Length: %d\r\n\r\n" % len(body), body[:9], body[9:])
        await peer.hung_up()

    (exchange,) = send_all(script)
    assert exchange.error is None
    assert body_of(exchange) == wire.token("a") + wire.DONE


@pytest.mark.parametrize("version", [b"HTTP/1.1", b"HTTP/1.0"])
def test_a_body_without_length_ends_with_its_connection(version):
    async def script(peer):
        await peer.request()
        await peer.send(
            version + b" 200 OK\r\nConnection: close\r\n\r\n", wire.token("a"), wire.DONE
        )

    first, second = send_all(script, 2)
    assert (first.error, second.error) == (None, None)
    assert body_of(first) == body_of(second) == wire.token("a") + wire.DONE
    assert first.ended_s >= first.body.arrived_s[-1]


def test_an_informational_answer_is_not_the_answer():
    async def script(peer):
        await peer.request()
        await peer.send(b"HTTP/1.1 100 Continue\r\n\r\n", wire.answer("a"))
        await peer.hung_up()

    (exchange,) = send_all(script)
    assert (exchange.status, exchange.error) == (200, None)
    assert body_of(exchange).startswith(wire.token("a"))


def test_connections_are_kept_alive_and_used_again():
    seen = []

    async def script(peer):
        for _ in range(3):
            await peer.request()
            seen.append(peer.number)
            await peer.send(wire.answer("a"))
        await peer.hung_up()

    exchanges = send_all(script, 3)
    assert [one.error for one in exchanges] == [None] * 3
    assert seen == [1, 1, 1]
    # Only the first one had a connection to make, and its time is kept apart.
    assert exchanges[0].connect_s > 0
    assert [one.connect_s for one in exchanges[1:]] == [None, None]


def test_connecting_is_no_part_of_the_request():
    clock = itertools.count(100.0, 1.0)
    (exchange,) = send_all(good, clock=lambda: next(clock), idle_timeout_s=1e9)
    # Read twice around connecting, then once for the send.
    assert (exchange.connect_s, exchange.sent_s) == (1.0, 102.0)


def test_connection_close_is_obeyed():
    seen = []

    async def script(peer):
        await peer.request()
        seen.append(peer.number)
        body = wire.token("a") + wire.DONE
        await peer.send(
            wire.HEAD + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        await peer.hung_up()

    exchanges = send_all(script, 2)
    assert [one.error for one in exchanges] == [None, None]
    assert [one.retried for one in exchanges] == [False, False]
    assert seen == [1, 2]


def test_case_16_a_connection_that_was_closed_while_idle_is_replaced():
    async def script(peer):
        await peer.request()
        await peer.send(wire.answer("a"))  # and hangs up

    exchanges = send_all(script, 2, pause_s=0.05)
    assert [one.error for one in exchanges] == [None, None]
    assert body_of(exchanges[1]) == body_of(exchanges[0])


@pytest.mark.parametrize("end", ["close", "reset"])
def test_case_16_a_stale_connection_is_retried_once_and_flagged(end):
    requests = []

    async def script(peer):
        requests.append(await peer.request())
        if peer.number == 1:
            await peer.send(wire.answer("a"))
            requests.append(await peer.request())  # used again, and gone without a byte
            if end == "reset":
                peer.reset()
            return
        await peer.send(wire.answer("b"))
        await peer.hung_up()

    first, second = send_all(script, 2)
    assert (first.error, first.retried) == (None, False)
    assert (second.error, second.retried) == (None, True)
    assert wire.token("b") in body_of(second)
    assert wire.token("a") not in body_of(second)
    assert requests[1][1] == requests[2][1] == b'{"n":1}'
    assert second.sent_s <= second.body.arrived_s[0] <= second.ended_s


def test_case_16_a_retry_is_not_repeated():
    async def script(peer):
        await peer.request()
        if peer.number == 1:
            await peer.send(wire.answer("a"))
            await peer.request()

    second = send_all(script, 2)[1]
    assert second.error.kind == "no_response"
    assert second.retried


def test_what_comes_after_an_answer_changes_nothing_in_it():
    async def script(peer):
        await peer.request()
        await peer.send(wire.answer("a"))
        if peer.number == 1:
            await peer.send(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 3\r\n\r\nbye")
        await peer.hung_up()

    first, second = send_all(script, 2, pause_s=0.05)
    assert (first.status, first.error, second.status, second.error) == (200, None, 200, None)
    assert b"bye" not in body_of(first) + body_of(second)
    assert first.ended_s == first.body.arrived_s[-1]


def test_a_cancelled_request_hangs_up_and_keeps_what_it_had():
    gone = []

    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, wire.chunk(wire.token("a")))
        await peer.hung_up()
        gone.append(peer.number)

    async def run():
        async with wire.serving(script) as port:
            target = Target("127.0.0.1", port)
            transport = HttpTransport(target)
            exchange = Exchange()
            task = asyncio.create_task(transport.send(target.post("/", {}, {}), exchange))
            while not exchange.body.data:
                await asyncio.sleep(0.005)
            task.cancel()
            await asyncio.wait([task])
            while not gone:
                await asyncio.sleep(0.005)
            await transport.close()
            return exchange

    exchange = asyncio.run(asyncio.wait_for(run(), 10))
    assert body_of(exchange) == wire.token("a")
    assert (exchange.ended_s, exchange.error) == (None, None)


def test_a_large_request_arrives_whole():
    seen = []

    async def script(peer):
        seen.append(await peer.request())
        await peer.send(wire.answer("a"))
        await peer.hung_up()

    (exchange,) = send_all(script, body={"prompt": list(range(200_000))})
    assert exchange.error is None
    assert seen[0][1].endswith(b",199999]}")


def listens(host: str) -> bool:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as one:
            one.bind((host, 0))
    except OSError:
        return False
    return True


@pytest.mark.parametrize("variable", ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"])
@pytest.mark.parametrize(
    ("host", "name"), [("127.0.0.1", "127.0.0.1"), ("127.0.0.1", "localhost"), ("::1", "::1")]
)
def test_case_33_proxy_variables_have_no_effect(variable, host, name, monkeypatch):
    if not listens(host):
        pytest.skip(f"this machine has no {host}")
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9")
    (exchange,) = send_all(good, host=host, name=name)
    assert (exchange.error, exchange.status) == (None, 200)


def test_the_clock_is_monotonic_by_default():
    before = time.monotonic()
    (exchange,) = send_all(good)
    assert before <= exchange.sent_s <= exchange.body.arrived_s[0] <= exchange.ended_s
    assert exchange.ended_s <= time.monotonic()


@pytest.mark.skipif(not KernelStamps().on, reason="this kernel gives no receive stamps")
def test_the_kernel_stamps_what_a_client_that_sleeps_reads_late():
    async def script(peer):
        await peer.request()
        await peer.send(wire.CHUNKED, wire.chunk(wire.token("a")), wire.LAST)
        await peer.hung_up()

    async def run() -> Exchange:
        async with wire.serving(script) as port:
            target = Target("127.0.0.1", port)
            transport = HttpTransport(target)
            exchange = Exchange()
            task = asyncio.create_task(transport.send(target.post("/", {}, {}), exchange))
            while exchange.status is None:  # the head is here, the token is not
                await asyncio.sleep(0)
            connection = next(iter(transport._busy))
            # What holds the client up: its loop reads nothing while the token arrives.
            asyncio.get_running_loop().remove_reader(connection._sock)
            await asyncio.sleep(0.15)
            asyncio.get_running_loop().add_reader(connection._sock, connection._readable)
            await task
            await transport.close()
            return exchange

    exchange = asyncio.run(run())
    # The stamp is of the arrival, and the rest is the client's own lag.
    assert exchange.body.lags_s[0] > 0.08
    assert exchange.body.arrived_s[0] - exchange.sent_s < exchange.body.lags_s[0]


@pytest.mark.parametrize("wrong_s", [-1e6, 1e6])
def test_a_stamp_that_cannot_be_is_replaced_by_the_time_of_the_read(wrong_s, monkeypatch):
    arrival = KernelStamps.arrival_s
    monkeypatch.setattr(
        KernelStamps, "arrival_s", lambda self, data: (arrival(self, data) or 0.0) + wrong_s
    )
    (exchange,) = send_all(good)
    assert exchange.sent_s <= exchange.body.arrived_s[0] <= exchange.ended_s
    assert all(math.isnan(lag_s) for lag_s in exchange.body.lags_s)


def test_somebody_who_sets_the_wall_clock_is_noticed(monkeypatch):
    stamps = KernelStamps()
    stamps.look()
    assert stamps.steps == 0
    monkeypatch.setattr(stamps_module, "clocks_apart_s", lambda: 5.0)
    stamps.look()
    assert stamps.steps == 1
    second = stamps_module.TIMESPEC.pack(15, 500_000_000)
    found = stamps.arrival_s([(socket.SOL_SOCKET, stamps_module.SO_TIMESTAMPNS, second)])
    assert found == 10.5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.binary(max_size=50), max_size=30))
def test_a_body_gives_back_what_it_was_given(pieces):
    body = Body()
    for number, piece in enumerate(pieces):
        body.data += piece
        body.stamp(float(number), 0.0)
    assert list(body) == [(float(n), piece) for n, piece in enumerate(pieces)]


def test_a_read_costs_its_payload_and_less_than_a_hundred_bytes():
    body, payload, count = Body(), b"x" * 180, 1000
    for number in range(count):
        body.data += payload
        body.stamp(float(number), 0.0)
    assert body.held_bytes < count * (len(payload) + 100)


def test_connections_made_ahead_cost_no_request_anything():
    async def run():
        async with wire.serving(good) as port:
            target = Target("127.0.0.1", port)
            transport = HttpTransport(target)
            await transport.open(5)
            exchanges = [Exchange() for _ in range(5)]
            payload = target.post("/", {}, {})
            await asyncio.gather(*(transport.send(payload, one) for one in exchanges))
            await transport.close()
            return exchanges

    exchanges = asyncio.run(run())
    assert [one.error for one in exchanges] == [None] * 5
    assert [one.connect_s for one in exchanges] == [None] * 5


def test_connections_that_cannot_be_made_ahead_are_a_requests_failure():
    async def run():
        target = Target("127.0.0.1", wire.free_port())
        transport, exchange = HttpTransport(target), Exchange()
        await transport.open(3)
        await transport.send(target.post("/", {}, {}), exchange)
        return exchange

    assert asyncio.run(run()).error.kind == "connection_refused"


async def serve_tls(context: ssl.SSLContext, pieces: list[bytes]):
    """Answer every request of a TLS connection with these pieces; returns (server, port)."""

    async def accept(reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                size = int(head.partition(b"content-length: ")[2].split(b"\r\n")[0])
                await reader.readexactly(size)
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.004)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    return server, server.sockets[0].getsockname()[1]


def ask_tls(monkeypatch, tmp_path, pieces, host="localhost", n=1, trusted=True):
    authority = trustme.CA()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    authority.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    if trusted:
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))

    async def run():
        server, port = await serve_tls(context, pieces)
        target = Target(host, port, tls=True)
        transport, exchanges = HttpTransport(target, idle_timeout_s=10.0), []
        for _ in range(n):
            exchanges.append(Exchange())
            await transport.send(target.post("/", {"a": 1}, {}), exchanges[-1])
        await transport.close()
        server.close()
        await asyncio.sleep(0.02)
        return exchanges

    return asyncio.run(run())


def test_tls_is_decrypted_as_it_comes(monkeypatch, tmp_path):
    # The second piece is of several TLS records.
    pieces = [wire.CHUNKED + wire.chunk(wire.token("a")), wire.chunk(wire.token("b" * 40_000))]
    one, two = ask_tls(monkeypatch, tmp_path, [*pieces, wire.LAST], n=2)
    for exchange in (one, two):
        assert (exchange.error, exchange.status) == (None, 200)
        assert bytes(exchange.body.data) == wire.token("a") + wire.token("b" * 40_000)
        stamps = list(exchange.body.arrived_s)
        assert len(stamps) >= 2
        assert stamps == sorted(stamps)
    assert one.connect_s is not None
    assert two.connect_s is None  # the session was kept


@pytest.mark.parametrize("why", ["unknown authority", "other name"])
def test_a_server_that_is_not_who_it_says_is_no_server(why, monkeypatch, tmp_path):
    host, trusted = ("127.0.0.1", True) if why == "other name" else ("localhost", False)
    (exchange,) = ask_tls(monkeypatch, tmp_path, [], host, trusted=trusted)
    assert exchange.error.kind == "connect_failed"
    assert "CERTIFICATE_VERIFY_FAILED" in exchange.error.message


def test_what_is_no_tls_after_the_handshake_is_the_servers_failure():
    with pytest.raises(TlsFailure, match=r"^TLS broke: "):
        Tls(ssl.create_default_context(), "localhost").decrypt(b"HTTP/1.1 200 OK\r\n\r\n")
