"""The real lab: engines as processes behind HTTP, on this machine's own clock."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from headway import arrivals, loadgen, transport
from headway.core import Case, EngineInfo, Level, Request
from headway.engines.launch import HERE, Endpoint, LaunchError, LaunchSpec, launched, tail
from headway.night import machine, texts, verify, warmup
from headway.night.found import Answer, Found, of_answer
from headway.night.lab import Driven
from headway.night.machine import Kernels
from headway.night.models import PreparedModel
from headway.night.plan import PlannedLaunch
from headway.night.probe import ENDING_S, first_output, probed, recipient_of
from headway.night.screen import Screen
from headway.suite import Instance, Suite
from headway.workload import extremes

PROGRESS_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True)
class Start:
    """What an instance is started with: its Python, and another commit's boot.py and folder."""

    python: Path
    boot: Path = HERE / "boot.py"
    cwd: Path | None = None


def now() -> str:
    """Return the wall clock, for labels only."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(slots=True)
class RealLab:
    """Starts the engines of a suite; logs go below `folder`."""

    folder: Path
    suite: Suite
    device: str
    prepared: Mapping[str, PreparedModel]
    starts: Mapping[str, Start]
    reference_python: Callable[[str], Path]
    screen: Screen = field(default_factory=Screen)
    lock: int | None = None
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    kernels: Kernels | None = None
    uncalibrated: bool = False

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def now(self) -> str:
        """Return the wall clock, for labels only."""
        return now()

    def spec(self, planned: PlannedLaunch) -> LaunchSpec:
        """Return how to start a planned launch."""
        instance = self.suite.instance(planned.instance)
        return LaunchSpec(
            instance=instance.name,
            kind=instance.kind,
            model=self.prepared[instance.model_name].folder,
            dtype=instance.dtype,
            device=self.device,
            python=self.starts[instance.name].python,
            log=self.folder / "logs" / f"{planned.name}.log",
            args=instance.args,
            env=instance.env,
            port=instance.port,
            start_timeout_s=instance.start_timeout_s,
            lock=self.lock,
            boot=self.starts[instance.name].boot,
            cwd=self.starts[instance.name].cwd,
            equal=self.suite.equal if instance.tuning == "equal" else {},
            gpus=instance.gpus,
            image=instance.image,
            base_url=instance.base_url,
            api_key=_api_key(instance),
        )

    def start(self, planned: PlannedLaunch, prompt: tuple[int, ...]) -> RealEngine:
        """Start an engine and wait for its first token; raises LaunchError or OSError."""
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(launched(self.spec(planned)))
            asked = self.suite.instance(planned.instance)
            request = Request(0, prompt, 1)
            first = transport.run(first_output(endpoint, request))
            launch_s = endpoint.clock_since_start()
            info = endpoint.info()
            _check_info(info, asked, self.device)
            found = self._probed(endpoint, request, first)
            ids = first.stream.events[0].token_ids or ()
            return RealEngine(self, planned, endpoint, info, launch_s, ids, found, stack.pop_all())

    def _probed(self, endpoint: Endpoint, request: Request, first: Answer) -> Found:
        """Ask what the endpoint understands; LaunchError where its workloads need more."""
        name, can = endpoint.spec.instance, endpoint.launcher.can
        if can.control:  # our own host shows what there is to know in its first token
            found = of_answer(can, request, first.stream)
        else:
            self.screen.status(f"{name}: asking what it understands")
            sizes = [pair for w in self.suite.workloads for pair in extremes(w.prompts, 1)]
            found = transport.run(probed(endpoint, request, sizes))
        wanting = [w.name for w in self.suite.workloads if w.prompts.path == "ids"]
        if wanting and not found.can.ids_in:
            why = f": {found.notices[0]}" if can.ids_in and found.notices else ""
            message = f"{name} takes no token ids as a prompt, which workload {wanting[0]} sends"
            raise LaunchError("cannot", message + why)
        return found

    def calibrate(self) -> Mapping[str, float]:
        """Return the seconds of each calibration kernel; empty, and said, where it cannot run."""
        if self.uncalibrated:
            return {}
        try:
            if self.kernels is None:
                self.kernels = self.stack.enter_context(self._kernels())
            return self.kernels.read()
        except machine.KernelFailure as error:
            self.uncalibrated = True
            self.screen.line(f"the machine is not watched from here on: {error}")
            return {}

    def _kernels(self) -> contextlib.AbstractContextManager[Kernels]:
        """On a GPU they need torch, which the reference's environment has; numpy is ours."""
        cpu = self.device == "cpu"
        python = Path(sys.executable) if cpu else self.reference_python("")
        return machine.kernels(python, self.device, self.folder / "logs" / "calibration.log")

    def wait_quiet(self, limit_s: float) -> float:
        """Wait until nothing else keeps the machine busy; returns the seconds that took."""
        return machine.wait_quiet(limit_s) if limit_s else 0.0

    @contextlib.contextmanager
    def reference(self, model: str) -> Iterator[verify.Reference]:
        """Start transformers for a model, in a process of its own."""
        log = self.folder / "logs" / "reference.log"
        python, folder = self.reference_python(model), self.prepared[model].folder
        with verify.reference(python, folder, self.device, log, self.screen.status) as running:
            yield running

    @contextlib.contextmanager
    def writer(self, model: str) -> Iterator[texts.TokenizerProcess]:
        """Start a model's tokenizer, in a process of its own."""
        log = self.folder / "logs" / "texts.log"
        python, folder = self.reference_python(model), self.prepared[model].folder
        with texts.writer(python, folder, log, self.screen.status) as running:
            yield running

    def close(self) -> None:
        """End what runs beside the engines."""
        self.stack.close()


