"""A night read into rows: engine × workload × level, with ratios to vLLM and to hf_naive. Pure.

What was not measured is None, never 0: an engine that is not there has rows without figures, and
a ratio to one that is not there is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.ratios import Interval, interval, ratio
from headway import correctness, metrics, stats
from headway.core import Case
from headway.results import Results

NAIVE = "hf_naive"
# vLLM as its documentation recommends, compiled and not: the faster of them is what counts.
VLLM_ARMS = ("vllm", "vllm_eager")
VLLM_EQUAL = "vllm_32"
# Each rung with one idea more than the one before it.
LADDER = ("no_cache", "kv_cache", "continuous", "paged", "chunked", "fused32", "flash32", "graphs")
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Machine:
    """What beside the night is known: bytes of weights that a decode step reads, and bytes a
    second that this machine reads; None where nobody measured it."""

    step_bytes: int | None = None
    bandwidth_bytes_per_s: float | None = None


def rows(results: Results, machine: Machine, engines: Sequence[str] = ()) -> list[Row]:
    """Return a row for each of `engines`, or of those that the night set out to measure."""
    expected = {instance for instance, _, _ in results.expected}
    own = [i.name for i in results.suite.instances if i.name in expected]
    names = engines or (*own, *results.suite.left_out)
    found = []
    for workload in results.suite.workloads:
        for level in workload.levels:
            place = _Place(results, workload.name, level.name)
            found += [_row(place, name, machine) for name in names]
    measured = {row["workload"] for row in found if row["n"]}
    return [row for row in found if row["workload"] in measured]


@dataclass(frozen=True, slots=True)
class _Place:
    """A workload at a level."""

    results: Results
    workload: str
    level: str

    @property
    def concurrency(self) -> int | None:
        """How many requests are in flight."""
        levels = self.results.suite.workload(self.workload).levels
        return next(one.concurrency for one in levels if one.name == self.level)

    def case(self, engine: str) -> Case | None:
        """Return an engine's case here; None where the suite has no such engine."""
        models = {i.name: i.model_name for i in self.results.suite.instances}
        return Case(engine, models[engine], self.workload, self.level) if engine in models else None

    def values(self, engine: str, metric: str) -> dict[int, float]:
        """Return a metric of the launches in which it can be judged."""
        case = self.case(engine)
        samples = () if case is None else self.results.samples(case, metrics.ALL[metric])
        return {s.launch: s.value for s in samples if s.value and not s.invalid}

    def speed(self, engine: str) -> dict[int, float]:
        """Return the output tokens a second of each launch."""
        return self.values(engine, "output_throughput")

    def vllm(self) -> str | None:
        """Name vLLM's faster arm here; None where it was not measured."""
        medians = {arm: stats.median(list(self.speed(arm).values())) for arm in VLLM_ARMS}
        known = {arm: value for arm, value in medians.items() if value is not None}
        return max(known, key=known.__getitem__, default=None)

    def before(self, engine: str) -> str | None:
        """Name the rung below one, of those that were measured here; None where there is none."""
        below = LADDER[: LADDER.index(engine)] if engine in LADDER else ()
        return next((rung for rung in reversed(below) if self.speed(rung)), None)

    def naive(self) -> tuple[dict[int, float], str | None]:
        """Return hf_naive's speeds and the level that they are of.

        One request at a time is as fast whatever waits: where it was not measured at this level,
        the highest one below stands for it, if more than one request was in flight there.
        """
        levels = self.results.suite.workload(self.workload).levels
        most = self.concurrency or 0
        below = [one for one in levels if 1 < (one.concurrency or 0) <= most]
        own = [one for one in levels if one.name == self.level]
        for one in [*own, *sorted(below, key=lambda one: -(one.concurrency or 0))]:
            speeds = _Place(self.results, self.workload, one.name).speed(NAIVE)
            if speeds:
                return speeds, one.name
        return {}, None


def _row(place: _Place, engine: str, machine: Machine) -> Row:
    speeds, arm = place.speed(engine), place.vllm()
    naive, naive_level = place.naive()
    share = _share(place, engine, machine)
    row: Row = {
        "engine": engine,
        "workload": place.workload,
        "concurrency": place.concurrency,
        "output_tokens_per_s": stats.median(list(speeds.values())),
        "n": len(speeds),
        "tpot_p50_s": stats.median(list(place.values(engine, "tpot_p50").values())),
        "ttft_p50_s": stats.median(list(place.values(engine, "ttft_p50").values())),
    }
    row |= _written("ratio_to_vllm", ratio(speeds, place.speed(arm)) if arm else None)
    row |= _written("ratio_to_vllm_32", ratio(speeds, place.speed(VLLM_EQUAL)))
    row |= _written("ratio_to_hf_naive", ratio(speeds, naive))
    row |= _written("bandwidth_share", share)
    before = place.before(engine)
    row |= _written("ratio_to_before", ratio(speeds, place.speed(before)) if before else None)
    row |= {"vllm": arm, "hf_naive_level": naive_level, "before": before}
    row |= _seen(place, engine)
    return row | {"problems": [*row["problems"], *_beyond(share)]}


def _share(place: _Place, engine: str, machine: Machine) -> Interval | None:
    """Return the share of the bandwidth that decode at one request in flight uses.

    Of more, a step also reads their caches, and the share would say less than it seems to.
    """
    if place.concurrency != 1 or not machine.step_bytes or not machine.bandwidth_bytes_per_s:
        return None
    least_s = machine.step_bytes / machine.bandwidth_bytes_per_s
    return interval([least_s / tpot for tpot in place.values(engine, "tpot_p50").values()])


def _beyond(share: Interval | None) -> list[str]:
    """Say that a share cannot be right: nothing is faster than the bound of its machine."""
    if share is None or share.value <= 1:
        return []
    return [f"reads at {share.value:.2f} of the bandwidth that was measured: that was too low"]


def _written(name: str, found: Interval | None) -> Row:
    keys = (name, f"{name}_low", f"{name}_high", f"{name}_n")
    values = (found.value, found.low, found.high, found.n) if found else (None, None, None, 0)
    return dict(zip(keys, values, strict=True))


def _seen(place: _Place, engine: str) -> Row:
    """Return what was seen beside the speed: rows in work, memory, outputs, what is wrong."""
    case = place.case(engine)
    runs = [] if case is None else list(place.results.runs_of(case).values())
    row: Row = {
        "most_running": max(_figures(runs, "server_running_max"), default=None),
        "preemptions": max(_figures(runs, "server_preemptions"), default=None),
    }
    filled = stats.median(_figures(runs, "server_kv_filled"))
    row["kv_waste"] = None if filled is None else 1 - filled
    equality = None if case is None or not runs else correctness.equality(place.results, case)
    unknown = equality is None or not (equality.right or equality.wrong)
    row["outputs_right"] = None if equality is None or unknown else equality.right
    row["outputs_wrong"] = None if equality is None or unknown else len(equality.wrong)
    invalid = [f"launch {run.launch}: {why}" for run in runs for why in run.invalid]
    return row | {"problems": [*invalid, *(_missing(place, case, engine) if not runs else [])]}


def _figures(runs: Sequence[Any], name: str) -> list[float]:
    return [run.engine[name] for run in runs if name in run.engine]


def _missing(place: _Place, case: Case | None, engine: str) -> list[str]:
    """Say why an engine has no Run at all here."""
    left_out: Mapping[str, str] = place.results.suite.left_out
    if case is None:
        return [f"left out: {left_out.get(engine, 'the suite has no such engine')}"]
    launches = place.results.launches_of(case)
    return [place.results.why_missing(case, launch) for launch in launches[:1]]
