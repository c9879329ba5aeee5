"""What a night will do, and in which order: a pure function of the suite.

Outer loop launches, inner loop instances in seeded random order, so that what is compared is
interleaved; within a launch the levels in rotating order, so that none is always measured first.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from headway import metrics
from headway.core import Case, Level
from headway.suite import Suite, SuiteError

# What the plan assumes of an engine it knows nothing about yet.
ASSUMED_START_S = 10.0
ASSUMED_TOKENS_PER_S = 20.0


@dataclass(frozen=True, slots=True)
class PlannedLaunch:
    """One life of an engine, and the cases measured in it, in order."""

    instance: str
    launch: int
    cases: tuple[Case, ...]

    @property
    def name(self) -> str:
        """`instance-launch`."""
        return f"{self.instance}-{self.launch}"


def order(suite: Suite, instances: Collection[str] | None = None) -> tuple[PlannedLaunch, ...]:
    """Return every launch of a night, in the order in which it is measured."""
    return tuple(_order(suite, instances))


def _order(suite: Suite, instances: Collection[str] | None) -> Iterator[PlannedLaunch]:
    cases = suite.cases()
    for launch in range(1, suite.launches + 1):
        names = [i.name for i in suite.instances if instances is None or i.name in instances]
        random.Random(f"order/{suite.seed}/{launch}").shuffle(names)
        for name in names:
            own = [case for case in cases if case.instance == name]
            turn = (launch - 1) % len(own)
            yield PlannedLaunch(name, launch, tuple(own[turn:] + own[:turn]))


def level_of(suite: Suite, case: Case) -> Level:
    """Return the level of a case."""
    levels = suite.workload(case.workload).levels
    return next(level for level in levels if level.name == case.level)


def check_metrics(loaded: Suite) -> None:
    """Refuse gates on what is no metric, or that a metric cannot carry."""
    names = [(f"limit[{i}].metric", limit.metric) for i, limit in enumerate(loaded.limits)]
    names += [("baseline.metrics", name) for name in loaded.baseline.metrics]
    for key, name in names:
        if name not in metrics.ALL:
            allowed = ", ".join(metrics.ALL)
            raise SuiteError(f"{loaded.path}: {key} is {name!r}; allowed: {allowed}")
    closed = any(level.closed for w in loaded.workloads for level in w.levels)
    for key, name in names:
        # Below saturation, throughput in open loop is the arrival rate: a gate would see nothing.
        if metrics.ALL[name].closed_loop_only and not closed:
            raise SuiteError(
                f"{loaded.path}: {key} is {name!r}, which in open loop is the arrival rate; "
                "gate on latency or success_rate"
            )


def describe(loaded: Suite) -> str:
    """Say what a night over a suite will do: for `headway plan`."""
    launches = order(loaded)
    cells = sum(
        metrics.ALL[name] is not None
        for case in loaded.cases()
        for name in metrics.TABLE
        if level_of(loaded, case).closed or not metrics.TABLE[name].closed_loop_only
    )
    lines = [
        f"suite {loaded.name}: {loaded.description}",
        f"{len(launches)} launches ({len(loaded.instances)} instances x {loaded.launches}), "
        f"{sum(len(item.cases) for item in launches)} runs, {cells} cells",
        "",
    ]
    lines += [
        f"  {n:2}. {item.name:24} {' '.join(case.level for case in item.cases)}"
        for n, item in enumerate(launches, 1)
    ]
    lines += ["", *_requests(loaded), "", *_gates(loaded), "", _minutes(loaded)]
    return "\n".join(lines) + "\n"


def _requests(loaded: Suite) -> list[str]:
    lines = []
    for workload in loaded.workloads:
        prompts = workload.prompts
        lines.append(
            f"workload {workload.name}: {prompts.prompt_tokens} prompt and "
            f"{prompts.output_tokens} output tokens, {prompts.kind} prompts"
        )
        lines += [f"  {lv.name:6} {lv.num_requests} requests" for lv in workload.levels]
    return lines


def _gates(loaded: Suite) -> list[str]:
    lines = []
    for limit in loaded.limits:
        bounds = [f">= {limit.min:g}"] if limit.min is not None else []
        bounds += [f"<= {limit.max:g}"] if limit.max is not None else []
        over = "each other engine" if limit.over == "*" else limit.over
        ratio = f" / {over}" if limit.over else ""
        where = " ".join(filter(None, (limit.engine, limit.workload, limit.level))) or "everywhere"
        lines.append(f"limit {limit.metric}{ratio} {' and '.join(bounds)}: {where}")
    gate = loaded.baseline
    lines.append(
        f"baseline on {', '.join(gate.metrics)}: never sees less than {gate.tolerance:.0%}; speaks "
        f"from {gate.min_launches} launches over {gate.min_nights} nights on"
    )
    return lines


def _minutes(loaded: Suite) -> str:
    tokens = sum(
        level.num_requests * workload.prompts.output_tokens
        for workload in loaded.workloads
        for level in workload.levels
    )
    each_s = ASSUMED_START_S + tokens / ASSUMED_TOKENS_PER_S
    total = each_s * loaded.launches * len(loaded.instances) / 60
    return (
        f"budget {loaded.budget_minutes:g} minutes; at {ASSUMED_TOKENS_PER_S:g} tokens/s without "
        f"any batching it would take {total:.0f}"
    )
