"""A lab without engines: the shipped night, its gates and its memory on simulated launches.

Everything above `headway.night.lab.Lab` is what ships: the plan, the order, replacement, the second
look, the journal, validity, verdicts, history, proposals. Below it a launch is a draw of noise, a
Run is a list of requests in closed form, and time is a number that jumps.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from detectors.layout import LaunchDraw, Night, RunDraw
from headway.answers import Pair, TextPair
from headway.core import (
    Capabilities,
    Case,
    EngineInfo,
    Level,
    Request,
    RequestError,
    RequestRecord,
    TokenEvent,
    Verification,
)
from headway.engines.fake import fake_tokens
from headway.night import Driven, First, PlannedLaunch
from headway.night.found import Found
from headway.results import Generated
from headway.workload import pair_key

# Nominal times. Between a request's last token and its end there is room for what throughput is to
# be, whatever the latencies are: each metric of a Run is drawn by itself.
TTFT_S, TTFT_P99_S, ITL_S, PERIOD_S = 0.060, 0.090, 0.030, 0.240
LAUNCH_S, WARM_UP_S = 2.0, 4.0
KERNELS_TAKE_S = 0.3
FOUND = Found(Capabilities())


@dataclass(slots=True)
class SimulatedLab:
    """Implements `headway.night.Lab` on one drawn night.

    `arms` names the arm of each instance, `cases` the drawn case of each of the suite's.
    """

    drawn: Night
    arms: Mapping[str, str]
    cases: Mapping[tuple[str, str], str]
    started: datetime
    time_s: float = 0.0
    launches: int = 0
    around: tuple[Mapping[str, float], ...] = ()
    driven: bool = False

    def clock(self) -> float:
        """Seconds since the night began."""
        return self.time_s

    def now(self) -> str:
        """Return the simulated wall clock."""
        at = self.started + timedelta(seconds=self.time_s)
        return at.astimezone(UTC).isoformat(timespec="seconds")

    def start(self, planned: PlannedLaunch, request: Request) -> SimulatedEngine:
        """Start a launch: nothing but a draw."""
        self.launches += 1
        self.time_s += LAUNCH_S
        info = EngineInfo("fake", "1.0", "fake", "none", "none")
        drawn = self.drawn.launch(self.arms[planned.instance])
        first = First(tuple(fake_tokens(request.prompt_token_ids, 1)))
        return SimulatedEngine(self, drawn, info, LAUNCH_S, first)

    def calibrate(self) -> Mapping[str, float]:
        """Return what was drawn before or after the Run at hand, else what the kernels take now.

        However often it is read, it stays what it is: waiting is in vain here.
        """
        self.time_s += KERNELS_TAKE_S
        return self.around[self.driven] if self.around else self.drawn.calibrate()

    def wait_quiet(self, limit_s: float) -> float:
        """Wait for nothing: the simulated machine is as quiet as it gets."""
        return 0.0

    @contextlib.contextmanager
    def reference(self, model: str) -> Iterator[SimulatedReference]:
        """Give a reference that knows the fake engine's tokens in closed form."""
        yield SimulatedReference()

    def close(self) -> None:
        """End nothing: nothing runs."""


