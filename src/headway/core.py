"""The nouns of Headway: what was asked, what came back and when, and who answered.

Everything here is frozen and needs only the standard library, so that a host in an engine's own
environment can import it too. Times are seconds. In a `Run` they count from the Run's own start
on the machine's monotonic clock; only `EngineInfo` and wall-clock labels mean anything elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
IgnoreEos = Literal["emit", "ban", "none"]
EventKind = Literal["content", "reasoning", "tool", "hidden"]
# How a prompt reaches the server: as ids; as text; as a message that the server's own chat template
# is put around; or as it stands in a file of the user's own requests.
PromptPath = Literal["ids", "text", "chat", "requests_file"]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as the workload made it, before anything was sent.

    Of a conversation (`session`, from turn 0 on) the prompt holds a turn's own ids only: what was
    said before stands in front of them as soon as it is known. With `texts` a text is sent, which
    stands for exactly these ids; to the chat endpoint as messages, the user's and the assistant's
    in turn, and once they hold an answer no ids are known. With a `body` (an OpenAI request as
    JSON) that is what is sent, and the fields only repeat what it says: ids are not known then, and
    `max_tokens` is None where it sets no limit.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    max_tokens: int | None
    ignore_eos: bool = True
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    session: int | None = None
    turn: int = 0
    body: str | None = None
    endpoint: str = COMPLETIONS
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """One stream event that carried output: text, or token ids, or both.

    `at_s` is when its last byte reached the client. `engine_at_s` is when the tokens left the
    engine's step loop, on the same clock, for servers that say so; else None. `num_tokens` is
    None where the server sends neither ids nor a running count. `kind` is what `text` is: the
    answer, what the model thought before it, a tool call's arguments, or nothing (ids alone).
    """

    at_s: float
    text: str = ""
    token_ids: tuple[int, ...] | None = None
    num_tokens: int | None = None
    engine_at_s: float | None = None
    kind: EventKind = "content"


@dataclass(frozen=True, slots=True)
class RequestError:
    """Why a request gave no usable answer.

    `origin` says whose failure it is: the engine's counts against its success rate, the client's
    or the machine's makes the Run invalid.
    """

    kind: str
    message: str
    origin: Literal["engine", "client"] = "engine"


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request's life. Latencies are derived from it, never stored.

    `due_s` is when the schedule asked for it (open loop) or when its slot became free (closed
    loop); `sent_s` is when its first byte left (None: never sent); `ended_s` is when the response
    ended or failed (None: still in flight when the Run was closed). `connect_s` is how long it took
    to connect for it, before it was sent (None: a connection was there). `asked_prompt_tokens` is 0
    where nobody but the server knows the prompt's ids, `asked_tokens` None where no limit was set.
    `cached_prompt_tokens` of the prompt's came from the server's prefix cache, where it says so.
    """

    index: int
    due_s: float
    sent_s: float | None
    ended_s: float | None
    events: tuple[TokenEvent, ...] = ()
    asked_tokens: int | None = 0
    asked_prompt_tokens: int = 0
    ignore_eos: bool = True
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = None
    engine_arrived_s: float | None = None
    error: RequestError | None = None
    warnings: tuple[str, ...] = ()
    connect_s: float | None = None
    cached_prompt_tokens: int | None = None

    @property
    def completed(self) -> bool:
        """Whether the request was answered to its end without an error."""
        return self.ended_s is not None and self.error is None

    @property
    def output_token_ids(self) -> tuple[int, ...] | None:
        """All token ids in order, or None when any event came without ids."""
        if not self.events or any(event.token_ids is None for event in self.events):
            return None
        return tuple(t for event in self.events for t in event.token_ids or ())


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep within to count as good; None in a field sets no limit there."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def holds(self, ttft_s: float | None, tpot_s: float | None, e2el_s: float | None) -> bool:
        """Whether latencies are within every limit; what has no token event is within none.

        A request of one token has no TPOT, and nothing to be late with.
        """
        tpot_fine = self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s
        pairs = ((ttft_s, self.ttft_s), (e2el_s, self.e2el_s))
        return tpot_fine and all(
            value is not None and (limit is None or value <= limit) for value, limit in pairs
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of open loop: its rate goes in a straight line to `to_per_s`, or stays (None)."""

    rate_per_s: float
    seconds: float
    to_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Level:
    """How hard the engine is pressed: a fixed concurrency, or arrivals at a rate.

    Closed loop: the slots begin one after the other within `fill_s`, so that a burst of
    connections and prefills is not the first thing measured.
    Open loop: `arrivals` names the process and `burstiness` the shape of its gaps, if it has one;
    `rate_per_s` is the mean rate (None: all at once). With `stages` the rate follows them; with
    `speed` a recorded trace is sent, so many times as fast as it was. Both hold the same number of
    requests at the same times in every launch.
    """

    name: str
    num_requests: int
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrivals: str = "closed"
    slo: Slo | None = None
    fill_s: float = 0.0
    burstiness: float | None = None
    stages: tuple[Stage, ...] = ()
    speed: float | None = None

    @property
    def closed(self) -> bool:
        """Whether a slot's next request waits for its last one."""
        return self.concurrency is not None


@dataclass(frozen=True)
class Case:
    """What is compared with itself from night to night: instance, model, workload, level."""

    instance: str
    model: str
    workload: str
    level: str

    @cached_property
    def name(self) -> str:
        """`instance-workload-level`; the parts hold no `-`, so it splits.

        What belongs to a launch as a whole (launch time) has neither workload nor level.
        """
        return "-".join(part for part in (self.instance, self.workload, self.level) if part)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Seconds that fixed kernels took on the machine, whatever engine is measured on it."""

    at: str
    seconds: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Series:
    """What was read of one gauge or counter while a Run lasted.

    `at_s` counts from the Run's start: what was read before it is negative. `source` says who was
    asked: the engine's own /metrics, the machine, or its GPU.
    """

    source: Literal["server", "machine", "gpu"]
    name: str
    unit: str
    at_s: tuple[float, ...]
    values: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Run:
    """One case measured once within one launch.

    `client` holds what the load generator knows about itself: seconds of lag, share of a CPU.
    `engine` holds what was seen of the engine besides: peak_rss_bytes of its processes when the
    Run ended, its warm-up (warmup_requests, warmup_s, warmup_failed, and warmup_stable: 1 where its
    last waves agreed, else 0), and what its telemetry comes to (server_..., gpu_..., machine_...;
    see `headway.telemetry`). `calibration` holds the seconds of the calibration kernels just before
    and just after it; empty where there are none.
    `begin_tokens` is how many tokens the model's own tokenizer puts before a prompt that is text.
    `series` are what server, machine and GPU said while it ran.
    """

    case: Case
    launch: int
    attempt: int
    level: Level
    started_at: str
    span_s: float
    records: tuple[RequestRecord, ...]
    schedule_hash: str
    workload_hash: str
    client: Mapping[str, float] = field(default_factory=dict)
    engine: Mapping[str, float] = field(default_factory=dict)
    calibration: tuple[Mapping[str, float], ...] = ()
    invalid: tuple[str, ...] = ()
    prompt_path: PromptPath = "ids"
    begin_tokens: int = 0
    series: tuple[Series, ...] = ()


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an endpoint understands. Only supported fields are sent.

    `ids_in`, `ids_out`: token ids as a prompt, and beside each event. `ignore_eos`: whether an
    answer can go on past its end: the mark is emitted, or banned, or it cannot. `cached_tokens`:
    usage says how many of the prompt's tokens came from a prefix cache. `strict_fields`: a field
    that it does not know is refused, and not ignored. `hosted`: it is our own host, which stamps
    what passes through it and serves a schedule inside; `steps`: it times single steps of its
    engine. `sampling`: each request's own temperature, top_p and seed hold.

    `fields` are sent in every request: what asks for ids, and what pins each default of sampling
    that its model's or its own configuration would set otherwise; `completions_fields` in those to
    the completions endpoint only; `greedy_fields` where nothing is sampled; `past_end` in those
    that are to go on past their end. `top_p_of_1`: a top_p that cuts nothing off may be said.
    `completions` is where a prompt that is no message goes, and a connection serves one request
    after the other unless `keep_alive` is false. `salt` is the field that keeps a request out of
    the prefix cache of those with another value (None: it has none).
    """

    ids_in: bool = True
    ids_out: bool = True
    ignore_eos: IgnoreEos = "emit"
    usage_in_stream: bool = True
    cached_tokens: bool = False
    logprobs: bool = False
    strict_fields: bool = False
    hosted: bool = False
    steps: bool = False
    sampling: bool = True
    fields: Mapping[str, object] = field(default_factory=dict)
    completions_fields: Mapping[str, object] = field(default_factory=dict)
    top_p_of_1: bool = True
    past_end: Mapping[str, object] = field(default_factory=lambda: {"ignore_eos": True})
    salt: str | None = None
    greedy_fields: Mapping[str, object] = field(default_factory=dict)
    completions: str = COMPLETIONS
    keep_alive: bool = True


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Who answers: read back from the running engine, never copied from what was asked for.

    `dtype` and `device` are None where it does not say, `version` is empty. `banned_ids` are those
    that it never emits where an answer is to go on past its end.
    """

    kind: str
    version: str
    model: str
    dtype: str | None
    device: str | None
    settings: Mapping[str, object] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    banned_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class LaunchRecord:
    """One life of an engine process, as the night saw it. Launch 0 only primes compile caches.

    `launch_s` is from process start to the first token (None: it never gave one, or ran before we
    came). `first_output` is that first answer, verified with the others; of an engine that sends no
    ids `first_text`, with the server's count of the prompt's tokens. `can` is what the endpoint was
    found to understand, `notices` one sentence for each thing that it does otherwise than it says,
    or takes without a word and without effect. `cpus` are the cores that it was kept to, away from
    the client's (none: it shared all of them with the client), `gpus` the UUIDs of those it could
    see. `failure` is one sentence, or None.
    """

    instance: str
    launch: int
    attempt: int
    started_at: str
    launch_s: float | None = None
    info: EngineInfo | None = None
    first_output: tuple[int, ...] = ()
    first_text: str | None = None
    first_prompt_tokens: int | None = None
    can: Capabilities | None = None
    notices: tuple[str, ...] = ()
    cpus: tuple[int, ...] = ()
    gpus: tuple[str, ...] = ()
    failure_kind: str | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Seconds of one kind of engine step, by the engine's own clock, one per round."""

    instance: str
    launch: int
    phase: Literal["prefill", "decode"]
    batch: int
    length: int
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Verification:
    """What the reference says of one output: how far each token is from its own choice.

    A gap is the reference's highest logit minus the logit of the token that was emitted, a margin
    its highest logit minus its second. `key` names the pair (prompt, output). `nonargmax` lists
    (index, gap, rank) of tokens that were not the reference's choice, in order; it may end early,
    `max_gap` and `num_nonargmax` are of all. `error` is why the pair could not be judged.
    An output that came as text alone is judged by the ids that it is read as, or `by` text: by
    tokens that the reference found to spell it. Where it found none, the text leaves what the
    reference would write at character `differs_at`.
    """

    key: str
    num_tokens: int = 0
    max_gap: float = 0.0
    num_nonargmax: int = 0
    min_margin: float | None = None
    nonargmax: tuple[tuple[int, float, int], ...] = ()
    error: str | None = None
    by: Literal["ids", "text"] = "ids"
    differs_at: int | None = None
