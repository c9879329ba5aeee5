"""The real lab: engines as processes behind HTTP, on this machine's own clock."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from headway import transport
from headway.core import EngineInfo, Request
from headway.engines.launch import HERE, Endpoint, LaunchError, LaunchSpec, launched
from headway.engines.servers import launcher_of
from headway.night import machine, texts, verify
from headway.night.cores import Cores, kept_to, parted_here
from headway.night.found import Answer, Found, of_answer
from headway.night.lab import First
from headway.night.machine import Kernels
from headway.night.models import PreparedModel, make
from headway.night.plan import PlannedLaunch
from headway.night.probe import probed
from headway.night.running import RealEngine, first_token
from headway.night.screen import Screen
from headway.night.watch import Telemetry
from headway.suite import Instance, Suite
from headway.workload import extremes


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
    cores: Cores = field(init=False)
    telemetry: Telemetry = field(init=False)

    def __post_init__(self) -> None:
        self.cores = parted_here(self.suite.load_workers) if self.suite.pin else Cores()
        log = self.folder / "logs" / "telemetry.log"
        self.telemetry = Telemetry(log, self.screen.line, self.stack, self.cores)

    def clock(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    def now(self) -> str:
        """Return the wall clock, for labels only."""
        return now()

    def spec(self, planned: PlannedLaunch, gpus: tuple[str, ...] = ()) -> LaunchSpec:
        """Return how to start a planned launch, on `gpus` where their UUIDs are known."""
        instance = self.suite.instance(planned.instance)
        # A container does not see what our own environment leaves visible.
        chosen = instance.gpus or instance.image is not None
        seen = gpus if chosen and gpus else instance.gpus
        made = self._spec(instance, planned.name)
        return replace(made, api_key=_api_key(instance), gpus=seen)

    def prepare(self, instances: Sequence[Instance], home: Path) -> None:
        """Have made of the models what their engines read; raises ModelFailure."""
        for instance in instances:
            launcher = launcher_of(instance.kind, instance.args)
            words = launcher.prepare(self._spec(instance, instance.name))
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
            image=instance.image,
            base_url=instance.base_url,
            cpus=() if instance.base_url is not None else self.cores.engine,
            made=self.made.get(instance.name),
        )

    def start(self, planned: PlannedLaunch, request: Request) -> RealEngine:
        """Start an engine and wait for its first token; raises LaunchError or OSError."""
        asked = self.suite.instance(planned.instance)
        gpus = self.telemetry.gpus_of(asked, self.device)
        if gpus and self.suite.calibrate and self.kernels is None:
            self.calibrate()  # what its kernels hold of a GPU is no engine's
        resting = self.telemetry.free(gpus)
        with contextlib.ExitStack() as stack:
            endpoint = stack.enter_context(launched(self.spec(planned, gpus)))
            first = first_token(endpoint, request)
            launch_s = endpoint.clock_since_start() if endpoint.ours else None
            info = endpoint.info()
            launch_s = _without_build(launch_s, info)
            if asked.image is not None:
                digest = asked.image.rpartition("@")[2]
                info = replace(info, versions={**info.versions, "image": digest})
            _check_info(info, asked, self.device)
            found = self._probed(endpoint, request, first)
            live = (stack.pop_all(), gpus, resting)
            return RealEngine(self, planned, endpoint, info, launch_s, _first(first), found, *live)

    def _probed(self, endpoint: Endpoint, request: Request, first: Answer) -> Found:
        """Ask what the endpoint understands; LaunchError where its workloads need more."""
        name, can = endpoint.spec.instance, endpoint.launcher.can
        if can.hosted:  # our own host shows what there is to know in its first token
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
                with kept_to(self.cores.client):
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


def _api_key(asked: Instance) -> str | None:
    """Return the key that its requests carry; raises LaunchError where it wants one not set."""
    key = None if asked.api_key_env is None else os.environ.get(asked.api_key_env)
    if asked.api_key_env is not None and not key:
        message = f"engine.{asked.name}.api_key_env is {asked.api_key_env}, which is not set here"
        raise LaunchError("no_api_key", message)
    if key and not re.fullmatch("[!-~]+", key):  # what complains of it later would quote it
        message = f"the key in {asked.api_key_env} holds a space, a line end or what is no ASCII"
        raise LaunchError("no_api_key", message)
    return key


def _without_build(launch_s: float | None, info: EngineInfo) -> float | None:
    """Return a launch time without what the engine spent on building itself for this machine.

    That is done once, and is a number of its own.
    """
    built_s = info.settings.get("engine_build_s")
    return launch_s - built_s if launch_s and isinstance(built_s, int | float) else launch_s


def _check_info(info: EngineInfo, asked: Instance, device: str) -> None:
    """Read back from the engine: it must run what was asked for, where it was asked for.

    What it does not say is not known to be otherwise.
    """
    if asked.kind == "fake":  # computes nothing, nowhere
        return
    for what, got, want in (
        ("dtype", info.dtype, asked.dtype),
        ("device", info.device and info.device.partition(":")[0], device),
    ):
        if got is not None and got != want:
            raise LaunchError(f"wrong_{what}", f"{asked.name} runs with {what} {got}, not {want}")


def _first(answer: Answer) -> First:
    """Return what an engine answered first: its ids, or its text where it sends none."""
    stream = answer.stream
    ids = stream.events[0].token_ids if stream.events else None
    if ids:
        return First(ids, prompt_tokens=stream.prompt_tokens)
    text = "".join(event.text for event in stream.events)
    return First(text=text, prompt_tokens=stream.prompt_tokens)
