"""What was measured and what was put under test, for comparison with what is stored."""

from __future__ import annotations

from dataclasses import fields, replace

from headway import fingerprint, metrics
from headway.core import Case, Level
from headway.results import Results
from headway.workload import Prompts

# What a load was described by when the first baselines were stored. What came later is named only
# where it is not at its default, so that a choice nobody made makes no baseline another one.
FIRST_FIELDS = frozenset(
    (
        *("prompt_tokens", "output_tokens", "kind", "ignore_eos"),
        *("num_requests", "concurrency", "rate_per_s", "arrivals", "slo"),
    )
)


def identity_of(results: Results, case: Case) -> dict[str, str]:
    """Return the identity of a case as measured in this night.

    An SLO is no load: it is part of what is compared only where a baseline is kept of a goodput.
    """
    suite = results.suite
    prompts, level = suite.workload(case.workload).prompts, suite.level(case)
    if not any(metrics.ALL[name].slo_only for name in suite.baseline.metrics):
        level = replace(level, slo=None)
    return fingerprint.identity(
        case,
        results.models[case.model].revision,
        suite.instance(case.instance).dtype,
        fingerprint.short_hash(f"({_said(prompts)}, {_said(level)}, {suite.seed!r})"),
        results.machine.device,
        metrics.VERSION,
    )


def _said(load: Prompts | Level) -> str:
    """Write a load as `repr` does, without what later versions added and nobody asked for."""
    parts = (
        f"{f.name}={getattr(load, f.name)!r}"
        for f in fields(load)
        if f.name in FIRST_FIELDS or getattr(load, f.name) != f.default
    )
    return f"{type(load).__qualname__}({', '.join(parts)})"


def treatment_of(results: Results, instance: str) -> fingerprint.Treatment:
    """Return what was put under test, from the last launch that came up.

    How many cores it was kept to is a setting like others: with fewer it is another engine.
    """
    mine = [r for r in results.launches if r.instance == instance]
    infos = [r.info for r in mine if r.info is not None]
    asked = results.suite.instance(instance)
    commit = results.commits.get(instance, results.commit)
    if not infos:
        unknown = fingerprint.Treatment(asked.kind, "unknown", asked.args, asked.env)
        return replace(unknown, commit=commit)
    info, kept_to = infos[-1], next((len(r.cpus) for r in reversed(mine) if r.cpus), None)
    if kept_to is not None:
        info = replace(info, settings={**info.settings, "kept_to_cores": kept_to})
    return fingerprint.treatment(info, asked.args, asked.env, commit)


def flat(treatment: fingerprint.Treatment) -> dict[str, object]:
    """Return a treatment as one table, to compare key by key."""
    table: dict[str, object] = {"version": treatment.version, "commit": treatment.commit}
    for name in ("args", "env", "settings", "versions"):
        table |= {f"{name}.{key}": value for key, value in getattr(treatment, name).items()}
    return table
