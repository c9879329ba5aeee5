"""`headway baseline …`: what is stored, recorded, proposed and decided, from the command line."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime
from pathlib import Path

from headway import (
    atomic,
    baseline,
    decisions,
    environment,
    history,
    night,
    proposal,
    suite,
    upkeep,
    verdict,
)
from headway.console import BAD, GOOD, UsageFailure, ended
from headway.decisions import Decision, DecisionError
from headway.fingerprint import find_device, read_machine
from headway.plugin.files import suite_folders
from headway.suite import Suite

Command = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str]) -> int:
    """Run one action; returns 0 good, 1 something is wrong, 2 usage."""
    arguments = _parser().parse_args(argv)
    refusals = (baseline.BaselineError, DecisionError, night.JournalError, suite.SuiteError)
    return ended(lambda: arguments.command(arguments), *refusals)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="headway baseline", description="What results are compared with, changed by review."
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    def add(name: str, command: Command, text: str) -> argparse.ArgumentParser:
        sub = actions.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        return sub

    sub = add("propose", propose, "Write a patch of what the nights so far would make of them.")
    sub.add_argument("what", metavar="NIGHT|SUITE", help="a night's folder, or a suite's name")
    sub.add_argument("--since", metavar="DAY", help="count no night before it; 2026-11-30")
    _add_places(sub)

    sub = add("show", show, "Show where each cell of a suite stands.")
    sub.add_argument("what", metavar="SUITE", help="a suite's name, or the path of its .toml")
    _add_places(sub)

    sub = add("check", check, "Look for what is wrong with the stored files.")
    sub.add_argument("suites", metavar="SUITE", nargs="*", help="default: all that are found")
    sub.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR")

    sub = add("accept", accept, "Accept an intended slowdown for a time.")
    _add_decision(sub)
    how = sub.add_mutually_exclusive_group()
    how.add_argument(
        "--run", type=Path, metavar="DIR", help="the night (or report.json) that shows it"
    )
    how.add_argument("--effect", metavar="8%%", help="how much worse it may be; default: as it is")

    sub = add("mute", mute, "Do not hear a cell for a time; wrong output is heard all the same.")
    _add_decision(sub)

    sub = add("merge", merge, "Merge two files by cell, night and launch, as git's merge driver.")
    sub.add_argument("ours", type=Path, metavar="OURS", help="the union is written into it")
    sub.add_argument("theirs", type=Path, metavar="THEIRS")
    sub.add_argument("--base", type=Path, metavar="BASE", help="what both sides began with")
    return parser


def _add_places(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR")
    sub.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    sub.add_argument("--device", metavar="NAME", help="where nights of several machines are known")


def _add_decision(sub: argparse.ArgumentParser) -> None:
    text = "CASE:METRIC, as in 'hf_static-w32_12-*:tpot_p50'"
    sub.add_argument("--cell", required=True, metavar="CELL", help=text)
    sub.add_argument("--reason", required=True, metavar="TEXT")
    sub.add_argument("--until", required=True, metavar="DAY", help="its last day; 2026-12-31")
    sub.add_argument("--issue", metavar="TEXT", help="where it is written about")
    sub.add_argument("--baselines", type=Path, default=Path("baselines"), metavar="DIR")


def today() -> date:
    """Return the day it is, as nights are dated."""
    return datetime.now(UTC).date()


def propose(arguments: argparse.Namespace) -> int:
    """`headway baseline propose NIGHT|SUITE`: write baseline.patch, for a reviewer to apply."""
    home, root = environment.default_home(), arguments.baselines
    folder = Path(arguments.what)
    if folder.is_dir() or (len(folder.parts) > 1 and folder.suffix != ".toml"):
        _, results = night.read(folder)
        memory, skipped = verdict.recall(home, root, results.machine.device, results.suite.name)
        judged = verdict.judge(results, memory)
        nights = (*memory.before(results), verdict.record_of(results, judged))
        loaded = results.suite
    else:
        folder, loaded = Path(), _suite(arguments.what, arguments.set)
        device = arguments.device or _device(home, loaded.name)
        nights, skipped = history.load(home, device, loaded.name)
        if not nights:
            raise UsageFailure(
                f"{home} holds no night of {loaded.name} on {device}: measure one first"
            )
    _warn(skipped)
    if arguments.since is not None:
        _day("--since", arguments.since)
    made = proposal.propose(loaded, nights, root, arguments.since)
    sys.stdout.write("\n".join(proposal.table(made.rows)) + "\n")
    if not made.changes:
        raise UsageFailure("there is nothing to propose yet: the last column says why")
    path = folder / proposal.PATCH
    _write(path, proposal.patch_of(made, Path()))
    sys.stdout.write(f"\nreview it, then:  git apply {path}\n")
    return GOOD


def show(arguments: argparse.Namespace) -> int:
    """`headway baseline show SUITE`: one line a cell."""
    home, loaded = environment.default_home(), _suite(arguments.what, arguments.set)
    device = arguments.device or _device(home, loaded.name)
    nights, skipped = history.load(home, device, loaded.name)
    decided, broken = decisions.load(arguments.baselines)
    _warn((*skipped, *broken))
    day = today()
    found = upkeep.standing(loaded, nights, arguments.baselines, device, decided, day)
    lines = proposal.table([cell.row for cell in found])
    told = ["", *("; ".join(cell.decided) for cell in found)]
    sys.stdout.write(f"{loaded.name} on {device}\n")
    for line, more in zip(lines, told, strict=True):
        sys.stdout.write(f"{line.rstrip()}{'; ' if more else ''}{more}\n")
    return GOOD


def check(arguments: argparse.Namespace) -> int:
    """`headway baseline check [SUITE …]`: one line for everything that is wrong."""
    if not arguments.baselines.is_dir():
        raise UsageFailure(f"{arguments.baselines} is no folder; choose another by --baselines")
    names = arguments.suites or [
        str(path) for folder in suite_folders() for path in sorted(folder.glob("*.toml"))
    ]
    found, loaded = [], []
    for name in names:
        try:
            loaded.append(_suite(name, ()))
        except suite.SuiteError as error:
            found.append(str(error))
    found += upkeep.problems(arguments.baselines, loaded, today())
    for line in found:
        sys.stdout.write(f"{line}\n")
    if not found:
        sys.stdout.write(f"{arguments.baselines}: nothing is wrong\n")
    return BAD if found else GOOD


def accept(arguments: argparse.Namespace) -> int:
    """`headway baseline accept`: the gates compare with what a cell is now, until a day."""
    decisions.check_cell(arguments.cell)
    if arguments.effect is not None:
        effects = {arguments.cell: _share(arguments.effect)}
    elif arguments.run is not None:
        effects = _from_run(arguments.run, arguments.cell)
    else:
        effects = upkeep.slowdowns(history.newest(environment.default_home()), arguments.cell)
    path = _decide(arguments, "accept", effects)
    for name, effect in sorted(effects.items()):
        sys.stdout.write(f"{name}: up to {effect:.1%} worse, until {arguments.until}\n")
    sys.stdout.write(f"commit it:  git add {path}\n")
    return GOOD


def mute(arguments: argparse.Namespace) -> int:
    """`headway baseline mute`: a cell's failures are not heard until a day."""
    path = _decide(arguments, "mute", {})
    sys.stdout.write(f"{arguments.cell}: muted until {arguments.until}\n")
    sys.stdout.write(f"commit it:  git add {path}\n")
    return GOOD


