"""Everything that one night left in its journal, and the samples that a cell draws from it.

The unit of replication is the launch: a cell has one sample per launch.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from headway import metrics, stats
from headway.core import Calibration, Case, LaunchRecord, Run, StepTiming, Verification
from headway.engines.servers import launcher_of
from headway.fingerprint import Machine
from headway.metrics import Metric
from headway.suite import Suite, SuiteError
from headway.workload import extremes

# Kinds of failure of a launch that are the machine's: what it was to measure cannot be judged.
MACHINE_FAILURES = frozenset(
    ("gpu_not_free", "port_in_use", "stranger", "no_container_client", "no_image", "no_prompt")
)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the night knows of a model without loading it."""

    name: str
    revision: str
    vocab_size: int
    special_ids: tuple[int, ...] = ()
    context_length: int | None = None
    eos_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Generated:
    """One sample of the reference's own `generate`: the continuation of a Run's prompt.

    `margins` are its highest logit minus its second at each token, teacher-forced.
    """

    prompt_key: str
    output: tuple[int, ...]
    margins: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """The prompts of a workload in one launch, where those that are drawn may not be sent.

    Request k has `ids[k]`. A prompt that is sent as text has `texts[k]`, which becomes its ids
    again: what was drawn is changed where its text would not do, so that it takes the model's
    tokenizer to know it. `begins` are the ids that this tokenizer itself puts before a text which
    is sent as a prompt. And where some engine of the suite cannot go on past the end of an answer,
    what the model would answer with an end is drawn anew, which takes the reference to know.
    The prompt that ends a launch's start, as text, is that of no workload; see `launch_key`.
    """

    model: str
    workload: str
    launch: int
    ids: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...] = ()
    begins: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        """What names it: model, workload, launch."""
        return (self.model, self.workload, self.launch)


