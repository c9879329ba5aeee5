"""Test items: their parameters, their order, and what the selected ones need measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from headway import metrics, pairs
from headway.core import Case
from headway.engines.servers import launcher_of
from headway.night import PlannedLaunch, order
from headway.plugin.state import State
from headway.results import gated
from headway.verdict import EQUALITY, applicable

Parameter = tuple[str, list[Any], list[str]]


def parameters(state: State, metafunc: pytest.Metafunc) -> list[Parameter]:
    """Return (fixture, values, ids) for each of our fixtures that a test asks for."""
    names = metafunc.fixturenames
    found: list[Parameter] = []
    if "engine" in names:
        launches = order(state.suite, _with_compared(state))
        found.append(("engine", list(launches), [item.name for item in launches]))
    if "step" in names:
        steps = [(p, b) for p in ("prefill", "decode") for b in state.suite.step_batches]
        found.append(("step", steps, [f"{phase}-b{batch}" for phase, batch in steps]))
    if "comparison" in names:
        gate = state.suite.reference
        chosen = [] if gate is None else [c for c in gate.candidates if c in state.instances]
        found.append(("comparison", chosen, chosen))
    if "cell" in names:
        marker = metafunc.definition.get_closest_marker("metric")
        if marker is None or not marker.args:
            raise pytest.UsageError(f"{metafunc.definition.nodeid} needs @pytest.mark.metric(NAME)")
        # Of several metrics, those that a gate of the suite is on.
        one, set_on = len(marker.args) == 1, gated(state.suite)
        chosen = [name for name in marker.args if one or name in set_on]
        cells = [(case, name) for name in chosen for case in _cases(state, name)]
        found.append(("cell", cells, [c.name if one else f"{c.name}:{name}" for c, name in cells]))
    if "complete" in names:
        names = [name for name in state.instances if state.has(name)]
        found.append(("complete", names, names))
    return found


def _cases(state: State, metric: str) -> list[Case]:
    """Return the cases that have this metric, in the suite's order."""
    if metric == metrics.LAUNCH_TIME.name:
        return [
            Case(i.name, i.model_name, "", "")
            for i in state.suite.instances
            if i.name in state.instances and state.has(i.name)
        ]
    if metric not in (*metrics.TABLE, EQUALITY):
        raise pytest.UsageError(
            f"metric {metric!r} is not known; allowed: {', '.join(metrics.ALL)}"
        )
    return [
        case
        for case in state.suite.cases()
        if state.selects(case)
        and state.has(case)
        and (metric == EQUALITY or metrics.TABLE[metric] in applicable(state.suite, case))
    ]


def _with_compared(state: State) -> set[str]:
    """Return the chosen instances and those that gates compare them with."""
    chosen = set(state.instances)
    gate = state.suite.reference
    gated = {limit.metric for limit in state.suite.limits} | set(gate.metrics if gate else ())
    for case in state.suite.cases():
        if case.instance in state.instances:
            for metric in gated:
                chosen |= {other.instance for other in compared_with(state, case, metric)}
    return chosen


def param(item: pytest.Item, name: str) -> Any:
    """Return the value of one of an item's parameters, or None."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get(name) if callspec is not None else None


def arrange(state: State, items: list[pytest.Item]) -> None:
    """Sort: launches in the night's order with their steps, then the second look, the reference
    that verifies, and the readers.

    What has nothing to do is dropped: measuring when a night is judged again, steps of a suite
    that times none.
    """
    idle = [item for item in items if _idle(state, item)] + _beside(state, items)
    if idle:
        items[0].config.hook.pytest_deselected(items=idle)
        items[:] = [item for item in items if item not in idle]
    position = {planned: n for n, planned in enumerate(order(state.suite))}

    def key(item: pytest.Item) -> tuple[int, int]:
        planned = param(item, "engine")
        if isinstance(planned, PlannedLaunch):
            return (0, 2 * position[planned] + _uses(item, "step"))
        if _uses(item, "comparison"):
            return (1, 0)
        return (2, 0) if _uses(item, "night_state") else (3, 0)

    items.sort(key=key)


def _uses(item: pytest.Item, fixture: str) -> bool:
    ours = item.get_closest_marker("headway") is not None
    return ours and fixture in getattr(item, "fixturenames", ())


def _idle(state: State, item: pytest.Item) -> bool:
    if _uses(item, "step") and not _times_steps(state, item):
        return True
    if _uses(item, "comparison") and param(item, "comparison") is None:
        return True
    if _uses(item, "cell") and not isinstance(param(item, "cell"), tuple):
        return True  # no case has its metric
    measures = any(_uses(item, name) for name in ("engine", "comparison", "night_state"))
    return measures and state.replayed is not None


def _times_steps(state: State, item: pytest.Item) -> bool:
    planned = param(item, "engine")
    if not state.suite.step_batches or not isinstance(planned, PlannedLaunch):
        return False
    asked = state.suite.instance(planned.instance)
    return launcher_of(asked.kind, asked.args).can.steps


def _beside(state: State, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the launches of instances that no selected reader needs."""
    wanted = {case.instance for case in needed(state, items)}
    launches = [(item, param(item, "engine")) for item in items]
    return [i for i, p in launches if isinstance(p, PlannedLaunch) and p.instance not in wanted]


def needed(state: State, items: Sequence[pytest.Item]) -> frozenset[Case]:
    """Return the cases to measure: those that the selected readers assert or compare with.

    An instance of which only launches were selected is measured whole.
    """
    ours = [item for item in items if item.get_closest_marker("headway") is not None]
    # Where no case has a metric, pytest itself stands in for the parameter.
    readers = {param(i, "cell") for i in ours if isinstance(param(i, "cell"), tuple)}
    asked = {case for case, _ in readers}
    cases = {case for case in asked if case.level}
    for case, metric in readers:
        cases |= compared_with(state, case, metric)
    covered = {case.instance for case in cases}
    whole = {case.instance for case in asked if not case.level}
    launched = {p.instance for p in (param(i, "engine") for i in ours) if p}
    whole |= launched & set(state.instances)
    whole |= {param(i, "complete") for i in ours if param(i, "complete")}
    cases |= {c for c in state.suite.cases() if c.instance in whole - covered and state.selects(c)}
    return frozenset(cases)


def compared_with(state: State, case: Case, metric: str) -> set[Case]:
    """Return the cases that this cell's ratio limits and its reference compare it with."""
    gate, others = state.suite.reference, set()
    other = pairs.counterpart(state.suite, case)
    if gate is not None and other is not None and metric in gate.metrics:
        others.add(other)
    for limit in state.suite.limits:
        if limit.metric == metric and limit.over is not None and limit.covers(case):
            names = {i.name for i in state.suite.instances} - {case.instance}
            for name in names if limit.over == "*" else {limit.over}:
                model = state.suite.instance(name).model_name
                others.add(Case(name, model, case.workload, case.level))
    return others
