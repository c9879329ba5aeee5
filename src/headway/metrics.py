"""The table of metrics: what each is called, means, and when it is None.

A request that failed gives no latency sample; a metric without samples is None, never 0.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from headway import stats
from headway.core import RequestRecord, Run

Direction = Literal["higher", "lower"]
Samples = Callable[[Run], list[float]]
VERSION = 1


@dataclass(frozen=True, slots=True)
class Metric:
    """A declared metric. Being a `percentile` of `samples` bounds what may gate on it."""

    name: str
    unit: str
    direction: Direction
    definition: str
    of_run: Callable[[Run], float | None]
    percentile: float | None = None
    closed_loop_only: bool = False
    further_tokens_only: bool = False
    slo_only: bool = False
    samples: Samples | None = None

    def worse_by(self, value: float, than: float) -> float:
        """Return how much worse `value` is, as a ratio minus one: 0.05 is 5 % worse."""
        return than / value - 1 if self.direction == "higher" else value / than - 1


def ttft_s(record: RequestRecord) -> float | None:
    """First token event − due."""
    return record.events[0].at_s - record.due_s if record.completed and record.events else None


def ttft_sent_s(record: RequestRecord) -> float | None:
    """First token event − sent: what TTFT is to tools that start their clock at the send."""
    if not (record.completed and record.events) or record.sent_s is None:
        return None
    return record.events[0].at_s - record.sent_s


def ttfc_s(record: RequestRecord) -> float | None:
    """First token event with text of the answer or a tool call − due: after any reasoning."""
    shown = (event.at_s for event in record.events if event.kind in ("content", "tool"))
    first = next(shown, None) if record.completed else None
    return None if first is None else first - record.due_s


def e2el_s(record: RequestRecord) -> float | None:
    """Last token event − due."""
    return record.events[-1].at_s - record.due_s if record.completed and record.events else None


def e2el_sent_s(record: RequestRecord) -> float | None:
    """Last token event − sent."""
    late = ttft_sent_s(record)
    return None if late is None else late + _decoding_s(record)


def output_tokens(record: RequestRecord) -> int | None:
    """Tokens generated: the server's usage, else the ids or counts of its events."""
    if record.completion_tokens is not None:
        return record.completion_tokens
    counts = [event.num_tokens for event in record.events]
    return None if None in counts or not counts else sum(count or 0 for count in counts)


def tpot_s(record: RequestRecord) -> float | None:
    """(last − first token event) / tokens after the first event; None with no further token."""
    further = _further_tokens(record)
    return None if further is None else _decoding_s(record) / further


def _further_tokens(record: RequestRecord) -> int | None:
    """Count tokens after the first event of a completed request; None where there is none."""
    total = output_tokens(record)
    if not record.completed or len(record.events) < 2 or total is None:
        return None
    first = record.events[0].num_tokens
    further = total - (1 if first is None else first)
    return further if further > 0 else None


def _decoding_s(record: RequestRecord) -> float:
    return record.events[-1].at_s - record.events[0].at_s


def itl_s(record: RequestRecord) -> list[float]:
    """Gaps between token events of one request."""
    if not record.completed:
        return []
    times = [event.at_s for event in record.events]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def steady_window(run: Run) -> tuple[float, float] | None:
    """Return [start, end): from when all slots are busy until the first one runs dry.

    None in open loop, and when fewer than half of the requests ended inside: such a window is
    mostly edge, and its throughput would be luck.
    """
    concurrency = run.level.concurrency
    sent = sorted(r.sent_s for r in run.records if r.sent_s is not None)
    ended = sorted(r.ended_s for r in run.records if r.ended_s is not None)
    if concurrency is None or len(sent) < concurrency or len(ended) < concurrency:
        return None
    start = sent[concurrency - 1]
    # The last C requests hold the last C slots: the first slot is dry when there is no next one.
    end = ended[len(ended) - concurrency]
    inside = sum(1 for at in ended if start < at <= end)
    return (start, end) if end > start and 2 * inside >= len(run.records) else None


def tokens_between(records: Sequence[RequestRecord], start: float, end: float) -> int | None:
    """Count tokens whose event arrived in (start, end]; None when an event has no count."""
    total = 0
    for record in records:
        for event in record.events:
            if start < event.at_s <= end:
                if event.num_tokens is None:
                    return None
                total += event.num_tokens
    return total


def output_throughput(run: Run) -> float | None:
    """Closed loop: tokens in the steady window / its length. Open loop: as over the span."""
    window = steady_window(run)
    if not run.level.closed:
        return output_throughput_span(run)
    if window is None:
        return None
    tokens = tokens_between(run.records, *window)
    return None if not tokens else tokens / (window[1] - window[0])


