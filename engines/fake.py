"""An engine without a model, whose tokens and times are known in closed form.

It proves the instrument: what a client reports is compared with what this engine planned, and
with what it recorded. With faults planted it proves the gates. It runs in the front's own event
loop and reads time from one clock only, so that it also runs on a virtual one (`virtual_time`).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import re
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from headway import __version__
from headway.core import EngineInfo, FinishReason
from headway.engines.contract import Departure, Output, Phase, Submission, parse_options
from headway.engines.host.inside import Schedule, replay

VOCAB_SIZE = 1000
FIRST_ID = 10  # the ids below are never generated
EOS_ID = 1
CONTEXT_LENGTH = 1 << 20
# The model `fake` as a ModelFolder in JSON: there are no files.
MODEL: Mapping[str, object] = {
    "name": "fake",
    "path": ".",
    "revision": "1",
    "vocab_size": VOCAB_SIZE,
    "special_ids": list(range(FIRST_ID)),
    "eos_ids": [EOS_ID],
    "context_length": CONTEXT_LENGTH,
    "synthetic": True,
}
MOST_RECORDS = 100_000
WRONG_POSITION = 3
DEATH_STATUS = 3


def fake_tokens(prompt: Sequence[int], n: int) -> list[int]:
    """Return the first `n` tokens of the answer to `prompt`.

    Pure: a hash of the whole prompt and the token's position, so that a token of another prompt,
    a lost one and two that changed places all show. More tokens go on with the same.
    """
    seed = hashlib.blake2b(array("I", prompt).tobytes()).digest()
    return list(itertools.islice(_stream(seed), n))


def _stream(seed: bytes) -> Iterator[int]:
    for block in itertools.count():
        digest = hashlib.blake2b(seed + block.to_bytes(8, "little")).digest()
        for number in memoryview(digest).cast("I"):
            yield FIRST_ID + number % (VOCAB_SIZE - FIRST_ID)


class FakeTokenizer:
    """Writes id 17 as `<17>`, so that `encode(decode(ids)) == ids`; other text goes by bytes.

    With `all_bytes` all text does: a server that reads a prompt as other tokens than were meant.
    """

    eos_ids = (EOS_ID,)
    begins = ()
    _pattern = re.compile(r"<(0|[1-9]\d{0,2})>|.", re.DOTALL)

    def __init__(self, all_bytes: bool = False) -> None:
        self._all_bytes = all_bytes

    def encode(self, text: str) -> list[int]:
        """Return the ids of a prompt."""
        ids: list[int] = []
        for match in self._pattern.finditer(text):
            if match[1] is not None and not self._all_bytes:
                ids.append(int(match[1]))
            else:
                ids.extend(FIRST_ID + byte for byte in match[0].encode("utf-8", "replace"))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids; a special one is text like any other."""
        return "".join([f"<{id}>" for id in ids])

    def chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the ids of a conversation."""
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages))


@dataclass(frozen=True, slots=True)
class FakePlan:
    """What a fake engine does. Times are seconds; a fault whose number is 0 is not planted.

    Token k of a request that starts at s leaves at s + ttft_s + prompt tokens x prefill_s_per_token
    + k x itl_s; `tokens_per_chunk` of them leave together, with the last. Each token is late by up
    to `jitter_s`, decided by seed, request and position, but never overtakes another. At most
    `slots` requests are served at a time, first come first served. All is `slower` by a fraction.
    Like an engine that compiles when a shape first comes, the first `compile_requests` wait up to
    `compile_s` more for their first token, each less than the one before.

    Faults count requests from 1: every n-th fails (`fail_every`), has one wrong token
    (`wrong_token_every`), ends two tokens early (`short_output_every`) or claims two tokens more
    than it sent (`lie_usage_every`); the n-th kills the process in mid-stream
    (`die_after_requests`) or sends two tokens and then nothing (`stall_request`). With
    `other_tokenizer` text becomes other tokens than the model's own tokenizer makes of it.
    """

    ttft_s: float = 0.02
    prefill_s_per_token: float = 0.0
    itl_s: float = 0.01
    slots: int = 64
    tokens_per_chunk: int = 1
    jitter_s: float = 0.0
    seed: int = 0
    load_s: float = 0.0
    compile_requests: int = 0
    compile_s: float = 0.0
    slower: float = 0.0
    fail_every: int = 0
    die_after_requests: int = 0
    die_while_loading: bool = False
    stall_request: int = 0
    wrong_token_every: int = 0
    short_output_every: int = 0
    lie_usage_every: int = 0
    wrong_model: bool = False
    hang_on_start: bool = False
    other_tokenizer: bool = False

    def __post_init__(self) -> None:
        at_least_one = ("slots", "tokens_per_chunk")
        for name in (field.name for field in fields(self)):
            value, low = getattr(self, name), 1 if name in at_least_one else 0
            if name == "slower" and -1 < value < float("inf"):
                continue
            if name != "seed" and not low <= value < float("inf"):
                raise ValueError(f"fake: argument {name} must be at least {low}, not {value!r}")

    @classmethod
    def from_args(cls, args: Mapping[str, object]) -> FakePlan:
        """Build a plan from JSON arguments; raises ValueError naming what is wrong."""
        return parse_options("fake", cls, args)

    def step_s(self, phase: Phase, length: int) -> float:
        """Seconds of one step over sequences of `length` tokens, however many."""
        if phase == "decode":
            return (1 + self.slower) * self.itl_s
        return (1 + self.slower) * (self.ttft_s + length * self.prefill_s_per_token)

    def served_name(self, name: str) -> str:
        """Return the name to serve under, for a model called `name`."""
        return f"not_{name}" if self.wrong_model else name


def script(
    plan: FakePlan, nth: int, submission: Submission, start_s: float
) -> list[tuple[float, Output]]:
    """Return what leaves when, for the n-th request when it starts at `start_s`.

    The last Output has no finish reason where the plan lets the request stall or kill the engine.
    """
    tokens = fake_tokens(submission.prompt_token_ids, submission.max_tokens)
    if _hits(plan.wrong_token_every, nth) and len(tokens) > WRONG_POSITION:
        wrong = tokens[WRONG_POSITION] + 1 - FIRST_ID
        tokens[WRONG_POSITION] = FIRST_ID + wrong % (VOCAB_SIZE - FIRST_ID)
    if _hits(plan.short_output_every, nth):
        tokens = tokens[: max(1, len(tokens) - 2)]
    times = _token_times(plan, nth, len(submission.prompt_token_ids), len(tokens), start_s)
    if _hits(plan.fail_every, nth):
        error = f"fake: planted failure of request {nth}"
        return [(times[0], Output(submission.id, (), "error", error))]
    last = len(tokens)
    counted = last + 2 if _hits(plan.lie_usage_every, nth) else None
    ends = [*range(plan.tokens_per_chunk, last, plan.tokens_per_chunk), last]
    if nth == plan.stall_request:
        ends = [*(end for end in ends if end < 2), min(2, last)]
        last = -1
    if nth == plan.die_after_requests:
        ends = ends[: len(ends) // 2]
        last = -1
    events = []
    reason: FinishReason | None
    for start, end in itertools.pairwise([0, *ends]):
        reason, count = ("length", counted) if end == last else (None, None)
        output = Output(submission.id, tuple(tokens[start:end]), reason, None, count)
        events.append((times[end - 1], output))
    return events


def _hits(every: int, nth: int) -> bool:
    return every > 0 and nth % every == 0


def _token_times(
    plan: FakePlan, nth: int, prompt_tokens: int, num_tokens: int, start_s: float
) -> list[float]:
    scale = 1 + plan.slower
    first_s = plan.ttft_s + prompt_tokens * plan.prefill_s_per_token
    if nth <= plan.compile_requests:
        first_s += plan.compile_s * (plan.compile_requests + 1 - nth) / plan.compile_requests
    times = [start_s + scale * (first_s + k * plan.itl_s) for k in range(num_tokens)]
    if plan.jitter_s:
        late = (scale * plan.jitter_s * _unit(plan.seed, nth, k) for k in range(num_tokens))
        times = list(itertools.accumulate(map(sum, zip(times, late, strict=True)), max))
    return times


def _unit(seed: int, nth: int, k: int) -> float:
    """A number in [0, 1) that looks random and depends on its arguments only."""
    digest = hashlib.blake2b(f"{seed} {nth} {k}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") / 2**64


class _Served:
    """A request in the fake engine, and the truth about it."""

    def __init__(
        self,
        nth: int,
        submission: Submission,
        deliver: Callable[[Departure], None],
        arrived_s: float,
    ) -> None:
        self.nth = nth
        self.submission = submission
        self.deliver = deliver
        self.arrived_s = arrived_s
        self.departed_s = array("d")
        self.finish_reason: str | None = None
        self.script: list[tuple[float, Output]] = []
        self.timer: asyncio.TimerHandle | None = None


class FakeBackend:
    """Serves a plan. Implements `contract.Backend` inside the running event loop.

    `clock` gives monotonic seconds. Departures carry what it says when they leave: the plan's time
    exactly on a virtual clock, up to a millisecond later on a real one (event loops round up).
    """

    def __init__(
        self, plan: FakePlan, clock: Callable[[], float] = time.monotonic, model: str = "fake"
    ) -> None:
        self._plan = plan
        self._clock = clock
        self._model = model
        self._nth = itertools.count(1)
        self._running: dict[int, _Served] = {}
        self._waiting: dict[int, _Served] = {}  # in order of arrival
        self._records: deque[_Served] = deque(maxlen=MOST_RECORDS)

    async def start(self) -> EngineInfo:
        """Wait as long as the plan loads; raises RuntimeError where it dies of that."""
        if self._plan.hang_on_start:
            await asyncio.get_running_loop().create_future()
        await asyncio.sleep((1 + self._plan.slower) * self._plan.load_s)
        if self._plan.die_while_loading:
            raise RuntimeError("fake: planted death while loading")
        return EngineInfo(
            kind="fake",
            version=__version__,
            model=self._plan.served_name(self._model),
            dtype="none",
            device="none",
            settings=asdict(self._plan),
        )

    def submit(self, submission: Submission, deliver: Callable[[Departure], None]) -> None:
        """Start a request, or queue it when all slots are taken."""
        served = _Served(next(self._nth), submission, deliver, self._clock())
        self._records.append(served)
        if len(self._running) < self._plan.slots:
            self._begin(served, served.arrived_s)
        else:
            self._waiting[submission.id] = served

    def abort(self, submission_id: int) -> None:
        """Forget a request; its slot is free at once."""
        if (waiting := self._waiting.pop(submission_id, None)) is not None:
            waiting.finish_reason = "abort"
        elif (served := self._running.get(submission_id)) is not None:
            if served.timer is not None:
                served.timer.cancel()
            self._release(served, "abort", self._clock())

    async def control(self, phase: Phase, batch: int, length: int) -> float:
        """Return the closed-form time of a step; nothing is waited for."""
        return self._plan.step_s(phase, length)

    async def replay(self, schedule: Schedule) -> dict[str, Any]:
        """Serve a schedule without the front."""
        return await replay(schedule, self.submit, self.abort, self._clock)

    async def stats(self) -> Mapping[str, float]:
        """How many requests run and wait."""
        return {"running": len(self._running), "waiting": len(self._waiting)}

    async def ended(self) -> str:
        """Never return: when this engine dies, so does the front around it."""
        never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return await never

    async def close(self) -> None:
        """Stop all timers."""
        for served in self._running.values():
            if served.timer is not None:
                served.timer.cancel()

    def truth(self) -> dict[str, object]:
        """Return what really happened: times on this engine's clock, one entry a request.

        `id` is the number in the answer's id. The last 100,000 requests are kept.
        """
        return {"plan": asdict(self._plan), "requests": [_record(one) for one in self._records]}

    def _begin(self, served: _Served, start_s: float) -> None:
        self._running[served.submission.id] = served
        served.script = script(self._plan, served.nth, served.submission, start_s)
        self._arm(served)

    def _arm(self, served: _Served) -> None:
        place = len(served.departed_s)
        if place < len(served.script):
            self._call_at(served, served.script[place][0], self._depart)
        elif served.nth == self._plan.die_after_requests:
            last_s = served.script[-1][0] if served.script else self._clock()
            self._call_at(served, last_s + self._plan.itl_s, _die)

    def _call_at(self, served: _Served, due_s: float, action: Callable[[_Served], None]) -> None:
        # The loop's clock and ours may differ (uvloop's stands still within a turn). Where they
        # are the same the difference is 0, and the timer exact.
        loop = asyncio.get_running_loop()
        served.timer = loop.call_at(due_s + (loop.time() - self._clock()), action, served)

    def _depart(self, served: _Served) -> None:
        due_s, output = served.script[len(served.departed_s)]
        now_s = self._clock()
        if now_s < due_s:
            self._arm(served)  # a timer may be early by its own rounding
            return
        served.departed_s.append(now_s)
        if output.finish_reason is None:
            self._arm(served)
        else:
            # The next one starts when this one was due to end, so that lateness does not add up.
            self._release(served, output.finish_reason, due_s)
        served.deliver(Departure(output, now_s, served.arrived_s))

    def _release(self, served: _Served, finish_reason: str, freed_s: float) -> None:
        served.finish_reason = finish_reason
        served.script = []
        del self._running[served.submission.id]
        if self._waiting:
            following = self._waiting.pop(next(iter(self._waiting)))
            self._begin(following, max(freed_s, following.arrived_s))


def _record(served: _Served) -> dict[str, object]:
    return {
        "id": served.submission.id,
        "nth": served.nth,
        "arrived_s": served.arrived_s,
        "departed_s": served.departed_s.tolist(),
        "prompt_tokens": len(served.submission.prompt_token_ids),
        "max_tokens": served.submission.max_tokens,
        "finish_reason": served.finish_reason,
    }


def _die(served: _Served) -> None:
    os._exit(DEATH_STATUS)
