"""Builds whole nights in closed form: Results whose every number is known in advance."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta

from headway import baseline, correctness, metrics, verdict
from headway.calibration import MIN_READINGS, night_medians
from headway.core import (
    Calibration,
    Case,
    EngineInfo,
    LaunchRecord,
    Level,
    RequestError,
    RequestRecord,
    Run,
    StepTiming,
    TokenEvent,
    Verification,
)
from headway.decisions import Decision
from headway.fingerprint import Machine
from headway.history import NightRecord
from headway.results import ModelFacts, Results
from headway.suite import ALWAYS, BaselineGate, Budget, Instance, Limit, Suite, Workload
from headway.workload import Prompts

MODEL = "fake"
OUTPUT_TOKENS = 16
PROMPT_TOKENS = 32
# What the client and the protocol add to each event.
PROTOCOL_S = 0.0005
# What the calibration kernels take on the machine of these nights.
KERNELS = {"matmul": 0.020, "copy": 0.030, "launch": 0.005, "python": 0.008}


@dataclasses.dataclass(frozen=True, slots=True)
class Speed:
    """An engine's closed-form times; `slower` stretches them all, `fails` requests per Run fail.

    Engines of one `salt` give the same answers.
    """

    ttft_s: float = 0.060
    itl_s: float = 0.012
    slower: float = 0.0
    fails: int = 0
    stamps: bool = True
    version: str = "1.0"
    salt: int = 0


def level(concurrency: int, requests: int | None = None) -> Level:
    return Level(f"c{concurrency}", requests or max(4 * concurrency, 12), concurrency=concurrency)


def make_suite(
    instances: Sequence[str] = ("a", "b"),
    levels: Sequence[Level] | None = None,
    *,
    launches: int = 2,
    dtype: str = "float32",
    model: str = MODEL,
    limits: Sequence[Limit] = (),
    gate: BaselineGate | None = None,
    description: str = "made up",
    args: Mapping[str, object] | None = None,
    env: Mapping[str, str] | None = None,
) -> Suite:
    prompts = Prompts("w32_16", PROMPT_TOKENS, OUTPUT_TOKENS)
    return Suite(
        name="smoke",
        path="smoke.toml",
        description=description,
        seed=1,
        launches=launches,
        budget=Budget(1.0),
        level_timeout_s=60.0,
        idle_timeout_s=5.0,
        step_batches=(1,),
        instances=tuple(
            Instance(name, "fake", model, dtype, args or {}, env or {}) for name in instances
        ),
        workloads=(Workload(prompts, tuple(levels or (level(1), level(4)))),),
        limits=(*limits, *ALWAYS),
        baseline=gate or BaselineGate(),
    )


def record(
    index: int, due_s: float, speed: Speed, noise: float = 1.0, tokens: int = OUTPUT_TOKENS
) -> RequestRecord:
    """Return a completed request: first event ttft after it was due, then equal gaps."""
    stretch = (1 + speed.slower) * noise
    sent_s = due_s + 0.0001
    times = [due_s + stretch * (speed.ttft_s + k * speed.itl_s) for k in range(tokens)]
    events = tuple(
        TokenEvent(
            at_s,
            token_ids=((index * 31 + k + speed.salt) % 64,),
            num_tokens=1,
            engine_at_s=at_s - PROTOCOL_S if speed.stamps else None,
        )
        for k, at_s in enumerate(times)
    )
    return RequestRecord(
        index=index,
        due_s=due_s,
        sent_s=sent_s,
        ended_s=times[-1],
        events=events,
        asked_tokens=tokens,
        asked_prompt_tokens=PROMPT_TOKENS,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=tokens,
        finish_reason="length",
        engine_arrived_s=sent_s if speed.stamps else None,
    )


def make_run(
    case: Case, launch: int, at: Level, speed: Speed, noise: float = 1.0, attempt: int = 1
) -> Run:
    """Return a closed-loop Run: each slot takes the next request as soon as its last one ended."""
    free = [0.0] * (at.concurrency or 1)
    records = []
    for index in range(at.num_requests):
        slot = min(range(len(free)), key=free.__getitem__)
        made = record(index, free[slot], speed, noise)
        free[slot] = made.ended_s or 0.0
        if index < speed.fails:
            error = RequestError("http_500", "the prompt was: SECRET PROMPT")
            made = dataclasses.replace(made, events=made.events[:2], error=error)
        records.append(made)
    return Run(
        case=case,
        launch=launch,
        attempt=attempt,
        level=at,
        started_at="2026-11-30T00:00:00Z",
        span_s=max(free),
        records=tuple(records),
        schedule_hash="s",
        workload_hash="w",
        client={"loop_lag_p99_s": 0.001, "cpu_share": 0.1},
        engine={"peak_rss_bytes": 2.0**28},
    )


def make_launch(instance: str, launch: int, speed: Speed, **changes: object) -> LaunchRecord:
    made = LaunchRecord(
        instance,
        launch,
        1,
        "2026-11-30T00:00:00Z",
        launch_s=1.5 * (1 + speed.slower),
        info=EngineInfo("fake", speed.version, MODEL, "float32", "cpu", {"max_batch": 8}),
        first_output=(1, 2, 3),
    )
    return dataclasses.replace(made, **changes)


def make_night(
    speeds: Mapping[str, Speed] | None = None,
    *,
    suite: Suite | None = None,
    night: str = "2026-11-30-a",
    spread: float = 0.0,
    seed: int = 0,
    device: str = "Test CPU x2",
    revision: str = "r1",
    started_at: str = "2026-11-30T00:00:00Z",
    kernels: Mapping[str, float] | None = None,
    os: str = "Linux 6 x86_64",
) -> Results:
    """Return a finished, verified night. `spread` is the noise of a launch, as a log-sd.

    `kernels` is what the calibration kernels took, all night long; empty for none.
    """
    kernels = KERNELS if kernels is None else kernels
    speeds = speeds if speeds is not None else {"a": Speed(), "b": Speed()}
    suite = suite or make_suite(tuple(speeds))
    draw = random.Random(seed)
    model = suite.instances[0].model_name
    runs, launches, steps, expected = [], [], [], []
    for launch in range(1, suite.launches + 1):
        for name, speed in speeds.items():
            noise = draw.lognormvariate(0.0, spread) if spread else 1.0
            launches.append(make_launch(name, launch, speed))
            seconds = (0.010 * (1 + speed.slower) * noise,) * 3
            steps.append(StepTiming(name, launch, "decode", 1, 32, seconds))
            for at in suite.workloads[0].levels:
                case = Case(name, model, suite.workloads[0].name, at.name)
                runs.append(make_run(case, launch, at, speed, noise))
                expected.append((name, launch, case.name))
    results = Results(
        night=night,
        suite=suite,
        machine=Machine(device, "Test CPU", 2, 2**33, os),
        started_at=started_at,
        finished=True,
        models={model: ModelFacts(model, revision, 64)},
        expected=tuple(expected),
        commit="abc123",
        runs=tuple(runs),
        launches=tuple(launches),
        steps=tuple(steps),
        calibrations=(Calibration(started_at, kernels),) * (MIN_READINGS if kernels else 0),
    )
    return verified(results)


def verified(results: Results, **faults: float) -> Results:
    """Add a Verification of every answer; `first_wrong=3` spoils the first three answers.

    `gap` is by how many logits; `tokens` says how many tokens of each.
    """
    spoilt, gap = faults.get("first_wrong", 0), faults.get("gap", 2.5)
    (model,) = results.models
    made = {}
    for index, pair in enumerate(correctness.pairs(results, model)):
        wrong = int(faults.get("tokens", 1)) if index - 1 < spoilt and index > 0 else 0
        made[pair.key] = Verification(
            pair.key,
            num_tokens=len(pair.output),
            max_gap=gap if wrong else 0.0,
            num_nonargmax=wrong,
            min_margin=1.0,
            nonargmax=tuple((4 + k, gap, 7) for k in range(wrong)),
        )
    return dataclasses.replace(results, verifications=made)


def judge(
    results: Results, load: verdict.Load = lambda case: None, **memory: object
) -> tuple[verdict.Judged, ...]:
    return verdict.judge(results, verdict.Memory(load, **memory))


def recorded(
    nights: Sequence[Results], load: verdict.Load = lambda case: None
) -> tuple[NightRecord, ...]:
    """Return what the history holds after those nights, each judged knowing the ones before."""
    records: tuple[NightRecord, ...] = ()
    for results in nights:
        records += (verdict.record_of(results, judge(results, load, nights=records)),)
    return records


def cell(
    judged: Sequence[verdict.Judged], instance: str, metric: str, level: str = "c4"
) -> verdict.Judged:
    """Return the one cell of that instance, metric and level."""
    (found,) = [
        j for j in judged if (j.case.instance, j.metric, j.case.level) == (instance, metric, level)
    ]
    return found


def baseline_of(nights: Sequence[Results], case: Case) -> baseline.Baseline:
    """Return what a repository would hold of a case after those nights."""
    stored: baseline.Baseline | None = None
    for results in nights:
        cells = {}
        for name in results.suite.baseline.metrics:
            metric = metrics.ALL[name]
            samples = results.samples(case, metric)
            cells[name] = baseline.Cell(
                metric.unit,
                metric.direction,
                tuple(baseline.Stored(results.night, s.launch, s.value or 0.0) for s in samples),
            )
        new = baseline.Baseline(
            baseline.SCHEMA,
            verdict.identity_of(results, case),
            results.machine.environment(),
            verdict.treatment_of(results, case.instance),
            cells,
            {
                results.night: baseline.NightFacts(
                    results.started_at, night_medians(results.readings())
                )
            },
        )
        stored = baseline.merge(stored, new)
    assert stored is not None
    return stored


def baseline_nights(
    count: int = 5, spread: float = 0.005, first: int = 1, **changes: object
) -> list[Results]:
    """Return nights of the default suite, two launches each, one a day of November."""
    return [
        dated(day, spread=spread, seed=100 + day, **changes) for day in range(first, first + count)
    ]


def dated(day: int, speeds: Mapping[str, Speed] | None = None, **changes: object) -> Results:
    """Return the night of a day, counted from the last of October."""
    at = datetime(2026, 10, 31, tzinfo=UTC) + timedelta(days=day)
    name, started_at = f"{at:%Y-%m-%d}", f"{at:%Y-%m-%dT%H:%M:%SZ}"
    return make_night(speeds, night=name, started_at=started_at, **changes)


def decision(kind: str, case: str, effect: float | None = None, **changes: object) -> Decision:
    """Return what people decided of every gated cell of a pattern of cases, for half a year."""
    cell = f"{case}:*"
    effects = {} if effect is None else {cell: effect}
    made = Decision(
        1, kind, cell, "it is meant to be so", "2026-11-01", "2027-04-30", None, effects
    )
    return dataclasses.replace(made, **changes)