def output_throughput_span(run: Run) -> float | None:
    """Tokens of all completed requests / (last token event − first due)."""
    return _per_s(run, output_tokens, lambda r: r.events[-1].at_s) or None


def decode_throughput_span(run: Run) -> float | None:
    """Tokens but for each request's first / (last token event − first due)."""
    return _per_s(run, _tokens_but_one, lambda r: r.events[-1].at_s) or None


def _tokens_but_one(record: RequestRecord) -> int | None:
    total = output_tokens(record)
    return None if total is None else max(0, total - 1)


def request_throughput(run: Run) -> float | None:
    """Completed requests / (last completion − first due)."""
    return _per_s(run, lambda _: 1)


def goodput(run: Run) -> float | None:
    """Requests within every limit of the level's SLO / (last completion − first due)."""
    return None if run.level.slo is None else _per_s(run, lambda r: int(is_good(r, run)))


def token_goodput(run: Run) -> float | None:
    """Tokens of requests within every limit of the SLO / (last completion − first due)."""
    tokens = _per_s(run, lambda r: output_tokens(r) if is_good(r, run) else 0)
    return None if run.level.slo is None else tokens


def slo_attainment(run: Run) -> float | None:
    """Requests within every limit of the level's SLO / requests that were due."""
    good = sum(is_good(record, run) for record in run.records)
    return good / len(run.records) if run.level.slo is not None and run.records else None


def is_good(record: RequestRecord, run: Run) -> bool:
    """Whether a request was answered within every limit of its level's SLO; a failed one is not."""
    slo = run.level.slo
    return slo is not None and slo.holds(ttft_s(record), tpot_s(record), e2el_s(record))


def _per_s(
    run: Run,
    amount: Callable[[RequestRecord], int | None],
    end_s: Callable[[RequestRecord], float] = lambda r: r.ended_s or 0.0,
) -> float | None:
    """Sum over completed requests / (latest end − first due); None when an amount is not known."""
    done = [r for r in run.records if r.completed and r.events]
    amounts = [amount(r) for r in done]
    if not done or None in amounts:
        return None
    span_s = max(map(end_s, done)) - min(r.due_s for r in run.records)
    return sum(a or 0 for a in amounts) / span_s if span_s > 0 else None


def decode_throughput(run: Run) -> float | None:
    """Σ tokens after the first event / union of the requests' [first, last event] intervals."""
    counted = [(further, r) for r in run.records if (further := _further_tokens(r)) is not None]
    length_s = union_length([(r.events[0].at_s, r.events[-1].at_s) for _, r in counted])
    return sum(further for further, _ in counted) / length_s if length_s > 0 else None


def tokens_per_event(run: Run) -> float | None:
    """Tokens of completed requests / their token events: above 1, an ITL is of several tokens."""
    done = [r for r in run.records if r.completed and r.events]
    totals = [output_tokens(r) for r in done]
    if not done or None in totals:
        return None
    return sum(t or 0 for t in totals) / sum(len(r.events) for r in done)


def union_length(spans: Sequence[tuple[float, float]]) -> float:
    """Return the length covered by intervals that may overlap."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def success_rate(run: Run) -> float | None:
    """Completed / all that were due, sent or not; None without requests."""
    if not run.records:
        return None
    return sum(r.completed for r in run.records) / len(run.records)


def token_accuracy(run: Run) -> float | None:
    """Share of completed requests with exactly the tokens asked for, by ids and by usage."""
    done = [r for r in run.records if r.completed]
    if not done:
        return None
    return sum(not token_problems(r) for r in done) / len(done)


def token_problems(record: RequestRecord) -> list[str]:
    """Name every way in which counts disagree: asked, usage, ids. What is not counted is wrong."""
    problems = []
    ids, usage, limit = record.output_token_ids, record.completion_tokens, record.asked_tokens
    if ids is not None and usage is not None and len(ids) != usage:
        problems.append(f"usage says {usage} tokens, {len(ids)} ids came")
    count = output_tokens(record)
    asked = count if limit is None else limit
    if count is None or asked is None:
        problems.append("neither ids nor usage say how many tokens came")
    elif count > asked:
        problems.append(f"{count} tokens came, at most {asked} were asked for")
    elif count < asked and (record.ignore_eos or record.finish_reason == "length"):
        why = "ended for length" if record.finish_reason == "length" else "was to go on at its end"
        problems.append(f"{count} of {asked} tokens came, yet it {why}")
    prompt, sent = record.prompt_tokens, record.asked_prompt_tokens
    if sent and prompt is not None and prompt != sent:
        problems.append(f"usage says {prompt} prompt tokens, {sent} ids were sent")
    return problems


def peak_memory(run: Run) -> float | None:
    """Peak resident memory of the engine's processes up to the end of this level."""
    return run.engine.get("peak_rss_bytes")


