"""What one pytest session knows of its night: options, the night itself, its judgement."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import headway
from headway import (
    available,
    baseline,
    environment,
    history,
    night,
    outlook,
    pairs,
    proposal,
    suite,
    verdict,
)
from headway.core import Case
from headway.night import Night
from headway.plugin import files, starting
from headway.plugin.message import told
from headway.results import Results
from headway.suite import Suite
from headway.verdict import Finding, Judged

DEFAULT_SUITE = "quick"


@dataclass(frozen=True, slots=True)
class Cell:
    """What a reader asserts: one case × metric. Nothing happens before `check` is called."""

    state: State
    case: Case
    metric: str
    item: pytest.Item

    def check(self) -> None:
        """Pass, skip or fail as the verdict says, with the verdict as the message's first word."""
        judged = self.state.judge(self.case, self.metric)
        self.item.user_properties += _properties(judged)
        message = told(judged.findings[0])
        strict = self.state.config.getoption("headway_strict")
        if judged.fails(strict):
            pytest.fail(message, pytrace=False)
        if judged.verdict in verdict.WAITS or judged.verdict == "SKIPPED":
            pytest.skip(message)


def _properties(judged: Judged) -> list[tuple[str, object]]:
    """Return what JUnit should hold of a cell."""
    shown = [("value", judged.value), ("unit", judged.findings[0].unit)]
    return [("verdict", judged.verdict), *(shown if judged.value is not None else [])]


