"""What each latency of a request means, and when it is None.

A request that failed gives no latency sample.
"""

from __future__ import annotations

import itertools

from headway.core import RequestRecord


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
    return None if late is None else late + decoding_s(record)


def protocol_s(record: RequestRecord) -> float | None:
    """E2EL − (the engine's last departure − the request's arrival there); None without stamps."""
    whole, arrived_s = e2el_s(record), record.engine_arrived_s
    left_s = record.events[-1].engine_at_s if record.events else None
    if whole is None or arrived_s is None or left_s is None:
        return None
    return whole - (left_s - arrived_s)


def output_tokens(record: RequestRecord) -> int | None:
    """Tokens generated: the server's usage, else the ids or counts of its events."""
    if record.completion_tokens is not None:
        return record.completion_tokens
    counts = [event.num_tokens for event in record.events]
    return None if None in counts or not counts else sum(count or 0 for count in counts)


def tpot_s(record: RequestRecord) -> float | None:
    """(last − first token event) / tokens after the first event; None with no further token."""
    further = further_tokens(record)
    return None if further is None else decoding_s(record) / further


def further_tokens(record: RequestRecord) -> int | None:
    """Count tokens after the first event of a completed request; None where there is none."""
    total = output_tokens(record)
    if not record.completed or len(record.events) < 2 or total is None:
        return None
    first = record.events[0].num_tokens
    further = total - (1 if first is None else first)
    return further if further > 0 else None


def decoding_s(record: RequestRecord) -> float:
    """Last token event − first token event, of a request that has any."""
    return record.events[-1].at_s - record.events[0].at_s


def itl_s(record: RequestRecord) -> list[float]:
    """Gaps between token events of one request."""
    if not record.completed:
        return []
    times = [event.at_s for event in record.events]
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def token_problems(record: RequestRecord, added: int = 0) -> list[str]:
    """Name every way in which counts disagree: asked, usage, ids. What is not counted is wrong.

    `added` is how many tokens the server puts around each prompt of the Run; see `tokens_added`.
    """
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
    if sent and prompt is not None and prompt != sent + added:
        more = f", {added} more are put around each" if added else ""
        problems.append(f"usage says {prompt} prompt tokens, {sent} ids were asked for{more}")
    return problems
