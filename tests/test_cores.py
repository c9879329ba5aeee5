"""Client and engines get cores of their own where there are enough, and keep to them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.night.cores import Cores, _siblings, kept_to, parted

SUPERVISE = Path(__file__).parents[1] / "engines" / "supervise.py"
linux = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs sched_setaffinity")
HYPERTHREADS = [(core, core + 8) for core in range(8)]


@pytest.mark.parametrize(
    ("cores", "workers", "siblings", "expected"),
    [
        (range(2), 1, (), Cores()),
        (range(3), 1, (), Cores()),
        (range(4), 1, (), Cores((2, 3), (0, 1))),
        (range(8), 1, (), Cores((6, 7), (0, 1, 2, 3, 4, 5))),
        (range(8), 3, (), Cores((4, 5, 6, 7), (0, 1, 2, 3))),
        (range(8), 4, (), Cores()),  # five would be more than half
        (range(16), 1, HYPERTHREADS, Cores((7, 15), (*range(7), *range(8, 15)))),
        (range(16), 2, HYPERTHREADS, Cores((6, 7, 14, 15), (*range(6), *range(8, 14)))),
        ((4, 5, 6, 7), 1, HYPERTHREADS, Cores((6, 7), (4, 5))),  # a container's share
    ],
)
def test_whole_cores_are_dealt_out(cores, workers, siblings, expected):
    assert parted(cores, workers, siblings) == expected


@given(st.sets(st.integers(0, 63), min_size=1), st.integers(1, 8), st.integers(0, 32))
def test_no_core_is_both_s_and_none_is_lost(cores, workers, half):
    siblings = [(core, core + half) for core in range(half)]
    found = parted(cores, workers, siblings)
    if found == Cores():
        assert len(cores) < 4 or len(cores) // 2 <= workers + 1
    else:
        assert set(found.client) | set(found.engine) == cores
        assert not set(found.client) & set(found.engine)
        assert workers + 1 <= len(found.client) <= len(found.engine)
        for pair in siblings:
            assert not (set(pair) & set(found.client) and set(pair) & set(found.engine))


@pytest.mark.parametrize(("text", "threads"), [("3\n", {3}), ("3,11\n", {3, 11}), ("2-3", {2, 3})])
def test_siblings_are_read(tmp_path, text, threads):
    folder = tmp_path / "cpu3" / "topology"
    folder.mkdir(parents=True)
    (folder / "thread_siblings_list").write_text(text)
    assert _siblings(3, tmp_path) == threads
    assert _siblings(4, tmp_path) == {4}


@linux
def test_every_thread_and_child_is_kept_to_them_and_let_go_again():
    mine = os.sched_getaffinity(0)
    one = min(mine)
    ready, done = threading.Event(), threading.Event()
    seen = []

    def other():
        ready.wait()
        seen.append(os.sched_getaffinity(0))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with kept_to((one,)):
        assert os.sched_getaffinity(0) == {one}
        ready.set()
        done.wait()
        code = "import os; print(*os.sched_getaffinity(0))"
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
        assert said.stdout.split() == [str(one).encode()]
    thread.join()
    assert seen == [{one}]
    assert os.sched_getaffinity(0) == mine
    with kept_to(()):
        assert os.sched_getaffinity(0) == mine


@linux
def test_an_engine_sees_only_its_own_cores():
    one = min(os.sched_getaffinity(0))
    code = "import os; print(*os.sched_getaffinity(0))"
    command = [sys.executable, "-I", str(SUPERVISE), f"--cpus={one}", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as supervisor:
        assert supervisor.stdout is not None
        assert supervisor.stdout.read().split() == [str(one).encode()]
