"""The launcher: one life of an engine process, from start to a verified end.

An Endpoint is ready when our own child is alive, the port is its own and not a stranger's, and it
serves the model we asked for. Whatever happens inside the `with` block, nothing is left running.
Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from headway.engines.container import Container, prepare
from headway.engines.container import command as run_command
from headway.engines.endpoint import Endpoint, tail
from headway.engines.launcher import HERE, Launcher, LaunchError, LaunchSpec
from headway.engines.servers import launcher_of
from headway.engines.supervise import end_session

__all__ = ["HERE", "Endpoint", "LaunchError", "LaunchSpec", "launched", "port_owners", "tail"]

POLL_S = 0.05
# Not every kernel lists a process's children.
CHILDREN_ARE_KNOWN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
STOP_TIMEOUT_S = 60.0
LOADING = "while it was loading"


@contextlib.contextmanager
def launched(spec: LaunchSpec) -> Iterator[Endpoint]:
    """Start an engine, wait until it is ready, and end it with all its processes afterwards.

    One that runs already is only looked at. Raises LaunchError.
    """
    launcher = launcher_of(spec.kind, spec.args)
    if launcher.command is None:
        endpoint = Endpoint(spec, launcher, spec.base_url or "", None, time.monotonic())
        _wait_until_ready(endpoint)
        yield endpoint
        return
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    _keep(spec.log)
    config = launcher.config(spec)
    if config is not None:
        spec.config.write_text(config, encoding="utf-8")
    container = None if spec.image is None else prepare(spec)
    port = _choose_port(spec)
    started_s = time.monotonic()
    supervisor = _start(spec, launcher, port, container)
    base_url = f"http://127.0.0.1:{port}"
    endpoint = Endpoint(spec, launcher, base_url, supervisor, started_s, container)
    try:
        _wait_until_ready(endpoint)
        yield endpoint
    finally:
        _stop(supervisor)


def _keep(log: Path) -> None:
    """Put the log of an earlier attempt aside: what is read back from this one is of this life."""
    if log.exists():
        number = next(n for n in itertools.count(1) if not log.with_suffix(f".{n}.log").exists())
        log.rename(log.with_suffix(f".{number}.log"))


def _start(
    spec: LaunchSpec, launcher: Launcher, port: int, container: Container | None
) -> subprocess.Popen[bytes]:
    assert launcher.command is not None
    env = {**launcher.env(spec), **spec.env}
    options = [f"--cpus={','.join(map(str, spec.cpus))}"] if spec.cpus else []
    if container is None:
        command = launcher.command(spec, port)
        if spec.gpus:
            env = {"CUDA_VISIBLE_DEVICES": ",".join(spec.gpus), **env}
    else:
        command = run_command(container, spec, launcher, port, env)
        options.append(f"--after={json.dumps(container.end())}")
    with spec.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-I", str(HERE / "supervise.py"), *options, *command],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **env},
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
    if supervisor.returncode < 0:  # killed, by us or by a stranger: it ended nothing any more
        end_session(supervisor.pid)


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
            raise endpoint.died(LOADING)
        if time.monotonic() > deadline:
            said = tail(spec.log) if endpoint.ours else f"it is to be at {endpoint.base_url}"
            message = f"{spec.instance} was not ready after {spec.start_timeout_s:g} s: {said}"
            raise LaunchError("start_timeout", message)
        with contextlib.suppress(OSError):
            if endpoint.says_ready():
                break
        time.sleep(POLL_S)
    if endpoint.ours:
        _check_it_is_ours(endpoint)
    _check_model(endpoint)


def _check_it_is_ours(endpoint: Endpoint) -> None:
    """A stranger on the same port may answer /health before our child failed to bind it.

    A container runs only once its port is published; who holds that port is nobody of ours.
    """
    port = urlsplit(endpoint.base_url).port or 0
    owners = port_owners(port)
    if endpoint.container is not None:
        if not endpoint.container.runs():
            message = f"port {port} of {endpoint.spec.instance} is answered, but not by its "
            raise LaunchError("stranger", message + f"container: {tail(endpoint.spec.log)}")
    elif owners and CHILDREN_ARE_KNOWN and owners.isdisjoint(endpoint.pids()):
        raise LaunchError(
            "stranger",
            f"port {port} of {endpoint.spec.instance} is answered by process "
            f"{min(owners)}, which is not ours",
        )


def _check_model(endpoint: Endpoint) -> None:
    """The model that was asked for is listed, or the only one that is; learn what it is called.

    A server of whose kind we know nothing need not list any: then the first request decides.
    """
    spec, wanted = endpoint.spec, endpoint.launcher.served(endpoint.spec)
    path = endpoint.launcher.models
    try:
        status, content = endpoint.get(path)
        if status == 404 and endpoint.launcher.environment == "none":
            return
        served = [entry["id"] for entry in json.loads(content)["data"]] if status == 200 else []
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, OSError) and endpoint.ends_within():
            raise endpoint.died(LOADING) from error
        message = f"{spec.instance}: {path} cannot be read: {error}"
        raise LaunchError("wrong_model", message) from error
    if wanted is None:
        wanted = served[0] if len(served) == 1 else spec.served_name
    if wanted not in served:
        message = f"{spec.instance} serves {', '.join(map(str, served)) or 'nothing'}, not {wanted}"
        message += "" if endpoint.ours else "; args.served_model says which of them is meant"
        raise LaunchError("wrong_model", message)
    endpoint.served_name = str(wanted)


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
