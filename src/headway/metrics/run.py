"""What each figure of a Run means, and when it is None."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from headway.core import RequestRecord, Run
from headway.metrics.request import (
    e2el_s,
    further_tokens,
    output_tokens,
    token_problems,
    tpot_s,
    ttft_s,
)


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
    # A slot may have sent twice before the last one began.
    start = max(sent[concurrency - 1], run.level.fill_s)
    # The last C requests hold the last C slots: the first slot is dry when there is no next one.
    end = ended[len(ended) - concurrency]
    inside = sum(1 for at in ended if start < at <= end)
    return (start, end) if end > start and 2 * inside >= len(run.records) else None


def tokens_between(records: Sequence[RequestRecord], start: float, end: float) -> float | None:
    """Count tokens whose event arrived in (start, end].

    Where a request's events have no counts, what came of it in all is spread evenly over them; None
    where that is not known either.
    """
    total = 0.0
    for record in records:
        inside = [event.num_tokens for event in record.events if start < event.at_s <= end]
        counted: float = sum(count or 0 for count in inside)
        if None in inside:
            whole = output_tokens(record)
            if whole is None:
                return None
            counted = whole * len(inside) / len(record.events)
        total += counted
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
    counted = [(further, r) for r in run.records if (further := further_tokens(r)) is not None]
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
    wrong = {index for index, _ in wrong_counts(run)}
    return (len(done) - len(wrong)) / len(done)


def wrong_counts(run: Run) -> list[tuple[int, str]]:
    """Return (request, problem) for every way in which counts of completed requests disagree."""
    added = tokens_added(run)
    return [
        (record.index, problem)
        for record in run.records
        if record.completed
        for problem in token_problems(record, added)
    ]


def tokens_added_each(run: Run) -> list[int]:
    """Return by how many tokens each completed request's prompt was longer than what was asked.

    By the server's usage; of prompts whose ids nobody else knows, and without usage, none.
    """
    return [
        record.prompt_tokens - record.asked_prompt_tokens
        for record in run.records
        if record.completed and record.asked_prompt_tokens and record.prompt_tokens is not None
    ]


def tokens_added(run: Run) -> int:
    """Return how many tokens the server puts around each prompt, as far as that can be right.

    Around ids none. Before a text none, or what the model's own tokenizer puts there. Around a
    message of a chat whatever the template holds, as long as it is the same around most: a request
    with another number was read as other tokens than were asked for.
    """
    counts = Counter(tokens_added_each(run))
    most = min(counts, key=lambda n: (-counts[n], n), default=0)
    if run.prompt_path == "chat":
        return max(0, most)
    return most if run.prompt_path == "text" and most == run.begin_tokens else 0


def cached_share(run: Run) -> float | None:
    """Prompt tokens that came from the server's prefix cache / all, of completed requests.

    None where the server does not say; one that says so of some means 0 of the others.
    """
    done = [r for r in run.records if r.completed and r.prompt_tokens]
    if all(r.cached_prompt_tokens is None for r in done):
        return None
    return sum(r.cached_prompt_tokens or 0 for r in done) / sum(r.prompt_tokens or 0 for r in done)


def energy_per_token(run: Run) -> float | None:
    """Energy of the GPUs from the Run's start to its end / all output tokens that came.

    Failed requests cost energy too: their tokens count. None where a token count is not known.
    """
    energy_j = run.engine.get("gpu_energy_j")
    counts = [output_tokens(r) if r.completed or r.events else 0 for r in run.records]
    tokens = None if None in counts else sum(count or 0 for count in counts)
    return None if energy_j is None or not tokens else energy_j / tokens


def gpu_memory(run: Run) -> float | None:
    """Most memory in use on the engine's GPUs at once, beside what was in use before its launch."""
    return run.engine.get("gpu_memory_peak_bytes")


def protocol_cost(run: Run) -> float | None:
    """1 − output throughput / that of the replay inside; None where there was none."""
    inside, outside = run.engine.get("inside_output_throughput"), output_throughput(run)
    return None if outside is None or not inside else 1 - outside / inside


def peak_memory(run: Run) -> float | None:
    """Peak resident memory of the engine's processes up to the end of this level."""
    return run.engine.get("peak_rss_bytes")
