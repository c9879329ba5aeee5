"""The shape of report.json, as frozen dataclasses: what is read is checked against them.

docs/report.schema.json says the same to other programs; a test holds the two together. Seconds
and bytes throughout; what is undefined is None, and null in the file.

Schema history: 1 (2026-11) first. 2 (2026-11) intervals, explanations, what is due, causes.
3 (2026-11) fill time, expected hit rate, outputs that are not judged. 4 (2026-11) prompt path.
5 (2026-11) what endpoints understand, notices, cached share; series, cores and GPUs of a launch,
the GPU's UUID; outputs verified by their text; engines left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from headway.core import Capabilities, PromptPath, Series
from headway.fingerprint import Machine, Treatment
from headway.suite import Limit
from headway.verdict import Gate, Interval, Verdict
from headway.verdict.split import EngineSplit

FORMAT = "headway report"
SCHEMA = 5

Key = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class Tool:
    """The Headway that measured, and the commit of the repository it ran in."""

    version: str
    commit: str | None


@dataclass(frozen=True, slots=True)
class SuiteView:
    """What of the suite a reader needs. `gates` names the metrics that a gate is set on.

    `reference` is the instance that others are compared with in pairs, None without one.
    `left_out` says which optional engines could not be had, and why.
    """

    name: str
    description: str
    launches: int
    seed: int
    gates: tuple[str, ...]
    tolerance: float
    resolution: float
    limits: tuple[Limit, ...]
    reference: str | None
    left_out: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class ModelView:
    """A model and the revision of its files."""

    name: str
    revision: str


@dataclass(frozen=True, slots=True)
class LaunchView:
    """One life of an engine process; `launch_s` is None when it gave no token, or ran before.

    See `core.LaunchRecord` for `cpus` and `gpus`.
    """

    launch: int
    attempt: int
    launch_s: float | None
    failure_kind: str | None
    failure: str | None
    cpus: tuple[int, ...]
    gpus: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InstanceView:
    """A named engine: what was put under test, and its launches.

    `capabilities` is what its endpoint was found to understand at its last launch (None: it never
    was up), `notices` what it does otherwise than it says, or takes without effect.
    """

    name: str
    model: str
    dtype: str
    device: str | None
    treatment: Treatment
    launches: tuple[LaunchView, ...]
    capabilities: Capabilities | None
    notices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """The night in numbers.

    `compared` counts cells on which some gate decided, `recording` those whose baseline is not
    there yet (a cell can be both), `missing` those that were to be measured and have no value.
    """

    cells: int
    verdicts: Mapping[str, int]
    words: Mapping[str, int]
    compared: int
    recording: int
    missing: int
    strict: bool
    exit_code: int


@dataclass(frozen=True, slots=True)
class SampleView:
    """A cell's value in one launch; None with the reason why there is none."""

    launch: int
    value: float | None
    reason: str | None
    valid: bool


@dataclass(frozen=True, slots=True)
class PairsView:
    """The pairs of launches behind a finding: how many are compared, and why others are not."""

    used: int
    dropped: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FindingView:
    """What one gate says of a cell; see `headway.verdict.Finding`."""

    gate: Gate
    verdict: Verdict
    reason: str
    worse_by: float | None
    bound: float | None
    visible: float | None
    interval: Interval | None
    pairs: PairsView | None
    changed: tuple[str, ...]
    explanation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CellView:
    """One metric of one case. `unit` and `direction` are None for what is no number.

    `value` is the median over launches, None where the cell could not be judged.
    """

    instance: str
    model: str
    workload: str
    level: str
    metric: str
    unit: str | None
    direction: Literal["higher", "lower"] | None
    definition: str
    verdict: Verdict
    word: str
    due: bool
    message: str
    value: float | None
    samples: tuple[SampleView, ...]
    findings: tuple[FindingView, ...]

    @property
    def case_key(self) -> Key:
        """Return what names the case: instance, model, workload, level."""
        return (self.instance, self.model, self.workload, self.level)


@dataclass(frozen=True, slots=True)
class Outputs:
    """How many answers were completed, and how many of them the reference agrees with.

    `by_text` of these came without ids, and were judged by tokens that were found to spell them.
    """

    completed: int
    verified: int
    by_text: int


@dataclass(frozen=True, slots=True)
class Requests:
    """due = completed + failed + in flight; `errors` counts the failed ones by kind."""

    due: int
    completed: int
    failed: int
    in_flight: int
    errors: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Span:
    """The least and the most of some counts."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class RunView:
    """One case measured once within one launch: everything but the requests themselves.

    `fill_s` is the time within which a closed loop's slots began. `expected_hit_rate` is the share
    of prompt tokens that a perfect prefix cache would find; None without shared prefixes.
    `cached_share` is what the server's found, by its usage; None where it does not say. `notices`
    hold a sentence for what does not make the Run invalid and may matter.
    `added_prompt_tokens` is how many tokens the server counted in a prompt beside those that were
    asked for: what its tokenizer puts before a text, what its template puts around a message. Of
    the requests whose tokens both count; None without any. Of long `series` their extremes stay.
    """

    launch: int
    attempt: int
    started_at: str
    span_s: float
    concurrency: int | None
    rate_per_s: float | None
    arrivals: str
    requests: Requests
    invalid: tuple[str, ...]
    client: Mapping[str, float]
    engine: Mapping[str, float]
    engine_split: EngineSplit | None
    vllm_bench_serve: Mapping[str, float | int | str | None]
    fill_s: float
    expected_hit_rate: float | None
    prompt_path: PromptPath
    added_prompt_tokens: Span | None
    cached_share: float | None
    notices: tuple[str, ...]
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True)
class ReplacedView:
    """A Run that a later attempt of its launch took the place of, and why."""

    launch: int
    attempt: int
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CaseView:
    """A case. One with neither workload nor level stands for its instance's launches."""

    instance: str
    model: str
    workload: str
    level: str
    identity: Mapping[str, str]
    outputs: Outputs | None
    runs: tuple[RunView, ...]
    replaced: tuple[ReplacedView, ...]

    @property
    def key(self) -> Key:
        """Return what names the case: instance, model, workload, level."""
        return (self.instance, self.model, self.workload, self.level)


@dataclass(frozen=True, slots=True)
class CauseView:
    """Cells that say the same thing; see `headway.verdict.causes.Cause`. `word` is for people."""

    verdict: Verdict
    word: str
    instance: str | None
    headline: str
    cells: tuple[str, ...]
    explanation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One night, judged. `schema` says how to read the rest."""

    format: str
    schema: int
    night: str
    started_at: str
    finished: bool
    headway: Tool
    suite: SuiteView
    machine: Machine
    models: tuple[ModelView, ...]
    instances: tuple[InstanceView, ...]
    summary: Summary
    causes: tuple[CauseView, ...]
    cases: tuple[CaseView, ...]
    cells: tuple[CellView, ...]