@dataclass(slots=True)
class RealEngine:
    """An engine that is up, behind its endpoint."""

    lab: RealLab
    planned: PlannedLaunch
    endpoint: Endpoint
    info: EngineInfo
    launch_s: float
    first_output: tuple[int, ...]
    found: Found
    stack: contextlib.ExitStack
    # No two engines salt alike: one that runs already may have seen these prompts another night.
    salt: str = field(default_factory=lambda: os.urandom(6).hex())

    def stop(self) -> None:
        """End it with all its processes."""
        self.stack.close()

    def serves(self) -> bool:
        """Whether our own child runs and says that it can serve."""
        return self.endpoint.serves()

    def last_words(self) -> str:
        """Say how it ended, with the last lines of its log."""
        ended = self.endpoint.ends_within(ENDING_S)
        self.stop()
        what = "the engine ended" if ended else "the engine answers /health no more"
        return f"{what}: {tail(self.lab.spec(self.planned).log, 3) or 'it said nothing'}"

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
        measured = transport.run(self._shown(case, share))
        # After a death, what is left of its processes is not the engine.
        peak = self.endpoint.peak_rss_bytes() if self.serves() else None
        memory = {} if peak is None else {"peak_rss_bytes": float(peak)}
        stopped = (r.error for r in measured.records if r.error and r.error.kind == "stopped")
        if (error := next(stopped, None)) is not None:
            self.lab.screen.line(f"{self.planned.name} {level.name} was stopped: {error.message}")
        problems = () if problem is None else (f"the prefix cache was not emptied: {problem}",)
        return Driven(measured.span_s, measured.records, measured.client, memory, problems)

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


def _api_key(asked: Instance) -> str | None:
    """Return the key that its requests carry; raises LaunchError where it wants one not set."""
    key = None if asked.api_key_env is None else os.environ.get(asked.api_key_env)
    if asked.api_key_env is not None and not key:
        message = f"engine.{asked.name}.api_key_env is {asked.api_key_env}, which is not set here"
        raise LaunchError("no_api_key", message)
    return key


def _check_info(info: EngineInfo, asked: Instance, device: str) -> None:
    """Read back from the engine: it must run what was asked for, where it was asked for."""
    if asked.kind == "fake":  # computes nothing, nowhere
        return
    for what, got, want in (
        ("dtype", info.dtype, asked.dtype),
        ("device", info.device.partition(":")[0], device),
    ):
        if got != want:
            raise LaunchError(f"wrong_{what}", f"{asked.name} runs with {what} {got}, not {want}")
