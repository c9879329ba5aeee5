"""The real lab: engines as processes behind HTTP, on this machine's own clock."""

from __future__ import annotations

import asyncio
import contextlib
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
from headway.engines.servers import launcher_of
from headway.night import machine, texts, verify
from headway.night.lab import Driven
from headway.night.machine import Kernels
from headway.night.models import PreparedModel, make
from headway.night.plan import PlannedLaunch
from headway.night.screen import Screen
from headway.sse import parse
from headway.suite import Instance, Suite
from headway.transport import Exchange, HttpTransport, Target

WARMUP_TOKENS = 4
# Waves of a level's own concurrency, until two in a row take about the same time.
MAX_WARMUP_WAVES = 4
WARMUP_AGREEMENT = 0.2
PROGRESS_PERIOD_S = 0.2
# Between an engine's last answer and the end of its processes.
ENDING_S = 2.0


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
    made: dict[str, str] = field(default_factory=dict)

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def now(self) -> str:
        """Return the wall clock, for labels only."""
        return now()

    def spec(self, planned: PlannedLaunch) -> LaunchSpec:
        """Return how to start a planned launch."""
        instance = self.suite.instance(planned.instance)
        return replace(self._spec(instance, planned.name), api_key=_api_key(instance))

    def prepare(self, instances: Sequence[Instance], home: Path) -> None:
        """Have made of the models what their engines read; raises ModelFailure."""
        for instance in instances:
            words = launcher_of(instance.kind).prepare(self._spec(instance, instance.name))
            if words is not None:
                what = f"the model of {instance.name}"
                python = self.reference_python(instance.model_name)
                self.made[instance.name] = make(words, what, python, home, self.screen.line)

    def _spec(self, instance: Instance, name: str) -> LaunchSpec:
        return LaunchSpec(
            instance=instance.name,
            kind=instance.kind,
            model=self.prepared[instance.model_name].folder,
            dtype=instance.dtype,
            device=self.device,
            python=self.starts[instance.name].python,
            log=self.folder / "logs" / f"{name}.log",
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
            made=self.made.get(instance.name),
        )

    def start(self, planned: PlannedLaunch, prompt: tuple[int, ...]) -> RealEngine:
        """Start an engine and wait for its first token; raises LaunchError or OSError."""
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(launched(self.spec(planned)))
            asked = self.suite.instance(planned.instance)
            first = transport.run(_first_output(endpoint, prompt))
            launch_s = endpoint.clock_since_start()
            info = endpoint.info()
            _check_info(info, asked, self.device)
            return RealEngine(self, planned, endpoint, info, launch_s, first, stack.pop_all())

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
    stack: contextlib.ExitStack

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
        """Send waves of short requests, as many at once as the level, until they agree.

        Returns how many requests that took, how many seconds, and how many failed.
        """
        together = level.concurrency or 1
        short = [_short(request) for request in requests]
        warm = Level("warmup", together, concurrency=together)
        spans: list[float] = []
        failed = 0
        while len(spans) < MAX_WARMUP_WAVES:
            wave = short[len(spans) * together : (len(spans) + 1) * together]
            self.lab.screen.status(f"{self.planned.name} {level.name}: warm-up {len(spans) + 1}")
            measured = transport.run(loadgen.measure(self._share(wave, warm)))
            spans.append(measured.span_s)
            failed += sum(not record.completed for record in measured.records)
            if failed or (
                len(spans) > 1 and min(spans[-2:]) >= max(spans[-2:]) * (1 - WARMUP_AGREEMENT)
            ):
                break
        return {
            "warmup_requests": float(len(spans) * together),
            "warmup_s": sum(spans),
            "warmup_failed": float(failed),
        }

    def drive(
        self, case: Case, level: Level, requests: Sequence[Request], offsets_s: Sequence[float]
    ) -> Driven:
        """Send a level's requests as it says; progress is drawn beside it."""
        self.endpoint.reset_peak_rss()
        # In closed loop each slot's first request has a time, the others follow.
        slots = level.concurrency
        times_s = offsets_s if slots is None else arrivals.slot_offsets(slots, level.fill_s)
        think_s = self.lab.suite.workload(case.workload).prompts.think_s
        share = self._share(requests, level, tuple(times_s), think_s)
        measured = transport.run(self._shown(case, share))
        # After a death, what is left of its processes is not the engine.
        peak = self.endpoint.peak_rss_bytes() if self.serves() else None
        memory = {} if peak is None else {"peak_rss_bytes": float(peak)}
        return Driven(measured.span_s, measured.records, measured.client, memory)

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
        requests: Sequence[Request],
        level: Level,
        times_s: tuple[float, ...] = (),
        think_s: float = 0.0,
    ) -> loadgen.Share:
        suite = self.lab.suite
        return loadgen.Share(
            recipient=_recipient(self.endpoint),
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


def _short(request: Request) -> Request:
    """Return a request that asks for little, and follows no other."""
    most = WARMUP_TOKENS if request.max_tokens is None else min(WARMUP_TOKENS, request.max_tokens)
    return replace(request, max_tokens=most, session=None, turn=0)


def _api_key(asked: Instance) -> str | None:
    """Return the key that its requests carry; raises LaunchError where it wants one not set."""
    key = None if asked.api_key_env is None else os.environ.get(asked.api_key_env)
    if asked.api_key_env is not None and not key:
        message = f"engine.{asked.name}.api_key_env is {asked.api_key_env}, which is not set here"
        raise LaunchError("no_api_key", message)
    return key


def _recipient(endpoint: Endpoint) -> loadgen.Recipient:
    """Return whom requests are for, as the documentation of its kind has it."""
    target, spec = Target.parse(endpoint.base_url), endpoint.spec
    return loadgen.Recipient(target, spec.served_name, endpoint.launcher.can, spec.api_key)


async def _first_output(endpoint: Endpoint, prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Ask for one token: an engine that gives none is not up."""
    recipient, exchange = _recipient(endpoint), Exchange()
    http = HttpTransport(recipient.target, idle_timeout_s=endpoint.spec.start_timeout_s)
    await http.send(loadgen.payload(Request(0, prompt, 1), recipient), exchange)
    await http.close()
    stream = parse(exchange.body)
    if exchange.error is not None or exchange.status != 200 or not stream.events:
        body = bytes(exchange.body.data[:300]).decode("utf-8", "replace")
        cause = exchange.error.message if exchange.error else f"status {exchange.status} {body}"
        name = endpoint.spec.instance
        raise LaunchError("no_token", f"{name} gave no first token: {cause}")
    return stream.events[0].token_ids or ()


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
