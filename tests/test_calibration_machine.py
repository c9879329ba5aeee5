"""Waiting for a quiet machine: on a machine and a clock that do what they are told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.night import machine
from headway.night.machine import LOOK_S, QUIET_SHARE, Ticks, others_share, wait_quiet

CORES, TICKS_PER_S = 2, 100
BURN = """
import sys, time
while time.process_time() < float(sys.argv[1]):
    pass
"""


class Machine:
    """Others use `others(t)` of all cores at second t; we use `ours`."""

    def __init__(self, others, ours=0.0):
        self.now, self.others, self.ours = 0.0, others, ours
        self.busy = self.own = 0.0
        self.slept = []

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        for _ in range(round(seconds * 1000)):
            self.own += self.ours * CORES * TICKS_PER_S / 1000
            self.busy += (self.ours + self.others(self.now)) * CORES * TICKS_PER_S / 1000
            self.now += 1 / 1000

    def look(self):
        return Ticks(round(self.now * CORES * TICKS_PER_S), round(self.busy), round(self.own))

    def wait(self, limit_s):
        return wait_quiet(limit_s, clock=self.clock, sleep=self.sleep, look=self.look)


def test_a_quiet_machine_costs_one_look():
    assert Machine(lambda _: 0.0).wait(60) == pytest.approx(LOOK_S)


def test_it_waits_until_others_are_done():
    loud = Machine(lambda t: 0.5 if t < 3.2 else 0.01)
    assert 3.2 <= loud.wait(60) <= 3.2 + 2 * LOOK_S


def test_it_waits_no_longer_than_it_may():
    assert Machine(lambda _: 0.5).wait(2.2) == pytest.approx(2.2)


def test_what_we_do_ourselves_is_not_waited_for():
    assert Machine(lambda _: 0.0, ours=0.5).wait(60) == pytest.approx(LOOK_S)
    assert Machine(lambda _: 0.4, ours=0.5).wait(2) == pytest.approx(2)


@pytest.mark.parametrize("limit_s", [0, -1])
def test_nothing_may_be_waited_for(limit_s):
    loud = Machine(lambda _: 1.0)
    assert loud.wait(limit_s) == 0.0
    assert loud.slept == []


def test_where_nothing_is_known_nothing_is_waited_for(tmp_path):
    still = Machine(lambda _: 1.0)
    waited = wait_quiet(
        60, clock=still.clock, sleep=still.sleep, look=lambda: machine.read_ticks(tmp_path)
    )
    assert waited == 0.0
    assert still.slept == []


@pytest.mark.parametrize("share", [0.0, QUIET_SHARE - 0.01, QUIET_SHARE + 0.01, 1.0])
def test_the_threshold_is_a_share_of_all_cores(share):
    waited = Machine(lambda _: share).wait(5)
    assert waited == pytest.approx(LOOK_S if share <= QUIET_SHARE else 5)


ticks = st.builds(Ticks, *[st.integers(0, 10**9)] * 3)


@given(ticks, ticks)
def test_a_share_is_never_negative(before, after):
    # Ticks of one tree may be read a moment after those of all: more ours than busy is no others.
    assert others_share(before, after) >= 0


@pytest.mark.parametrize(
    "text", ["", "cpu", "cpu 1 2 3", "cpu a b c d e f g h", "intr 1", "cpu  1 2 3 4\n"]
)
def test_a_table_of_another_kind_says_nothing(tmp_path, text):
    (tmp_path / "stat").write_text(text)
    assert machine.read_ticks(tmp_path) is None


def test_what_each_column_counts_as(tmp_path):
    # user nice system idle iowait irq softirq steal guest guest_nice
    (tmp_path / "stat").write_text("cpu  1 2 4 8 16 32 64 128 256 512\ncpu0 1 1 1 1 1 1 1 1 0 0\n")
    assert machine.read_ticks(tmp_path) == Ticks(total=255, busy=231, ours=0, steal=128)


linux = pytest.mark.skipif(not Path("/proc/stat").exists(), reason="needs /proc")


def burnt(command):
    """Ticks of others and of our own until a command has closed its output."""
    before = machine.read_ticks()
    subprocess.run(command, check=True, stdout=subprocess.PIPE)
    after = machine.read_ticks()
    own = after.ours - before.ours
    return after.busy - before.busy - own, own


@linux
def test_a_child_is_ours_and_stays_so_when_it_has_ended():
    _, own = burnt([sys.executable, "-c", BURN, "0.5"])
    assert own >= 45


@linux
def test_a_stranger_is_not_ours():
    # Its parent ends at once, so that it is nobody's child here; its output closes with its end.
    script = f'"{sys.executable}" -c "$1" 0.5 & exit 0'
    others, own = burnt(["sh", "-c", script, "sh", BURN])
    assert others >= 45
    assert own < 45
