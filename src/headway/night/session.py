"""A night in progress: its folder, its journal, what is known so far, and what is still to do."""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headway
from headway import calibration, codec, correctness, pairs, questions
from headway.answers import Pair, TextPair
from headway.calibration import Band
from headway.core import Calibration, Case, Request, Run
from headway.engines.servers import launcher_of
from headway.fingerprint import Machine
from headway.night import journal
from headway.night.lab import Lab
from headway.night.plan import PlannedLaunch, more_pairs, order
from headway.night.real import now
from headway.night.screen import Screen
from headway.results import ModelFacts, Results
from headway.suite import Instance, Suite
from headway.workload import pair_key

GENERATED_PER_MODEL = 2
VERIFIED_AT_ONCE = 20
# What was read after one Run was read before the next one too, if nothing long is in between.
SAME_READING_S = 3.0
# A machine that is another one for a moment is waited for before a Run, this long at most.
SETTLE_S = 15.0
# A night that was left unfinished longer ago is not carried on: the machine is another by now.
MAX_AGE_S = 12 * 3600
PythonFor = Callable[[str], Path]
MakeLab = Callable[[Path], Lab]
# A request for the reference, and the ids that it may not answer with.
Sampled = tuple[Request, tuple[int, ...]]


@dataclass(slots=True)
class Night:
    """One pass over a suite. Everything it learns goes to the journal before it is used.

    `month_minutes` is what earlier nights of this calendar month took on this device.
    """

    folder: Path
    suite: Suite
    lab: Lab
    results: Results
    screen: Screen
    resumed_runs: int = 0
    cases: frozenset[Case] = frozenset()
    started_s: float = 0.0
    resumed_s: float = 0.0
    month_minutes: float = 0.0
    reading: tuple[float, Mapping[str, float]] = (-math.inf, {})

    def add(self, *items: Any) -> None:
        """Write items to the journal, then know them."""
        journal.append(self.folder, *items)
        self.results = journal.with_items(self.results, items)

    def say(self, text: str) -> None:
        """Show where the night is."""
        self.screen.status(text)

    def calibrate(self, fresh: bool = True) -> Mapping[str, float]:
        """Read the calibration kernels; the night's first reading is one of several.

        Unless it is to be `fresh`, the last reading will do as long as it is next to now, and what
        lies outside its band is waited for: a Run is better begun later than thrown away.
        """
        if not self.suite.calibrate:
            return {}
        while len(self.results.calibrations) < calibration.MIN_READINGS:
            self.say("reading the calibration kernels")
            seconds = self.lab.calibrate()
            if not seconds:
                return {}
            self.add(Calibration(self.lab.now(), seconds))
        at, last = self.reading
        if fresh or self.lab.clock() - at > SAME_READING_S:
            last = self._read()
        until_s = self.lab.clock() + SETTLE_S
        while not fresh and calibration.moved((last,), self.bands()):
            if self.lab.clock() >= until_s:
                break  # what stays outside is the Run's to say
            self.say("waiting for the calibration kernels to come back into their bands")
            self.add(Calibration(self.lab.now(), last))
            last = self._read()
        return last

    def _read(self) -> Mapping[str, float]:
        seconds = self.lab.calibrate()
        self.reading = (self.lab.clock(), seconds)  # its age counts from its end
        return seconds

    def bands(self) -> Mapping[str, Band]:
        """Return where each kernel may be, by what this night has read of it so far."""
        return calibration.bands(self.results.readings())

    def expect(self, cases: Collection[Case]) -> None:
        """Note what is to be measured, so that what is missing later is seen."""
        self.cases = frozenset(cases)
        cells = tuple(
            (item.instance, item.launch, case.name)
            for item in order(self.suite)
            for case in item.cases
            if case in cases
        )
        if not set(cells) <= set(self.results.expected):
            self.add(journal.Expected(cells))

    def expect_more(self, cases: Collection[Case]) -> tuple[PlannedLaunch, ...]:
        """Return the launches of the second look, if the first one asks for any; note them."""
        wanted = pairs.extension(self.results)
        mine = {name: [c for c in own if c in cases] for name, own in wanted.items()}
        launches = more_pairs(self.suite, {name: own for name, own in mine.items() if own})
        cells = tuple((p.instance, p.launch, c.name) for p in launches for c in p.cases)
        if not set(cells) <= set(self.results.expected):
            self.add(journal.Expected(cells))
        return launches

    def minutes(self) -> float:
        """Return what this night has taken so far, earlier sessions of it included."""
        return (self.lab.clock() - self.started_s + self.resumed_s) / 60

    def budget_spent(self, planned: PlannedLaunch) -> str | None:
        """Say which budget forbids another launch; None when none does."""
        budget, took = self.suite.budget, self.minutes()
        compared = pairs.compared(self.suite, planned.instance)
        limits = [
            ("the night's", budget.night_minutes, took),
            ("the month's", budget.month_minutes, took + self.month_minutes),
            *(
                (f"{name}'s comparison", budget.comparison_minutes, self._seconds_of(name) / 60)
                for name in compared
            ),
        ]
        for whose, minutes, spent in limits:
            if minutes is not None and spent > minutes:
                cost = budget.cost(minutes)
                money = (
                    "" if cost is None else f" ({cost:.2f} at {budget.price_per_hour:g} an hour)"
                )
                return f"{whose} budget of {minutes:g} minutes{money} was spent before it"
        return None

    def _seconds_of(self, candidate: str) -> float:
        gate = self.suite.reference
        assert gate is not None
        return self.results.measured_s({candidate, gate.instance})

    def seconds_left(self) -> float | None:
        """Estimate from the same case in an earlier launch, else from the instance's other Runs."""
        spans = {
            (run.case.name, run.launch): run.span_s + run.engine.get("inside_s", 0.0)
            for run in self.results.runs
        }
        total = 0.0
        for instance, launch, name in self.results.expected:
            if (name, launch) in spans:
                continue
            same = [s for (other, _), s in spans.items() if other == name]
            own = [s for (other, _), s in spans.items() if other.startswith(f"{instance}-")]
            if not (same or own):
                return None
            total += max(same or own)
        return total

    def verify_all(self) -> None:
        """Verify every distinct output that has not been, and ask for a few generated ones."""
        for model in dict.fromkeys(i.model_name for i in self.suite.instances):
            todo = self._unverified(model)
            known = {generated.prompt_key for generated in self.results.generated}
            sample = [
                (request, banned)
                for request, banned in self._sample(model)
                if pair_key(request.prompt_token_ids, (), banned) not in known
            ]
            if todo or sample:
                self._verify(model, todo, sample)

    def _unverified(self, model: str) -> list[Pair | TextPair]:
        """Return the distinct outputs of a model that the reference has not seen."""
        known = self.results.verifications
        return [pair for pair in correctness.pairs(self.results, model) if pair.key not in known]

    def _verify(self, model: str, todo: list[Pair | TextPair], sample: list[Sampled]) -> None:
        with self.lab.reference(model) as running:
            for start in range(0, len(todo), VERIFIED_AT_ONCE):
                batch = todo[start : start + VERIFIED_AT_ONCE]
                self.add(*[running.verify(pair) for pair in batch])
                self.say(f"verified {start + len(batch)} of {len(todo)} outputs of {model}")
            for request, banned in sample:
                self.say(f"{model}: the reference generates for itself")
                self.add(running.generate(request, banned))

    def _sample(self, model: str) -> list[Sampled]:
        """Return the first requests of a model's first Run, for each set of ids that was banned."""
        results, first = self.results, dict[tuple[int, ...], Run]()
        for run in results.runs:
            if run.case.model == model and correctness.why_unverified(results, run.case) is None:
                first.setdefault(correctness.banned_of(results, run), run)
        sample: list[Sampled] = []
        for banned, run in first.items():
            # What a later turn asks for depends on the answers before it.
            early = [one for one in questions.requests_of(results, run) if not one.turn]
            chosen = early[:GENERATED_PER_MODEL]
            sample += [(one, banned if one.ignore_eos else ()) for one in chosen]
        return sample

    def finish(self) -> None:
        """Mark the night as complete once nothing that was expected is missing."""
        measured = {(r.case.instance, r.launch, r.case.name) for r in self.results.runs}
        failed = {(r.instance, r.launch) for r in self.results.launches if r.failure is not None}
        missing = [
            cell
            for cell in self.results.expected
            if cell not in measured and cell[:2] not in failed
        ]
        unverified = any(self._unverified(model) for model in self.results.models)
        if not missing and not unverified and not self.results.finished:
            self.add(journal.End(self.lab.now()))


