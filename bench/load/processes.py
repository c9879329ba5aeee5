"""Owns the processes of a run: each on a core, under the supervisor that leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headway.engines import supervise

LOOK_S = 0.2
TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class RunFailed(Exception):
    """A server or a client did not do what it is for; one sentence says what it did instead."""


@contextlib.contextmanager
def pinned(core: int) -> Iterator[None]:
    """Hold this process to a core; what it starts meanwhile inherits that, and keeps it."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def supervised(
    command: Sequence[str], core: int, folder: Path, name: str, env: Mapping[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command on a core for the time of a block; whatever is left of it then is ended.

    Its working folder is `folder`, its output goes to `NAME.out` and `NAME.err` there, and its
    environment is ours with `env`.
    """
    with (folder / f"{name}.out").open("wb") as out, (folder / f"{name}.err").open("wb") as err:
        with pinned(core):
            process = subprocess.Popen(
                [sys.executable, supervise.__file__, *command],
                cwd=folder,
                env={**os.environ, **env},
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=err,
            )
        try:
            yield process
        finally:
            end(process)


def end(process: subprocess.Popen[bytes]) -> int:
    """End a supervised command, gently at first, and return its exit status."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    return process.wait()


@dataclass(slots=True)
class Cpu:
    """CPU seconds of a client and everything below it: (monotonic time, seconds so far), sorted."""

    samples: list[tuple[float, float]] = field(default_factory=list)

    @property
    def total_s(self) -> float:
        """All of it."""
        return self.samples[-1][1] if self.samples else 0.0

    def before(self, at_s: float) -> float:
        """Return the seconds taken up to a time, linear between two samples."""
        times_s, seconds = np.array(self.samples).T
        return float(np.interp(at_s, times_s, seconds))


def run_client(
    command: Sequence[str], core: int, folder: Path, limit_s: float, env: Mapping[str, str]
) -> Cpu:
    """Run a client to its end and return the CPU time that it took.

    Raises RunFailed if it fails, or does not end within `limit_s`.
    """
    cpu, until_s, reaped_s = Cpu(), time.monotonic() + limit_s, _reaped_s()
    with supervised(command, core, folder, "client", env) as process:
        while process.poll() is None:
            now_s = time.monotonic()
            if now_s > until_s:
                raise RunFailed(f"not finished within {limit_s:g} s")
            cpu.samples.append((now_s, tree_s(process.pid)))
            time.sleep(LOOK_S)
        status = end(process)
    # What the kernel counted is exact. Nothing else was waited for meanwhile.
    cpu.samples.append((time.monotonic(), _reaped_s() - reaped_s))
    if status:
        said = last_line(folder / "client.err", folder / "client.out")
        raise RunFailed(f"ended with {status}: {said}")
    return cpu


def tree_s(pid: int) -> float:
    """Return the CPU seconds of a process, what is below it, and what they have waited for."""
    ticks = 0
    for one in (pid, *supervise.descendants(pid)):
        with contextlib.suppress(OSError):
            # Fields 14 to 17 of proc(5), counted after the name, which may hold spaces.
            values = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, values[11:15]))
    return ticks * TICK_S


def last_line(*paths: Path) -> str:
    """Return the last line that says something, of the first file that has one."""
    for path in paths:
        for line in reversed(path.read_text(errors="replace").splitlines()):
            if line.strip():
                return line.strip()[:300]
    return "it said nothing"


def _reaped_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
