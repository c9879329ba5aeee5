"""Two engines against each other: the suite that `headway ab A B` runs, made from another one.

What runs is an ordinary night with a reference gate and nothing else: A is the reference, B the
candidate. So it interleaves, resumes, verifies outputs, keeps a journal and explains as any does.
Two equal arms are allowed: they show what the machine does to a comparison.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headway import tables
from headway.suite import ONE_LEVEL, SENSITIVITIES, SuiteError, level_names
from headway.tables import parse_value

# `key=value` between blanks or commas; a value may be quoted or a list.
ARGUMENT = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|\[[^\]]*\]|[^\s,]*)""")
DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
MINUTES = {"s": 1 / 60, "m": 1.0, "h": 60.0}
# With a budget, the clock decides how many pairs there are; more than these tell little more.
MOST_PAIRS = 60


@dataclass(frozen=True, slots=True)
class Asked:
    """What a comparison was asked for. Without `pairs` there are as many as the budget allows, or
    as the sensitivity needs at most."""

    a: str
    b: str
    engine: str | None = None
    pairs: int | None = None
    budget: str | None = None
    sensitivity: str = "3%"
    levels: tuple[str, ...] = ()


def derive(path: Path, asked: Asked, overrides: Sequence[str] = ()) -> tuple[str, str]:
    """Return the name and the TOML of the suite that answers a question; raises SuiteError."""
    table = tables.read(path, overrides)
    engines = table.get("engine", {})
    if not isinstance(engines, dict) or not engines:
        raise SuiteError(f"{path}: [engine.NAME] is missing: the suite selects nothing")
    arms = [_arm(path, engines, text, asked.engine) for text in (asked.a, asked.b)]
    names = [base for base, _ in arms]
    if names[0] == names[1]:
        names = [f"{names[0]}_a", f"{names[1]}_b"]
    (_, a), (_, b) = arms
    for arm in (a, b):
        arm.pop("port", None)  # two engines live one after the other, but may both keep one
        arm.pop("reference", None)
        arm.pop("optional", None)  # both were asked for
    suite = {k: v for k, v in table.get("suite", {}).items() if k not in _OF_NIGHTS}
    made = {
        "suite": suite | {"description": f"{asked.a} against {asked.b}"},
        "engine": {names[0]: a | {"reference": True}, names[1]: b},
        **({"equal": table["equal"]} if "equal" in table else {}),
        "workload": _workloads(path, table, asked.levels),
        "baseline": {"metrics": []},
        "reference": _gate(table, asked),
        "budget": _budget(table, asked),
    }
    return f"ab_{path.stem}_{names[0]}_{names[1]}", tables.write(made)


_OF_NIGHTS = ("launches", "description", "step_batches")


def _arm(
    path: Path, engines: Mapping[str, Any], text: str, engine: str | None
) -> tuple[str, dict[str, Any]]:
    """Return an engine's name and table: `NAME`, `NAME:ARGS`, or ARGS of the engine given."""
    name, _, rest = text.partition(":")
    if name not in engines:
        if engine is None:
            known = ", ".join(engines)
            raise SuiteError(
                f"{path}: {text!r} names no engine of the suite; known: {known}; for two settings "
                "of one, say NAME:key=value, or --of NAME"
            )
        name, rest = engine, text
    if name not in engines:
        raise SuiteError(f"{path}: there is no engine {name!r}; known: {', '.join(engines)}")
    table = copy.deepcopy(dict(engines[name]))
    if rest.startswith("git:"):
        rest, _, after = rest.partition(" ")
        table["source"], rest = rest, after
    left = ARGUMENT.sub("", rest).strip(" ,")
    if left:
        raise SuiteError(f"{text!r}: {left!r} must look like key=value, or git:REV")
    table["args"] = dict(table.get("args", {})) | {
        key: parse_value(value) for key, value in ARGUMENT.findall(rest)
    }
    return name, table


def _workloads(path: Path, table: Mapping[str, Any], levels: Sequence[str]) -> dict[str, Any]:
    """Return the workloads with only the levels asked for (all, where none is).

    A trace is named by its own place: the derived suite lies elsewhere.
    """
    workloads = copy.deepcopy(dict(table.get("workload", {})))
    for workload in workloads.values():
        if isinstance(workload.get("replay"), str):
            workload["replay"] = str((path.parent / workload["replay"]).absolute())
    if not levels:
        return workloads
    some = {}
    for name, workload in workloads.items():
        made = list(level_names(workload))
        kept = [(key, value) for key, value, level in made if level in levels]
        for key in {key for key, _, _ in made}:
            values = [value for other, value in kept if other == key]
            if key in ONE_LEVEL and not values:
                del workload[key]
            elif key not in ONE_LEVEL:
                workload[key] = values
        if kept:
            some[name] = workload
    if not some:
        raise SuiteError(f"{path}: no workload has a level {' or '.join(levels)}")
    return some


def _gate(table: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    """One look at the last pair: whoever asks for a comparison wants to know either way."""
    preset = SENSITIVITIES.get(asked.sensitivity)
    if preset is None:
        allowed = ", ".join(SENSITIVITIES)
        raise SuiteError(f"--sensitivity {asked.sensitivity!r}; allowed: {allowed}")
    pairs = asked.pairs or (preset.max_pairs if asked.budget is None else MOST_PAIRS)
    given = table.get("reference", {})
    kept = {key: given[key] for key in ("metrics", "margin", "alpha") if key in given}
    fixed = {"sensitivity": asked.sensitivity, "prime": True}
    return kept | fixed | {"first_pairs": pairs, "max_pairs": pairs}


def _budget(table: Mapping[str, Any], asked: Asked) -> dict[str, Any]:
    given = dict(table.get("budget", {}))
    if asked.budget is None:
        return given
    match = DURATION.fullmatch(asked.budget)
    if match is None or not float(match[1]):
        raise SuiteError(f"--budget {asked.budget!r} must look like 90s, 10m or 1h")
    return given | {"night_minutes": float(match[1]) * MINUTES[match[2]]}
