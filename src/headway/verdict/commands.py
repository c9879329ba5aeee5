"""What to type after a verdict: to measure again, to accept a slowdown, to mute a cell."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

from headway import pairs
from headway.decisions import cell_name
from headway.results import Results
from headway.verdict.decided import COMPARING
from headway.verdict.finding import Finding
from headway.verdict.memory import day_of

REPEAT = "repeat: "
ACCEPT = "accept: headway baseline accept --cell "
# Where waiting for a person may take its time: what was not measured is measured again instead.
WAITED_FOR = frozenset(("REGRESSION", "LIMIT", "INCOMPATIBLE"))
# For how long a decision holds that is made by a command given here.
DECIDED_FOR = timedelta(days=30)


def commands(results: Results, finding: Finding) -> Iterator[str]:
    """Give the commands that fit a finding, each with what it is for before it."""
    suite = results.suite
    path = Path(suite.path)
    name = shlex.quote(suite.name if path.parent.name == "suites" else str(path))
    yield f"{REPEAT}{_repeat(results, finding, name)}"
    cell = shlex.quote(cell_name(finding.case, finding.metric))
    until = f"--reason '...' --until {day_of(results) + DECIDED_FOR}"
    slower = finding.verdict == "REGRESSION" or finding.suspected
    if slower and finding.gate in COMPARING and (finding.worse_by or 0.0) > 0:
        yield f"{ACCEPT}{cell} {until}"
    if finding.gate == "baseline" and finding.verdict in ("IMPROVEMENT", "INCOMPATIBLE"):
        first = "delete its file, then " if finding.verdict == "INCOMPATIBLE" else ""
        yield f"make it the standard: {first}headway baseline propose {name}"
    late = finding.verdict == "MISSING" and finding.gate == "baseline"
    if finding.verdict in WAITED_FOR or finding.suspected or late:
        yield f"mute: headway baseline mute --cell {cell} {until}"


def _repeat(results: Results, finding: Finding, suite: str) -> str:
    case = finding.case
    level = f" --level {shlex.quote(case.level)}" if case.level else " -k launch_time"
    engine = shlex.quote(case.instance)
    gate = results.suite.reference
    if finding.gate in COMPARING and gate and pairs.counterpart(results.suite, case) is not None:
        return f"headway ab {shlex.quote(gate.instance)} {engine} --suite {suite}{level}"
    return f"headway run {suite} --engine {engine}{level}"