@dataclass(slots=True)
class SimulatedEngine:
    """Implements `headway.night.Engine`."""

    lab: SimulatedLab
    drawn: LaunchDraw
    info: EngineInfo
    launch_s: float
    first: First
    found: Found = FOUND
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()

    def warm_up(self, case: Case, level: Level, requests: Sequence[Request]) -> Mapping[str, float]:
        """Let time pass; what the kernels are to say around the Run is known from here on."""
        drawn = self.drawn.run(self.lab.cases[case.workload, case.level])
        self.lab.around, self.lab.driven = drawn.calibration, False
        self.lab.time_s += WARM_UP_S
        return {}

    def drive(
        self, case: Case, level: Level, requests: Sequence[Request], offsets_s: Sequence[float]
    ) -> Driven:
        """Serve each slot's requests one after the other, as drawn."""
        drawn = self.drawn.run(self.lab.cases[case.workload, case.level])
        records = served(requests, level.concurrency or 1, drawn)
        span_s = max(record.ended_s or 0.0 for record in records)
        self.lab.time_s += span_s
        self.lab.driven = True
        client = {"loop_lag_p99_s": 0.0005, "cpu_share": 0.05}
        return Driven(span_s, records, client, {"peak_rss_bytes": 2.0**28})

    def replay(
        self, case: Case, level: Level, requests: Sequence[Request]
    ) -> tuple[RequestRecord, ...]:
        """Return nothing: it has no process to replay in."""
        return ()

    def serves(self) -> bool:
        """Say yes: it never dies."""
        return True

    def last_words(self) -> tuple[str, str]:
        """Say what is never asked: it never dies."""
        return "died", "the engine ended: simulated"

    def stop(self) -> None:
        """End nothing: nothing runs."""

    def step_clock(self) -> float:
        """Return 0: no steps are timed here."""
        return 0.0

    def step(self, phase: str, batch: int, length: int) -> None:
        """Do nothing: no steps are timed here."""


class SimulatedReference:
    """Implements `headway.night.Reference` for the fake engine's tokens."""

    def verify(self, pair: Pair | TextPair) -> Verification:
        """Compare with the closed form."""
        assert isinstance(pair, Pair)  # the simulated engine sends ids
        right = fake_tokens(pair.prompt, len(pair.output))
        wrong = tuple(
            (i, 2.5, 1) for i, (a, b) in enumerate(zip(pair.output, right, strict=True)) if a != b
        )
        gap = 2.5 if wrong else 0.0
        return Verification(pair.key, len(right), gap, len(wrong), 1.0, wrong)

    def ends(self, prompt: tuple[int, ...], max_tokens: int) -> bool:
        """Say no: the closed form goes on for ever."""
        return False

    def generate(self, request: Request, banned: tuple[int, ...]) -> Generated:
        """Continue by the closed form."""
        prompt = request.prompt_token_ids
        tokens = tuple(fake_tokens(prompt, request.max_tokens or 1))
        return Generated(pair_key(prompt, (), banned), tokens, (1.0,) * len(tokens))


def served(requests: Sequence[Request], slots: int, drawn: RunDraw) -> tuple[RequestRecord, ...]:
    """Return the records of a closed loop in closed form, with the metrics that were drawn."""
    slower = {name: math.exp(value) for name, value in drawn.values.items()}
    ttft_s, itl_s = TTFT_S * slower["ttft_p50"], ITL_S * slower["tpot_p50"]
    period_s = PERIOD_S * slower["output_throughput"]
    slowest_s = _slowest(len(requests), ttft_s, TTFT_P99_S * slower.get("ttft_p99", 1.0))
    free = [0.0] * slots
    records = []
    for number, request in enumerate(requests):
        slot = min(range(slots), key=free.__getitem__)
        first_s = slowest_s if number == 0 else ttft_s
        made = _record(request, free[slot], first_s, itl_s, period_s)
        if _fails(number, drawn.failed):
            error = RequestError("http_500", "planted")
            made = replace(made, events=made.events[:1], error=error, finish_reason=None)
        free[slot] = made.ended_s or 0.0
        records.append(made)
    return tuple(records)


def _slowest(n: int, usual_s: float, p99_s: float) -> float:
    """Return the one value beside n - 1 usual ones whose 99th percentile is `p99_s`."""
    share = (n - 1) * 0.99 - (n - 2)
    return max(usual_s, usual_s + (p99_s - usual_s) / share)


def _record(
    request: Request, due_s: float, ttft_s: float, itl_s: float, period_s: float
) -> RequestRecord:
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
        ended_s=max(times[-1], due_s + period_s),
        events=events,
        asked_tokens=request.max_tokens,
        asked_prompt_tokens=len(request.prompt_token_ids),
        prompt_tokens=len(request.prompt_token_ids),
        completion_tokens=len(tokens),
        finish_reason="length",
    )


def _fails(number: int, share: float) -> bool:
    """Fail evenly: as often as the share says, and in each Run at least once."""
    return share > 0 and number % max(1, round(1 / share)) == 0
