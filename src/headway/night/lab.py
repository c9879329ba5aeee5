"""Where engines are started and driven: what a night needs of the world, and of a simulated one.

`headway.night.real` is the world. DETBENCH puts simulated engines on a virtual clock in its place,
under the same night.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from headway.answers import Pair, TextPair
from headway.core import Case, EngineInfo, Level, Request, RequestRecord, Series, Verification
from headway.night.found import Found
from headway.night.plan import PlannedLaunch
from headway.results import Generated


@dataclass(frozen=True, slots=True)
class Driven:
    """What one level left behind; see `core.Run` for `client`, `engine` and `series`.

    `problems` are why it may not be judged, as far as only the lab can know.
    """

    span_s: float
    records: tuple[RequestRecord, ...]
    client: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    series: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class First:
    """The answer that ends a launch's start: ids, or without any its text.

    With the server's count of the prompt's tokens.
    """

    output: tuple[int, ...] = ()
    text: str | None = None
    prompt_tokens: int | None = None


class Engine(Protocol):
    """One engine that is up, with what its start told."""

    @property
    def info(self) -> EngineInfo:
        """Who answers, read back from it."""

    @property
    def launch_s(self) -> float | None:
        """Seconds from its process's start to its first token; None where it ran before."""

    @property
    def first(self) -> First:
        """That first answer."""

    @property
    def found(self) -> Found:
        """What its endpoint was found to understand."""

    @property
    def cpus(self) -> tuple[int, ...]:
        """The cores that it is kept to; none where it shares them with the client."""

    @property
    def gpus(self) -> tuple[str, ...]:
        """The UUIDs of the GPUs that it may see."""

    def warm_up(self, case: Case, level: Level, requests: Sequence[Request]) -> Mapping[str, float]:
        """Send waves of short requests until steps are stable; say what that took."""

    def drive(
        self, case: Case, level: Level, requests: Sequence[Request], offsets_s: Sequence[float]
    ) -> Driven:
        """Send a level's requests as it says, and wait for their end."""

    def replay(
        self, case: Case, level: Level, requests: Sequence[Request]
    ) -> tuple[RequestRecord, ...]:
        """Have the same requests served in the engine's own process, in closed loop.

        Nothing comes back from an engine that is not ours to ask. Raises LaunchError or OSError.
        """

    def serves(self) -> bool:
        """Whether it runs and says that it can serve."""

    def last_words(self) -> tuple[str, str]:
        """Return the kind of failure (`died`, `oom`), and how one ended that serves no more."""

    def stop(self) -> None:
        """End it with all its processes."""

    def step_clock(self) -> float:
        """Return the seconds that it has spent in timed steps; raises LaunchError."""

    def step(self, phase: str, batch: int, length: int) -> None:
        """Have it do one timed step; raises LaunchError."""


class Reference(Protocol):
    """The reference for one model."""

    def verify(self, pair: Pair | TextPair) -> Verification:
        """Judge one output."""

    def ends(self, prompt: tuple[int, ...], max_tokens: int) -> bool:
        """Whether the greedy answer comes to an end within as many tokens."""

    def generate(self, request: Request, banned: tuple[int, ...]) -> Generated:
        """Continue a request's prompt with other ids than those `banned`."""


class Writer(Protocol):
    """A model's tokenizer, which writes prompts as text."""

    @property
    def begins(self) -> tuple[int, ...]:
        """The ids that it puts before a text by itself."""

    def write(
        self, ids: Sequence[int], fixed: Sequence[int], seed: str
    ) -> tuple[tuple[int, ...], str]:
        """Return ids that stand for a text, as many as asked for, and the text."""


class Lab(Protocol):
    """Starts engines, knows the machine, and tells the time."""

    def clock(self) -> float:
        """Monotonic seconds."""

    def now(self) -> str:
        """Return the wall clock, for labels only."""

    def start(self, planned: PlannedLaunch, request: Request) -> Engine:
        """Start an engine; `request` asks for its first token. Raises LaunchError or OSError."""

    def calibrate(self) -> Mapping[str, float]:
        """Return the seconds of each calibration kernel; empty where there are none."""

    def wait_quiet(self, limit_s: float) -> float:
        """Wait until nothing else keeps the machine busy; returns the seconds that took."""

    def reference(self, model: str) -> AbstractContextManager[Reference]:
        """Start the reference for a model, for the length of the block."""

    def writer(self, model: str) -> AbstractContextManager[Writer]:
        """Start the tokenizer of a model, for the length of the block."""

    def close(self) -> None:
        """End what the lab keeps running beside the engines."""