def launch_key(model: str) -> tuple[str, str, int]:
    """Return what names the text of the prompt that ends every launch's start."""
    return (model, "", 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """A cell's value in one launch; None with the reason why there is none."""

    launch: int
    value: float | None
    reason: str | None = None
    invalid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Results:
    """One night. `expected` names what was to be measured: (instance, launch, case name).

    `commit` is that of the working tree, `commits` those of engines built from another one.
    """

    night: str
    suite: Suite
    machine: Machine
    started_at: str
    finished: bool
    models: Mapping[str, ModelFacts]
    expected: tuple[tuple[str, int, str], ...] = ()
    commit: str | None = None
    commits: Mapping[str, str] = field(default_factory=dict)
    runs: tuple[Run, ...] = ()
    launches: tuple[LaunchRecord, ...] = ()
    steps: tuple[StepTiming, ...] = ()
    verifications: Mapping[str, Verification] = field(default_factory=dict)
    generated: tuple[Generated, ...] = ()
    calibrations: tuple[Calibration, ...] = ()
    written: Mapping[tuple[str, str, int], Written] = field(default_factory=dict)

    def runs_of(self, case: Case) -> Mapping[int, Run]:
        """Return the last attempt of each launch of a case."""
        return self._runs.get(case, {})

    @cached_property
    def _runs(self) -> Mapping[Case, Mapping[int, Run]]:
        found: dict[Case, dict[int, Run]] = {}
        for run in self.runs:
            chosen = found.setdefault(run.case, {})
            if run.attempt >= chosen.get(run.launch, run).attempt:
                chosen[run.launch] = run
        return found

    def replaced(self, case: Case) -> list[Run]:
        """Return the Runs of a case that a later attempt of their launch took the place of."""
        kept = self.runs_of(case).values()
        return [run for run in self.runs if run.case == case and all(run is not k for k in kept)]

    def launches_of(self, case: Case) -> list[int]:
        """Return the launches in which a case was to be measured, in order.

        A case without a level stands for the launches of its instance.
        """
        return self._expected.get((case.instance, case.name), [])

    @cached_property
    def _expected(self) -> Mapping[tuple[str, str], list[int]]:
        found: dict[tuple[str, str], dict[int, None]] = {}
        for instance, launch, name in self.expected:
            for key in ((instance, name), (instance, instance)):
                found.setdefault(key, {})[launch] = None
        return {key: sorted(launches) for key, launches in found.items()}

    def launch_of(self, instance: str, launch: int) -> LaunchRecord | None:
        """Return what is known last of a launch: its last attempt, and how that ended."""
        return self._records.get((instance, launch))

    @cached_property
    def _records(self) -> Mapping[tuple[str, int], LaunchRecord]:
        return {(record.instance, record.launch): record for record in self.launches}

    def readings(self) -> tuple[Mapping[str, float], ...]:
        """Return every reading of the calibration kernels in this night."""
        around = (reading for run in self.runs for reading in run.calibration)
        return (*(one.seconds for one in self.calibrations), *around)

    def measured_s(self, instances: Collection[str] | None = None) -> float:
        """Return the seconds that launches, warm-ups and Runs took, of these instances or all."""

        def counts(instance: str) -> bool:
            return instances is None or instance in instances

        starts = (r.launch_s or 0.0 for r in self.launches if counts(r.instance))
        runs = [run for run in self.runs if counts(run.case.instance)]
        beside = ("warmup_s", "inside_s")
        spans = (run.span_s + sum(run.engine.get(key, 0.0) for key in beside) for run in runs)
        return math.fsum((*starts, *spans))

    def ran_out(self, case: Case, last: int | None = None) -> str | None:
        """Say that the budget kept a case from some launch (up to `last`); None if it did not."""
        runs = self.runs_of(case) if case.level else {}
        for launch in self.launches_of(case):
            record = None if launch in runs else self._records.get((case.instance, launch))
            if record is not None and record.failure_kind == "budget":
                return record.failure if last is None or launch <= last else None
        return None

    def launch_case(self, instance: str) -> Case:
        """Return the case that stands for an instance's launches as a whole."""
        return Case(instance, self.suite.instance(instance).model_name, "", "")

    def samples(self, case: Case, metric: Metric) -> tuple[Sample, ...]:
        """Return one sample per launch that was to be measured, in order."""
        if metric is metrics.LAUNCH_TIME:
            return self._launch_samples(case.instance)
        runs = self.runs_of(case)
        launches = self.launches_of(case)
        return tuple(self._sample(case, metric, launch, runs.get(launch)) for launch in launches)

    def _sample(self, case: Case, metric: Metric, launch: int, run: Run | None) -> Sample:
        if run is None:
            why = self.why_missing(case, launch)
            lost = self.lost_to_the_machine(case.instance, launch)
            return Sample(launch, None, why, (why,) if lost else ())
        value = metric.of_run(run)
        reason = None if value is not None else f"{metric.name} is undefined in this Run"
        return Sample(launch, value, reason, run.invalid)

    def why_missing(self, case: Case, launch: int) -> str:
        """Return one sentence on why a case has no Run in a launch."""
        record = self.launch_of(case.instance, launch)
        if record is None:
            return f"launch {launch} of {case.instance} was never started"
        if record.failure is not None:
            return f"launch {launch} of {case.instance} failed: {record.failure}"
        return f"launch {launch} of {case.instance} ended before this level"

    def unmeasured(self, case: Case, metric: Metric) -> str | None:
        """Say why a cell of an engine's processes is nobody's to measure; None where it is ours.

        Where they are seen from here, a number that is missing is missing.
        """
        if metric.name not in metrics.OF_PROCESSES:
            return None
        elsewhere = runs_elsewhere(self.suite, case.instance)
        if elsewhere is not None or metric is metrics.LAUNCH_TIME:
            return elsewhere
        runs = self.runs_of(case)
        ended = any(self.why_ended(case.instance, launch) for launch in runs)
        if not runs or ended or any(metric.of_run(run) is not None for run in runs.values()):
            return None
        return f"the processes of {case.instance} are not seen from here"

    def why_ended(self, instance: str, launch: int) -> str | None:
        """Return why a launch failed, or None."""
        record = self.launch_of(instance, launch)
        return None if record is None else record.failure

    def lost_to_the_machine(self, instance: str, launch: int) -> bool:
        """Whether a launch failed for what is no fault of its engine."""
        record = self.launch_of(instance, launch)
        return record is not None and record.failure_kind in MACHINE_FAILURES

    def _launch_samples(self, instance: str) -> tuple[Sample, ...]:
        """Return launch times, one per launch."""
        samples, case = [], self.launch_case(instance)
        for launch in self.launches_of(case):
            record = self.launch_of(instance, launch)
            value = record.launch_s if record else None
            reason = None if value is not None else self.why_missing(case, launch)
            lost = reason is not None and self.lost_to_the_machine(instance, launch)
            samples.append(Sample(launch, value, reason, (reason or "",) if lost else ()))
        return tuple(samples)

    def step_cells(self, instance: str) -> dict[Metric, tuple[Sample, ...]]:
        """Return the median step time per launch, for each phase and batch that was timed."""
        cells: dict[str, tuple[Metric, list[Sample]]] = {}
        for step in self.steps:
            if step.instance != instance or not step.seconds:
                continue
            metric = metrics.step_metric(step.phase, step.batch)
            value = stats.median(step.seconds)
            cells.setdefault(metric.name, (metric, []))[1].append(Sample(step.launch, value))
        return {metric: tuple(samples) for metric, samples in cells.values()}


def runs_elsewhere(suite: Suite, instance: str) -> str | None:
    """Say why nothing is known of an instance's processes, where we do not start it; else None."""
    asked = suite.instance(instance)
    if launcher_of(asked.kind, asked.args).command is not None:
        return None
    return f"{instance} ran before we came: its processes are not ours to measure"


def applies(suite: Suite, case: Case, metric: Metric) -> bool:
    """Whether a case has a metric.

    Throughput in open loop is the arrival rate; of a single token there is no time per further
    one; what is good is for an SLO to say; and what HTTP costs is not known without a replay.
    """
    level = suite.level(case)
    prompts = suite.workload(case.workload).prompts
    one_token = {output for _, output in extremes(prompts, 1)} == {1}
    return (
        (level.closed or not metric.closed_loop_only)
        and not (one_token and metric.further_tokens_only)
        and (level.slo is not None or not metric.slo_only)
        and (suite.replay_inside or not metric.inside_only)
    )


def gated(suite: Suite) -> tuple[str, ...]:
    """Return the metrics that some gate of a suite is on, each once: pairs, baseline, limits."""
    paired = suite.reference.metrics if suite.reference is not None else ()
    limited = (limit.metric for limit in suite.limits)
    return tuple(dict.fromkeys((*paired, *suite.baseline.metrics, *limited)))


def check_context(suite: Suite, models: Mapping[str, ModelFacts]) -> None:
    """Refuse a workload that does not fit a model's context; raises SuiteError.

    `models` goes by model name; a model that is not in it is not checked.
    """
    for instance in suite.instances:
        facts = models.get(instance.model_name)
        most = facts.context_length if facts is not None else None
        for workload in suite.workloads:
            pairs = extremes(workload.prompts, 1)
            prompt, output = max(pairs, key=sum, default=(0, 0))
            if most is not None and prompt + output > most:
                raise SuiteError(
                    f"{suite.path}: workload.{workload.name} has {prompt} prompt and {output} "
                    f"output tokens, {prompt + output} in all; the context of "
                    f"{instance.model_name} holds {most}"
                )
