"""Run one command and leave nothing of it behind, however the one who asked for it ends.

    python supervise.py [--cpus=2,3] [--after=JSON] COMMAND [ARGUMENT ...]

With a pipe on standard input. The command gets a process group of its own, and the cores that
`--cpus` names. When standard input closes (its owner stopped it, or was killed) the whole group is
asked to end, then killed after a grace period; processes that left the group are found, because
orphans of this process come back to it (a subreaper, on Linux). Then the command `--after`, a JSON
list, is run: it ends what was started elsewhere, such as a container, whose processes are no
children of the one who asked for it. Ends with the command's own status; 128 + the signal when a
signal ended it. If this process is itself killed its child is, too; what the child had started is
left to whoever started us, who finds it in our session (`end_session`).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

GRACE_S = 10.0
AFTER_S = 40.0
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LINUX = sys.platform == "linux"


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def _die_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it was killed before it could be watched
        os._exit(1)


def descendants(pid: int) -> list[int]:
    """Return the processes below `pid`, parents first; empty where /proc tells nothing."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def end_session(leader: int, timeout_s: float = 5.0) -> None:
    """Kill what is left of a session whose leader has ended, until nothing is.

    While one process of it lives no other process gets the leader's number.
    """
    deadline = time.monotonic() + timeout_s
    while (rest := _session(leader)) and time.monotonic() < deadline:
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _session(leader: int) -> list[int]:
    """Return the processes of a session that still run; none where its leader does, or its heir."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
            if int(session) == leader and state != "Z":
                found.append(int(path.parent.name))
    return [] if leader in found else found


def _wait_for_end(child: subprocess.Popen[bytes], wakeup: int) -> None:
    """Return when the child ended, the owner is gone, or a signal asks us to stop."""
    watched = [0, wakeup]
    if _LINUX:
        watched.append(os.pidfd_open(child.pid))
    while child.poll() is None:
        ready, _, _ = select.select(watched, [], [], None if _LINUX else 0.2)
        if wakeup in ready:
            return
        if 0 in ready and not os.read(0, 4096):
            return


def _end(child: subprocess.Popen[bytes]) -> None:
    """End the child's group gently, then everything that is left below us, and reap it all."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGTERM)
        os.killpg(child.pid, signal.SIGCONT)  # what is stopped hears nothing else before it is not
    deadline = time.monotonic() + GRACE_S
    while child.poll() is None and time.monotonic() < deadline:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
    while rest := descendants(os.getpid()):
        for pid in rest:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _run_after(command: list[str]) -> None:
    """Run what ends the rest; whatever becomes of it, it is over in time."""
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, timeout=AFTER_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.stderr.write(f"{command[0]} did not end what was started: {error}\n")


def main(command: list[str]) -> int:
    """Supervise `command`; returns its exit status."""
    options: dict[str, str] = {}
    while command[0].startswith("--"):
        name, _, value = command[0].partition("=")
        options[name], command = value, command[1:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    if "--cpus" in options:
        os.sched_setaffinity(0, map(int, options["--cpus"].split(",")))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    die_with_us = partial(_die_with, os.getpid())
    try:
        child = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, process_group=0, preexec_fn=die_with_us
        )
    except OSError as error:
        sys.stderr.write(f"{command[0]} cannot be started: {error.strerror}\n")
        return 127
    _wait_for_end(child, reader)
    _end(child)
    if "--after" in options:
        _run_after(json.loads(options["--after"]))
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
