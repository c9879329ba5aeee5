"""What the host asks of an engine, and what passes between its two processes.

An engine is anything with the methods of `Engine`: the host's engine process calls `step` while
there is work and stamps what leaves. Or, where it works by itself beside an event loop, with those
of `AsyncEngine`. `Backend` is the same thing seen from the front: the engine process on the other
end of a socket, or an engine that needs no process (`fake`).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from dataclasses import dataclass
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    Protocol,
    TypeVar,
    get_args,
    get_type_hints,
    runtime_checkable,
)

from headway.core import EngineInfo, FinishReason

if TYPE_CHECKING:
    from headway.engines.host.inside import Schedule

Phase = Literal["prefill", "decode"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Submission:
    """A request as the engine sees it: ids in, ids out; text is the front's business.

    An engine with a prefix cache shares it among requests with the same `salt` only.
    """

    id: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    salt: str | None = None

    def ends_with(
        self, token: int, num_tokens: int, eos_ids: Collection[int]
    ) -> FinishReason | None:
        """Return why `token`, the output's `num_tokens`th, is its last; None where it is not."""
        if token in eos_ids and not self.ignore_eos:
            return "stop"
        return "length" if num_tokens >= self.max_tokens else None


@dataclass(frozen=True, slots=True)
class Output:
    """Tokens that leave the engine for one request in one step.

    `finish_reason` is set on the last one; it may then carry no tokens. `error` is one sentence,
    set exactly when `finish_reason` is "error". `counted` is the engine's own count of the output
    tokens, for an engine that counts; where it is None the front counts what it passed on.
    `cached` of the prompt's tokens came from a prefix cache; None for an engine without one.
    """

    id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    counted: int | None = None
    cached: int | None = None


@dataclass(frozen=True, slots=True)
class Departure:
    """An Output with the monotonic time at which it left the step loop, in seconds.

    `arrived_s` is when the step loop took the request in, on the same clock.
    """

    output: Output
    at_s: float
    arrived_s: float


class Engine(Protocol):
    """A step-loop engine: lives in the engine process, is called from one thread.

    Built as `Class(model_folder, dtype, device, **arguments)`; ValueError there means an argument
    it cannot take. An exception from `step` ends the process, and with it every open request.
    """

    info: EngineInfo

    def add(self, submission: Submission) -> None:
        """Queue a request; raises ValueError, one sentence, for one that it cannot serve."""

    def abort(self, submission_id: int) -> None:
        """Forget a request; unknown ids are ignored."""

    def has_work(self) -> bool:
        """Whether `step` would do anything."""

    def step(self) -> list[Output]:
        """Do one unit of work (a prefill or a decode step) and return what it produced."""

    def time_step(self, phase: Phase, batch: int, length: int) -> float:
        """Seconds one step takes with `batch` sequences of `length` tokens; only when idle.

        Raises ValueError, one sentence, for a batch or length that it cannot hold.
        """

    def stats(self) -> Mapping[str, float]:
        """Gauges and counters for /metrics: running, waiting, and what the engine has more."""


@runtime_checkable
class AsyncEngine(Protocol):
    """An engine that works by itself: lives in the event loop of the engine process.

    Built as `Class(model_folder, dtype, device, **arguments)`; ValueError there or from `start`
    means an argument it cannot take. Any other exception than `generate`'s ValueError ends the
    process, and with it every open request. It times no steps: nobody else decides when it does
    one.
    """

    async def start(self) -> EngineInfo:
        """Load; returns when a token could be served."""

    def generate(self, submission: Submission) -> AsyncGenerator[Output, None]:
        """Yield what a request gets, as it leaves the engine; closing it early is an abort.

        Raises ValueError, one sentence, before the first output, for a request it cannot serve.
        """

    async def ended(self) -> str:
        """Return the cause, one sentence, when the engine has died, busy or idle."""

    async def stats(self) -> Mapping[str, float]:
        """Gauges and counters for /metrics: running, waiting, and what the engine has more."""

    async def close(self) -> None:
        """Stop, and leave no process behind."""


class Backend(Protocol):
    """The engine as the front sees it."""

    async def start(self) -> EngineInfo:
        """Load; returns when a token could be served. Raises RuntimeError with the cause."""

    def submit(self, submission: Submission, deliver: Callable[[Departure], None]) -> None:
        """Hand a request over; `deliver` is called in the front's event loop for each Output."""

    def abort(self, submission_id: int) -> None:
        """Stop working on a request; nothing more is delivered for it."""

    async def control(self, phase: Phase, batch: int, length: int) -> float:
        """Run `Engine.time_step`; raises its ValueError, or RuntimeError when the engine ended."""

    async def replay(self, schedule: Schedule) -> dict[str, Any]:
        """Serve a schedule without the front; returns `inside.Replay.answer`.

        Raises RuntimeError when the engine ended; cancelled, the engine forgets what is left of it.
        """

    async def stats(self) -> Mapping[str, float]:
        """The engine's gauges and counters; empty when it has ended."""

    async def ended(self) -> str:
        """Return the cause, one sentence, when the engine ended without being asked to."""

    async def close(self) -> None:
        """Stop, and leave no process behind."""


def check_step(
    kind: str, phase: Phase, batch: int, length: int, max_batch: int, context_length: int
) -> None:
    """Raise ValueError, one sentence, for a step of more sequences or tokens than there may be."""
    if not 1 <= batch <= max_batch:
        raise ValueError(f"{kind} works on 1 to {max_batch} requests at a time, not {batch}")
    longest = context_length - (phase == "decode")
    if not 1 <= length <= longest:
        raise ValueError(f"length must be 1 to {longest} for a {phase} step, not {length}")


def step_prompt(row: int, length: int, vocab_size: int) -> tuple[int, ...]:
    """Return the ids that a timed step passes: others in each row; what they are matters not."""
    return tuple((17 * row + 7919 * k) % vocab_size for k in range(length))


def parse_options(kind: str, options: Callable[..., T], given: Mapping[str, object]) -> T:
    """Build the frozen dataclass `options` from an engine's arguments, as they stand in JSON.

    Raises ValueError, one sentence, for a name it does not have or a value of another type.
    """
    hints = get_type_hints(options)
    for name, value in given.items():
        if name not in hints:
            allowed = ", ".join(hints)
            raise ValueError(f"{kind} has no argument {name!r}; it takes: {allowed}")
        kinds = get_args(hints[name]) or (hints[name],)
        if not any(_is_a(value, one) for one in kinds):
            wanted = " or ".join(_TYPE_NAMES.get(one, one.__name__) for one in kinds)
            raise ValueError(f"{kind}: argument {name} must be {wanted}, not {value!r}")
    return options(**given)


_TYPE_NAMES: dict[type, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a text",
    type(None): "null",
}


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