def python_of(instance: Instance, python_for: PythonFor) -> Path:
    """Return the Python that an instance runs in: its own, its image's, or that of its kind.

    An engine of the user's own (`package.module:Class`) runs in the Python that runs this.
    """
    if instance.python is not None:
        return Path(instance.python)
    none = launcher_of(instance.kind, instance.args).environment == "none"
    if none or instance.image is not None:
        return Path("python3")  # the image's; of a command or a running server it is never asked
    return Path(sys.executable) if ":" in instance.kind else python_for(instance.kind)


def begin(
    suite: Suite,
    machine: Machine,
    facts: Mapping[str, ModelFacts],
    reports: Path,
    make_lab: MakeLab,
    *,
    screen: Screen,
    commits: Mapping[str, str] | None = None,
    month_minutes: Callable[[str], float] = lambda night: 0.0,
    fresh: bool = False,
) -> Night:
    """Start a night in a folder of its own, or carry on an unfinished one of the same kind.

    `make_lab` is given the folder, where the lab keeps its logs; `month_minutes` the night's name,
    for what nights but this one took.
    """
    commit = read_commit()
    key = _key(suite, machine, facts, f"{commit} {sorted((commits or {}).items())}")
    folder = None if fresh else _unfinished(reports, key)
    if folder is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{suite.name}-{os.urandom(2).hex()}"
        folder = reports / name
        versions = {"headway": headway.__version__}
        header = journal.Header(
            journal.SCHEMA, name, key, now(), suite, machine, facts, commit, versions, commits or {}
        )
        journal.append(folder, header)
    else:
        journal.mend(folder)
    _, results = journal.read(folder)
    lab = make_lab(folder)
    made = Night(folder, suite, lab, results, screen, len(results.runs), started_s=lab.clock())
    made.resumed_s, made.month_minutes = results.measured_s(), month_minutes(results.night)
    screen.launches, screen.seconds_left = suite.launches, made.seconds_left
    return made


def _key(suite: Suite, machine: Machine, facts: Mapping[str, Any], commit: str | None) -> str:
    parts = [codec.encode(suite), codec.encode(machine), codec.encode(facts), commit]
    text = json.dumps([*parts, headway.__version__], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _unfinished(reports: Path, key: str) -> Path | None:
    """Return the newest night with this key that did not reach its end."""
    for folder in sorted(reports.glob(f"*/{journal.NAME}"), reverse=True):
        try:
            found, finished = journal.peek(folder.parent)
        except journal.JournalError:
            continue  # a broken journal is nobody's to carry on; `headway gate` says what is wrong
        if found == key:
            old = time.time() - folder.stat().st_mtime > MAX_AGE_S
            return None if finished or old else folder.parent
    return None


def read_commit() -> str | None:
    """Return the commit of the working directory, `-dirty` with changes; None outside git."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    commit = answer.stdout.strip()
    if answer.returncode != 0 or not commit:
        return None
    if commit.endswith("-dirty"):  # two states of one commit are two things
        command = ["git", "diff", "HEAD"]
        changes = subprocess.run(command, capture_output=True, timeout=60, check=False).stdout
        commit += f"-{hashlib.sha256(changes).hexdigest()[:8]}"
    return commit
