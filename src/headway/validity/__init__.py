"""May this Run be judged? Looks at accounting, client, schedule and machine, never at speed.

A reason given here makes the Run INVALID: the instrument or the machine failed, or the books do
not balance. What the engine failed at counts against its success rate instead.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping

from headway import calibration, metrics, stats
from headway.calibration import Band
from headway.core import RequestRecord, Run
from headway.validity import seen

# A sum of float gaps and a difference of floats agree to rounding, not to the bit.
ROUNDING_S = 1e-6
# How late the client may be: a share of the typical TTFT, between two bounds. What the kernel
# stamped is late in no stamp, only in what follows it; without its stamps the lower bound holds.
MIN_LAG_P99_S, MAX_LAG_P99_S, MAX_LAG_P99_OF_TTFT = 0.010, 0.050, 0.25
MIN_KERNEL_STAMPS = 0.99
# Events that were read together carry the stamp of the last: their gaps are upper bounds.
MAX_MERGED_EVENTS = 0.10
# One thread drives a Run: what it does not get, or collects garbage in, it cannot measure in.
MAX_CPU_SHARE = 0.95
MAX_GC_SHARE, MAX_GC_S = 0.005, 0.005
# Slots that wait for the client are not in flight.
MIN_ACHIEVED_CONCURRENCY = 0.90
# A late send matters by what it adds to what is measured: a share of the typical TTFT for the
# typical request, of the typical E2EL for the worst.
MAX_SEND_LAG_P50_S, MAX_SEND_LAG_P50_OF_TTFT = 0.002, 0.05
MAX_SEND_LAG_P99_S, MAX_SEND_LAG_P99_OF_E2EL = 0.050, 0.5
MIN_ACHIEVED_RATE = 0.95


def problems(
    run: Run, bands: Mapping[str, Band] | None = None, intended_hit_rate: float | None = None
) -> tuple[str, ...]:
    """Return one sentence per reason why the Run cannot be judged; empty when it can.

    `bands` says where each calibration kernel is to be on this machine, in this night;
    `intended_hit_rate` what share of its prompts' tokens a perfect prefix cache would find (None:
    nobody knows). A Run with failed requests is no matter of speed: whatever the machine did, the
    failures count.
    """
    found = [*_accounting(run), *_clocks(run), *_little(run), *_client(run), *_schedule(run)]
    found += seen.contradictions(run, _most_in_flight(run), intended_hit_rate)
    if any(record.error is not None for record in run.records):
        return tuple(found)
    found += seen.disturbed(run)
    return (*found, *calibration.moved(run.calibration, bands or {}))


def _accounting(run: Run) -> Iterator[str]:
    """completed + failed + in flight = sent; and one record for each request asked for."""
    if len(run.records) != run.level.num_requests:
        yield f"{len(run.records)} records of {run.level.num_requests} requests"
    if len({record.index for record in run.records}) != len(run.records):
        yield "two records carry the same request number"
    yield from _few(
        f"request {record.index} neither ended nor failed"
        for record in run.records
        if record.ended_s is None and record.error is None
    )
    yield from _few(
        f"the client failed on request {record.index}: {record.error.message}"
        for record in run.records
        if record.error is not None and record.error.origin == "client"
    )
    most = _most_in_flight(run)
    if run.level.concurrency is not None and most > run.level.concurrency:
        yield f"{most} requests were in flight at once, {run.level.concurrency} were asked for"


def _few(reasons: Iterable[str]) -> Iterator[str]:
    """Let the first pass and count the others, of the same kind: what broke one breaks hundreds."""
    found = list(reasons)
    if found:
        yield found[0] + (f" (and {len(found) - 1} more)" if len(found) > 1 else "")


def _most_in_flight(run: Run) -> int:
    steps = []
    for record in run.records:
        if record.sent_s is not None:
            ended_s = run.span_s if record.ended_s is None else record.ended_s
            steps += [(record.sent_s, 1), (ended_s, -1)]
    # Where one ends as another begins, the end sorts first.
    return max(itertools.accumulate(step for _, step in sorted(steps)), default=0)


def _clocks(run: Run) -> Iterator[str]:
    """No time runs backwards, and Σ ITL = E2EL − TTFT for each request."""
    reasons = ((record.index, _clock_problem(record)) for record in run.records)
    yield from _few(f"request {index}: {reason}" for index, reason in reasons if reason)


def _clock_problem(record: RequestRecord) -> str | None:
    times = [record.due_s]
    times += [] if record.sent_s is None else [record.sent_s]
    times += [event.at_s for event in record.events]
    times += [] if record.ended_s is None else [record.ended_s]
    if any(not math.isfinite(at) for at in times):
        return "a time stamp is not a finite number"
    if any(later < earlier for earlier, later in itertools.pairwise(times)):
        return "its stamps are not in order (due, sent, events, end)"
    ttft, e2el = metrics.ttft_s(record), metrics.e2el_s(record)
    if ttft is None or e2el is None:
        return None
    gap_sum = math.fsum(metrics.itl_s(record))
    if abs(gap_sum - (e2el - ttft)) > ROUNDING_S:
        return f"the gaps sum to {gap_sum} s, E2EL - TTFT is {e2el - ttft} s"
    return _engine_clock_problem(record)


def _engine_clock_problem(record: RequestRecord) -> str | None:
    """The engine's stamps are of the same clock: in order, and between the send and the arrival."""
    stamps = [event.engine_at_s for event in record.events if event.engine_at_s is not None]
    if record.engine_arrived_s is not None:
        if record.sent_s is not None and record.engine_arrived_s < record.sent_s:
            early = record.sent_s - record.engine_arrived_s
            return f"it arrived at the engine {early:.6f} s before it was sent"
        stamps.insert(0, record.engine_arrived_s)
    late = max(
        (e.engine_at_s - e.at_s for e in record.events if e.engine_at_s is not None), default=0
    )
    if late > 0:
        return f"a token arrived {late:.6f} s before it left the engine"
    if any(later < earlier for earlier, later in itertools.pairwise(stamps)):
        return "the engine's stamps are not in order"
    return None


