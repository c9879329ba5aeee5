"""The launcher: one life of an engine process, from start to a verified end.

An Endpoint is ready when our own child is alive, the port is its own and not a stranger's, and it
serves the model we asked for. Whatever happens inside the `with` block, nothing is left running.
Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from headway.engines.endpoint import HEALTH_TIMEOUT_S, Endpoint, tail, telling
from headway.engines.launcher import HERE, Launcher, LaunchError, LaunchSpec
from headway.engines.servers import launcher_of

__all__ = ["HERE", "Endpoint", "LaunchError", "LaunchSpec", "launched", "port_owners", "tail"]

POLL_S = 0.05
# Not every kernel lists a process's children.
CHILDREN_ARE_KNOWN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
STOP_TIMEOUT_S = 60.0


@contextlib.contextmanager
def launched(spec: LaunchSpec) -> Iterator[Endpoint]:
    """Start an engine, wait until it is ready, and end it with all its processes afterwards.

    One that runs already is only looked at. Raises LaunchError.
    """
    launcher = launcher_of(spec.kind)
    if launcher.command is None:
        endpoint = Endpoint(spec, launcher, spec.base_url or "", None, time.monotonic())
        _wait_until_ready(endpoint)
        yield endpoint
        return
    port = _choose_port(spec)
    command = launcher.command(spec, port)
    started_s = time.monotonic()
    supervisor = _start(spec, launcher, command)
    endpoint = Endpoint(spec, launcher, f"http://127.0.0.1:{port}", supervisor, started_s)
    try:
        _wait_until_ready(endpoint)
        yield endpoint
    finally:
        _stop(supervisor)


def _start(spec: LaunchSpec, launcher: Launcher, command: list[str]) -> subprocess.Popen[bytes]:
    gpus = {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus)} if spec.gpus else {}
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-I", str(HERE / "supervise.py"), *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **gpus, **launcher.env(spec), **spec.env},
            cwd=spec.cwd,
            start_new_session=True,
            pass_fds=() if spec.lock is None else (spec.lock,),
        )


def _stop(supervisor: subprocess.Popen[bytes]) -> None:
    assert supervisor.stdin is not None
    with contextlib.suppress(OSError):
        supervisor.stdin.close()
    try:
        supervisor.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        supervisor.kill()  # its child then dies with it, by its parent-death signal
        supervisor.wait()


def _choose_port(spec: LaunchSpec) -> int:
    """Return the suite's port if it is free, else one that is."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", spec.port or 0))
        except OSError as error:
            message = f"port {spec.port} of {spec.instance} is in use by another process"
            raise LaunchError("port_in_use", message) from error
        port: int = probe.getsockname()[1]
        return port


def _wait_until_ready(endpoint: Endpoint) -> None:
    spec = endpoint.spec
    deadline = endpoint.started_s + spec.start_timeout_s
    while True:
        if not endpoint.alive():
            said = telling(spec.log)
            raise LaunchError("died_loading", f"{spec.instance} ended while it was loading: {said}")
        if time.monotonic() > deadline:
            raise LaunchError(
                "start_timeout",
                f"{spec.instance} was not ready after {spec.start_timeout_s:g} s: {tail(spec.log)}",
            )
        with contextlib.suppress(OSError):
            if endpoint.get(endpoint.launcher.health, HEALTH_TIMEOUT_S)[0] == 200:
                break
        time.sleep(POLL_S)
    if endpoint.launcher.command is not None:
        _check_it_is_ours(endpoint)
    _check_model(endpoint)


def _check_it_is_ours(endpoint: Endpoint) -> None:
    """A stranger on the same port may answer /health before our child failed to bind it."""
    port = urlsplit(endpoint.base_url).port or 0
    owners = port_owners(port)
    if owners and CHILDREN_ARE_KNOWN and owners.isdisjoint(endpoint.pids()):
        raise LaunchError(
            "stranger",
            f"port {port} of {endpoint.spec.instance} is answered by process "
            f"{min(owners)}, which is not ours",
        )


def _check_model(endpoint: Endpoint) -> None:
    try:
        status, content = endpoint.get("/v1/models")
        served = [entry["id"] for entry in json.loads(content)["data"]] if status == 200 else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        message = f"{endpoint.spec.instance}: /v1/models cannot be read: {error}"
        raise LaunchError("wrong_model", message) from error
    if endpoint.spec.served_name not in served:
        raise LaunchError(
            "wrong_model",
            f"{endpoint.spec.instance} serves {', '.join(map(str, served)) or 'nothing'}, "
            f"not {endpoint.spec.served_name}",
        )


def port_owners(port: int) -> set[int]:
    """Return the processes that listen on a TCP port of this machine; empty where unknown."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A" and int(fields[1].rpartition(":")[2], 16) == port:
                    inodes.add(f"socket:[{fields[9]}]")
    owners = set()
    for entry in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with contextlib.suppress(OSError):
            if str(entry.readlink()) in inodes:
                owners.add(int(entry.parts[2]))
    return owners
