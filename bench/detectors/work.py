"""Cuts a benchmark into pieces of work, does them in processes, adds up what they counted."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from detectors import recordings
from detectors.detector import Detector, NotAvailable
from detectors.injections import INJECTIONS, NONE
from detectors.layout import Conditions
from detectors.noise import PRESETS
from detectors.ours import OURS
from detectors.peers import PEERS, RULES
from detectors.real_tools import TOOLS
from detectors.scores import Tally, row, tally

# Every detector by its label: its name, with what it is set to where there are several of it.
DETECTORS: dict[str, Detector] = {**OURS, **PEERS, **TOOLS}
CHUNK = 20
# The preset that goals are set for, and the share of its nights that each of the others gets.
MAIN, REST = "shared", 0.25
Key = tuple[str, str, str]


def conditions(name: str) -> Conditions:
    """Return a preset, or a recording; raises KeyError."""
    if name in PRESETS:
        return PRESETS[name]
    if name in recordings.names():
        return recordings.load(recordings.FOLDER / f"{name}.json")
    raise KeyError(name)


@dataclass(frozen=True, slots=True)
class Job:
    """Some episodes of each injection, by detectors that share what is drawn.

    `first` is how many episodes there were before these; together with the seed it makes theirs.
    """

    detectors: tuple[str, ...]
    preset: str
    injections: tuple[str, ...]
    seed: int
    first: int
    num_nights: int


@dataclass(slots=True)
class Counted:
    """What was counted, by (label, preset, injection), and what could not be run, and why.

    `seconds` is what it took, in one process.
    """

    tallies: dict[Key, Tally] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, other: Counted) -> None:
        """Add the counts of another piece of work."""
        for key, counts in other.tallies.items():
            self.tallies[key] = self.tallies.get(key, Tally()) + counts
        self.missing |= other.missing
        self.seconds += other.seconds


def do(job: Job) -> Counted:
    """Do one piece of work."""
    started, drawn, counted = time.monotonic(), conditions(job.preset), Counted()
    # Chunks that follow each other get seeds that do not.
    seed = job.seed * 1_000_003 + job.first
    for name in job.injections:
        injection = INJECTIONS[name]
        for one in job.detectors:
            detector = DETECTORS[one]
            most = None if injection is NONE else detector.most
            most = None if most is None else _share_of(job.preset, most)
            num_nights = job.num_nights if most is None else min(job.num_nights, most - job.first)
            if num_nights <= 0 or (one, job.preset) in counted.missing:
                continue
            touches = bool(injection.touched(drawn.layout).any())
            if injection.effect and not touches:
                continue  # a recording without that level or metric
            try:
                outcomes = detector.run(drawn, injection, seed, num_nights)
            except NotAvailable as error:
                counted.missing[one, job.preset] = str(error)
                continue
            counted.tallies[one, job.preset, name] = tally(outcomes, injection, drawn.layout)
    counted.seconds = time.monotonic() - started
    return counted


def _share_of(preset: str, count: int) -> int:
    return count if preset == MAIN else math.ceil(REST * count)


def jobs(
    detectors: Sequence[str],
    presets: Sequence[str],
    injections: Sequence[str],
    seed: int,
    num_nights: int,
) -> dict[str, Iterator[Job]]:
    """Return the work of each family, in rounds of a chunk, so that its rows come equally far."""
    families: dict[str, list[str]] = {}
    for label in detectors:
        families.setdefault(DETECTORS[label].family, []).append(label)

    def of(family: str) -> Iterator[Job]:
        # The rules take less time than what is drawn for them, the others far more.
        some = [tuple(injections)] if family == RULES else [(one,) for one in injections]
        for first in range(0, num_nights, CHUNK):
            for names, preset in itertools.product(some, presets):
                count = min(CHUNK, _share_of(preset, num_nights) - first)
                if count > 0:
                    yield Job(tuple(families[family]), preset, names, seed, first, count)

    return {family: of(family) for family in families}


@dataclass(slots=True)
class Queue:
    """Work still to be begun: next comes the family that has had the least time."""

    todo: dict[str, Iterator[Job]]
    until: float
    spent: dict[str, float] = field(init=False)

    def __post_init__(self) -> None:
        """Nothing was begun."""
        self.spent = dict.fromkeys(self.todo, 0.0)

    def next(self) -> Job | None:
        """Return what to begin; None when there is nothing left, or no time."""
        while self.todo and time.monotonic() < self.until:
            family = min(self.todo, key=self.spent.__getitem__)
            job = next(self.todo[family], None)
            if job is not None:
                self.spent[family] += 1e-3  # what is under way counts a little
                return job
            del self.todo[family]
        return None


def run(
    todo: dict[str, Iterator[Job]],
    processes: int,
    seconds: float | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Counted:
    """Do all work, or what can be begun within some seconds.

    Processes are spawned: what a fork would share, libraries' threads above all, is not shared.
    """
    counted, started = Counted(), time.monotonic()
    queue = Queue(todo, started + (math.inf if seconds is None else seconds))

    def note(job: Job, result: Counted) -> None:
        counted.add(result)
        family = DETECTORS[job.detectors[0]].family
        queue.spent[family] += result.seconds
        nights, taken = job.first + job.num_nights, time.monotonic() - started
        injections = job.injections[0] if len(job.injections) == 1 else "all"
        say(f"{taken:6.0f} s  {job.preset} {family} {injections}: {nights} nights\n")

    if processes == 1:
        while (job := queue.next()) is not None:
            note(job, do(job))
        return counted
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting: dict[concurrent.futures.Future[Counted], Job] = {}
        while True:
            # Only what can start at once: what was submitted cannot be left out any more.
            while len(waiting) < processes and (job := queue.next()) is not None:
                waiting[pool.submit(do, job)] = job
            if not waiting:
                return counted
            first = concurrent.futures.FIRST_COMPLETED
            for future in concurrent.futures.wait(waiting, return_when=first).done:
                note(waiting.pop(future), future.result())


def rows(
    counted: Counted, detectors: Sequence[str], presets: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the scores, a row per detector and preset; `not_run` says why there are none."""
    made = []
    for preset, label in itertools.product(presets, detectors):
        own = {
            injection: counts
            for (one, under, injection), counts in counted.tallies.items()
            if (one, under) == (label, preset)
        }
        detector = DETECTORS[label]
        scores = row(detector.name, detector.sensitivity, preset, own)
        why = counted.missing.get((label, preset))
        if why is not None or not own:
            scores["not_run"] = why or "there was no time for it"
        made.append(scores)
    return made
