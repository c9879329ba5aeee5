"""A running engine as its launcher sees it: where it listens, who it is, what its processes cost.

Standard library only: this runs in the instrument's process.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headway.core import EngineInfo
from headway.engines.container import Container
from headway.engines.launcher import Launcher, LaunchError, LaunchSpec
from headway.engines.supervise import descendants

HEALTH_TIMEOUT_S = 2.0
# Between an engine's last answer and the end of its processes.
ENDING_S = 2.0
# The same where it answers that it cannot say who it is: of several processes, one may have died.
PARTING_S = 10.0
MEMORY = "ran out of memory"
# What allocators of the host and of a GPU, and servers that plan with memory, end with.
_OUT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemoryError|MemoryError|bad_alloc|can(no|')t allocate|failed to allocate"
    r"|no available memory for the cache blocks|ErrorOutOfDeviceMemory",
    re.IGNORECASE,
)
_LAST_LINES = 60
# The status of a child that SIGKILL ended, as its supervisor passes it on.
_KILLED = 128 + 9
# What a server puts before a line of its log: `(EngineCore pid=7) ERROR 11-30 14:12:35 [core.py:1]`
LOG_HEAD = re.compile(r"^(\([\w -]*pid=\d+\) ?)?([A-Z]+ [\d-]+ [\d:,.]+ \[[^\]]*\] ?)?")
ERROR_LINE = re.compile(r"([A-Za-z_]\w*\.)*[A-Z]\w*(Error|Exception|Exit|Interrupt)\b(: .*)?$")
MOST_ERROR_LINES = 4


class Endpoint:
    """A running engine. One that ran already when we came has no `supervisor`.

    `served_name` is what requests must call its model.
    """

    def __init__(
        self,
        spec: LaunchSpec,
        launcher: Launcher,
        base_url: str,
        supervisor: subprocess.Popen[bytes] | None,
        started_s: float,
        container: Container | None = None,
    ) -> None:
        self.spec = spec
        self.launcher = launcher
        self.base_url = base_url
        self.started_s = started_s
        self.container = container
        self.served_name = launcher.served(spec) or spec.served_name
        self._supervisor = supervisor
        self._oom_kills = oom_kills()

    def alive(self) -> bool:
        """Whether our own child still runs; of a server that is not ours, nobody knows."""
        return self._supervisor is None or self._supervisor.poll() is None

    def ends_within(self, seconds: float = ENDING_S) -> bool:
        """Whether our own child has ended, or does so in a moment."""
        if self._supervisor is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._supervisor.wait(seconds)
        return not self.alive()

    @property
    def ours(self) -> bool:
        """Whether we started it: else nobody here knows its processes, or when they began."""
        return self._supervisor is not None

    def says_ready(self) -> bool:
        """Whether it says that it can serve; raises OSError when nobody answers.

        One that ran already need not list its models: then the first request decides. It may want
        a key: LaunchError.
        """
        status = self.get(self.launcher.health, HEALTH_TIMEOUT_S)[0]
        if not self.ours and status in (401, 403):
            message = f"{self.spec.instance}: {self.base_url} answered {status}: api_key_env names "
            raise LaunchError("no_api_key", message + "the variable that holds its key")
        return status == 200 or (not self.ours and status == 404)

    def out_of_memory(self) -> bool:
        """Whether our own child, which has ended, ran out of memory.

        Its last words say so; or the kernel killed a process for memory while it lived; or it was
        killed by nobody here, on a kernel that does not count such kills.
        """
        if self.alive() or self._supervisor is None:
            return False
        last = "\n".join(_read(self.spec.log).splitlines()[-_LAST_LINES:])
        if _OUT_OF_MEMORY.search(last):
            return True
        kills = oom_kills()
        if kills is None or self._oom_kills is None:
            return self._supervisor.returncode == _KILLED
        return kills > self._oom_kills

    def died(self, when: str) -> LaunchError:
        """Return how our own child, which has ended, did so `when` it was at something."""
        kind, what = ("oom", MEMORY) if self.out_of_memory() else ("died_loading", "ended")
        said = telling(self.spec.log)
        return LaunchError(kind, f"{self.spec.instance} {what} {when}: {said}")

    def serves(self) -> bool:
        """Whether our own child runs and says that it can serve."""
        try:
            return self.alive() and self.says_ready()
        except (OSError, LaunchError):
            return False

    def clock_since_start(self) -> float:
        """Return the seconds since the engine's process was started."""
        return time.monotonic() - self.started_s

    def pids(self) -> list[int]:
        """Return the engine's processes; empty where /proc tells nothing, or none is ours."""
        if self.container is not None:
            return self.container.pids()
        return [] if self._supervisor is None else descendants(self._supervisor.pid)

    def get(self, path: str, timeout_s: float = 10.0) -> tuple[int, bytes]:
        """GET a path; raises OSError when nobody answers."""
        return self._ask("GET", path, None, timeout_s)

    def get_json(self, path: str, timeout_s: float = 10.0) -> Any:
        """GET a path's JSON; raises LaunchError when there is none, OSError when nobody answers."""
        status, content = self.get(path, timeout_s)
        try:
            if status == 200:
                return json.loads(content)
        except ValueError as error:
            message = f"{self.spec.instance}: {path} answered no JSON: {error}"
            raise LaunchError("no_info", message) from error
        raise LaunchError("no_info", f"{self.spec.instance}: {path} answered {status}")

    def post(self, path: str, body: Mapping[str, Any], timeout_s: float = 120.0) -> Any:
        """POST JSON and return JSON (None: it is none); raises LaunchError when it is no 200.

        Raises OSError when nobody answers.
        """
        status, content = self._ask("POST", path, json.dumps(dict(body)), timeout_s)
        if status != 200:
            shown = content[:300].decode("utf-8", "replace")
            raise LaunchError("refused", f"{self.spec.instance}: {path} answered {status}: {shown}")
        try:
            return json.loads(content)
        except ValueError:
            return None

    def empty_cache(self, path: str, timeout_s: float = 60.0) -> tuple[int, bytes]:
        """POST to what empties its prefix cache; raises OSError when nobody answers."""
        return self._ask("POST", path, "", timeout_s)

    def _ask(self, method: str, path: str, body: str | None, timeout_s: float) -> tuple[int, bytes]:
        url = urlsplit(self.base_url)
        tls = url.scheme == "https"
        kind = http.client.HTTPSConnection if tls else http.client.HTTPConnection
        connection = kind(url.hostname or "", url.port, timeout=timeout_s)
        headers = {"Content-Type": "application/json"}
        if self.spec.api_key:
            headers["Authorization"] = f"Bearer {self.spec.api_key}"
        try:
            connection.request(method, url.path.rstrip("/") + path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()

    def info(self) -> EngineInfo:
        """Read back who answers; raises LaunchError, OSError when nobody does."""
        try:
            return self.launcher.info(self)
        except (LaunchError, OSError) as error:
            if self.ours and self.ends_within(PARTING_S):
                raise self.died("when it was asked who it is") from error
            raise
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            message = f"{self.spec.instance} describes itself otherwise than {self.spec.kind} does"
            raise LaunchError("no_info", f"{message}: {type(error).__name__} {error}") from error

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


def telling(log: Path) -> str:
    """Return what a log says of the engine's end, in one line: its first error, else its end.

    Of several processes the one that failed first tells why; the tracebacks of those that waited
    for it come after.
    """
    lines = [LOG_HEAD.sub("", line).rstrip() for line in _read(log).splitlines()]
    for start, line in enumerate(lines):
        if line == "Traceback (most recent call last):":
            rest = range(start + 1, len(lines))
            end = next((n for n in rest if ERROR_LINE.match(lines[n])), None)
            if end is not None:
                return " ".join(_message(lines[end : end + MOST_ERROR_LINES]))[:600]
    return tail(log)


def _message(lines: list[str]) -> Iterator[str]:
    """Yield an error's line, and those after it that belong to its message."""
    yield lines[0]
    for line in lines[1:]:
        if not line.startswith(" "):
            return
        yield line.strip()


def tail(log: Path, lines: int = 5) -> str:
    """Return the last lines of a log, in one line; empty when there is none."""
    last = _read(log).splitlines()[-lines:]
    return " | ".join(line.strip() for line in last if line.strip())[-600:]


def _read(log: Path) -> str:
    try:
        return log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def oom_kills(proc: Path = Path("/proc")) -> int | None:
    """Return how many processes this kernel has killed for memory; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", (proc / "vmstat").read_text(), re.M)
    except OSError:
        return None
    return None if found is None else int(found[1])
