"""A level replayed in the engine's own process: what HTTP costs is what it is slower by outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headway import arrivals, loadgen, metrics
from headway.core import Case, Level, Request, RequestError, RequestRecord, Run, TokenEvent
from headway.suite import Suite

PATH = "/headway/replay"


def wanted(suite: Suite, case: Case) -> bool:
    """Whether a case is to be replayed; what follows an answer cannot be, before that is known."""
    conversation = suite.workload(case.workload).prompts.turns > 1
    return suite.replay_inside and suite.level(case).closed and not conversation


def body(
    requests: Sequence[Request], recipient: loadgen.Recipient, level: Level
) -> dict[str, object]:
    """Return what is asked of the host: the bodies that went to it, and when each slot begins."""
    slots = level.concurrency or 1
    return {
        "requests": [loadgen.body(request, recipient) for request in requests],
        "concurrency": slots,
        "slots_s": list(arrivals.slot_offsets(slots, level.fill_s)),
    }


def records(requests: Sequence[Request], answer: Mapping[str, Any]) -> tuple[RequestRecord, ...]:
    """Return the host's answer as records, whose times count from the replay's start."""
    start_s = answer["start_s"]
    return tuple(
        _record(request, life, start_s)
        for request, life in zip(requests, answer["requests"], strict=True)
    )


def _record(request: Request, life: Mapping[str, Any], start_s: float) -> RequestRecord:
    events = tuple(TokenEvent(at_s - start_s, num_tokens=n) for at_s, n in life["departed"])
    failed = life["error"] or ("no token left the engine" if not events else None)
    return RequestRecord(
        index=request.index,
        due_s=life["due_s"] - start_s,
        sent_s=life["arrived_s"] - start_s,
        ended_s=life["ended_s"] - start_s,
        events=events,
        asked_tokens=request.max_tokens,
        ignore_eos=request.ignore_eos,
        completion_tokens=sum(event.num_tokens or 0 for event in events),
        finish_reason=life["finish_reason"],
        error=None if failed is None else RequestError("engine_error", failed),
    )


def figures(case: Case, level: Level, inside: Sequence[RequestRecord]) -> dict[str, float]:
    """Return what the replay says, by the same definitions as outside; nothing of no records.

    Where a request failed or has another number of tokens than asked for, there are no figures.
    """
    if not inside:
        return {}
    span_s = max(record.ended_s or 0.0 for record in inside)
    wrong = sum(not r.completed or bool(metrics.token_problems(r)) for r in inside)
    said = {"inside_s": span_s, "inside_failed": float(wrong)}
    if wrong:
        return said
    run = Run(case, 0, 0, level, "", span_s, tuple(inside), "", "")
    found = {
        "inside_output_throughput": metrics.output_throughput(run),
        "inside_ttft_p50_s": metrics.ALL["ttft_p50"].of_run(run),
        "inside_tpot_p50_s": metrics.ALL["tpot_p50"].of_run(run),
    }
    return said | {name: value for name, value in found.items() if value is not None}