def _percentile(samples: Samples, q: float) -> Callable[[Run], float | None]:
    return lambda run: stats.percentile(samples(run), q)


def _each(of: Callable[[RequestRecord], float | None]) -> Samples:
    return lambda run: [v for v in map(of, run.records) if v is not None]


def _pooled_itl(run: Run) -> list[float]:
    return [gap for record in run.records for gap in itl_s(record)]


def _latency(
    name: str, text: str, samples: Samples, qs: Sequence[int], further: bool = False
) -> list[Metric]:
    return [
        Metric(
            f"{name}_p{q}",
            "s",
            "lower",
            f"{text}; p{q}",
            _percentile(samples, q),
            q,
            further_tokens_only=further,
            samples=samples,
        )
        for q in qs
    ]


_QS = (50, 90, 99)
TABLE: dict[str, Metric] = {
    metric.name: metric
    for metric in [
        Metric(
            "output_throughput",
            "tokens/s",
            "higher",
            "output tokens in the steady window (all slots busy until the first runs dry) / length",
            output_throughput,
            closed_loop_only=True,
        ),
        Metric(
            "output_throughput_span",
            "tokens/s",
            "higher",
            "output tokens of completed requests / (last token event - first due)",
            output_throughput_span,
            closed_loop_only=True,
        ),
        Metric(
            "decode_throughput",
            "tokens/s",
            "higher",
            "tokens after each first event / union of the requests' [first, last event]",
            decode_throughput,
            further_tokens_only=True,
        ),
        Metric(
            "decode_throughput_span",
            "tokens/s",
            "higher",
            "output tokens but for each request's first / (last token event - first due)",
            decode_throughput_span,
            closed_loop_only=True,
            further_tokens_only=True,
        ),
        Metric(
            "request_throughput",
            "requests/s",
            "higher",
            "completed requests / (last completion - first due)",
            request_throughput,
            closed_loop_only=True,
        ),
        Metric(
            "goodput",
            "requests/s",
            "higher",
            "requests within every limit of the SLO / (last completion - first due)",
            goodput,
            slo_only=True,
        ),
        Metric(
            "token_goodput",
            "tokens/s",
            "higher",
            "tokens of requests within every limit of the SLO / (last completion - first due)",
            token_goodput,
            slo_only=True,
        ),
        Metric(
            "slo_attainment",
            "1",
            "higher",
            "requests within every limit of the SLO / requests that were due",
            slo_attainment,
            slo_only=True,
        ),
        Metric(
            "tokens_per_event",
            "tokens",
            "lower",
            "output tokens / token events; above 1, an ITL is between chunks",
            tokens_per_event,
        ),
        *_latency("ttft", "first token event - due", _each(ttft_s), _QS),
        *_latency("ttfc", "first token event but reasoning - due", _each(ttfc_s), (50,)),
        *_latency("ttft_sent", "first token event - sent", _each(ttft_sent_s), (50,)),
        *_latency(
            "tpot", "(last - first event) / tokens after the first", _each(tpot_s), _QS, True
        ),
        *_latency("itl", "gaps between token events, pooled over requests", _pooled_itl, _QS, True),
        *_latency("e2el", "last token event - due", _each(e2el_s), _QS),
        Metric("success_rate", "1", "higher", "completed / due", success_rate),
        Metric("token_accuracy", "1", "higher", "requests with right token counts", token_accuracy),
        Metric("peak_memory", "bytes", "lower", "peak resident memory of the engine", peak_memory),
    ]
}

# What belongs to a launch, not to a Run: measured once per launch.
LAUNCH_TIME = Metric(
    "launch_time", "s", "lower", "process start - first verified token", lambda _: None
)
ALL: dict[str, Metric] = {**TABLE, LAUNCH_TIME.name: LAUNCH_TIME}


def step_metric(phase: str, batch: int) -> Metric:
    """Return the metric of one engine step, timed by the engine's own clock."""
    text = f"one {phase} step with {batch} sequences; the median of its rounds"
    return Metric(f"{phase}_step_b{batch}", "s", "lower", text, lambda _: None)
