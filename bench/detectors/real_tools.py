"""Tools that install here, run as they are: pytest-benchmark, and Apache Otava.

Each gets many cells at once: as benchmarks of one pytest session on a simulated clock, or as series
for one process in an environment of Otava's own. What a tool does not decide itself stands in the
class that runs it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from detectors.detector import NightOutcome, NotAvailable
from detectors.episodes import PAST_LAUNCHES, episode
from detectors.injections import Injection
from detectors.layout import Array, Conditions, Layout
from detectors.peers import Signs, outcome
from headway.environment import default_home
from headway.installer import EnvironmentFailed, build, is_made, locked

DRIVERS = Path(__file__).resolve().parent / "drivers"
FAILED = re.compile(r"^\ttest_cell\[(?P<name>[^\]]+)\] \(.*\) - Field 'median' has failed ", re.M)
OTAVA = "apache-otava==0.8.0"
OTAVA_KEY = f"{OTAVA}, Python {sys.version_info[0]}.{sys.version_info[1]}"


@dataclass(frozen=True, slots=True)
class PytestBenchmark:
    """`--benchmark-compare --benchmark-compare-fail=median:N%`, as its documentation shows it.

    Two real sessions: one saves last night's rounds (a launch each), the next measures tonight's,
    compares with the last file saved, and fails. The names are read from what it then prints.
    Throughputs are given as seconds per token: it has no metric that is better when higher.
    """

    percent: int = 5
    sensitivity: str | None = None
    family: str = "pytest_benchmark"
    most: int | None = 40

    @property
    def name(self) -> str:
        """With the limit."""
        return f"pytest_benchmark_{self.percent}pct"

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge episodes; see `Detector.run`."""
        layout, gated = conditions.layout, conditions.layout.mask(conditions.layout.gated)
        cells = [tuple(map(int, cell)) for cell in np.argwhere(gated)]
        last: dict[str, list[float]] = {}
        tonight: dict[str, list[float]] = {}
        nights: list[tuple[int, int]] = []
        for number in range(num_nights):
            drawn = episode(conditions, injection, seed, number, PAST_LAUNCHES)
            for night, (past, now) in enumerate(drawn):
                nights.append((number, night))
                for case, metric in cells:
                    name = f"{number}.{night}.{case}.{metric}"
                    last[name] = np.exp(past.nights[-1][:, case, metric]).tolist()
                    tonight[name] = np.exp(now[:, case, metric]).tolist()
        if not nights:
            return []
        slower = self.failing(last, tonight)
        outcomes = []
        for number, night in nights:
            signs = np.zeros(layout.shape, int)
            for case, metric in cells:
                signs[case, metric] = f"{number}.{night}.{case}.{metric}" in slower
            outcomes.append(outcome(number, night, signs, layout, PAST_LAUNCHES))
        return outcomes

    def failing(
        self, last: Mapping[str, Sequence[float]], tonight: Mapping[str, Sequence[float]]
    ) -> frozenset[str]:
        """Return the benchmarks that pytest-benchmark calls slower, of seconds per round."""
        limit = f"--benchmark-compare-fail=median:{self.percent}%"
        with tempfile.TemporaryDirectory() as folder:
            saved = _session(Path(folder), last, "--benchmark-save=last")
            if saved.returncode != 0:
                raise RuntimeError(f"pytest-benchmark did not save: {saved.stderr[-500:]}")
            done = _session(Path(folder), tonight, "--benchmark-compare", limit)
        names = frozenset(match["name"] for match in FAILED.finditer(done.stderr))
        if done.returncode != (1 if names else 0):
            raise RuntimeError(
                f"pytest-benchmark ended with {done.returncode}: {done.stderr[-500:]}"
            )
        return names


