"""SIGKILL a night at random moments, and look at what is left: `make kills ARGS="fake 45"`.

By turns one of the engine's processes, chosen at random, and the pytest process are killed, at a
moment drawn from the length of a whole night: start-up, loading, measuring, the reference. Then,
from outside: no process of the night is left, the engines' ports are free, the verdict is clear.
An engine that was killed is red for the reason and nobody else is; a night whose pytest was killed
is resumed and ends well. Prints a table, and one JSON line last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from command import Done, Workspace, kill, nothing_left, ours

from headway import environment

SUITE = """
[suite]
model = "{model}"
launches = 1
idle_timeout_s = {idle_s}
calibrate = false

[budget]
night_minutes = 30

[baseline]
metrics = []

[engine.one]
kind = "{kind}"
port = {ports[0]}
{args}

[engine.other]
kind = "{other}"
port = {ports[1]}
{args_of_other}

[workload.w]
{prompts}
concurrency = [1, 2]
"""
ENGINES = ("one", "other")  # in the order of the ports
FAKE = "args = { ttft_s = 0.02, itl_s = 0.004 }"
RECALL = 'prompts = "recall"\nprompt_tokens = 48\noutput_tokens = 8'
FINE = frozenset({"PASS", "IMPROVEMENT", "RECORDING", "SKIPPED"})
POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class Subject:
    """What is killed: an engine of some kind, beside one that must not suffer by it."""

    kind: str
    model: str
    other: str
    prompts: str
    args: str = ""
    args_of_other: str = ""
    idle_s: int = 30
    ends_within_s: float = 30.0
    night_within_s: float = 900.0

    def suite(self, ports: tuple[int, int]) -> str:
        """Return its suite."""
        return SUITE.format(**asdict(self), ports=ports)


SUBJECTS = {
    "fake": Subject(
        "fake",
        "fake",
        "fake",
        "prompt_tokens = 8\noutput_tokens = 4\nrequests = 8",
        args=FAKE,
        args_of_other=FAKE,
        idle_s=2,
        night_within_s=120.0,
    ),
    "hf_naive": Subject("hf_naive", "tiny_recall", "hf_static", RECALL),
    "vllm_serve": Subject("vllm_serve", "tiny_recall", "hf_naive", RECALL, ends_within_s=60.0),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """What one kill did. `left` counts processes, `taken` ports; `unclear` is empty where good.

    `red` counts the cells that a kill turned red, `unsure` those that the machine, busy with other
    work, left without a verdict.
    """

    number: int
    whom: str
    role: str
    at_s: float
    exit: int
    left: int
    taken: int
    verdict: str
    red: int
    unsure: int
    unclear: str
    seconds: float

    @property
    def good(self) -> bool:
        """Whether everything was as it should be."""
        return not (self.left or self.taken or self.unclear)


class Field:
    """A workspace with the suite in it, and two ports of its own; a night takes `night_s`."""

    def __init__(self, subject: Subject, folder: Path, night_s: float = 0.0) -> None:
        self.subject = subject
        self.night_s = night_s
        self.workspace = Workspace(folder)
        self.ports = free_ports()
        (folder / "suites").mkdir()
        (folder / "suites" / "night.toml").write_text(subject.suite(self.ports))
        home, real = folder / "home", environment.default_home()
        home.mkdir()
        for name in ("envs", "models"):
            if (real / name).is_dir():
                (home / name).symlink_to(real / name)

    def start(self) -> subprocess.Popen[str]:
        """Start a night."""
        return self.workspace.start("run", "night", "-q")

    def end(self, process: subprocess.Popen[str]) -> Done:
        """Wait for a night's end."""
        text, _ = process.communicate(timeout=self.subject.night_within_s)
        return Done(process.returncode, text, self.workspace.folder)

    def others(self, process: subprocess.Popen[str]) -> list[int]:
        """Return the night's processes but pytest's own."""
        return [pid for pid in ours(self.workspace.folder) if pid != process.pid]

    def taken(self) -> int:
        """Count the engines' ports that somebody still listens on."""
        return sum(not is_free(port) for port in self.ports)


def free_ports() -> tuple[int, int]:
    """Return two ports that nobody has now."""
    with socket.socket() as one, socket.socket() as other:
        for each in (one, other):
            each.bind(("127.0.0.1", 0))
        return one.getsockname()[1], other.getsockname()[1]


