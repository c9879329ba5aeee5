"""A lab without engines: the shipped night, its gates and its memory on simulated launches.

Everything above `headway.night.lab.Lab` is what ships: the plan, the order, replacement, the second
look, the journal, validity, verdicts, history, proposals. Below it a launch is a draw of noise, a
Run is a list of requests in closed form, and time is a number that jumps.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Protocol

from headway.core import (
    Case,
    EngineInfo,
    Level,
    Request,
    RequestError,
    RequestRecord,
    TokenEvent,
    Verification,
)
from headway.correctness import Pair
from headway.engines.fake import fake_tokens
from headway.night import Driven, PlannedLaunch
from headway.results import Generated
from headway.workload import pair_key

TTFT_S, ITL_S = 0.060, 0.012
LAUNCH_S = 2.0
KERNEL_S = {"matmul": 0.020, "copy": 0.030, "launch": 0.005, "python": 0.008}
KERNELS_TAKE_S = 0.3


@dataclass(frozen=True, slots=True)
class Slowness:
    """How much slower one Run is than nominal, in log units.

    `kernels` is what the calibration kernels see of it when it has ended (before it they see the
    machine as it is). `tail` slows one request in a hundred; `fails` is the share of requests that fail.
    """

    ttft: float
    tpot: float
    kernels: Mapping[str, float]
    tail: float = 0.0
    fails: float = 0.0


class Launch(Protocol):
    """One simulated life of an engine."""

    def run(self, case: int) -> Slowness:
        """Draw the Run of the case with this number."""


class Machine(Protocol):
    """The machine in one simulated night."""

    def launch(self, instance: str) -> Launch:
        """Draw the next launch, of this instance."""

    def kernels(self) -> Mapping[str, float]:
        """Draw how much slower than nominal each calibration kernel is now, in log units."""


@dataclass(slots=True)
class SimulatedLab:
    """Implements `headway.night.Lab`; `started` is when its night begins."""

    machine: Machine
    cases: Sequence[str]
    started: datetime
    version: Mapping[str, str] = field(default_factory=dict)
    time_s: float = 0.0
    launches: int = 0
    next_kernels: Mapping[str, float] | None = None

    def clock(self) -> float:
        """Seconds since the night began."""
        return self.time_s

    def now(self) -> str:
        """Return the simulated wall clock."""
        at = self.started + timedelta(seconds=self.time_s)
        return at.astimezone(UTC).isoformat(timespec="seconds")

    def start(self, planned: PlannedLaunch, prompt: tuple[int, ...]) -> SimulatedEngine:
        """Start a launch: nothing but a draw."""
        self.launches += 1
        self.time_s += LAUNCH_S
        name = planned.instance
        info = EngineInfo("fake", self.version.get(name, "1.0"), "fake", "none", "none")
        drawn = self.machine.launch(name)
        return SimulatedEngine(self, drawn, info, LAUNCH_S, tuple(fake_tokens(prompt, 1)))

    def calibrate(self) -> Mapping[str, float]:
        """Return what the kernels take now: as drawn with the Run, if one is about to be or was."""
        drawn, self.next_kernels = self.next_kernels, None
        self.time_s += KERNELS_TAKE_S
        slower = self.machine.kernels() if drawn is None else drawn
        return {name: s * math.exp(slower.get(name, 0.0)) for name, s in KERNEL_S.items()}

    def wait_quiet(self, limit_s: float) -> float:
        """The simulated machine is as quiet as it gets."""
        return 0.0

    @contextlib.contextmanager
    def reference(self, model: str) -> Iterator[SimulatedReference]:
        """The reference knows the fake engine's tokens in closed form."""
        yield SimulatedReference()

    def close(self) -> None:
        """Nothing runs."""


