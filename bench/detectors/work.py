"""Cuts a benchmark into pieces of work, does them in processes, adds up what they counted."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from detectors import recordings
from detectors.detector import Detector, NotAvailable
from detectors.injections import INJECTIONS, NONE
from detectors.layout import Conditions
from detectors.noise import PRESETS
from detectors.peers import PEERS
from detectors.real_tools import TOOLS
from detectors.scores import Tally, tally

# Every detector, by name. All are frozen and can be sent to another process.
DETECTORS: dict[str, Detector] = {**PEERS, **TOOLS}
CHUNK = 20
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
    """What was counted, by (detector, preset, injection), and what could not be run, and why."""

    tallies: dict[Key, Tally] = field(default_factory=dict)
    missing: dict[tuple[str, str], str] = field(default_factory=dict)

    def add(self, other: Counted) -> None:
        """Add the counts of another piece of work."""
        for key, counts in other.tallies.items():
            self.tallies[key] = self.tallies.get(key, Tally()) + counts
        self.missing |= other.missing


def do(job: Job) -> Counted:
    """Do one piece of work."""
    drawn, counted = conditions(job.preset), Counted()
    # Chunks that follow each other get seeds that do not.
    seed = job.seed * 1_000_003 + job.first
    for name in job.injections:
        injection = INJECTIONS[name]
        for one in job.detectors:
            detector = DETECTORS[one]
            most = None if injection is NONE else detector.most
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
    return counted


def jobs(
    detectors: Sequence[str],
    presets: Sequence[str],
    injections: Sequence[str],
    seed: int,
    num_nights: int,
) -> Iterator[Job]:
    """Yield all work in rounds of a chunk, so that what is done so far is even over all rows."""
    families: dict[str, list[str]] = {}
    for name in detectors:
        families.setdefault(DETECTORS[name].family, []).append(name)
    for first in range(0, num_nights, CHUNK):
        count = min(CHUNK, num_nights - first)
        for preset in presets:
            for family in families.values():
                yield Job(tuple(family), preset, tuple(injections), seed, first, count)


def run(
    todo: Iterator[Job],
    processes: int,
    seconds: float | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Counted:
    """Do all work, or what can be begun within some seconds; at least one chunk of each row.

    Processes are spawned: what a fork would share, libraries' threads above all, is not shared.
    """
    counted, started, done = Counted(), time.monotonic(), 0

    def goes_on(job: Job) -> bool:
        return job.first == 0 or seconds is None or time.monotonic() - started < seconds

    def note(job: Job, result: Counted) -> None:
        nonlocal done
        counted.add(result)
        done += 1
        nights = job.first + job.num_nights
        taken = time.monotonic() - started
        say(f"{taken:6.0f} s  {job.preset}: {', '.join(job.detectors)}: {nights} nights\n")

    if processes == 1:
        for job in todo:
            if goes_on(job):
                note(job, do(job))
        return counted
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(processes, mp_context=context) as pool:
        waiting: dict[concurrent.futures.Future[Counted], Job] = {}
        for job in todo:
            if not goes_on(job):
                break
            waiting[pool.submit(do, job)] = job
            # No more than the processes need: what was submitted cannot be left out any more.
            while len(waiting) > 2 * processes:
                _collect(waiting, note)
        while waiting:
            _collect(waiting, note)
    return counted


def _collect(
    waiting: dict[concurrent.futures.Future[Counted], Job], note: Callable[[Job, Counted], None]
) -> None:
    first = concurrent.futures.FIRST_COMPLETED
    for future in concurrent.futures.wait(waiting, return_when=first).done:
        note(waiting.pop(future), future.result())