def _session(
    folder: Path, cells: Mapping[str, Sequence[float]], *options: str
) -> subprocess.CompletedProcess[str]:
    """Run the benchmarks of some cells in a pytest of its own, with no other plugin."""
    values, settings = folder / "cells.json", folder / "pytest.ini"
    values.write_text(json.dumps(cells), encoding="utf-8")
    settings.write_text("[pytest]\n", encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    own = {
        "DETBENCH_CELLS": str(values),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": str(DRIVERS),
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "pytest_benchmark.plugin", "-c", str(settings), f"--rootdir={DRIVERS}"]
    command += ["--benchmark-timer=cells_benchmark.now", "--benchmark-quiet", *options]
    command += [f"--benchmark-storage=file://{folder / 'saved'}", "cells_benchmark.py"]
    return subprocess.run(
        command, cwd=DRIVERS, env=kept | own, capture_output=True, text=True, check=False
    )


@dataclass(frozen=True, slots=True)
class Otava:
    """Apache Otava's change points of 60 nights, with its defaults (window 50, p < 0.001).

    A night's value is the median of its launches. Otava is a tool for trends and says nothing of
    "tonight": a night alarms here when its analysis shows a change for the worse that last night's
    did not, give or take `near` nights.
    """

    nights: int = 60
    near: int = 2
    name: str = "apache_otava"
    sensitivity: str | None = None
    family: str = "apache_otava"
    most: int | None = 60

    def run(
        self, conditions: Conditions, injection: Injection, seed: int, num_nights: int
    ) -> list[NightOutcome]:
        """Judge episodes; see `Detector.run`."""
        layout = conditions.layout
        python = otava_folder() / "bin" / "python"
        if not otava_made():
            raise NotAvailable("not installed (--install makes an environment for it)")
        series: list[Array] = []
        for number in range(num_nights):
            drawn = list(episode(conditions, injection, seed, number, PAST_LAUNCHES))
            if not drawn:
                return []
            before = np.median(drawn[0][0].nights[-self.nights :], axis=1)
            tonight = [np.median(now, axis=0)[None] for _, now in drawn]
            series += [
                np.concatenate([before, *tonight[:night]]) for night in range(len(drawn) + 1)
            ]
        found = iter(change_points(python, series, layout))
        outcomes = []
        for number in range(num_nights):
            yesterday = next(found)
            for night in range(injection.lasts):
                today = next(found)
                signs = self.new(yesterday, today, layout)
                outcomes.append(outcome(number, night, signs, layout, PAST_LAUNCHES))
                yesterday = today
        return outcomes

    def new(self, yesterday: Points, today: Points, layout: Layout) -> Signs:
        """Return the direction of each cell's new change point, the latest one if there are two."""
        signs = np.zeros(layout.shape, int)
        for cell, points in today.items():
            known = yesterday.get(cell, ())
            for index, change in points:
                same = [k for k, was in known if abs(k - index) <= self.near and was * change > 0]
                if not same:
                    signs[cell] = 1 if change > 0 else -1
        return signs


Points = Mapping[tuple[int, int], Sequence[tuple[int, float]]]


def change_points(python: Path, series: Iterable[Array], layout: Layout) -> list[Points]:
    """Return Otava's change points (index, relative change) of [night, case, metric]."""
    cells = [tuple(map(int, cell)) for cell in np.argwhere(layout.mask(layout.gated))]
    lines = [
        json.dumps({f"{c}.{m}": np.exp(values[:, c, m]).tolist() for c, m in cells})
        for values in series
    ]
    done = subprocess.run(
        [str(python), "-I", str(DRIVERS / "otava_points.py")],
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    answers = done.stdout.splitlines()
    if done.returncode != 0 or len(answers) != len(lines):
        raise RuntimeError(f"Otava ended with {done.returncode}: {done.stderr[-500:]}")
    return [
        {
            (int(cell.partition(".")[0]), int(cell.partition(".")[2])): points
            for cell, points in json.loads(answer).items()
        }
        for answer in answers
    ]


def otava_folder() -> Path:
    """Where Otava's environment is made: it pins numpy and scipy, and must not meet ours."""
    return default_home() / "detectors" / OTAVA.replace("==", "-")


def otava_made() -> bool:
    """Whether it is there, whole and of this version."""
    return is_made(otava_folder(), OTAVA_KEY)


def install(say: Callable[[str], object]) -> None:
    """Make Otava's environment, where it is not made; raises EnvironmentFailed."""
    folder = otava_folder()
    with locked(folder.parent / "lock", say):
        if otava_made():
            say(f"{OTAVA} is in {folder}\n")
            return
        say(f"installing {OTAVA} into {folder}: some 100 MB to download\n")
        interpreter = Path(getattr(sys, "_base_executable", sys.executable))
        pip = [["install", "--only-binary", ":all:", OTAVA]]
        try:
            build(folder, OTAVA_KEY, interpreter, pip, say)
        except EnvironmentFailed as error:
            raise EnvironmentFailed(f"{OTAVA} could not be installed: {error}") from error


TOOLS = {tool.name: tool for tool in (PytestBenchmark(), Otava())}
