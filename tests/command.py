"""Runs the shipped command on a small suite of fake engines, and reads back what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADWAY = [sys.executable, "-c", "import sys; from headway.cli import main; sys.exit(main())"]
INSTANCES = ("fake_a", "fake_b")
MINI = """
[suite]
description = "two quick fake engines"
model = "fake"
launches = {launches}
idle_timeout_s = 2
calibrate = false
level_timeout_s = 30
step_batches = {steps}

[budget]
night_minutes = 1

[engine.fake_a]
kind = "fake"
args = {{ ttft_s = 0.04, itl_s = 0.008 }}
start_timeout_s = 10

[engine.fake_b]
kind = "fake"
args = {{ ttft_s = 0.04, itl_s = 0.008 }}
start_timeout_s = 10

[workload.w]
prompt_tokens = 8
output_tokens = 6
concurrency = [1, 2]

[[limit]]
metric = "tpot_p50"
over = "*"
max = 1.15
"""


@dataclass(frozen=True)
class Done:
    """What one command said and left."""

    code: int
    text: str
    folder: Path

    @property
    def nights(self) -> list[Path]:
        return sorted(path.parent for path in (self.folder / "reports").glob("*/journal.jsonl"))

    @property
    def night(self) -> Path:
        return self.nights[-1]

    def report(self) -> dict[str, Any]:
        return json.loads((self.night / "report.json").read_text())

    def journal(self, kind: str) -> list[dict[str, Any]]:
        text = (self.night / "journal.jsonl").read_text()
        lines = [json.loads(line) for line in text.splitlines()]
        return [line["data"] for line in lines if line["type"] == kind]

    def cells(self, *verdicts: str) -> set[tuple[str, str]]:
        """Return (instance, metric) of the cells with these verdicts."""
        cells = self.report()["cells"]
        return {(c["instance"], c["metric"]) for c in cells if c["verdict"] in verdicts}

    def failed(self) -> dict[str, str]:
        """Return the failures of JUnit's file: test id → message."""
        return {
            case.attrib["name"]: failure.attrib["message"]
            for case in ET.parse(self.folder / "reports" / "junit.xml").iter("testcase")
            for failure in case.findall("failure")
        }


@dataclass(frozen=True)
class Workspace:
    """A folder with a suite in it, and a HEADWAY_HOME of its own."""

    folder: Path

    def write(self, launches: int = 1, steps: str = "[]", more: str = "") -> None:
        suites = self.folder / "suites"
        suites.mkdir(exist_ok=True)
        (suites / "mini.toml").write_text(MINI.format(launches=launches, steps=steps) + more)

    @property
    def env(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTEST", "COLUMNS"))}
        return clean | {"HEADWAY_HOME": str(self.folder / "home")}

    def start(self, *words: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [*HEADWAY, *words],
            cwd=self.folder,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            **options,
        )

    def run(self, *words: str, **options: Any) -> Done:
        with self.start(*words, **options) as process:
            text, _ = process.communicate(timeout=240)
        return Done(process.returncode, text, self.folder)

    def mini(self, *words: str, **options: Any) -> Done:
        return self.run("run", "mini", *words, **options)

    def runs_so_far(self) -> int:
        journals = self.folder.glob("reports/*/journal.jsonl")
        return sum(path.read_bytes().count(b'{"type": "run"') for path in journals)

    def wait_for_runs(self, count: int, timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while self.runs_so_far() < count:
            assert time.monotonic() < deadline, "the night makes no progress"
            time.sleep(0.02)


def ours(folder: Path) -> list[int]:
    """Return the processes that run on behalf of a workspace, seen from outside."""
    return list(_ours(folder))


def _ours(folder: Path) -> Iterator[int]:
    marker = f"HEADWAY_HOME={folder / 'home'}".encode()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (path / "environ").read_bytes().split(b"\0"):
                yield int(path.name)
        except OSError:
            continue


def nothing_left(folder: Path, timeout_s: float = 20.0) -> bool:
    """Whether all of a workspace's processes end by themselves."""
    deadline = time.monotonic() + timeout_s
    while ours(folder):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def kill(pid: int) -> None:
    """SIGKILL one process, which may be gone already."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
