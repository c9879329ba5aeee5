"""A client that gets a tenth of a core measures itself: its Run is invalid, and not slow."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.alone
ROOT = Path(__file__).resolve().parent.parent
# Of the kernel's usual period of a tenth of a second.
PERIOD_S, RUNS_S = 0.1, 0.01
CGROUPS = Path("/sys/fs/cgroup/cpu"), Path("/sys/fs/cgroup")


@contextlib.contextmanager
def mock_server() -> Iterator[str]:
    """Run the server whose truth is known; yields its base URL."""
    headway = str(Path(sys.executable).with_name("headway"))
    command = [headway, "mock-server", "--itl", "0.005"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield json.loads(process.stdout.readline())["base_url"]
        finally:
            process.terminate()


@contextlib.contextmanager
def a_tenth_of_a_core(pid: int) -> Iterator[str]:
    """Let a process run for a tenth of each period: by a quota of the kernel's, or by signals."""
    for root in CGROUPS:
        group = root / f"headway-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            if (group / "cpu.max").exists():
                (group / "cpu.max").write_text(f"{RUNS_S * 1e6:.0f} {PERIOD_S * 1e6:.0f}")
            else:
                (group / "cpu.cfs_period_us").write_text(f"{PERIOD_S * 1e6:.0f}")
                (group / "cpu.cfs_quota_us").write_text(f"{RUNS_S * 1e6:.0f}")
            (group / "cgroup.procs").write_text(str(pid))
            yield "quota"
            return
        except OSError:
            continue
        finally:
            while True:  # it is empty as soon as the process has ended
                with contextlib.suppress(OSError):
                    group.rmdir()
                    break
                time.sleep(0.05)
    with stopped_most_of_the_time(pid):
        yield "signals"


@contextlib.contextmanager
def stopped_most_of_the_time(pid: int) -> Iterator[None]:
    """Stop and continue a process in turn."""
    over = threading.Event()

    def work() -> None:
        with contextlib.suppress(ProcessLookupError):
            while not over.is_set():
                os.kill(pid, signal.SIGSTOP)
                over.wait(PERIOD_S - RUNS_S)
                os.kill(pid, signal.SIGCONT)
                over.wait(RUNS_S)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def figures(base_url: str, out: Path, throttled: str) -> dict[str, object]:
    command = [sys.executable, str(ROOT / "bench" / "load" / "ours.py"), "--base-url", base_url]
    command += ["--model", "mock", "--streams", "64", "--requests", "256", "--prompt-tokens", "16"]
    command += ["--output-tokens", "64", "--seed", "1", "--out", str(out)]
    process = subprocess.Popen(command)
    try:
        if throttled == "no":
            assert process.wait(120) == 0
        else:
            how = a_tenth_of_a_core if throttled == "quota" else stopped_most_of_the_time
            with how(process.pid):
                assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()
    found: dict[str, object] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize("throttled", ["quota", "signals"])
def test_a_tenth_of_a_core_is_invalid_and_says_that_the_client_was_late(
    throttled: str, tmp_path: Path
) -> None:
    with mock_server() as base_url:
        free = figures(base_url, tmp_path / "free.json", "no")
        slow = figures(base_url, tmp_path / "slow.json", throttled)
    assert free["requests"] == slow["requests"] == 256
    assert free["invalid"] == []
    reasons = slow["invalid"]
    assert isinstance(reasons, list)
    # What the lag does first is the kernel's choice: it moves a TTFT, or it merges events.
    late = "the client (woke up|was) late by|what arrived waited"
    assert any(re.search(late, reason) for reason in reasons), reasons
