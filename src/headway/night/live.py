"""One launch of a night while it lives: start, warm up, measure level by level, stop.

The engine is started by the first thing that needs it and not at all when the journal has
everything already. A Run that cannot be judged is replaced by another launch, at most twice and
only within the budget.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from headway import arrivals, prefix_cache, questions, validity
from headway.core import Case, LaunchRecord, Level, Request, Run, StepTiming
from headway.engines.launch import LaunchError
from headway.night import inside, prompts, warmup
from headway.night.asked import ReferenceFailure
from headway.night.lab import Engine
from headway.night.plan import PRIMING, PlannedLaunch, order
from headway.night.session import Night
from headway.workload import workload_hash

MAX_REPLACEMENTS = 2


class LiveLaunch:
    """A planned launch, its engine when it runs, and the journal it writes into."""

    def __init__(self, night: Night, planned: PlannedLaunch) -> None:
        self.night = night
        self.planned = planned
        self.engine: Engine | None = None
        self.attempt = 1 + max((r.attempt for r in self._records()), default=0)

    def _records(self) -> Iterator[LaunchRecord]:
        for record in self.night.results.launches:
            if (record.instance, record.launch) == (self.planned.instance, self.planned.launch):
                yield record

    @property
    def failure(self) -> str | None:
        """Why this launch will give nothing more, or None."""
        return next((r.failure for r in self._records() if r.failure is not None), None)

    @property
    def lost_to_the_machine(self) -> bool:
        """Whether this launch gives nothing more, and its engine is not to blame."""
        return self.night.results.lost_to_the_machine(self.planned.instance, self.planned.launch)

    @property
    def out_of_budget(self) -> bool:
        """Whether this launch gives nothing more because the budget was spent before it."""
        return any(record.failure_kind == "budget" for record in self._records())

    def missing(self, cases: Collection[Case]) -> list[Case]:
        """Return the cases that have no Run yet, or only one that may be replaced."""
        return [case for case in self.planned.cases if case in cases and not self._settled(case)]

    def _settled(self, case: Case) -> bool:
        launch = self.planned.launch
        runs = [r for r in self.night.results.runs if r.case == case and r.launch == launch]
        return any(not run.invalid for run in runs) or len(runs) > MAX_REPLACEMENTS

    def measure(self, cases: Collection[Case]) -> None:
        """Measure what is missing, each Run into the journal at once."""
        while self.failure is None and (todo := self.missing(cases)):
            if not self._start():
                return
            for case in todo:
                self._measure_case(case)
                if self.engine is None or not self.engine.serves():
                    self._died(case)
                    return
            if self.missing(cases):
                self.stop()  # what was invalid needs another launch

    def prime(self) -> None:
        """Let the engine fill its compile caches, once a night; nothing is measured."""
        gate, launch = self.night.suite.reference, self.planned
        if gate is None or not gate.prime or launch.launch != 1:
            return
        primer = LiveLaunch(self.night, replace(launch, launch=PRIMING))
        if not any(primer._records()) and primer._start():
            assert primer.engine is not None
            for case in launch.cases:
                primer._warm_up(primer.engine, case, self.night.suite.level(case))
            primer.stop()

    def stop(self) -> None:
        """End the engine; what comes next is another attempt."""
        if self.engine is not None:
            self.attempt += 1
            self.engine.stop()
        self.engine = None

    def _start(self) -> bool:
        """Start the engine unless it runs; False when it did not come up."""
        if self.engine is not None:
            return True
        night, planned, lab = self.night, self.planned, self.night.lab
        record = LaunchRecord(planned.instance, planned.launch, self.attempt, lab.now())
        spent = night.budget_spent(planned)
        if spent is not None:
            night.add(replace(record, failure_kind="budget", failure=spent))
            return False
        self.prime()
        try:
            self._fix_prompts()
            request = questions.launch_request(night.results, planned.instance)
            waited = lab.wait_quiet(night.suite.wait_quiet_s)
            if waited:
                night.say(f"{planned.name}: waited {waited:.0f} s for a quiet machine")
            night.say(f"{planned.name}: starting")
            engine = lab.start(planned, request)
        except (LaunchError, OSError, ValueError) as error:
            kind = error.kind if isinstance(error, LaunchError) else "launch_failed"
            night.add(replace(record, failure_kind=kind, failure=str(error)))
            return False
        self.engine, first, found = engine, engine.first, engine.found
        night.add(
            replace(
                record,
                launch_s=engine.launch_s,
                info=engine.info,
                first_output=first.output,
                first_text=first.text,
                first_prompt_tokens=first.prompt_tokens,
                can=found.can,
                notices=found.notices,
                cpus=engine.cpus,
                gpus=engine.gpus,
            )
        )
        return True

    def _fix_prompts(self) -> None:
        """Fix the prompts that are not sent as they are drawn, before the engine runs beside it."""
        night, what = self.night, "the prompt that ends a start"
        try:
            if not questions.takes_ids(night.results, self.planned.instance):
                prompts.fix_launch(night, self.planned.cases[0].model)
            for case in self.planned.cases:
                level, what = night.suite.level(case), f"workload {case.workload}"
                prompts.fix(night, case, level.num_requests, self.planned.launch)
                prompts.fix(night, case, warmup.num_requests(level), PRIMING)
        except ReferenceFailure as error:
            raise LaunchError("no_prompt", f"{what}: {error}") from error

    def _died(self, case: Case) -> None:
        """Journal that the engine ended, or serves no more, with the last it said."""
        assert self.engine is not None
        kind, said = self.engine.last_words()
        self.stop()
        *_, begun = self._records()
        what, _, log = said.partition(": ")
        failure = f"{what} in level {case.level}: {log}"
        self.night.add(replace(begun, failure_kind=kind, failure=failure))

    def _measure_case(self, case: Case) -> None:
        assert self.engine is not None
        night, engine, level = self.night, self.engine, self.night.suite.level(case)
        warm_up = self._warm_up(engine, case, level)
        requests = self._requests(case, level.num_requests, self.planned.launch)
        trace = night.suite.workload(case.workload).prompts.trace
        offsets = arrivals.schedule(level, night.suite.seed, self.planned.launch, trace)
        # Neither is always the second to ask the same of the engine.
        inside_first = self.planned.launch % 2 == 0
        replayed = self._inside(engine, case, level, requests) if inside_first else {}
        before = night.calibrate(fresh=False)
        started_at = night.lab.now()
        driven = engine.drive(case, level, requests, offsets)
        after = night.calibrate()
        if not inside_first:
            replayed = self._inside(engine, case, level, requests)
        night.screen.measured(self.planned, case, level.num_requests)
        run = Run(
            case=case,
            launch=self.planned.launch,
            attempt=self.attempt,
            level=level,
            started_at=started_at,
            span_s=driven.span_s,
            records=driven.records,
            schedule_hash=arrivals.schedule_hash(offsets, level.concurrency, level.fill_s),
            workload_hash=workload_hash(requests),
            client=driven.client,
            engine={**driven.engine, **warm_up, **replayed},
            calibration=(before, after) if before and after else (),
            prompt_path=night.suite.workload(case.workload).prompts.path,
            begin_tokens=prompts.begin_tokens(night, case, self.planned.launch),
            series=driven.series,
        )
        intended = _intended_hit_rate(requests)
        problems = validity.problems(run, night.bands(), intended)
        cached = prefix_cache.problems(run, requests)
        night.add(replace(run, invalid=(*driven.problems, *cached, *problems)))

    def _inside(
        self, engine: Engine, case: Case, level: Level, requests: Sequence[Request]
    ) -> dict[str, float]:
        """Replay a level's requests without HTTP, where the suite asks for it and it can be."""
        if not inside.wanted(self.night.suite, case):
            return {}
        try:
            records = engine.replay(case, level, requests)
        except (LaunchError, OSError) as error:
            self.night.screen.line(f"{case.name} was not replayed inside: {error}")
            return {"inside_failed": 1.0}
        return inside.figures(case, level, records)

    def _requests(self, case: Case, n: int, launch: int) -> tuple[Request, ...]:
        return questions.requests_for(self.night.results, case, n, launch)

    def _warm_up(self, engine: Engine, case: Case, level: Level) -> dict[str, float]:
        """Warm up a level, on prompts that no launch is measured with: those of launch 0."""
        requests = self._requests(case, warmup.num_requests(level), PRIMING)
        return dict(engine.warm_up(case, level, requests))

    @property
    def max_batch(self) -> int | None:
        """The most sequences that a step of this engine holds, if it says so."""
        infos = [record.info for record in self._records() if record.info is not None]
        most = infos[-1].settings.get("max_num_seqs") if infos else None
        return most if isinstance(most, int) else None

    def engine_clock(self) -> float:
        """Return the seconds that the engine has spent in timed steps, by its own clock."""
        return self._running().step_clock()

    def step(self, phase: str, batch: int, length: int) -> None:
        """Have the engine do one prefill or decode step; its clock moves by the step's time."""
        self._running().step(phase, batch, length)

    def has_steps(self, phase: str, batch: int) -> bool:
        """Whether this kind of step was timed in this launch."""
        mine = (self.planned.instance, self.planned.launch, phase, batch)
        steps = self.night.results.steps
        return any((s.instance, s.launch, s.phase, s.batch) == mine for s in steps)

    def add_steps(self, phase: str, batch: int, length: int, seconds: Sequence[float]) -> None:
        """Journal the rounds of one kind of step."""
        planned = self.planned
        self.night.add(
            StepTiming(
                planned.instance,
                planned.launch,
                "prefill" if phase == "prefill" else "decode",
                batch,
                length,
                tuple(seconds),
            )
        )

    def _running(self) -> Engine:
        if self.failure is not None or not self._start():
            raise LaunchError("failed", f"{self.planned.name} is not running: {self.failure}")
        assert self.engine is not None
        return self.engine


def _intended_hit_rate(requests: Sequence[Request]) -> float | None:
    """Return what share of the prompts' tokens a prefix cache may find; None where it may find
    answers in them as well, of which nobody knows what it kept."""
    if any(request.turn for request in requests):
        return None
    return prefix_cache.expected_hit_rate(requests)


def measure_all(night: Night, cases: Collection[Case]) -> None:
    """Measure whatever of these cases is missing: the first launches, then the second look."""
    for planned in order(night.suite, {case.instance for case in cases}):
        measure_launch(night, planned, cases)
    second_look(night, cases)


def second_look(night: Night, cases: Collection[Case]) -> int:
    """Measure the further pairs that the first look asks for; returns how many launches it took."""
    launches = night.expect_more(cases)
    for planned in launches:
        measure_launch(night, planned, planned.cases)
    return len(launches)


def measure_launch(night: Night, planned: PlannedLaunch, cases: Collection[Case]) -> None:
    """Measure one launch, and leave nothing of it running."""
    live = LiveLaunch(night, planned)
    try:
        live.measure(cases)
    finally:
        live.stop()
