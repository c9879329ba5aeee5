"""Cuts a benchmark into pieces of work, does them in processes, adds up what they counted."""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import signal
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
from detectors.peers import PEERS
from detectors.real_tools import TOOLS
from detectors.scores import Tally, row, tally

# Every detector by its label: its name, with what it is set to where there are several of it.
DETECTORS: dict[str, Detector] = {**OURS, **PEERS, **TOOLS}
CHUNK = 10
# The preset that goals are set for, and the share of its nights that each of the others gets.
MAIN, REST = "shared", 0.25
ENDING_S = 5.0
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
    """Some episodes of each injection, by detectors that share what is drawn: pasts above all.

    `first` is how many episodes there were before these; together with the seed it makes theirs.
    """

    detectors: tuple[str, ...]
    preset: str
    injections: tuple[str, ...]
    seed: int
    first: int
    num_nights: int

    def episodes(self, label: str, injection: str) -> int:
        """Return how many of them a detector is asked for, under an injection."""
        most = DETECTORS[label].most
        if most is None or INJECTIONS[injection] is NONE:
            return self.num_nights
        return max(0, min(self.num_nights, _share_of(self.preset, most) - self.first))


@dataclass(slots=True)
class Counted:
    """What was counted, by (label, preset, injection), and what could not be run, and why.

    `seconds` is what it took, in one process; `interrupted`, whether it was ended by SIGINT.
    """

    tallies: dict[Key, Tally] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)
    seconds: float = 0.0
    interrupted: bool = False

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
    for name, one in itertools.product(job.injections, job.detectors):
        injection, num_nights = INJECTIONS[name], job.episodes(one, name)
        if not num_nights or (one, job.preset) in counted.missing:
            continue
        if injection.effect and not injection.touched(drawn.layout).any():
            continue  # a recording without that level or metric
        try:
            outcomes = DETECTORS[one].run(drawn, injection, seed, num_nights)
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
        labels = tuple(families[family])
        for first, preset in itertools.product(range(0, num_nights, CHUNK), presets):
            count = min(CHUNK, _share_of(preset, num_nights) - first)
            job = Job(labels, preset, tuple(injections), seed, first, count)
            if any(job.episodes(*asked) > 0 for asked in itertools.product(labels, injections)):
                yield job

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
    """Do all work, or what can be begun within some seconds; SIGINT ends it with what there is.

    Processes are spawned: what a fork would share, libraries' threads above all, is not shared.
    """
    counted, started = Counted(), time.monotonic()
    queue = Queue(todo, started + (math.inf if seconds is None else seconds))

    def note(job: Job, result: Counted) -> None:
        counted.add(result)
        family = DETECTORS[job.detectors[0]].family
        queue.spent[family] += result.seconds
        nights, taken = job.first + job.num_nights, time.monotonic() - started
        say(f"{taken:6.0f} s  {job.preset} {family}: {nights} nights\n")

    try:
        if processes == 1:
            while (job := queue.next()) is not None:
                note(job, do(job))
        else:
            _in_processes(queue, processes, note)
    except KeyboardInterrupt:
        counted.interrupted = True
    return counted


def _in_processes(queue: Queue, processes: int, note: Callable[[Job, Counted], None]) -> None:
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(processes, context, initializer=_ended_by_us)
    waiting: dict[concurrent.futures.Future[Counted], Job] = {}
    with pool:
        try:
            while True:
                # Only what can start at once: what was submitted cannot be left out any more.
                while len(waiting) < processes and (job := queue.next()) is not None:
                    waiting[pool.submit(do, job)] = job
                if not waiting:
                    return
                first = concurrent.futures.FIRST_COMPLETED
                for future in concurrent.futures.wait(waiting, return_when=first).done:
                    note(waiting.pop(future), future.result())
        except BaseException:
            _end(multiprocessing.active_children())
            raise


def _end(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    """End processes; one whose interrupt became the result of its job waits for another job."""
    for process in processes:
        process.terminate()
    for process in processes:
        process.join(ENDING_S)
        process.kill()


def _ended_by_us() -> None:
    """Let a terminal's SIGINT be for the parent alone; what it ends takes its own children along.

    An exception, unlike a signal's default, lets `subprocess.run` kill what it waits for.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.default_int_handler)


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
