"""The process of the calibration kernels: what it runs, says, costs, and how it ends."""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest

from headway.engines import calibration as engine
from headway.engines import launch as launcher
from headway.night import machine
from headway.night.machine import KernelFailure, kernels

MIB = 1024**2
NAMES = {"copy", "launch", "python", "matmul"}
HERE = Path(sys.executable)
PARENT = """
import sys, time
from pathlib import Path
from headway.night.machine import kernels
with kernels(Path(sys.executable), "cpu", Path(sys.argv[1])) as running:
    print(running.pid, flush=True)
    time.sleep(600)
"""


def cpu_ticks(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def runs(pid):
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid, within_s=30.0):
    deadline = time.monotonic() + within_s
    while runs(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not runs(pid)


@pytest.fixture
def log(tmp_path):
    return tmp_path / "logs" / "calibration.log"


@pytest.fixture
def script(tmp_path):
    """A stand-in for a Python: it runs a shell script, whatever it is asked to."""

    def write(text):
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
        return path

    return write


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory):
    """A Python without numpy or anything else."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    return folder / "bin" / "python"


# What the kernels are.


@pytest.mark.parametrize(
    ("cache", "expected"),
    [(None, 128), (1, 128), (32, 128), (33, 132), (96, 384), (128, 512), (504, 512)],
)
def test_far_more_is_copied_than_the_cache_holds(cache, expected):
    assert engine.copy_bytes(None if cache is None else cache * MIB) == expected * MIB


@pytest.mark.parametrize(
    ("usable", "watched"),
    [
        ({0, 1}, (0, 1)),
        ({3, 7}, (3, 7)),
        (set(range(16)), tuple(range(16))),
        (set(range(64)), tuple(range(0, 64, 4))),
        (set(range(20)), tuple(range(0, 20, 2))),
    ],
)
def test_which_cores_are_watched(monkeypatch, usable, watched):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: usable, raising=False)
    assert engine.cores() == watched


def test_each_core_works_once_when_asked():
    done = [0, 0, 0]

    def work(number):
        done[number] += 1

    core = engine.cores()[0]
    crew = engine.Crew([core] * 3, [lambda number=number: work(number) for number in range(3)])
    for times in (1, 2, 3):
        crew.work()
        assert done == [times] * 3


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (["32K", "32K", "1024K", "32768K"], 32 * MIB),
        (["48K", "96M"], 96 * MIB),
        (["48K", "", "much", "12", "K"], 48 * 1024),
        ([], None),
    ],
)
def test_the_last_cache_is_the_largest(tmp_path, sizes, expected):
    for number, size in enumerate(sizes):
        folder = tmp_path / "cache" / f"index{number}"
        folder.mkdir(parents=True)
        (folder / "size").write_text(f"{size}\n")
    assert engine.last_cache_bytes(tmp_path) == expected


def test_a_short_disturbance_does_not_show():
    usual = {"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0}
    calls, now = itertools.count(), 0.0

    def work(seconds):
        nonlocal now
        # Everything takes ten times as long in the round that warms up and in two of the others,
        # and half as long in one.
        factor = {0: 10.0, 2: 10.0, 3: 10.0, 4: 0.5}
        now += seconds * factor.get(next(calls) // len(usual), 1.0)

    made = [
        engine.Kernel(name, lambda seconds=seconds: work(seconds))
        for name, seconds in usual.items()
    ]
    assert engine.read(made, clock=lambda: now) == usual
    assert next(calls) == (1 + engine.ROUNDS) * len(usual)


def test_each_line_is_answered_by_a_reading():
    out = io.StringIO()
    made = [engine.Kernel("a", lambda: None, {"calls": 7}), engine.Kernel("b", lambda: None)]
    engine.serve(made, "cpu", io.StringIO("\n\n"), out)
    ready, *answers = map(json.loads, out.getvalue().splitlines())
    assert ready == {"ready": True, "device": "cpu", "kernels": {"a": {"calls": 7}, "b": {}}}
    assert [set(answer["seconds"]) for answer in answers] == [{"a", "b"}] * 2


# The process.


def test_it_reads_and_is_idle_between_readings(log):
    with kernels(HERE, "cpu", log) as running:
        assert set(running.sizes) == NAMES
        assert running.sizes["copy"]["bytes"] >= 128 * MIB
        for _ in range(2):
            reading = running.read()
            assert set(reading) == NAMES
            assert all(seconds > 0 for seconds in reading.values())
        before = cpu_ticks(running.pid)
        time.sleep(2)
        # Of 200 ticks a core: threads that spin after a product take ten at once.
        assert cpu_ticks(running.pid) - before <= 2
    assert not runs(running.pid)


def test_an_exported_number_of_threads_changes_nothing(log, monkeypatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "4")
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    with kernels(HERE, "cpu", log) as running:
        running.read()
        threads = len(list(Path(f"/proc/{running.pid}/task").iterdir()))
    # Its own, and one for each core that it watches: none of the matrix library's.
    assert threads == 1 + len(engine.cores())


def test_it_ends_when_its_input_closes():
    command = [sys.executable, str(launcher.HERE / "boot.py"), "headway.engines.calibration"]
    ended = subprocess.run(command, input="\n", capture_output=True, text=True, check=True)
    assert [list(json.loads(line)) for line in ended.stdout.splitlines()] == [
        ["ready", "device", "kernels"],
        ["seconds"],
    ]
    assert ended.stderr == ""


def test_it_ends_with_its_parent(log):
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(log)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert runs(pid)
        parent.kill()
    assert ends(pid)


def test_an_interrupt_of_the_terminal_is_not_its_own(log):
    with kernels(HERE, "cpu", log) as running:
        assert os.getpgid(running.pid) == running.pid
        assert os.getsid(running.pid) == running.pid


def test_whatever_happens_in_the_block_nothing_is_left(log):
    with pytest.raises(ZeroDivisionError):
        with kernels(HERE, "cpu", log) as running:
            raise ZeroDivisionError
    assert not runs(running.pid)


# What can go wrong.


def test_one_that_was_killed_is_a_failure_then_and_later(log):
    with kernels(HERE, "cpu", log) as running:
        os.kill(running.pid, signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(KernelFailure, match="the calibration kernels ended"):
                running.read()
    assert not runs(running.pid)


def test_one_that_does_not_answer_is_ended(log):
    with kernels(HERE, "cpu", log) as running:
        with pytest.raises(KernelFailure, match=r"did not answer within 0\.001 s"):
            running.read(timeout_s=0.001)
        with pytest.raises(KernelFailure, match="ended"):
            running.read()
    assert not runs(running.pid)


def test_one_that_is_never_ready_is_ended(log, script):
    with pytest.raises(KernelFailure, match=r"did not answer within 0\.2 s"):
        with kernels(script("exec sleep 600"), "cpu", log, start_timeout_s=0.2):
            pytest.fail("it was never ready")


def test_one_that_keeps_running_when_its_input_closes_is_ended(log, script, monkeypatch):
    monkeypatch.setattr(machine, "STOP_TIMEOUT_S", 0.2)
    deaf = script("""echo '{"ready": true, "kernels": {}}'; exec sleep 600""")
    with kernels(deaf, "cpu", log) as running:
        assert runs(running.pid)
    assert not runs(running.pid)


@pytest.mark.parametrize(
    "answer",
    [
        '{"seconds": {"copy": 0}}',
        '{"seconds": {"copy": -0.1}}',
        '{"seconds": {"copy": NaN}}',
        '{"seconds": {"copy": Infinity}}',
        '{"seconds": {"copy": null}}',
        '{"seconds": {"copy": true}}',
        '{"seconds": {"copy": "0.1"}}',
        '{"seconds": [0.1]}',
        '{"second": {}}',
        "[1]",
        "3",
    ],
)
def test_what_is_no_reading_is_never_used(log, script, answer):
    odd = script(f"echo '{{\"ready\": true, \"kernels\": {{}}}}'; read line; echo '{answer}'")
    with kernels(odd, "cpu", log) as running:
        with pytest.raises(KernelFailure, match="not seconds of each"):
            running.read()


def test_what_it_said_last_is_told(log, script):
    with pytest.raises(KernelFailure, match="ended: cannot go on"):
        with kernels(script("echo 'cannot go on' >&2; exit 3"), "cpu", log):
            pytest.fail("it was never ready")


def test_a_python_that_is_not_there(log, tmp_path):
    with pytest.raises(KernelFailure, match=r"cannot be started with .*nowhere: No such file"):
        with kernels(tmp_path / "nowhere", "cpu", log):
            pytest.fail("it was never ready")


@pytest.mark.parametrize(("device", "library"), [("cpu", "numpy"), ("cuda", "torch")])
def test_a_python_without_what_the_kernels_need(log, bare_python, device, library):
    with pytest.raises(KernelFailure, match=f"need {library}.*cannot import"):
        with kernels(bare_python, device, log):
            pytest.fail("it was never ready")


def test_a_device_that_nobody_knows(log):
    with pytest.raises(KernelFailure, match="--device must be cpu, cuda or cuda:N, not abacus"):
        with kernels(HERE, "abacus", log):
            pytest.fail("it was never ready")
