"""One engine of the real lab while it runs: warmed up, driven, watched, ended."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from headway import arrivals, loadgen, telemetry, transport
from headway.core import Case, EngineInfo, Level, Request, RequestRecord
from headway.engines.endpoint import MEMORY, telling
from headway.engines.launch import Endpoint, LaunchError
from headway.night import inside, warmup
from headway.night.cores import kept_to
from headway.night.found import Answer, Found
from headway.night.lab import Driven, First
from headway.night.plan import PlannedLaunch
from headway.night.probe import first_output, recipient_of
from headway.night.watch import our_processes
from headway.telemetry import Reading

if TYPE_CHECKING:
    from headway.night.real import RealLab

PROGRESS_PERIOD_S = 0.2


@dataclass(slots=True)
class RealEngine:
    """An engine that is up, behind its endpoint."""

    lab: RealLab
    planned: PlannedLaunch
    endpoint: Endpoint
    info: EngineInfo
    launch_s: float | None
    first: First
    found: Found
    stack: contextlib.ExitStack
    gpus: tuple[str, ...] = ()
    resting: Mapping[str, Reading] = field(default_factory=dict)
    # No two engines salt alike: one that runs already may have seen these prompts another night.
    salt: str = field(default_factory=lambda: os.urandom(6).hex())

    @property
    def cpus(self) -> tuple[int, ...]:
        """The cores that it is kept to."""
        return self.endpoint.spec.cpus

    def stop(self) -> None:
        """End it with all its processes."""
        self.stack.close()

    def serves(self) -> bool:
        """Whether our own child runs and says that it can serve."""
        return self.endpoint.serves()

    def last_words(self) -> tuple[str, str]:
        """Return why it serves no more, and how it ended, with the last lines of its log."""
        ended = self.endpoint.ends_within()
        memory = self.endpoint.out_of_memory()
        self.stop()
        what = f"the engine answers {self.endpoint.launcher.health} no more"
        what = "the engine ended" if ended else what
        what = f"the engine {MEMORY}" if memory else what
        said = telling(self.endpoint.spec.log) or "it said nothing"
        return "oom" if memory else "died", f"{what}: {said}"

    def warm_up(self, case: Case, level: Level, requests: Sequence[Request]) -> dict[str, float]:
        """Send waves of short requests, as many at once as the level has, until steps are stable.

        Returns how many requests that took, how many seconds, how many failed, and whether it was
        stable in the end.
        """
        together = warmup.together(level)
        short = [warmup.short(request) for request in requests]
        level = Level(f"{level.name}_warmup", together, concurrency=together)
        self._empty_cache()  # where it fails, it fails before the Run as well, which says so
        waves: list[warmup.Wave] = []
        failed = 0
        begun_s = self.lab.clock()
        left_s = limit_s = self.lab.suite.warmup_timeout_s
        while not (failed or warmup.settled(waves)) and left_s > 0 and len(short) >= together:
            wave, short = short[:together], short[together:]
            self.lab.screen.status(f"{self.planned.name} {level.name}: wave {len(waves) + 1}")
            share = replace(self._share(case, wave, level), timeout_s=left_s)
            with kept_to(self.lab.cores.client):
                measured = transport.run(loadgen.measure(share))
            waves.append(warmup.wave(measured.span_s, measured.records))
            errors = [one.error for one in measured.records if one.error is not None]
            failed += sum(error.kind != "level_timeout" for error in errors)  # that is our bound
            left_s = limit_s - (self.lab.clock() - begun_s)
        return {
            "warmup_requests": float(len(waves) * together),
            "warmup_s": sum(wave.span_s for wave in waves),
            "warmup_failed": float(failed),
            "warmup_stable": float(not failed and left_s > 0 and warmup.settled(waves)),
        }

    def _empty_cache(self) -> str | None:
        """Empty the prefix cache of an engine that takes no salt; returns why it could not."""
        path = self.endpoint.launcher.reset
        if self.found.can.salt is not None or path is None:
            return None
        try:
            status, content = self.endpoint.empty_cache(path)
        except OSError as error:
            return f"POST {path} was not answered: {error}"
        said = content[:200].decode("utf-8", "replace").strip()
        return None if status == 200 else f"POST {path} was answered with {status} {said}".strip()

    def drive(
        self, case: Case, level: Level, requests: Sequence[Request], offsets_s: Sequence[float]
    ) -> Driven:
        """Send a level's requests as it says; progress is drawn beside it."""
        problem = self._empty_cache()
        self.endpoint.reset_peak_rss()
        # In closed loop each slot's first request has a time, the others follow.
        slots = level.concurrency
        times_s = offsets_s if slots is None else arrivals.slot_offsets(slots, level.fill_s)
        think_s = self.lab.suite.workload(case.workload).prompts.think_s
        share = self._share(case, requests, level, tuple(times_s), think_s)
        ours = self._processes()
        self.lab.telemetry.begin(self.endpoint, self.gpus)
        with kept_to(self.lab.cores.client):
            measured = transport.run(self._shown(case, share))
        watched = self.lab.telemetry.end()
        ours += self._processes()
        # After a death, what is left of its processes is not the engine.
        peak = self.endpoint.peak_rss_bytes() if self.serves() else None
        memory = {} if peak is None else {"peak_rss_bytes": float(peak)}
        stopped = (r.error for r in measured.records if r.error and r.error.kind == "stopped")
        if (error := next(stopped, None)) is not None:
            self.lab.screen.line(f"{self.planned.name} {level.name} was stopped: {error.message}")
        start_s, span_s = measured.start_s, measured.span_s
        seen = telemetry.figures(watched, start_s, span_s, self.resting, ours)
        series = telemetry.series(watched, start_s)
        problems = () if problem is None else (f"the prefix cache was not emptied: {problem}",)
        client = measured.client
        return Driven(span_s, measured.records, client, memory | seen, problems, series)

    def replay(
        self, case: Case, level: Level, requests: Sequence[Request]
    ) -> tuple[RequestRecord, ...]:
        """Have the host serve the same requests inside; nothing where it is not our host."""
        if not self.endpoint.launcher.can.hosted:
            return ()
        self.lab.screen.status(f"{self.planned.name} {level.name}: replayed inside")
        inner = replace(level, name=f"{level.name}_inside")
        recipient = self._share(case, requests, inner).recipient
        body = inside.body(requests, recipient, level)
        with kept_to(self.lab.cores.client):
            answer = self.endpoint.post(inside.PATH, body, self.lab.suite.level_timeout_s)
        return inside.records(requests, answer)

    def _processes(self) -> list[int]:
        """Return our processes as a GPU's driver numbers them; a container's are no children."""
        mine = our_processes()
        return [*mine, *self.endpoint.pids()] if mine else []

    async def _shown(self, case: Case, share: loadgen.Share) -> loadgen.Measured:
        done = 0

        def count(more: int) -> None:
            nonlocal done
            done += more  # nothing else: this runs between a slot's end and its next send

        async def draw() -> None:
            while True:
                self.lab.screen.progress(self.planned, case, done, share.level.num_requests)
                await asyncio.sleep(PROGRESS_PERIOD_S)

        drawing = asyncio.create_task(draw())
        try:
            return await loadgen.measure_with(share, self.lab.suite.load_workers, count)
        finally:
            drawing.cancel()

    def _share(
        self,
        case: Case,
        requests: Sequence[Request],
        level: Level,
        times_s: tuple[float, ...] = (),
        think_s: float = 0.0,
    ) -> loadgen.Share:
        suite = self.lab.suite
        # Hashed: vLLM takes at most 128 characters, and every Run's requests are as long.
        salted = f"{self.salt}-{case.workload}-{level.name}"
        salt = hashlib.sha256(salted.encode()).hexdigest()[:24]
        return loadgen.Share(
            recipient=recipient_of(self.endpoint, self.found.can, salt),
            requests=tuple(requests),
            level=level,
            offsets_s=times_s,
            idle_timeout_s=suite.idle_timeout_s,
            timeout_s=suite.level_timeout_s,
            think_s=think_s,
        )

    def step_clock(self) -> float:
        """Return the seconds that the engine has spent in timed steps, by its own clock."""
        status, content = self.endpoint.get("/headway/clock")
        if status != 200:
            raise LaunchError("no_clock", f"/headway/clock answered {status}")
        return float(json.loads(content)["step_s"])

    def step(self, phase: str, batch: int, length: int) -> None:
        """Have the engine do one prefill or decode step; its clock moves by the step's time."""
        body = {"phase": phase, "batch": batch, "length": length}
        self.endpoint.post("/headway/step", body, self.lab.suite.idle_timeout_s)


def first_token(endpoint: Endpoint, request: Request) -> Answer:
    """Return what an engine answers first; raises LaunchError, of kind `oom` for what it is."""
    try:
        return transport.run(first_output(endpoint, request))
    except LaunchError as error:
        if not (endpoint.ends_within() and endpoint.out_of_memory()):
            raise
        raise endpoint.died("at its first token") from error
