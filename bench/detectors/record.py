"""Turns nights on disk into a recording: `python bench/detectors record REPORTS --name NAME`.

The engines of the nights must be equal (the same kind with the same arguments under two names, as
in the suite smoke), or only one of them taken, for their launches are taken for interchangeable.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from detectors.layout import TAIL
from detectors.recordings import (
    FOLDER,
    SCHEMA,
    File,
    RecordedLaunch,
    RecordedNight,
    RecordingError,
    dump,
    load,
    rounded,
)
from headway import metrics
from headway.core import Run
from headway.fingerprint import slug
from headway.night import JournalError, read
from headway.results import Results


def main(argv: Sequence[str]) -> int:
    """Write a recording; return 0, or 2 with one clear message on stderr."""
    parser = argparse.ArgumentParser(prog="python bench/detectors record", description=__doc__)
    parser.add_argument("reports", type=Path, help="a folder of nights: */journal.jsonl")
    parser.add_argument(
        "--name", required=True, help="of the file below bench/detectors/recordings"
    )
    parser.add_argument("--suite", help="only nights of this suite; needed if there are several")
    parser.add_argument("--instances", nargs="+", metavar="NAME", help="only these engines")
    parser.add_argument("--out", type=Path, default=FOLDER, help="another folder to write it to")
    given = parser.parse_args(argv)
    try:
        if slug(given.name) != given.name:
            raise RecordingError(f"--name {given.name!r} must be a file name without its ending")
        nights = list(finished(given.reports, given.suite))
        file, left_out = recorded(nights, given.instances)
    except RecordingError as error:
        sys.stderr.write(f"record: {error}\n")
        return 2
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.name}.json"
    path.write_text(dump(file), encoding="utf-8")
    load.cache_clear()
    num_launches = sum(len(night.launches) for night in load(path).file.nights)
    for reason, count in left_out.items():
        sys.stderr.write(f"record: {count} left out: {reason}\n")
    sys.stdout.write(
        f"{path}: {len(file.nights)} nights, {num_launches} launches, {len(file.cases)} cases, "
        f"{path.stat().st_size / 1e3:.0f} kB\n"
    )
    return 0


def finished(reports: Path, suite: str | None) -> Iterable[Results]:
    """Yield the nights of one suite on one machine, in order; raises RecordingError."""
    first: Results | None = None
    for path in sorted(reports.glob("*/journal.jsonl")):
        try:
            _, results = read(path.parent)
        except JournalError as error:
            sys.stderr.write(f"record: left out: {error}\n")
            continue
        if suite not in (None, results.suite.name) or not results.finished:
            continue
        if first is not None and results.suite.name != first.suite.name:
            both = f"{first.suite.name} and {results.suite.name}"
            raise RecordingError(f"{reports} has nights of {both}: choose with --suite")
        if first is not None and results.machine != first.machine:
            raise RecordingError(
                f"{reports} has nights of two machines: {path.parent.name} differs"
            )
        first = first or results
        yield results
    if first is None:
        named = f" of suite {suite}" if suite else ""
        raise RecordingError(f"{reports} has no finished night{named}: */journal.jsonl")


def recorded(
    nights: Sequence[Results], instances: Sequence[str] | None = None
) -> tuple[File, Counter[str]]:
    """Return a recording of nights, and how many launches were left out for which reason.

    A launch with a Run that is missing or invalid, or with an undefined value, is left out, and so
    is a night without any left. Raises RecordingError.
    """
    suite = nights[0].suite
    chosen = [i for i in suite.instances if instances is None or i.name in instances]
    unlike = {(i.kind, i.model, i.dtype, repr(sorted(i.args.items()))) for i in chosen}
    if len(unlike) != 1:
        names = ", ".join(i.name for i in chosen) or "none"
        raise RecordingError(
            f"the engines of a recording must be equal, and these are not: {names}; "
            f"choose with --instances out of {', '.join(i.name for i in suite.instances)}"
        )
    cases = tuple(f"{w.name}-{level.name}" for w in suite.workloads for level in w.levels)
    gate = suite.baseline if suite.reference is None else suite.reference
    gated = tuple(gate.metrics)
    tail = all(_value(run, TAIL) is not None for results in nights for run in results.runs)
    columns = (*gated, *((TAIL,) if tail and TAIL not in gated else ()))
    kernels = tuple(
        sorted({k for n in nights for run in n.runs for c in run.calibration for k in c})
    )
    left_out: Counter[str] = Counter()
    kept = []
    for results in nights:
        order = dict.fromkeys(
            (run.case.instance, run.launch)
            for run in results.runs
            if run.case.instance in {i.name for i in chosen}
        )
        launches = []
        for instance, launch in order:
            runs = _runs(results, instance, launch)
            reason = _unusable(runs, cases, columns, kernels)
            if reason is None:
                launches.append(_launch(instance, launch, runs, cases, columns, kernels))
            else:
                left_out[reason] += 1
        if launches:
            kept.append(RecordedNight(results.started_at[:10], tuple(launches)))
    if not kept:
        raise RecordingError(f"no launch can be used: {dict(left_out)}")
    better = {name: metrics.ALL[name].direction for name in columns}
    machine = nights[0].machine
    # Of the kernel, what says how it schedules; a build's own name is nobody's business.
    machine = replace(machine, os=re.sub(r"(\d+\.\d+)\S*", r"\1", machine.os, count=1))
    return (
        File(SCHEMA, suite.name, machine, cases, columns, gated, better, kernels, tuple(kept)),
        left_out,
    )


def _runs(results: Results, instance: str, launch: int) -> dict[str, Run]:
    """Return a launch's Runs by `workload-level`, the last attempt of each."""
    return {
        f"{run.case.workload}-{run.case.level}": run
        for run in results.runs
        if (run.case.instance, run.launch) == (instance, launch)
    }


def _unusable(
    runs: dict[str, Run], cases: Sequence[str], columns: Sequence[str], kernels: Sequence[str]
) -> str | None:
    """Say why a launch cannot be used; None if it can."""
    if set(runs) != set(cases):
        return "a Run is missing"
    if any(run.invalid for run in runs.values()):
        return "a Run is invalid"
    if any(_value(run, name) is None for run in runs.values() for name in columns):
        return "a metric is undefined"
    read = [run.calibration for run in runs.values()]
    if kernels and any([sorted(reading) for reading in pair] != [[*kernels]] * 2 for pair in read):
        return "a calibration is missing"
    return None


def _launch(
    instance: str,
    launch: int,
    runs: dict[str, Run],
    cases: Sequence[str],
    columns: Sequence[str],
    kernels: Sequence[str],
) -> RecordedLaunch:
    def table(reading: int) -> tuple[tuple[float, ...], ...]:
        if not kernels:
            return ()
        return tuple(
            tuple(rounded(runs[case].calibration[reading][name]) for name in kernels)
            for case in cases
        )

    values = tuple(
        tuple(rounded(_value(runs[case], name) or 0.0) for name in columns) for case in cases
    )
    return RecordedLaunch(instance, launch, values, table(0), table(1))


def _value(run: Run, name: str) -> float | None:
    return metrics.ALL[name].of_run(run)
