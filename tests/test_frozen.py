"""An engine that stands still (SIGSTOP) in mid-level: seen, red in its own cells, and ended."""

from __future__ import annotations

import os
import re
import signal
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

# Beyond the request of the launch and those of the warm-up, and well before a level's last.
IN_MID_LEVEL = 6
ANSWERED = re.compile(r'headway:requests_total\{finish_reason="length"\} (\d+)')


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        return []


def find(command: Any, folder: Path, module: str, engine: str) -> tuple[int, list[str]] | None:
    """Return the process that runs a module of the host for an engine, and its command line."""
    for pid in command.ours(folder):
        words = words_of(pid)
        if words[2:4] == [module, engine]:
            return pid, words
    return None


def answered(words: list[str]) -> int:
    """Return how many requests the host with this command line has answered to their end."""
    port = words[words.index("--port") + 1]
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as reply:
            found = ANSWERED.search(reply.read().decode())
    except (urllib.error.URLError, OSError):
        return 0
    return int(found[1]) if found else 0


def freeze(command: Any, folder: Path, module: str, engine: str) -> int:
    """Stop the process that runs `module` for an engine, once it is in mid-level."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        front = find(command, folder, "headway.engines.host", engine)
        if front is not None and answered(front[1]) >= IN_MID_LEVEL:
            found = find(command, folder, module, engine)
            assert found is not None
            os.kill(found[0], signal.SIGSTOP)
            return found[0]
        time.sleep(0.02)
    raise AssertionError("no engine came into mid-level")


# The fake engine lives in the front; an engine with steps in a process behind it, whose front goes
# on answering /health.
@pytest.mark.parametrize(
    ("module", "frozen", "other"),
    [
        ("headway.engines.host", "fake", "my_engines.echo:Echo"),
        ("headway.engines.host.loop", "my_engines.echo:Echo", "fake"),
    ],
    ids=["the whole engine", "the process behind the front"],
)
def test_an_engine_that_stands_still_is_seen_and_ended(
    command: Any, workspace: Any, module: str, frozen: str, other: str
) -> None:
    workspace.run("init")
    changes = {
        "suite.launches": "1",
        "suite.idle_timeout_s": "2",
        "suite.step_batches": "[]",
        "engine.fake.args.itl_s": "0.05",
        "engine.echo.args.step_s": "0.05",
    }
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    with workspace.start("run", "mine", "--level", "c4", *words) as process:
        pid = freeze(command, workspace.folder, module, frozen)
        text, _ = process.communicate(timeout=120)
    assert words_of(pid) == []
    assert command.ours(workspace.folder) == []
    done = command.Done(process.returncode, text, workspace.folder)
    assert done.code == 1, text
    names = {"fake": "fake", "my_engines.echo:Echo": "echo"}
    assert (names[frozen], "success_rate") in done.cells("LIMIT")
    assert any("read_timeout" in message for message in done.failed().values())
    others = {t: m for t, m in done.failed().items() if f"[{names[frozen]}" not in t}
    assert others == {}
    assert (names[other], "greedy_equality") in done.cells("PASS")
