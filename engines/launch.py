"""The launcher: one life of an engine process, from start to a verified end.

An Endpoint is ready when our own child is alive, the port is its own and not a stranger's, and it
serves the model we asked for. Whatever happens inside the `with` block, nothing is left running.
Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core import Capabilities, EngineInfo
from headway.engines.supervise import descendants

HERE = Path(__file__).resolve().parent
POLL_S = 0.05
# Not every kernel lists a process's children.
CHILDREN_ARE_KNOWN = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").exists()
HEALTH_TIMEOUT_S = 2.0
STOP_TIMEOUT_S = 60.0
HOSTED = Capabilities(engine_stamps=True, control=True)


@dataclass(frozen=True, slots=True)
class Launcher:
    """How engines of one kind are started, and what their endpoint understands.

    `command` gives the command that serves a spec on a port; `health` answers 200 when it serves.
    """

    command: Callable[[LaunchSpec, int], list[str]]
    capabilities: Capabilities
    health: str = "/health"


class LaunchError(RuntimeError):
    """An engine did not come up. `kind` is a stable word, the message one sentence."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything needed to start one engine. `model` is a ModelFolder as JSON values.

    Another commit's engine has that commit's `boot`, or is found from its `cwd` (None: ours).
    """

    instance: str
    kind: str
    model: Mapping[str, Any]
    dtype: str
    device: str
    python: Path
    log: Path
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    port: int | None = None
    start_timeout_s: float = 600.0
    lock: int | None = None  # a descriptor that its supervisor holds until all of it has ended
    boot: Path = HERE / "boot.py"
    cwd: Path | None = None

    @property
    def served_name(self) -> str:
        """The model's name, as the engine must list it."""
        return str(self.model["name"])


def host_command(spec: LaunchSpec, port: int) -> list[str]:
    """Return the command of our own host, in the engine's environment."""
    # A path means what it means here, wherever the engine runs; a bare name is one on the PATH.
    python = spec.python if len(spec.python.parts) == 1 else spec.python.absolute()
    return [
        str(python),
        str(spec.boot),
        "headway.engines.host",
        spec.kind,
        *("--model-json", json.dumps(dict(spec.model))),
        *("--served-name", spec.served_name),
        *("--dtype", spec.dtype),
        *("--device", spec.device),
        *("--port", str(port)),
        *("--args", json.dumps(dict(spec.args))),
    ]


HOST = Launcher(host_command, HOSTED)
# Kinds that have a launcher of their own; every other kind is an engine that our host serves.
LAUNCHERS: dict[str, Launcher] = {}


class Endpoint:
    """A running engine: where it listens, who it says it is, and what its processes cost."""

    def __init__(
        self, spec: LaunchSpec, port: int, supervisor: subprocess.Popen[bytes], started_s: float
    ) -> None:
        self.spec = spec
        self.port = port
        self.launcher = LAUNCHERS.get(spec.kind, HOST)
        self.capabilities = self.launcher.capabilities
        self.started_s = started_s
        self._supervisor = supervisor

    @property
    def base_url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def alive(self) -> bool:
        """Whether our own child still runs."""
        return self._supervisor.poll() is None

    def ends_within(self, seconds: float) -> bool:
        """Whether our own child has ended, or does so in a moment."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(seconds)
        return not self.alive()

    def serves(self) -> bool:
        """Whether our own child runs and says that it can serve."""
        try:
            return self.alive() and self.get(self.launcher.health, HEALTH_TIMEOUT_S)[0] == 200
        except OSError:
            return False

    def clock_since_start(self) -> float:
        """Return the seconds since the engine's process was started."""
        return time.monotonic() - self.started_s

    def pids(self) -> list[int]:
        """Return the engine's processes; empty where /proc tells nothing."""
        return descendants(self._supervisor.pid)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """GET a path; raises OSError when nobody answers."""
        return self._ask("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> Any:
        """POST JSON and return JSON; raises LaunchError when the answer is not a 200."""
        status, content = self._ask("POST", path, json.dumps(dict(body)), timeout_s)
        if status != 200:
            shown = content[:300].decode("utf-8", "replace")
            raise LaunchError("refused", f"{self.spec.instance}: {path} answered {status}: {shown}")
        return json.loads(content)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def info(self) -> EngineInfo:
        """Read back who answers."""
        status, content = self.get("/headway/info")
        if status != 200:
            raise LaunchError("no_info", f"{self.spec.instance}: /headway/info answered {status}")
        return EngineInfo(**json.loads(content))

    def peak_rss_bytes(self) -> int | None:
        """Return the sum of the peak resident sizes of the engine's processes that still live."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                match = re.search(
                    r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.M
                )
                total += int(match[1]) * 1024 if match else 0
        return total or None

    def reset_peak_rss(self) -> None:
        """Let the peak resident sizes count from now on (Linux: 5 into clear_refs)."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                Path(f"/proc/{pid}/clear_refs").write_text("5")


def tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of a log, in one line; empty when there is none."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return " | ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip())[-600:]


@contextlib.contextmanager
def launched(spec: LaunchSpec) -> Iterator[Endpoint]:
    """Start an engine, wait until it is ready, and end it with all its processes afterwards."""
    port = _choose_port(spec)
    started_s = time.monotonic()
    spec.log.parent.mkdir(parents=True, exist_ok=True)
    with spec.log.open("ab") as log:
        supervisor = subprocess.Popen(
            [
                sys.executable,
                "-I",
                str(HERE / "supervise.py"),
                *LAUNCHERS.get(spec.kind, HOST).command(spec, port),
            ],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **spec.env},
            cwd=spec.cwd,
            start_new_session=True,
            pass_fds=() if spec.lock is None else (spec.lock,),
        )
    endpoint = Endpoint(spec, port, supervisor, started_s)
    try:
        _wait_until_ready(endpoint)
        yield endpoint
    finally:
        _stop(supervisor)


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
            said = tail(spec.log)
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
    _check_it_is_ours(endpoint)
    _check_model(endpoint)


def _check_it_is_ours(endpoint: Endpoint) -> None:
    """A stranger on the same port may answer /health before our child failed to bind it."""
    owners = port_owners(endpoint.port)
    if owners and CHILDREN_ARE_KNOWN and owners.isdisjoint(endpoint.pids()):
        raise LaunchError(
            "stranger",
            f"port {endpoint.port} of {endpoint.spec.instance} is answered by process "
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