@dataclass(slots=True)
class State:
    """One session. Built when the first test of a night is collected."""

    config: pytest.Config
    suite: Suite
    replayed: Results | None
    instances: tuple[str, ...]
    levels: tuple[str, ...]
    cases: frozenset[Case] = frozenset()
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    folder: Path | None = None
    _night: Night | None = None
    _memory: verdict.Memory | None = None
    _cells: dict[tuple[Case, str], Judged] = field(default_factory=dict)
    _judged_from: Results | None = None
    _document: dict[str, Any] | None = None
    _documented: Results | None = None
    _measured: bool = False
    _unverified: str | None = None
    _broken: str | None = None
    _stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    @classmethod
    def from_config(cls, config: pytest.Config) -> State:
        """Read options and suite; raises pytest.UsageError with one sentence."""
        option = config.getoption
        try:
            if option("headway_run"):
                folder = Path(option("headway_run"))
                _, results = night.read(folder)
                loaded = results.suite
            else:
                folder, results = None, None
                path = suite.find(option("headway_suite") or DEFAULT_SUITE, files.suite_folders())
                loaded = _available(suite.load(path, option("headway_set") or ()), config)
                outlook.check(loaded)
        except (suite.SuiteError, night.JournalError) as error:
            raise pytest.UsageError(str(error)) from error
        known = tuple(instance.name for instance in loaded.instances)
        levels = tuple(dict.fromkeys(lv.name for w in loaded.workloads for lv in w.levels))
        return cls(
            config,
            loaded,
            results,
            _chosen("--headway-engine", option("headway_engine"), known, loaded.left_out),
            _chosen("--headway-level", option("headway_level"), levels),
            folder=folder,
        )

    def selects(self, case: Case) -> bool:
        """Whether the options ask for a case."""
        return case.instance in self.instances and case.level in self.levels

    def has(self, what: Case | str) -> bool:
        """Whether a night that is judged again set out to measure a case, or an instance."""
        if self.replayed is None:
            return True
        expected = self.replayed.expected
        if isinstance(what, Case):
            return any((i, name) == (what.instance, what.name) for i, _, name in expected)
        return any(i == what for i, _, _ in expected)

    def begin(self, cases: frozenset[Case]) -> None:
        """Start or resume the night that the selected tests need."""
        self.cases = cases
        if self.replayed is not None or not cases:
            return
        if hasattr(self.config, "workerinput"):
            self._broken = starting.XDIST
            return
        starting.refuse(self.config)
        self._night = starting.begin(self.config, self.suite, cases, self._stack)
        self.folder = self._night.folder

    def night_in_progress(self) -> Night:
        """Return the night; a test that measures cannot run without one."""
        self._fail_if_broken(self.suite.name)
        if self._night is None:
            pytest.skip("nothing is measured in this session")
        return self._night

    @property
    def results(self) -> Results:
        """What is known so far."""
        if self.replayed is not None:
            return self.replayed
        assert self._night is not None
        return self._night.results

    def measure(self) -> None:
        """Measure and verify what the selected tests need and no measuring item has brought."""
        if self._night is None or self._measured:
            return
        self._measured = True
        try:
            night.measure_all(self._night, self.cases)
            self._night.verify_all()
        except night.JournalError as error:
            self._broken = str(error)
        except (night.ReferenceFailure, environment.EnvironmentFailed) as error:
            self._unverified = str(error)

    def second_look(self, candidate: str) -> str:
        """Measure what a candidate's first pairs make suspicious again; say what it took."""
        assert self._night is not None
        compared = {name: pairs.compared(self.suite, name) for name in self.instances_measured}
        mine = {case for case in self.cases if candidate in compared[case.instance]}
        launches = night.second_look(self._night, mine)
        return f"{launches} more launches" if launches else "nothing was suspicious"

    @property
    def instances_measured(self) -> set[str]:
        """The instances that this session measures."""
        return {case.instance for case in self.cases}

    def verify(self) -> None:
        """Measure what is missing and verify every output; fails when the reference cannot."""
        self.measure()
        if self._unverified is not None:
            pytest.fail(f"MISSING outputs could not be verified: {self._unverified}", pytrace=False)
        self._fail_if_broken(self.suite.name)

    def _fail_if_broken(self, what: str) -> None:
        if self._broken is not None:
            pytest.fail(f"INVALID {what}: {self._broken}", pytrace=False)

    def cell(self, case: Case, metric: str, item: pytest.Item) -> Cell:
        """Return a cell for a test to check."""
        return Cell(self, case, metric, item)

    def judge(self, case: Case, metric: str) -> Judged:
        """Judge a cell, after measuring what is missing of it."""
        self.measure()
        self._fail_if_broken(f"{case.name} {metric}")
        unknown = Finding(case, metric, "watch", "SKIPPED", "this engine does not tell")
        return self.judged().get((case, metric), Judged(case, metric, (unknown,)))

    def judged(self) -> dict[tuple[Case, str], Judged]:
        """Return every cell by (case, metric); judged anew whenever there are new results."""
        results = self.results
        if self._judged_from is not results:
            cells = verdict.judge(results, self.memory())
            self._cells = {(cell.case, cell.metric): cell for cell in cells}
            self._judged_from = results
        return self._cells

    def memory(self) -> verdict.Memory:
        """What is known besides tonight; read once a session."""
        if self._memory is None:
            device, name = self.results.machine.device, self.suite.name
            home, root = (
                environment.default_home(),
                Path(self.config.getoption("headway_baselines")),
            )
            self._memory, skipped = verdict.recall(home, root, device, name)
            self.notes += skipped
        return self._memory

    def missing(self, instance: str) -> tuple[list[str], ...]:
        """Return one sentence per expected case of an instance that has no Run.

        First those that should be there, then those that the machine kept it from, then those that
        no budget was left for.
        """
        self.measure()
        results = self.results
        found: tuple[list[str], ...] = ([], [], [])
        mine = self.cases if self.replayed is None else frozenset(self.suite.cases())
        cases = {case.name: case for case in mine}
        for name, launch, case_name in results.expected:
            case = cases.get(case_name)
            if case and name == instance and launch not in results.runs_of(case):
                record = results.launch_of(instance, launch)
                unpaid = record is not None and record.failure_kind == "budget"
                place = 2 if unpaid else int(results.lost_to_the_machine(instance, launch))
                found[place].append(f"{case_name}: {results.why_missing(case, launch)}")
        return found

    def note(self, report: pytest.TestReport) -> None:
        """Remember a failure's first word."""
        if report.failed:
            words = str(report.longrepr).split()
            self.failures.append(words[0] if words else "")

    def finish(self, exitstatus: int) -> int:
        """Write the reports; return the session's exit status."""
        if self._night is not None:
            with contextlib.suppress(night.JournalError):
                self._night.finish()
        if self.folder is not None and self.results.expected:
            files.write_reports(self.folder, self.document())
            self._remember()
        cannot_tell = {"INVALID", *verdict.WAITS}
        only_those = self.failures and set(self.failures) <= cannot_tell
        return 3 if exitstatus == 1 and only_those else exitstatus

    def _remember(self) -> None:
        """Keep tonight for later nights, and propose the baselines that are ready."""
        if self._night is None:
            return
        results, folder = self.results, self._night.folder
        record = verdict.record_of(results, tuple(self._cells.values()), self._night.minutes())
        nights = (*self.memory().before(results), record)
        root = Path(self.config.getoption("headway_baselines"))
        try:
            history.save(environment.default_home(), record)
            said = proposal.write_patch(folder, proposal.propose(self.suite, nights, root))
        except (history.HistoryError, baseline.BaselineError) as error:
            said = str(error)
        self.notes += [] if said is None else [said]

    def document(self) -> dict[str, Any]:
        """Return report.json's content; made once for what is known."""
        cells = self.judged()
        if self._document is None or self._documented is not self.results:
            self._documented = self.results
            self._document = self._new_document(cells)
        return self._document

    def _new_document(self, cells: Mapping[tuple[Case, str], Judged]) -> dict[str, Any]:
        from headway.report.document import document

        return document(
            self.results,
            tuple(cells.values()),
            strict=self.config.getoption("headway_strict"),
            headway_version=headway.__version__,
        )

    def summary(self, reporter: Any) -> str:
        """Return the night's table for the terminal."""
        if self.folder is None or not self.results.expected:
            return ""
        from headway.report.terminal import terminal

        width = reporter._tw.fullwidth
        text = terminal(self.document(), width, reporter._tw.hasmarkup, str(self.folder))
        return "\n".join([text, *self.notes, f"{self.folder}", ""])

    def close(self) -> None:
        """Give the device back, and keep JUnit's file with its night."""
        junit = getattr(self.config.option, "xmlpath", None)
        if junit and self._night is not None:
            files.keep_junit(Path(junit), self._night.folder)
        self._stack.close()


def _available(loaded: Suite, config: pytest.Config) -> Suite:
    """Leave out the optional engines that cannot be had; nothing is made only to list tests."""
    asked = config.getoption("headway_engine") or [i.name for i in loaded.instances]
    wanted = () if config.option.collectonly else asked
    return available.available(loaded, wanted, environment.default_home(), sys.stderr.write)


def _chosen(
    option: str,
    asked: Iterable[str] | None,
    known: tuple[str, ...],
    left_out: Mapping[str, str] | None = None,
) -> tuple[str, ...]:
    chosen = tuple(asked or known)
    for name in chosen:
        if left_out and name in left_out:
            raise pytest.UsageError(f"{option} {name!r} cannot be had here: {left_out[name]}")
        if name not in known:
            raise pytest.UsageError(f"{option} {name!r} is not in the suite: {', '.join(known)}")
    return chosen