def is_free(port: int) -> bool:
    """Whether a server could listen on a port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen()
        except OSError:
            return False
    return True


def role_of(pid: int) -> str | None:
    """Return what a process is in its night; None for one that is gone, or none of an engine's."""
    seen = pid
    for depth in range(20):
        try:
            words = Path(f"/proc/{seen}/cmdline").read_bytes().decode("utf-8", "replace")
            parent = int(Path(f"/proc/{seen}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
        if "headway.engines.reference" in words:
            return "reference"
        if "supervise.py" in words:
            return "supervisor" if not depth else ("server" if depth == 1 else "engine")
        seen = parent
    return None


def instance_of(pid: int, ports: Sequence[int]) -> str | None:
    """Return the engine that a process belongs to: the one whose port stands above it."""
    seen = pid
    for _ in range(20):
        try:
            words = Path(f"/proc/{seen}/cmdline").read_bytes().split(b"\0")
            parent = int(Path(f"/proc/{seen}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return None
        for name, port in zip(ENGINES, ports, strict=True):
            if str(port).encode() in words:
                return name
        seen = parent
    return None


Struck = tuple[str, str | None]


def strike(field: Field, process: subprocess.Popen[str], draw: random.Random) -> Struck | None:
    """Kill one of the engine's processes; return its role and engine. None: the night ended first.

    Where there is none yet it is a moment after the first one that comes: not always its first.
    """
    early = False
    while process.poll() is None:
        roles = {pid: role_of(pid) for pid in field.others(process)}
        victims = sorted(pid for pid, role in roles.items() if role is not None)
        if victims and early:
            early = False
            wait(process, draw.uniform(0.0, field.night_s / 4))
        elif victims:
            pid = draw.choice(victims)
            instance = instance_of(pid, field.ports)
            kill(pid)
            return roles[pid] or "", instance
        else:
            early = True
            time.sleep(POLL_S)
    return None


def engine_trial(field: Field, draw: random.Random, at_s: float) -> tuple[str, Done, str]:
    """Kill an engine's process; returns which, what the night said, and what of it is unclear."""
    process = field.start()
    wait(process, at_s)
    struck = strike(field, process, draw)
    done = field.end(process)
    if struck is None:
        return "nobody", done, "" if done.code == 0 else f"exit {done.code} without a kill"
    role, instance = struck
    return role, done, unclear(done, role, instance)


def pytest_trial(field: Field, at_s: float) -> tuple[str, Done, str]:
    """Kill pytest, see everything end, and run the night again."""
    process = field.start()
    wait(process, at_s)
    alive = process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    role = "pytest" if alive else "nobody"
    if not nothing_left(field.workspace.folder, field.subject.ends_within_s):
        return role, Done(-signal.SIGKILL, "", field.workspace.folder), "it did not end"
    if field.taken():
        return role, Done(-signal.SIGKILL, "", field.workspace.folder), "a port is taken"
    done = field.end(field.start())
    why = unclear(done, None)
    if not why and not done.report()["finished"]:
        why = "the second run did not finish the night"
    return role, done, why


def wait(process: subprocess.Popen[str], seconds: float) -> None:
    """Wait for a moment, or the night's end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def reported(done: Done) -> bool:
    """Whether a night left a report."""
    return bool(done.nights) and (done.night / "report.json").is_file()


def red_cells(done: Done) -> set[tuple[str, str]]:
    """Return (instance, metric) of the cells that are neither fine nor the machine's doing."""
    cells = done.report()["cells"]
    return {(c["instance"], c["metric"]) for c in cells if c["verdict"] not in FINE | {"INVALID"}}


def unclear(done: Done, killed: str | None, instance: str | None = None) -> str:
    """Return what is wrong with a verdict, or an empty text.

    Where an engine was killed its own cells are red, if it was not done; without the reference
    nobody's outputs are verified. What is INVALID is the machine's doing: no verdict on a kill.
    """
    if not reported(done):
        return f"exit {done.code}, and no report: {done.text[-300:]}"
    red = red_cells(done)
    if not red:
        return "" if done.code in (0, 3) else f"exit {done.code}, and nothing is red"
    if killed is None:
        return f"red without a kill: {sorted(red)[:3]}"
    if done.code != 1:
        return f"exit {done.code} although cells are red"
    if killed == "reference":
        wrong = {metric for _, metric in red} - {"greedy_equality", "launch_time"}
        return f"red for want of a reference: {sorted(wrong)}" if wrong else ""
    others = {name for name, _ in red} - {instance}
    if others:
        return f"{instance} was killed, and red is {', '.join(sorted(others))}: {sorted(red)[:5]}"
    told = done.failed().values()
    causes = ("ended", "requests failed", "gave no first token", "answers /health no more")
    if not any(cause in message for message in told for cause in causes):
        return f"nothing says why: {next(iter(told), '')[:200]}"
    return ""


def trial(subject: Subject, number: int, draw: random.Random, night_s: float) -> Trial:
    """Do one kill in a folder of its own."""
    whom = ("engine", "pytest")[number % 2]
    at_s = draw.uniform(0.0, night_s)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        field = Field(subject, Path(name), night_s)
        if whom == "engine":
            role, done, why = engine_trial(field, draw, at_s)
        else:
            role, done, why = pytest_trial(field, at_s)
        ended = nothing_left(field.workspace.folder, subject.ends_within_s)
        left = [] if ended else ours(field.workspace.folder)
        taken = field.taken()
        for pid in left:
            kill(pid)
        cells = done.report()["cells"] if reported(done) else []
    red = sum(cell["verdict"] not in FINE | {"INVALID"} for cell in cells)
    words = Counter(cell["word"] for cell in cells)
    unsure = sum(cell["verdict"] == "INVALID" for cell in cells)
    verdict = ", ".join(f"{count} {word}" for word, count in sorted(words.items()))
    seconds = time.monotonic() - started_s
    return Trial(
        number=number,
        whom=whom,
        role=role,
        at_s=at_s,
        exit=done.code,
        left=len(left),
        taken=taken,
        verdict=verdict,
        red=red,
        unsure=unsure,
        unclear=why,
        seconds=round(seconds, 2),
    )


def trials(subject: Subject, count: int, seed: int) -> Iterator[Trial]:
    """Run one night untouched, to know how long one takes, then kill so many others."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as name:
        field = Field(subject, Path(name))
        started_s = time.monotonic()
        done = field.end(field.start())
        night_s = time.monotonic() - started_s
        why = unclear(done, None)
    if why:
        raise SystemExit(f"a night that nobody touched is not clear: {why}\n{done.text}")
    sys.stdout.write(f"a whole night takes {night_s:.1f} s\n")
    for number in range(count):
        yield trial(subject, number, draw, night_s)


def main() -> int:
    """Return 0 when every kill left nothing but a clear verdict."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("subject", nargs="?", choices=SUBJECTS, default="fake")
    parser.add_argument("trials", nargs="?", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    given = parser.parse_args()
    rows = []
    sys.stdout.write("trial  killed      at s  exit  left  ports     s  verdict\n")
    for row in trials(SUBJECTS[given.subject], given.trials, given.seed):
        rows.append(row)
        sys.stdout.write(
            f"{row.number:5}  {row.role:10}  {row.at_s:4.1f}  {row.exit:4}  {row.left:4}  "
            f"{row.taken:5}  {row.seconds:4.1f}  {row.unclear or row.verdict}\n"
        )
        sys.stdout.flush()
    sys.stdout.write(json.dumps(summary(given.subject, given.seed, rows)) + "\n")
    return 0 if all(row.good for row in rows) else 1


def summary(subject: str, seed: int, rows: list[Trial]) -> dict[str, object]:
    """Return what the trials come to."""
    return {
        "subject": subject,
        "seed": seed,
        "trials": len(rows),
        "good": sum(row.good for row in rows),
        "killed": dict(sorted(Counter(row.role for row in rows).items())),
        "engine_kills_that_are_red": sum(row.red > 0 for row in rows if row.whom == "engine"),
        "processes_left": sum(row.left for row in rows),
        "ports_taken": sum(row.taken for row in rows),
        "unsure_trials": sum(row.unsure > 0 for row in rows),
        "unclear": [f"{row.number}: {row.unclear}" for row in rows if row.unclear],
        "cores": os.cpu_count(),
        "seconds": round(sum(row.seconds for row in rows), 1),
    }


if __name__ == "__main__":
    sys.exit(main())
