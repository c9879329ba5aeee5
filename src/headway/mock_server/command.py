"""`headway mock-server …`: the edge. Arguments and a plan are checked before a socket is opened."""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import resource
import signal
import socket
import ssl
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from headway.console import GOOD, UsageFailure, ended
from headway.mock_server import asked, plan
from headway.mock_server.dialects import DIALECTS, Writer
from headway.mock_server.server import Server, Settings
from headway.mock_server.timing import Timing
from headway.tables import SuiteError

MOST_TOKENS_PER_CHUNK = 1000
BACKLOG = 4096


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM or SIGINT, then write the log; returns 0 good, 2 usage."""
    arguments = _parser().parse_args(argv)
    return ended(lambda: serve(arguments), SuiteError)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway mock-server",
        description="An OpenAI-compatible server that computes nothing, writes its tokens at times "
        "known beforehand, and logs when it really did: the truth to test a load generator by.",
        epilog="Prints one line of JSON once it listens. SIGTERM and SIGINT end it; POST /mock/log "
        "writes the log while nothing is being answered. docs/mock_server.md says more.",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="default: a free one")
    parser.add_argument("--dialect", choices=tuple(DIALECTS), default="vllm")
    parser.add_argument("--ttft", type=float, default=0.1, metavar="SECONDS")
    parser.add_argument(
        "--itl", type=float, default=0.02, metavar="SECONDS", help="between two chunks"
    )
    text = "each gap is multiplied by 1 + SHARE x u, u uniform from -1 to 1"
    parser.add_argument("--jitter", type=float, default=0.0, metavar="SHARE", help=text)
    parser.add_argument("--tokens-per-chunk", type=int, default=1, metavar="N")
    parser.add_argument("--seed", type=int, default=1, help="of the jitter")
    parser.add_argument("--model", default="mock", metavar="NAME", help="what it calls itself")
    parser.add_argument("--plan", type=Path, metavar="FILE", help="faults, as TOML or .json")
    parser.add_argument("--log", type=Path, metavar="FILE", help="JSON lines, one a request")
    parser.add_argument("--tls", type=Path, nargs=2, metavar=("CERT", "KEY"), help="PEM files")
    default = f"an answer has max_tokens tokens, {asked.DEFAULT_TOKENS} where a request names none"
    parser.description = f"{parser.description} Whatever the prompt, {default}."
    return parser


def serve(arguments: argparse.Namespace) -> int:
    """Run the server; raises UsageFailure and SuiteError before it listens."""
    settings = _settings(arguments)
    tls = _tls(*arguments.tls) if arguments.tls else None
    _touch(arguments.log)
    # Each stream holds a descriptor, and the usual soft limit is 1024.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    listener = _listen(arguments.host, arguments.port)
    server = Server(settings, listener, tls)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        told = _hear_signals(theirs)
        _announce(listener, arguments.host, tls is not None)
        gc.disable()  # a pause would make tokens late, and what is kept has no cycles
        server.run(ours, lambda: bool(told))
        signal.set_wakeup_fd(-1)
    try:
        server.write_log()
    except OSError as error:
        raise UsageFailure(f"{settings.log} cannot be written: {error.strerror}") from error
    return GOOD


def _settings(arguments: argparse.Namespace) -> Settings:
    for name in ("ttft", "itl"):
        value = getattr(arguments, name)
        if not 0 <= value < math.inf:
            raise UsageFailure(f"--{name} is {value}; it must be 0 or more seconds")
    if not 0 <= arguments.jitter < 1:
        raise UsageFailure(f"--jitter is {arguments.jitter}; it must be from 0 to below 1")
    if not 0 <= arguments.port <= 65535:
        raise UsageFailure(f"--port is {arguments.port}; it must be from 0 to 65535")
    size = arguments.tokens_per_chunk
    if not 1 <= size <= MOST_TOKENS_PER_CHUNK:
        raise UsageFailure(
            f"--tokens-per-chunk is {size}; it must be from 1 to {MOST_TOKENS_PER_CHUNK}"
        )
    return Settings(
        writer=Writer(arguments.dialect, arguments.model, size, int(time.time())),
        timing=Timing(arguments.ttft, arguments.itl, arguments.jitter, arguments.seed),
        plan=plan.Plan() if arguments.plan is None else plan.load(arguments.plan),
        log=arguments.log,
    )


def _tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key)
    except OSError as error:
        raise UsageFailure(f"--tls {certificate} {key} cannot be used: {error}") from error
    return context


def _touch(log: Path | None) -> None:
    """Find out now, not after an hour of serving, whether the log can be written."""
    if log is None:
        return
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_bytes(b"")
    except OSError as error:
        raise UsageFailure(f"--log {log} cannot be written: {error.strerror}") from error


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageFailure(f"cannot listen on {host} port {port}: {reason}") from error
    return listener


def _hear_signals(wake: socket.socket) -> list[int]:
    """Return a list that a signal to end puts its number into, and makes `wake` readable."""
    told: list[int] = []
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: told.append(number))
    return told


def _announce(listener: socket.socket, host: str, tls: bool) -> None:
    port = listener.getsockname()[1]
    shown = f"[{host}]" if ":" in host else host
    base_url = f"{'https' if tls else 'http'}://{shown}:{port}"
    line = {"host": host, "port": port, "pid": os.getpid(), "base_url": base_url}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