def _little(run: Run) -> Iterator[str]:
    """Output throughput ≤ concurrency / TPOT: each slot makes one token per TPOT at best.

    Checked by the times behind it, so that it holds for requests of any mix: in the steady window,
    no more requests on average than there are slots are between their first and last event.
    """
    throughput, window = metrics.output_throughput(run), metrics.steady_window(run)
    if run.level.concurrency is None or throughput is None or window is None:
        return
    start, end = window
    done = [r for r in run.records if r.completed and r.events]
    decoding_s = math.fsum(
        max(0.0, min(r.events[-1].at_s, end) - max(r.events[0].at_s, start)) for r in done
    )
    if decoding_s > run.level.concurrency * (end - start) + ROUNDING_S:
        tpot = stats.mean([v for v in map(metrics.tpot_s, done) if v is not None]) or math.inf
        yield (
            f"{throughput:.1f} tokens/s with {run.level.concurrency} in flight and a TPOT of "
            f"{tpot * 1e3:.2f} ms: at most {run.level.concurrency / tpot:.1f} is possible"
        )


def _client(run: Run) -> Iterator[str]:
    """The client had time: it woke up, read, and sent as soon as there was something to do."""
    client = run.client
    most = MIN_LAG_P99_S
    if client.get("kernel_stamps", 1.0) >= MIN_KERNEL_STAMPS:
        most = min(MAX_LAG_P99_S, max(most, MAX_LAG_P99_OF_TTFT * _typical(run, metrics.ttft_s)))
    for name, what in (("loop", "the client woke up late by"), ("read", "what arrived waited")):
        lag = client.get(f"{name}_lag_p99_s")
        if lag is not None and lag > most:
            yield (
                f"{what} {lag * 1e3:.1f} ms (p99); "
                f"beyond {most * 1e3:.0f} ms the client measures itself"
            )
    yield from _merged(run)
    share = client.get("cpu_share")
    if share is not None and share > MAX_CPU_SHARE:
        yield f"the client took {share:.0%} of a core; beyond {MAX_CPU_SHARE:.0%} it is the limit"
    collecting = client.get("gc_s", 0.0)
    if collecting > max(MAX_GC_S, MAX_GC_SHARE * run.span_s):
        yield f"the client collected garbage for {collecting * 1e3:.0f} ms of {run.span_s:.1f} s"
    yield from _concurrency(run)


def _merged(run: Run) -> Iterator[str]:
    """Events that are far enough apart were read one by one, unless the client was late."""
    share = run.client.get("merged_events", 0.0)
    if share <= MAX_MERGED_EVENTS:
        return
    late = max(run.client.get(f"{name}_lag_p99_s", 0.0) for name in ("loop", "read"))
    gap = stats.median([gap for record in run.records for gap in metrics.itl_s(record) if gap > 0])
    if gap is not None and late > gap:
        yield (
            f"{share:.0%} of the events were read together with an earlier one, as the client was "
            f"late by {late * 1e3:.1f} ms (p99): the gaps between tokens are not known"
        )


def _concurrency(run: Run) -> Iterator[str]:
    """As many requests were in flight as there were to be, while all slots had work.

    Counted by how long those that were due waited to be sent: who thinks does not wait.
    """
    asked, window = run.level.concurrency, metrics.steady_window(run)
    if asked is None or window is None:
        return
    start, end = window
    waited_s = math.fsum(
        max(0.0, min(r.sent_s, end) - max(r.due_s, start))
        for r in run.records
        if r.sent_s is not None
    )
    achieved = asked - waited_s / (end - start)
    if achieved < MIN_ACHIEVED_CONCURRENCY * asked:
        yield (
            f"{achieved:.1f} requests were in flight on average, {asked} were asked for: "
            "slots waited for the client"
        )


def _typical(run: Run, of: Callable[[RequestRecord], float | None]) -> float:
    return stats.median([v for v in map(of, run.records) if v is not None]) or 0.0


def _schedule(run: Run) -> Iterator[str]:
    """Requests left when they were due, at the rate that was asked for."""
    lags = [r.sent_s - r.due_s for r in run.records if r.sent_s is not None and r.error is None]
    ttft, e2el = _typical(run, metrics.ttft_s), _typical(run, metrics.e2el_s)
    for q, most in (
        (50, max(MAX_SEND_LAG_P50_S, MAX_SEND_LAG_P50_OF_TTFT * ttft)),
        (99, max(MAX_SEND_LAG_P99_S, MAX_SEND_LAG_P99_OF_E2EL * e2el)),
    ):
        lag = stats.percentile(lags, q)
        if lag is not None and lag > most:
            yield (
                f"requests left {lag * 1e3:.1f} ms after they were due (p{q}); "
                f"at most {most * 1e3:.1f} ms leaves the latencies meaningful"
            )
    if run.level.rate_per_s is None or len(run.records) < 2:
        return
    due = max(r.due_s for r in run.records)
    left = max((r.sent_s for r in run.records if r.sent_s is not None), default=0.0)
    # A schedule of milliseconds, or all at once, is not late by less than a send may be.
    if left - due > MAX_SEND_LAG_P99_S and due < MIN_ACHIEVED_RATE * left:
        yield f"the schedule took {left:.3f} s instead of {due:.3f} s"
