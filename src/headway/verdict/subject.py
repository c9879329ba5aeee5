"""What was measured and what was put under test, for comparison with what is stored."""

from __future__ import annotations

from dataclasses import replace

from headway import fingerprint, metrics
from headway.core import Case
from headway.results import Results


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
        fingerprint.short_hash(repr((prompts, level, suite.seed))),
        results.machine.device,
        metrics.VERSION,
    )


def treatment_of(results: Results, instance: str) -> fingerprint.Treatment:
    """Return what was put under test, from the last launch that came up."""
    infos = [r.info for r in results.launches if r.instance == instance and r.info is not None]
    asked = results.suite.instance(instance)
    commit = results.commits.get(instance, results.commit)
    if not infos:
        unknown = fingerprint.Treatment(asked.kind, "unknown", asked.args, asked.env)
        return replace(unknown, commit=commit)
    return fingerprint.treatment(infos[-1], asked.args, asked.env, commit)


def flat(treatment: fingerprint.Treatment) -> dict[str, object]:
    """Return a treatment as one table, to compare key by key."""
    table: dict[str, object] = {"version": treatment.version, "commit": treatment.commit}
    for name in ("args", "env", "settings", "versions"):
        table |= {f"{name}.{key}": value for key, value in getattr(treatment, name).items()}
    return table
