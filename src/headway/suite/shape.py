"""What a suite says, as frozen dataclasses; every default of it stands here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headway.core import Case, Level
from headway.workload import Prompts


@dataclass(frozen=True, slots=True)
class Instance:
    """A named engine of a suite: kind, arguments, environment.

    `source` is where its process is built from: `git:REV` for another commit, None for this tree.
    `api_key_env` names the environment variable that holds the key its requests carry. `gpus` are
    those that it may see, by number or UUID (empty: all). `image` is the container it runs in, by
    digest; `base_url` where it runs already. `tuning` is `vendor` (as its vendor recommends) or
    `equal` (with the settings of the suite's `[equal]`). One that is `optional` is left out where
    it cannot be installed.
    """

    name: str
    kind: str
    model: str
    dtype: str
    args: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    source: str | None = None
    port: int | None = None
    start_timeout_s: float = 600.0
    api_key_env: str | None = None
    gpus: tuple[str, ...] = ()
    image: str | None = None
    base_url: str | None = None
    tuning: str = "vendor"
    optional: bool = False

    @property
    def model_name(self) -> str:
        """What results call the model: where a folder of somebody's lies is not for a report."""
        local = self.model.startswith(("/", "./", "../", "~"))
        return (Path(self.model).name or "model") if local else self.model


@dataclass(frozen=True, slots=True)
class Workload:
    """Prompts, and the levels of load they are sent at."""

    prompts: Prompts
    levels: tuple[Level, ...]

    @property
    def name(self) -> str:
        """The name that tests and files use."""
        return self.prompts.name


@dataclass(frozen=True, slots=True)
class Limit:
    """A bound that a person set on a metric, or on its ratio to another instance's.

    None in `engine`, `workload` or `level` stands for all of them; `over = "*"` compares with
    each of the other instances in turn.
    """

    metric: str
    engine: str | None = None
    over: str | None = None
    workload: str | None = None
    level: str | None = None
    min: float | None = None
    max: float | None = None

    def covers(self, case: Case) -> bool:
        """Whether the bound is on this case."""
        wanted = (
            (self.engine, case.instance),
            (self.workload, case.workload),
            (self.level, case.level),
        )
        return case.instance != self.over and all(want in (None, got) for want, got in wanted)


# What gates in every suite that does not say otherwise: all requests answered, counts right.
ALWAYS = (Limit("success_rate", min=1.0), Limit("token_accuracy", min=1.0))


NIGHT_MINUTES = 60.0
# The chance of a false SLOWER in a night without any change.
ALPHA = 0.005
# What gates by default: few metrics, because each one more is a chance of a false alarm more.
GATED = ("output_throughput", "ttft_p50", "tpot_p50")


@dataclass(frozen=True, slots=True)
class BaselineGate:
    """When a stored baseline may speak, and how far a cell may move before it does.

    A single night fails beyond `tolerance`; `persistence` nights in a row, tonight's the last,
    fail beyond `drift_budget`. A gate that nobody armed within `arm_within_days` of the first
    night that recorded it fails too.
    """

    metrics: tuple[str, ...] = GATED
    tolerance: float = 0.05
    resolution: float = 0.10
    min_launches: int = 10
    min_nights: int = 5
    drift_budget: float = 0.03
    persistence: int = 3
    arm_within_days: int = 30


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """How small a slowdown the reference gate is set up to find, and what that takes.

    A slowdown of `finds` is found nine times out of ten on a shared machine; one that is no larger
    than `margin` is none. `first_pairs` run every night, up to `max_pairs` on suspicion.
    """

    finds: float
    margin: float
    first_pairs: int
    max_pairs: int


SENSITIVITIES = {
    "5%": Sensitivity(0.05, 0.02, 5, 12),
    "3%": Sensitivity(0.03, 0.01, 5, 16),
    "1.5%": Sensitivity(0.025, 0.005, 6, 24),
}


@dataclass(frozen=True, slots=True)
class ReferenceGate:
    """Pairs of fresh launches of each candidate and the reference.

    `alpha` is the chance of a false SLOWER per night, over all cells and both looks. With `prime`
    each engine lives once, unmeasured, before the first pair: what it compiles is cached then.
    """

    instance: str
    candidates: tuple[str, ...]
    metrics: tuple[str, ...] = GATED
    sensitivity: str = "5%"
    margin: float = SENSITIVITIES["5%"].margin
    first_pairs: int = SENSITIVITIES["5%"].first_pairs
    max_pairs: int = SENSITIVITIES["5%"].max_pairs
    alpha: float = ALPHA
    prime: bool = False

    @property
    def finds(self) -> float:
        """The slowdown that the sensitivity promises to find."""
        return SENSITIVITIES[self.sensitivity].finds


@dataclass(frozen=True, slots=True)
class Budget:
    """Minutes that measuring may take; None sets no limit. The price only turns them into money.

    A comparison is one candidate's pairs in one night; a month is a calendar month of all nights
    on this device.
    """

    night_minutes: float = NIGHT_MINUTES
    comparison_minutes: float | None = None
    month_minutes: float | None = None
    price_per_hour: float | None = None

    def cost(self, minutes: float) -> float | None:
        """Return what minutes cost; None without a price."""
        return None if self.price_per_hour is None else minutes / 60 * self.price_per_hour


@dataclass(frozen=True, slots=True)
class Suite:
    """Everything that one night measures.

    `equal` are the settings that engines with `tuning = "equal"` share. With `replay_inside` each
    level of an engine that we host is measured once more without HTTP, for what that costs. With
    `pin` client and engines are kept to different cores where there are enough. `left_out` says
    which optional engines are not among the instances, and why.
    """

    name: str
    path: str
    description: str
    seed: int
    launches: int
    budget: Budget
    level_timeout_s: float
    idle_timeout_s: float
    step_batches: tuple[int, ...]
    instances: tuple[Instance, ...]
    workloads: tuple[Workload, ...]
    limits: tuple[Limit, ...]
    baseline: BaselineGate
    reference: ReferenceGate | None = None
    load_workers: int = 1
    wait_quiet_s: float = 0.0
    calibrate: bool = True
    equal: Mapping[str, Any] = field(default_factory=dict)
    replay_inside: bool = False
    warmup_timeout_s: float = 120.0
    pin: bool = True
    left_out: Mapping[str, str] = field(default_factory=dict)

    def instance(self, name: str) -> Instance:
        """Return the instance of that name."""
        return next(i for i in self.instances if i.name == name)

    def workload(self, name: str) -> Workload:
        """Return the workload of that name."""
        return next(w for w in self.workloads if w.name == name)

    def level(self, case: Case) -> Level:
        """Return the level of a case."""
        return next(lv for lv in self.workload(case.workload).levels if lv.name == case.level)

    def cases(self) -> tuple[Case, ...]:
        """Return every case: instance × workload × level."""
        return tuple(
            Case(i.name, i.model_name, w.name, level.name)
            for i in self.instances
            for w in self.workloads
            for level in w.levels
        )
