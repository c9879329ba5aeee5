"""A night in progress: its folder, its journal, what is known so far, and what is still to do."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import headway
from headway import codec, correctness
from headway.core import Case, Request
from headway.engines.launch import LaunchSpec
from headway.fingerprint import Machine
from headway.night import journal, models, verify
from headway.night.plan import PlannedLaunch, order
from headway.results import Results
from headway.suite import Instance, Suite
from headway.workload import pair_key

GENERATED_PER_MODEL = 2
VERIFIED_AT_ONCE = 20
# A night that was left unfinished longer ago is not carried on: the machine is another by now.
MAX_AGE_S = 12 * 3600
PythonFor = Callable[[str], Path]


def now() -> str:
    """Return the wall clock, for labels only."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class Screen:
    """Where live progress goes: `line` stays, `status` is overwritten by the next one."""

    line: Callable[[str], None] = lambda _: None
    status: Callable[[str], None] = lambda _: None


@dataclass(slots=True)
class Night:
    """One pass over a suite. Everything it learns goes to the journal before it is used."""

    folder: Path
    suite: Suite
    device: str
    home: Path
    python_for: PythonFor
    results: Results
    prepared: Mapping[str, models.PreparedModel]
    screen: Screen
    resumed_runs: int = 0
    cases: frozenset[Case] = frozenset()
    lock: int | None = None
    started_s: float = field(default_factory=time.monotonic)

    def add(self, *items: Any) -> None:
        """Write items to the journal, then know them."""
        journal.append(self.folder, *items)
        self.results = journal.with_items(self.results, items)

    def say(self, text: str) -> None:
        """Show where the night is."""
        self.screen.status(text)

    def spec(self, planned: PlannedLaunch) -> LaunchSpec:
        """Return how to start a planned launch."""
        instance = self.suite.instance(planned.instance)
        python = python_of(instance, self.python_for)
        return LaunchSpec(
            instance=instance.name,
            kind=instance.kind,
            model=self.prepared[instance.model_name].folder,
            dtype=instance.dtype,
            device=self.device,
            python=python,
            log=self.folder / "logs" / f"{planned.name}.log",
            args=instance.args,
            env=instance.env,
            port=instance.port,
            start_timeout_s=instance.start_timeout_s,
            lock=self.lock,
        )

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

    def progress(self, planned: PlannedLaunch, case: Case, done: int, total: int) -> None:
        """Show instance, launch, level, requests and the time left."""
        left = self.seconds_left()
        text = "" if left is None else f", about {left / 60:.0f} min left"
        self.screen.status(f"{self._where(planned, case)}: {done} of {total} requests{text}")

    def measured(self, planned: PlannedLaunch, case: Case, total: int) -> None:
        """Show a level that is done, in a line that stays."""
        self.screen.line(f"{self._where(planned, case)}: {total} requests")

    def _where(self, planned: PlannedLaunch, case: Case) -> str:
        launch = f"launch {planned.launch} of {self.suite.launches}"
        return f"{case.instance} {launch} {case.workload} {case.level}"

    def budget_is_spent(self) -> bool:
        """Whether this session has taken the minutes that the suite allows."""
        return time.monotonic() - self.started_s > 60 * self.suite.budget.night_minutes

    def seconds_left(self) -> float | None:
        """Estimate from the same case in an earlier launch, else from the instance's other Runs."""
        spans = {(run.case.name, run.launch): run.span_s for run in self.results.runs}
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
                request
                for request in self._sample(model)
                if pair_key(request.prompt_token_ids, ()) not in known
            ]
            if todo or sample:
                self._verify(model, todo, sample)

    def _unverified(self, model: str) -> list[correctness.Pair]:
        """Return the distinct outputs of a model that the reference has not seen."""
        known = self.results.verifications
        return [pair for pair in correctness.pairs(self.results, model) if pair.key not in known]

    def _verify(self, model: str, todo: list[correctness.Pair], sample: list[Request]) -> None:
        python = self.python_for("reference" if model != "fake" else "fake")
        log = self.folder / "logs" / "reference.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        folder = self.prepared[model].folder
        with verify.reference(python, folder, self.device, log, self.say) as running:
            for start in range(0, len(todo), VERIFIED_AT_ONCE):
                batch = todo[start : start + VERIFIED_AT_ONCE]
                self.add(*[running.verify(pair) for pair in batch])
                self.say(f"verified {start + len(batch)} of {len(todo)} outputs of {model}")
            for request in sample:
                self.say(f"{model}: the reference generates for itself")
                prompt = request.prompt_token_ids
                self.add(running.generate(prompt, request.max_tokens, request.ignore_eos))

    def _sample(self, model: str) -> list[Request]:
        run = next((run for run in self.results.runs if run.case.model == model), None)
        if run is None:
            return []
        return list(correctness.requests_of(self.results, run)[:GENERATED_PER_MODEL])

    def finish(self) -> None:
        """Mark the night as complete once nothing that was expected is missing."""
        measured = {(r.case.instance, r.launch, r.case.name) for r in self.results.runs}
        failed = {(r.instance, r.launch) for r in self.results.launches if r.failure is not None}
        missing = [
            cell
            for cell in self.results.expected
            if cell not in measured and cell[:2] not in failed
        ]
        unverified = any(self._unverified(model) for model in self.prepared)
        if not missing and not unverified and not self.results.finished:
            self.add(journal.End(now()))


def python_of(instance: Instance, python_for: PythonFor) -> Path:
    """Return the Python that an instance runs in: its own, or that of its kind.

    An engine of the user's own (`package.module:Class`) runs in the Python that runs this.
    """
    if instance.python is not None:
        return Path(instance.python)
    return Path(sys.executable) if ":" in instance.kind else python_for(instance.kind)


def begin(
    suite: Suite,
    machine: Machine,
    prepared: Mapping[str, models.PreparedModel],
    reports: Path,
    *,
    device: str,
    home: Path,
    python_for: PythonFor,
    screen: Screen,
    lock: int | None = None,
    fresh: bool = False,
) -> Night:
    """Start a night in a folder of its own, or carry on an unfinished one of the same kind."""
    commit = read_commit()
    facts = {name: model.facts for name, model in prepared.items()}
    key = _key(suite, machine, facts, commit)
    folder = None if fresh else _unfinished(reports, key)
    if folder is None:
        stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
        name = f"{stamp}-{suite.name}-{os.urandom(2).hex()}"
        folder = reports / name
        versions = {"headway": headway.__version__}
        header = journal.Header(
            journal.SCHEMA, name, key, now(), suite, machine, facts, commit, versions
        )
        journal.append(folder, header)
    else:
        journal.mend(folder)
    _, results = journal.read(folder)
    runs = len(results.runs)
    return Night(
        folder, suite, device, home, python_for, results, prepared, screen, runs, lock=lock
    )


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
