"""One Run under the keys of `vllm bench serve`'s result file, by its definitions.

It differs from Headway's own metrics: the clock of a request starts when it was sent, not when it
was due; TPOT divides by output tokens - 1, whatever the first event held; throughput is over the
whole duration, edges included; failed requests count in the duration only. Where vLLM writes 0 for
want of a sample, this writes None. docs/reports.md says which of its keys are left out and why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from headway import metrics, stats
from headway.core import RequestRecord, Run

View = dict[str, float | int | str | None]


def view(run: Run) -> View:
    """Return the view of a Run; what was asked stands in where the server reported no usage."""
    done = [r for r in run.records if r.completed and r.events and r.sent_s is not None]
    duration = max((r.ended_s for r in run.records if r.ended_s is not None), default=0.0)
    outputs = [metrics.output_tokens(r) for r in done]
    output = None if None in outputs else sum(n or 0 for n in outputs)
    total = sum(r.asked_prompt_tokens if r.prompt_tokens is None else r.prompt_tokens for r in done)
    rate = run.level.rate_per_s
    shown: View = {
        "model_id": run.case.model,
        "num_prompts": len(run.records),
        "request_rate": "inf" if rate is None or math.isinf(rate) else rate,
        "max_concurrency": run.level.concurrency,
        "duration": duration,
        "completed": len(done),
        "failed": len(run.records) - len(done),
        "total_input_tokens": total,
        "total_output_tokens": output,
        "request_throughput": _per(len(done), duration),
        "request_goodput": _goodput(run, done, duration),
        "output_throughput": _per(output, duration),
        "total_token_throughput": _per(None if output is None else total + output, duration),
        "max_concurrent_requests": _peak(done),
    }
    ttfts = [v for v in map(metrics.ttft_sent_s, done) if v is not None]
    e2els = [v for v in map(metrics.e2el_sent_s, done) if v is not None]
    tpots = [v for v in map(_tpot_s, done) if v is not None]
    itls = [gap for r in done for gap in metrics.itl_s(r)]
    for name, samples in (("ttft", ttfts), ("tpot", tpots), ("itl", itls), ("e2el", e2els)):
        shown |= _spread(name, samples)
    return shown


def _goodput(run: Run, done: Sequence[RequestRecord], duration_s: float) -> float | None:
    slo = run.level.slo
    if slo is None:
        return None
    good = [
        r for r in done if slo.holds(metrics.ttft_sent_s(r), _tpot_s(r), metrics.e2el_sent_s(r))
    ]
    return _per(len(good), duration_s)


def _per(amount: float | None, duration_s: float) -> float | None:
    return amount / duration_s if amount is not None and duration_s > 0 else None


def _tpot_s(record: RequestRecord) -> float | None:
    tokens = metrics.output_tokens(record)
    if tokens is None or tokens <= 1:
        return None
    return (record.events[-1].at_s - record.events[0].at_s) / (tokens - 1)


def _spread(name: str, samples_s: Sequence[float]) -> View:
    """Mean, median, population standard deviation and p99, in milliseconds."""
    mean = stats.mean(samples_s)
    std = None
    if mean is not None:
        std = math.sqrt(math.fsum((x - mean) ** 2 for x in samples_s) / len(samples_s))
    found = {
        "mean": mean,
        "median": stats.median(samples_s),
        "std": std,
        "p99": stats.percentile(samples_s, 99),
    }
    return {f"{key}_{name}_ms": None if s is None else s * 1e3 for key, s in found.items()}


def _peak(records: Sequence[RequestRecord]) -> int:
    """Return the most requests that were between sent and last token event at one moment."""
    changes = [(r.sent_s, 1) for r in records if r.sent_s is not None]
    changes += [(r.events[-1].at_s, -1) for r in records]
    most = now = 0
    for _, change in sorted(changes):
        now += change
        most = max(most, now)
    return most
