"""One launch of a night while it lives: start, warm up, measure level by level, stop.

The engine is started by the first thing that needs it and not at all when the journal has
everything already. A Run that cannot be judged is replaced by another launch, at most twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from headway import arrivals, correctness, loadgen, validity
from headway.core import Case, EngineInfo, LaunchRecord, Level, Request, Run, StepTiming
from headway.engines.launch import Endpoint, LaunchError, launched, tail
from headway.night.plan import PlannedLaunch, order
from headway.night.session import Night, now
from headway.sse import parse
from headway.transport import Exchange, HttpTransport, Target
from headway.workload import workload_hash

MAX_REPLACEMENTS = 2
WARMUP_TOKENS = 4
# Waves of a level's own concurrency, until two in a row take about the same time.
MAX_WARMUP_WAVES = 4
WARMUP_AGREEMENT = 0.2
PROGRESS_PERIOD_S = 0.2
# Between an engine's last answer and the end of its processes.
ENDING_S = 2.0
# Launch numbers count from 1; the prompts of launch 0 are the warm-up's alone.
WARMUP_LAUNCH = 0


class LiveLaunch:
    """A planned launch, its engine when it runs, and the journal it writes into."""

    def __init__(self, night: Night, planned: PlannedLaunch) -> None:
        self.night = night
        self.planned = planned
        self.endpoint: Endpoint | None = None
        self.attempt = 1 + max((r.attempt for r in self._records()), default=0)
        self._stack = contextlib.ExitStack()

    def _records(self) -> Iterator[LaunchRecord]:
        for record in self.night.results.launches:
            if (record.instance, record.launch) == (self.planned.instance, self.planned.launch):
                yield record

    @property
    def failure(self) -> str | None:
        """Why this launch will give nothing more, or None."""
        return next((r.failure for r in self._records() if r.failure is not None), None)

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
                if self.endpoint is None or not self.endpoint.serves():
                    self._died(case)
                    return
            if self.missing(cases):
                self.stop()  # what was invalid needs another launch

    def stop(self) -> None:
        """End the engine; what comes next is another attempt."""
        if self.endpoint is not None:
            self.attempt += 1
        self.endpoint = None
        self._stack.close()

    def _start(self) -> bool:
        """Start the engine unless it runs; False when it did not come up."""
        if self.endpoint is not None:
            return True
        record = LaunchRecord(self.planned.instance, self.planned.launch, self.attempt, now())
        if self.night.budget_is_spent():
            minutes = self.night.suite.budget.night_minutes
            spent = f"the night's budget of {minutes:g} minutes was spent before it"
            self.night.add(replace(record, failure_kind="budget", failure=spent))
            return False
        self.night.say(f"{self.planned.name}: starting")
        try:
            endpoint = self._stack.enter_context(launched(self.night.spec(self.planned)))
            first = self._first_output(endpoint)
            launch_s = endpoint.clock_since_start()
            info = endpoint.info()
            self._check_info(info)
        except (LaunchError, OSError, ValueError) as error:
            kind = error.kind if isinstance(error, LaunchError) else "launch_failed"
            self._stack.close()
            self.night.add(replace(record, failure_kind=kind, failure=str(error)))
            return False
        self.endpoint = endpoint
        self.night.add(replace(record, launch_s=launch_s, info=info, first_output=first))
        return True

    def _check_info(self, info: EngineInfo) -> None:
        """Read back from the engine: it must run what was asked for, where it was asked for."""
        asked = self.night.suite.instance(self.planned.instance)
        if asked.kind == "fake":  # computes nothing, nowhere
            return
        for what, got, want in (
            ("dtype", info.dtype, asked.dtype),
            ("device", info.device.partition(":")[0], self.night.device),
        ):
            if got != want:
                message = f"{asked.name} runs with {what} {got}, not {want}"
                raise LaunchError(f"wrong_{what}", message)

    def _first_output(self, endpoint: Endpoint) -> tuple[int, ...]:
        """Ask for one token: an engine that gives none is not up."""
        model = self.night.suite.instance(self.planned.instance).model_name
        prompt = correctness.launch_prompt(self.night.results, model)
        exchange = asyncio.run(self._ask(endpoint, Request(0, prompt, 1)))
        stream = parse(exchange.chunks)
        if exchange.error is not None or exchange.status != 200 or not stream.events:
            body = b"".join(piece for _, piece in exchange.chunks)[:300].decode("utf-8", "replace")
            cause = exchange.error.message if exchange.error else f"status {exchange.status} {body}"
            name = self.planned.instance
            raise LaunchError("no_token", f"{name} gave no first token: {cause}")
        return stream.events[0].token_ids or ()

    async def _ask(self, endpoint: Endpoint, request: Request) -> Exchange:
        target = Target.parse(endpoint.base_url)
        instance = self.night.suite.instance(self.planned.instance)
        transport = HttpTransport(target, idle_timeout_s=instance.start_timeout_s)
        exchange = Exchange()
        await transport.send(
            loadgen.payload(request, endpoint.spec.served_name, target, endpoint.capabilities),
            exchange,
        )
        await transport.close()
        return exchange

    def _died(self, case: Case) -> None:
        """Journal that the engine ended, or serves no more, with the last it said."""
        assert self.endpoint is not None
        ended = self.endpoint.ends_within(ENDING_S)
        self.stop()
        *_, begun = self._records()
        what = "the engine ended" if ended else "the engine answers /health no more"
        said = tail(self.night.spec(self.planned).log, 3) or "it said nothing"
        failure = f"{what} in level {case.level}: {said}"
        self.night.add(replace(begun, failure_kind="died", failure=failure))

    def _measure_case(self, case: Case) -> None:
        assert self.endpoint is not None
        level = self.night.suite.level(case)
        warm_up = self._warm_up(case, level)
        self.endpoint.reset_peak_rss()
        requests = self._requests(case, level.num_requests, self.planned.launch)
        offsets = () if level.closed else self._offsets(level)
        started_at = now()
        driven = asyncio.run(self._drive(requests, level, offsets, case))
        self.night.measured(self.planned, case, level.num_requests)
        run = Run(
            case=case,
            launch=self.planned.launch,
            attempt=self.attempt,
            level=level,
            started_at=started_at,
            span_s=driven.end_s - driven.start_s,
            records=loadgen.records(driven, requests),
            schedule_hash=arrivals.schedule_hash(offsets, level.concurrency),
            workload_hash=workload_hash(requests),
            client=driven.client,
            engine={**self._engine_memory(), **warm_up},
        )
        self.night.add(replace(run, invalid=validity.problems(run)))

    def _engine_memory(self) -> dict[str, float]:
        assert self.endpoint is not None
        # After a death, what is left of its processes is not the engine.
        peak = self.endpoint.peak_rss_bytes() if self.endpoint.serves() else None
        return {} if peak is None else {"peak_rss_bytes": float(peak)}

    def _offsets(self, level: Level) -> tuple[float, ...]:
        assert level.rate_per_s is not None
        seed = self.night.suite.seed * 1000 + self.planned.launch
        return arrivals.offsets(level.arrivals, level.num_requests, level.rate_per_s, seed)

    def _requests(self, case: Case, n: int, launch: int) -> tuple[Request, ...]:
        return correctness.requests_for(self.night.results, case, n, launch)

    def _warm_up(self, case: Case, level: Level) -> dict[str, float]:
        """Send waves of short requests, as many at once as the level, until they take equally long.

        Returns how many requests that took, how many seconds, and how many failed.
        """
        together = level.concurrency or 1
        made = self._requests(case, together * MAX_WARMUP_WAVES, WARMUP_LAUNCH)
        short = [replace(r, max_tokens=min(WARMUP_TOKENS, r.max_tokens)) for r in made]
        warm = Level("warmup", together, concurrency=together)
        spans: list[float] = []
        failed = 0
        while len(spans) < MAX_WARMUP_WAVES:
            wave = short[len(spans) * together : (len(spans) + 1) * together]
            self.night.say(f"{self.planned.name} {level.name}: warm-up {len(spans) + 1}")
            driven = asyncio.run(self._drive(wave, warm, ()))
            spans.append(driven.end_s - driven.start_s)
            failed += sum(not record.completed for record in loadgen.records(driven, wave))
            if failed or (
                len(spans) > 1 and min(spans[-2:]) >= max(spans[-2:]) * (1 - WARMUP_AGREEMENT)
            ):
                break
        return {
            "warmup_requests": float(len(spans) * together),
            "warmup_s": sum(spans),
            "warmup_failed": float(failed),
        }

    async def _drive(
        self,
        requests: Sequence[Request],
        level: Level,
        offsets: Sequence[float],
        shown_as: Case | None = None,
    ) -> loadgen.Drive:
        """Drive a level; where it is `shown_as` a case, its progress is drawn beside it."""
        assert self.endpoint is not None
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more  # nothing else: this runs between a slot's end and its next send

        async def draw(case: Case) -> None:
            while True:
                self.night.progress(self.planned, case, done, level.num_requests)
                await asyncio.sleep(PROGRESS_PERIOD_S)

        drawing = asyncio.create_task(draw(shown_as)) if shown_as is not None else None
        endpoint, suite = self.endpoint, self.night.suite
        target = Target.parse(endpoint.base_url)
        payloads = [
            loadgen.payload(r, endpoint.spec.served_name, target, endpoint.capabilities)
            for r in requests
        ]
        transport = HttpTransport(target, idle_timeout_s=suite.idle_timeout_s)
        try:
            return await loadgen.drive(
                payloads,
                level,
                offsets,
                transport,
                timeout_s=suite.level_timeout_s,
                progress=count,
            )
        finally:
            if drawing is not None:
                drawing.cancel()

    @property
    def max_batch(self) -> int | None:
        """The most sequences that a step of this engine holds, if it says so."""
        infos = [record.info for record in self._records() if record.info is not None]
        most = infos[-1].settings.get("max_batch") if infos else None
        return most if isinstance(most, int) else None

    def engine_clock(self) -> float:
        """Return the seconds that the engine has spent in timed steps, by its own clock."""
        endpoint = self._running()
        status, content = endpoint.get("/headway/clock")
        if status != 200:
            raise LaunchError("no_clock", f"/headway/clock answered {status}")
        return float(json.loads(content)["step_s"])

    def step(self, phase: str, batch: int, length: int) -> None:
        """Have the engine do one prefill or decode step; its clock moves by the step's time."""
        body = {"phase": phase, "batch": batch, "length": length}
        self._running().post("/headway/step", body, self.night.suite.idle_timeout_s)

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

    def _running(self) -> Endpoint:
        if self.failure is not None or not self._start():
            raise LaunchError("failed", f"{self.planned.name} is not running: {self.failure}")
        assert self.endpoint is not None
        return self.endpoint


def measure_all(night: Night, cases: Collection[Case]) -> None:
    """Measure whatever of these cases is missing, in the night's order."""
    for planned in order(night.suite, {case.instance for case in cases}):
        live = LiveLaunch(night, planned)
        try:
            live.measure(cases)
        finally:
            live.stop()
