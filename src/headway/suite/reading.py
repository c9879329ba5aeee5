"""The TOML that says what a night runs on, checked whole before anything starts.

Text becomes frozen dataclasses here, once. Every error is one sentence that names the file, the
key, the value and what is allowed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from headway.engines.servers import launcher_of
from headway.suite.gates import GateReader
from headway.suite.instances import DTYPES, InstanceReader
from headway.suite.loads import Given, LoadReader
from headway.suite.shape import (
    ALWAYS,
    BaselineGate,
    Limit,
    ReferenceGate,
    Suite,
)
from headway.tables import read

DEFAULT_LAUNCHES = 2


def _always(suite: Suite) -> tuple[Limit, ...]:
    """Return what gates by default, for each case on which the suite sets no such limit itself."""
    cases, found = suite.cases(), []
    for always in ALWAYS:
        own = [one for one in suite.limits if one.metric == always.metric and one.over is None]
        open_cases = [case for case in cases if not any(limit.covers(case) for limit in own)]
        if len(open_cases) == len(cases):
            found.append(always)
        else:
            found += [
                replace(always, engine=case.instance, workload=case.workload, level=case.level)
                for case in open_cases
            ]
    return tuple(found)


def load(path: Path, overrides: Sequence[str] = ()) -> Suite:
    """Read a suite; `overrides` are `dotted.key=value` with a TOML value."""
    return _Reader(str(path)).suite(path.stem, read(path, overrides))


def _gates(
    limits: Sequence[Limit],
    baseline: BaselineGate,
    reference: ReferenceGate | None,
    workload: str,
    level: str,
) -> list[str]:
    """Return the metrics that gate at a level of a workload."""
    limited = [
        limit.metric
        for limit in limits
        if limit.workload in (None, workload) and limit.level in (None, level)
    ]
    return [*limited, *baseline.metrics, *(reference.metrics if reference is not None else ())]


class _Reader(GateReader, InstanceReader, LoadReader):
    """Reads the tables of a suite."""

    def suite(self, name: str, table: Mapping[str, Any]) -> Suite:
        self.known("", table, _TABLES)
        top = self.get("", table, "suite", dict, {})
        self.known("suite", top, _SUITE_KEYS)
        engines = self.get("", table, "engine", dict, {})
        workloads = self.get("", table, "workload", dict, {})
        if not engines or not workloads:
            missing = "[engine.NAME]" if not engines else "[workload.NAME]"
            raise self.fail(missing, "is missing: the suite selects nothing")
        limits = [self.limit(i, t) for i, t in enumerate(self.tables(table, "limit"))]
        baseline = self.baseline(self.get("", table, "baseline", dict, {}))
        dtype = self.get("suite", top, "dtype", str, "float32")
        common = (
            self.get("suite", top, "model", str, "smollm2_135m"),
            self.choice("suite.dtype", dtype, DTYPES),
        )
        equal = self.equal(self.get("", table, "equal", dict, {}))
        instances = tuple(self.instance(n, t, equal, *common) for n, t in engines.items())
        marked = [n for n, t in engines.items() if t.get("reference") is True]
        for one in instances:
            if one.optional and one.name in marked:
                message = "is true of the reference, without which nothing is compared"
                raise self.fail(f"engine.{one.name}.optional", message)
        reference = self.reference(table, instances, marked)
        launches = DEFAULT_LAUNCHES if reference is None else reference.first_pairs
        seed = self.get("suite", top, "seed", int, 1)
        timeout_s = self.positive("suite", top, "level_timeout_s", float, 1800.0)

        def given(workload: str) -> Given:
            gates = partial(_gates, limits, baseline, reference, workload)
            return Given(gates, seed, timeout_s)

        suite = Suite(
            name=self.name("the file name", name),
            path=self.path,
            description=self.get("suite", top, "description", str, ""),
            seed=seed,
            launches=self.positive("suite", top, "launches", int, launches),
            budget=self.budget(self.get("", table, "budget", dict, {})),
            level_timeout_s=timeout_s,
            idle_timeout_s=self.positive("suite", top, "idle_timeout_s", float, 120.0),
            step_batches=self.step_batches(top),
            instances=instances,
            workloads=tuple(self.workload(n, t, given(n)) for n, t in workloads.items()),
            limits=tuple(limits),
            baseline=baseline,
            reference=reference,
            load_workers=self.positive("suite", top, "load_workers", int, 1),
            wait_quiet_s=self.get("suite", top, "wait_quiet_s", float, 0.0),
            calibrate=self.get("suite", top, "calibrate", bool, True),
            equal=equal,
            replay_inside=self.get("suite", top, "replay_inside", bool, False),
            warmup_timeout_s=self.positive("suite", top, "warmup_timeout_s", float, 120.0),
            pin=self.get("suite", top, "pin", bool, True),
        )
        self._check_references(suite)
        self._check_understood(suite)
        return replace(suite, limits=suite.limits + _always(suite))

    def step_batches(self, top: Mapping[str, Any]) -> tuple[int, ...]:
        batches = self.get("suite", top, "step_batches", list, [])
        if not all(type(b) is int and b > 0 for b in batches):
            raise self.fail("suite.step_batches", f"is {batches!r}; it must be whole numbers > 0")
        return tuple(batches)

    def _check_understood(self, suite: Suite) -> None:
        """Refuse what an engine's kind does not understand, before anything starts."""
        for workload, instance in itertools.product(suite.workloads, suite.instances):
            can, prompts = launcher_of(instance.kind, instance.args).can, workload.prompts
            where, who = f"workload.{workload.name}", f"{instance.name} ({instance.kind})"
            if prompts.path == "ids" and not can.ids_in:
                message = f"is 'ids', which {who} does not take; write send = \"text\""
                raise self.fail(f"{where}.send", message)
            if not prompts.greedy and not can.sampling:
                message = f"is {prompts.temperature:g}, and {who} does not sample as each request"
                raise self.fail(f"{where}.temperature", f"{message} asks; it must be 0")

    def _check_references(self, suite: Suite) -> None:
        models: dict[str, str] = {}
        for i in suite.instances:
            other = models.setdefault(i.model_name, i.model)
            if other != i.model:
                message = f"is {i.model!r}, which results would not tell from {other!r}"
                raise self.fail(f"engine.{i.name}.model", message)
        engines = [i.name for i in suite.instances]
        workloads = [w.name for w in suite.workloads]
        levels = sorted({level.name for w in suite.workloads for level in w.levels})
        for index, limit in enumerate(suite.limits):
            where = f"limit[{index}]"
            for key, value, allowed in (
                ("engine", limit.engine, engines),
                ("over", limit.over, [*engines, "*"]),
                ("workload", limit.workload, workloads),
                ("level", limit.level, levels),
            ):
                if value is not None:
                    self.choice(f"{where}.{key}", value, allowed)
            if not any(limit.covers(case) for case in suite.cases()):
                raise self.fail(where, f"on {limit.metric} covers no case: it limits nothing")
            if limit.over == "*" and len(engines) < 2:
                raise self.fail(f"{where}.over", "is '*' in a suite of one engine: nothing to hold")
        gate = suite.reference
        if gate is not None and suite.launches != gate.first_pairs:
            message = f"is {suite.launches}; the reference gate's first look is at"
            message += f" {gate.first_pairs} pairs, so leave it out or say reference.first_pairs"
            raise self.fail("suite.launches", message)


_TABLES = ("suite", "engine", "equal", "workload", "limit", "baseline", "reference", "budget")
_SUITE_KEYS = (
    *("description", "seed", "model", "dtype", "launches"),
    *(
        "level_timeout_s",
        "idle_timeout_s",
        "step_batches",
        "load_workers",
        "wait_quiet_s",
        "calibrate",
        "replay_inside",
        "warmup_timeout_s",
        "pin",
    ),
)
