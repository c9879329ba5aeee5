"""Starting a night from a session's options: the device, the models, the environments, the lab."""

from __future__ import annotations

import contextlib
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headway import environment, history, night, source
from headway.core import Case
from headway.fingerprint import find_device, read_machine
from headway.night import Night, Screen
from headway.results import check_context
from headway.suite import Instance, Suite

XDIST = "xdist would measure several engines at once; run without -n"
# What would time itself, reorder, repeat or spread a measurement.
REFUSED_PLUGINS = {
    "rerunfailures": "a rerun turns an error rate into best-of-k",
    "flaky": "a rerun turns an error rate into best-of-k",
    "randomly": "the night has an order of its own",
    "random_order": "the night has an order of its own",
}


def refuse(config: pytest.Config) -> None:
    """Refuse what would disturb a measurement; raises pytest.UsageError."""
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError(XDIST)
    for name, why in REFUSED_PLUGINS.items():
        if config.pluginmanager.hasplugin(name):
            raise pytest.UsageError(f"the plugin {name} is active and {why}: -p no:{name}")
    if sys.gettrace() is not None or getattr(config.option, "cov_source", None):
        raise pytest.UsageError(
            "a tracer (coverage, a debugger) is active and would be measured; run without it"
        )


def begin(
    config: pytest.Config, suite: Suite, cases: frozenset[Case], stack: contextlib.ExitStack
) -> Night:
    """Start or resume the night that measures `cases`; raises pytest.UsageError.

    `stack` gives the device back at its end.
    """
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    screen = _screen(reporter, config.pluginmanager.get_plugin("capturemanager"))
    try:
        started = _begin(config, suite, cases, stack, screen)
    except (
        ValueError,
        night.DeviceBusy,
        night.JournalError,
        night.ModelFailure,
        environment.EnvironmentFailed,
    ) as error:
        raise pytest.UsageError(str(error)) from error
    for name, why in suite.left_out.items():
        screen.line(f"left out: {name}: {why}")
    screen.line(_greeting(started))
    return started


def _begin(
    config: pytest.Config,
    suite: Suite,
    cases: frozenset[Case],
    stack: contextlib.ExitStack,
    screen: Screen,
) -> Night:
    option, home = config.getoption, environment.default_home()

    def python_for(kind: str) -> Path:
        return environment.python_for(kind, home, screen.line)

    def reference_python(model: str) -> Path:
        return python_for("fake" if model == "fake" else "reference")

    device = find_device(option("headway_device"))
    machine = read_machine(device)
    instances = [i for i in suite.instances if any(case.instance == i.name for case in cases)]
    lock = stack.enter_context(night.device_lock(home, machine.device, suite.name))
    sources = source.resolve_all(suite.path, instances, home, Path.cwd(), screen.line)
    starts = {  # before the first launch, not in between
        i.name: _start(i, sources.get(i.name), python_for, home, screen) for i in instances
    }
    models = dict(sorted((instance.model_name, instance.model) for instance in instances))
    prepared = {
        name: night.prepare(model, reference_python(model), home, screen.line)
        for name, model in models.items()
    }
    facts = {name: model.facts for name, model in prepared.items()}
    check_context(suite, facts)

    def make_lab(folder: Path) -> night.Lab:
        lab = night.RealLab(
            folder,
            suite,
            device,
            prepared,
            starts,
            reference_python=reference_python,
            screen=screen,
            lock=lock,
        )
        stack.callback(lab.close)
        lab.prepare(instances, home)
        return lab

    month = datetime.now(UTC).strftime("%Y-%m")
    started = night.begin(
        suite,
        machine,
        facts,
        Path(option("headway_reports")),
        make_lab,
        screen=screen,
        month_minutes=lambda name: history.minutes_in_month(home, machine.device, month, name),
        commits={name: one.short for name, one in sources.items()},
        fresh=option("headway_fresh"),
    )
    started.expect(cases)
    return started


def _start(
    instance: Instance,
    built_from: source.Source | None,
    python_for: night.PythonFor,
    home: Path,
    screen: Screen,
) -> night.Start:
    if built_from is None:
        return night.Start(night.python_of(instance, python_for))
    python = source.python_for(built_from, instance.kind, home, screen.line)
    own = Path(instance.python) if instance.python is not None else python
    return night.Start(own, built_from.boot, built_from.cwd)


def _greeting(started: Night) -> str:
    resumed = f", resumed: {started.resumed_runs} Runs are there" if started.resumed_runs else ""
    return f"night {started.folder.name} on {started.results.machine.device}{resumed}"


def _screen(reporter: Any, capture: Any) -> Screen:
    """Progress through pytest's own terminal, so that it mixes with the tests' lines."""
    if reporter is None:
        return Screen()

    def uncaptured() -> contextlib.AbstractContextManager[None]:
        return capture.global_and_fixture_disabled() if capture else contextlib.nullcontext()

    def line(text: str) -> None:
        with uncaptured():
            reporter.ensure_newline()
            reporter.write_line(text.rstrip("\n"))

    def status(text: str) -> None:
        if reporter.isatty:
            with uncaptured():
                reporter.rewrite(text[: reporter._tw.fullwidth - 1], erase=True)

    return Screen(line, status)