def _decide(arguments: argparse.Namespace, kind: decisions.Kind, effects: dict[str, float]) -> Path:
    day = today()
    decision = Decision(
        decisions.SCHEMA,
        kind,
        arguments.cell,
        arguments.reason,
        day.isoformat(),
        arguments.until,
        arguments.issue,
        effects,
    )
    decisions.check(decision, day)
    return decisions.save(arguments.baselines, decision)


def merge(arguments: argparse.Namespace) -> int:
    """`headway baseline merge OURS THEIRS`: 1 for what only a person can decide."""
    try:
        ours, theirs, base = (
            None if path is None else _side(path)
            for path in (arguments.ours, arguments.theirs, arguments.base)
        )
        if theirs is None:
            raise baseline.BaselineError(f"{arguments.theirs} is empty")
        merged = baseline.merge(ours, theirs, base)
    except baseline.BaselineError as error:
        sys.stderr.write(f"headway: {arguments.ours} and {arguments.theirs}: {error}\n")
        return BAD
    _write(arguments.ours, baseline.dump(merged))
    return GOOD


def _side(path: Path) -> baseline.Baseline | None:
    """Read one side of a merge; git gives an empty file for what was not there."""
    try:
        if path.exists() and not path.read_bytes().strip():
            return None
    except OSError as error:
        raise baseline.BaselineError(f"{path} cannot be read: {error.strerror}") from error
    found = baseline.load(path)
    if found is None:
        raise baseline.BaselineError(f"{path} is not there")
    return found


def _from_run(path: Path, cell: str) -> dict[str, float]:
    from headway.report.document import ReportError, read_document

    file = path / "report.json" if path.is_dir() else path
    try:
        document = read_document(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageFailure(f"{file} cannot be read: {error}") from error
    except ReportError as error:
        raise UsageFailure(str(error)) from error
    return upkeep.slowdowns_of_report(document, cell)


def _share(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if match is None or not float(match[1]) > 0:
        raise UsageFailure(f"--effect is {text!r}; it must be a percentage above 0, as 8%")
    return float(match[1]) / 100


def _day(option: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError as error:
        raise UsageFailure(f"{option} is {text!r}; it must be a day, 2026-12-31") from error


def _suite(name: str, overrides: Sequence[str]) -> Suite:
    return suite.load(suite.find(name, suite_folders()), overrides)


def _device(home: Path, name: str) -> str:
    """Return the device that a suite's nights are on: the only one, or this machine's."""
    known = history.devices(home, name)
    here = [read_machine(kind).device for kind in dict.fromkeys((find_device("auto"), "cpu"))]
    mine = [device for device in here if device in known]
    if len(known) == 1 or len(mine) == 1:
        return (mine or known)[0]
    if not known:
        return here[0]
    raise UsageFailure(f"nights of {name} are on {'; '.join(known)}: choose one by --device")


def _warn(lines: Sequence[str]) -> None:
    for line in lines:
        sys.stderr.write(f"headway: {line}\n")


def _write(path: Path, text: str) -> None:
    try:
        atomic.write_text(path, text)
    except OSError as error:
        raise UsageFailure(f"{path} cannot be written: {error.strerror}") from error
