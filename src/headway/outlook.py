"""What a suite will do, before it does it: may it run at all, and what will it take?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headway import metrics
from headway.core import Case
from headway.lengths import said
from headway.night import order
from headway.prefix_cache import expected_hit_rate
from headway.results import runs_elsewhere
from headway.suite import Limit, Suite, SuiteError
from headway.verdict import applicable
from headway.workload import (
    Prompts,
    Vocabulary,
    lengths_of,
    make_requests,
    parts_of,
)

# What is assumed of an engine that no night has measured yet.
ASSUMED_START_S = 10.0
ASSUMED_TOKENS_PER_S = 20.0
# Prompts of any vocabulary share prefixes alike, if it is not so small that they do by chance.
MANY_IDS = Vocabulary(50_000)


@dataclass(frozen=True, slots=True)
class Known:
    """What earlier nights told: seconds that one took, and the smallest effect a cell could see."""

    seconds: float | None = None
    visible: Mapping[tuple[str, str], float] | None = None


def check(loaded: Suite) -> None:
    """Refuse gates on no metric, and limits that would judge no cell."""
    names = [(f"limit[{i}].metric", limit.metric) for i, limit in enumerate(loaded.limits)]
    names += [("baseline.metrics", name) for name in loaded.baseline.metrics]
    if loaded.reference is not None:
        names += [("reference.metrics", name) for name in loaded.reference.metrics]
    for key, name in names:
        if name not in metrics.ALL:
            allowed = ", ".join(metrics.ALL)
            raise SuiteError(f"{loaded.path}: {key} is {name!r}; allowed: {allowed}")
        if metrics.ALL[name].inside_only and not key.startswith("limit"):
            message = f"{key} holds {name!r}, which lies around 0: only a limit can gate on it"
            raise SuiteError(f"{loaded.path}: {message}")
    for index, limit in enumerate(loaded.limits):
        if not any(limit.covers(case) for case in _cases_of(loaded, limit.metric)):
            raise SuiteError(
                f"{loaded.path}: limit[{index}] on {limit.metric} judges no cell; "
                f"{_why_none(loaded, limit)}"
            )


def _cases_of(loaded: Suite, metric: str) -> list[Case]:
    """Return the cases that have a metric."""
    away = {i.name for i in loaded.instances if runs_elsewhere(loaded, i.name)}
    away = away if metric in metrics.OF_PROCESSES else set()
    if metric == metrics.LAUNCH_TIME.name:
        mine = [i for i in loaded.instances if i.name not in away]
        return [Case(i.name, i.model_name, "", "") for i in mine]
    cases = [case for case in loaded.cases() if case.instance not in away]
    return [case for case in cases if metrics.TABLE[metric] in applicable(loaded, case)]


def _why_none(loaded: Suite, limit: Limit) -> str:
    metric = limit.metric
    if metric in metrics.OF_PROCESSES and limit.engine is not None:
        elsewhere = runs_elsewhere(loaded, limit.engine)
        if elsewhere is not None:
            return elsewhere
    if metric == metrics.LAUNCH_TIME.name:
        return "it belongs to a launch as a whole: name neither workload nor level"
    if metrics.ALL[metric].inside_only and not loaded.replay_inside:
        return "say suite.replay_inside = true"
    if metrics.ALL[metric].closed_loop_only:
        return "in open loop it is the arrival rate: gate on latency or success_rate there"
    if metrics.ALL[metric].slo_only:
        return "its workload has no slo"
    return "no case has it"


def describe(loaded: Suite, known: Known) -> str:
    """Say what a night over a suite will do: for `headway plan`."""
    launches = order(loaded)
    cells = sum(len(applicable(loaded, case)) + 1 for case in loaded.cases())
    cells += len(loaded.instances) * (1 + 2 * len(loaded.step_batches))
    lines = [
        f"suite {loaded.name}: {loaded.description}",
        f"{len(launches)} launches ({len(loaded.instances)} instances x {loaded.launches}), "
        f"{sum(len(item.cases) for item in launches)} Runs, {cells} cells",
        "",
    ]
    lines += [f"  left out: {name}: {why}" for name, why in loaded.left_out.items()]
    lines += [
        f"  {n:2}. {item.name:24} {' '.join(case.level for case in item.cases)}"
        for n, item in enumerate(launches, 1)
    ]
    lines += ["", *_requests(loaded), "", *_gates(loaded, known), *_pairs(loaded)]
    lines += ["", *_minutes(loaded, known)]
    return "\n".join(lines) + "\n"


PATHS = {
    "text": " sent as text",
    "chat": " sent through the server's chat template: outputs are not verified",
}


def _requests(loaded: Suite) -> Iterable[str]:
    for workload in loaded.workloads:
        prompts = workload.prompts
        path = PATHS.get(prompts.path, "")
        yield f"workload {workload.name}: {_lengths(prompts)}, {prompts.kind} prompts{path}"
        if (prefix := prompts.prefix) is not None:
            yield (
                f"  {prefix.share:.0%} of prompts have one of {prefix.groups} shared prefixes of "
                f"{prefix.tokens} tokens before them"
            )
        if not prompts.greedy:
            yield f"  sampled at temperature {prompts.temperature:g}: outputs are not verified"
        for level in workload.levels:
            hits = _hits(prompts, level.num_requests, loaded.seed)
            yield f"  {level.name:6} {level.num_requests} requests{hits}"


def _lengths(prompts: Prompts) -> str:
    """Say how long requests are."""
    if prompts.trace is not None:
        return f"prompt and output tokens as in {prompts.trace.name}"
    parts = parts_of(prompts)
    total = sum(part.share for part in parts)
    texts = [f"{said(p.prompt_tokens)} prompt and {said(p.output_tokens)} output" for p in parts]
    if len(parts) == 1:
        return f"{texts[0]} tokens"
    shares = (f"{part.share / total:.0%} {text}" for part, text in zip(parts, texts, strict=True))
    return f"{', '.join(shares)} tokens"


def _hits(prompts: Prompts, n: int, seed: int) -> str:
    """Say what a perfect prefix cache would find."""
    if prompts.prefix is None:
        return ""
    rate = expected_hit_rate(make_requests(prompts, n, 1, seed, MANY_IDS))
    return "" if rate is None else f", {rate:.1%} of prompt tokens in a perfect cache"


def _gates(loaded: Suite, known: Known) -> Iterable[str]:
    for limit in loaded.limits:
        bounds = [f">= {limit.min:g}"] if limit.min is not None else []
        bounds += [f"<= {limit.max:g}"] if limit.max is not None else []
        over = "each other engine" if limit.over == "*" else limit.over
        ratio = f" / {over}" if limit.over else ""
        where = " ".join(filter(None, (limit.engine, limit.workload, limit.level))) or "everywhere"
        yield f"limit {limit.metric}{ratio} {' and '.join(bounds)}: {where}"
    gate = loaded.baseline
    yield (
        f"baseline on {', '.join(gate.metrics)}: never sees less than {gate.tolerance:.0%}; speaks "
        f"from {gate.min_launches} launches over {gate.min_nights} nights on"
    )
    visible = known.visible or {}
    for case in loaded.cases():
        seen = [
            f"{m} {visible[case.name, m]:.0%}" for m in gate.metrics if (case.name, m) in visible
        ]
        yield f"  {case.name:28} smallest visible change: {', '.join(seen) or 'no baseline yet'}"


def _pairs(loaded: Suite) -> Iterable[str]:
    """Say what the reference gate does, and how sharp it is."""
    gate = loaded.reference
    if gate is None:
        return
    names = ", ".join(gate.candidates)
    more = gate.max_pairs > gate.first_pairs
    upto = f", up to {gate.max_pairs} on suspicion" if more else ""
    yield (
        f"reference {gate.instance} for {names}, on {', '.join(gate.metrics)}: "
        f"{gate.first_pairs} pairs{upto}"
    )
    yield (
        f"  sensitivity {gate.sensitivity}: set up to find {gate.finds:.1%}; never calls "
        f"{gate.margin:.1%} or less a change; {gate.alpha:.1%} false alarms a night at most"
    )


def _minutes(loaded: Suite, known: Known) -> Iterable[str]:
    """Say what a night takes, in time and, at a price, in money; and what the budget allows."""
    launches = loaded.launches * len(loaded.instances)
    if known.seconds is not None:
        took = f"the last night over it measured for {known.seconds / 60:.1f} minutes"
        each = known.seconds / launches / 60
    else:
        tokens = sum(
            output * (2 if loaded.replay_inside and level.closed else 1)
            for workload in loaded.workloads
            for level in workload.levels
            for _, output in lengths_of(workload.prompts, level.num_requests, loaded.seed)
        )
        each = (ASSUMED_START_S + tokens / ASSUMED_TOKENS_PER_S) / 60
        took = (
            "no night over it is known here; this is for "
            f"{ASSUMED_TOKENS_PER_S:g} tokens/s without any batching"
        )
    yield f"every night about {_priced(loaded, each * launches)}; {took}"
    gate = loaded.reference
    if gate is not None and gate.max_pairs > gate.first_pairs:
        most = each * (gate.max_pairs - gate.first_pairs) * (1 + len(gate.candidates))
        yield f"on suspicion up to {_priced(loaded, most)} more, if every level is suspect"
    budget = loaded.budget
    limits = [
        f"{what} {_priced(loaded, minutes)}"
        for what, minutes in (
            ("a night", budget.night_minutes),
            ("a comparison", budget.comparison_minutes),
            ("a month", budget.month_minutes),
        )
        if minutes is not None
    ]
    yield f"budget: {', '.join(limits)}"


def _priced(loaded: Suite, minutes: float) -> str:
    cost = loaded.budget.cost(minutes)
    return f"{minutes:.0f} minutes" + ("" if cost is None else f" ({cost:.2f})")