@dataclass(slots=True)
class SimulatedEngine:
    """Implements `headway.night.Engine`."""

    lab: SimulatedLab
    drawn: Launch
    info: EngineInfo
    launch_s: float
    first_output: tuple[int, ...]
    slowness: Slowness | None = None

    def warm_up(self, level: Level, requests: Sequence[Request]) -> Mapping[str, float]:
        """Take no time."""
        return {}

    def drive(
        self, case: Case, level: Level, requests: Sequence[Request], offsets_s: Sequence[float]
    ) -> Driven:
        """Serve each slot's requests one after the other, as slowly as drawn."""
        drawn = self.drawn.run(self.lab.cases.index(f"{case.workload}-{case.level}"))
        records = served(requests, level.concurrency or 1, drawn)
        span_s = max(record.ended_s or 0.0 for record in records)
        self.lab.time_s += span_s
        self.lab.next_kernels = drawn.kernels
        client = {"loop_lag_p99_s": 0.0005, "cpu_share": 0.05}
        return Driven(span_s, records, client, {"peak_rss_bytes": 2.0**28})

    def serves(self) -> bool:
        """It never dies."""
        return True

    def last_words(self) -> str:
        """It never dies."""
        return "the engine ended: simulated"

    def stop(self) -> None:
        """Nothing runs."""

    def step_clock(self) -> float:
        """No steps are timed here."""
        return 0.0

    def step(self, phase: str, batch: int, length: int) -> None:
        """No steps are timed here."""


class SimulatedReference:
    """Implements `headway.night.Reference` for the fake engine's tokens."""

    def verify(self, pair: Pair) -> Verification:
        """Compare with the closed form."""
        right = fake_tokens(pair.prompt, len(pair.output))
        wrong = tuple(
            (i, 2.5, 1) for i, (a, b) in enumerate(zip(pair.output, right, strict=True)) if a != b
        )
        gap = 2.5 if wrong else 0.0
        return Verification(pair.key, len(right), gap, len(wrong), 1.0, wrong)

    def generate(self, prompt: tuple[int, ...], max_tokens: int, ignore_eos: bool) -> Generated:
        """Continue by the closed form."""
        tokens = tuple(fake_tokens(prompt, max_tokens))
        return Generated(pair_key(prompt, ()), tokens, (1.0,) * len(tokens))


def served(requests: Sequence[Request], slots: int, slow: Slowness) -> tuple[RequestRecord, ...]:
    """Return the records of a closed loop in closed form."""
    ttft_s, itl_s = TTFT_S * math.exp(slow.ttft), ITL_S * math.exp(slow.tpot)
    free = [0.0] * slots
    records = []
    for number, request in enumerate(requests):
        slot = min(range(slots), key=free.__getitem__)
        late = math.exp(slow.tail) if slow.tail and number % 100 == 99 else 1.0
        made = _record(request, free[slot], ttft_s * late, itl_s)
        if slow.fails and _fails(number, slow.fails):
            made = _failed(made)
        free[slot] = made.ended_s or 0.0
        records.append(made)
    return tuple(records)


def _record(request: Request, due_s: float, ttft_s: float, itl_s: float) -> RequestRecord:
    tokens = fake_tokens(request.prompt_token_ids, request.max_tokens)
    times = [due_s + ttft_s + k * itl_s for k in range(len(tokens))]
    events = tuple(
        TokenEvent(at_s, token_ids=(token,), num_tokens=1)
        for at_s, token in zip(times, tokens, strict=True)
    )
    return RequestRecord(
        index=request.index,
        due_s=due_s,
        sent_s=due_s,
        ended_s=times[-1],
        events=events,
        asked_tokens=request.max_tokens,
        asked_prompt_tokens=len(request.prompt_token_ids),
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(tokens),
        finish_reason="length",
    )


def _fails(number: int, share: float) -> bool:
    """Fail evenly: as often as the share says, whatever the number of requests."""
    return math.floor((number + 1) * share) > math.floor(number * share)


def _failed(record: RequestRecord) -> RequestRecord:
    error = RequestError("http_500", "planted")
    return replace(record, events=record.events[:1], error=error, finish_reason=None)


def case_names(workloads: Sequence[str], levels: Sequence[str]) -> list[str]:
    """Return the cases of a simulated suite, by workload and level, in the suite's order."""
    return [f"{w}-{lv}" for w, lv in itertools.product(workloads, levels)]
