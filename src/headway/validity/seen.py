"""Does what server, machine and GPUs said while a Run lasted fit what the client saw?

A server that serves more than the client sent it serves somebody else as well; a GPU that was
slowed down, or shared, is not the one that is measured. Preemptions, a full cache and a power cap
are what an engine does with what it has: they are shown, and make nothing invalid.
"""

from __future__ import annotations

from collections.abc import Iterator

from headway import metrics
from headway.core import Run, Series

# A request that has just ended may still be counted beside the next one of its slot, in a reading
# that falls between: what is seen twice is no such moment.
MIN_SEEN = 2
# What a server counts and does not send: an end mark of each answer that ended by itself, and
# the last steps of what was cut off in a warm-up.
WARM_UP_TAIL_TOKENS = 16
# Blocks that several prompts begin with by chance, in shares of all prompt tokens.
MAX_HITS_BEYOND = 0.02
# A card at its power cap (sw_power_cap) runs as it was made to run at full load, every night alike;
# sync_boost keeps cards of one group at one clock. Neither is in this list.
SLOWED = {
    "hw_slowdown": "by its hardware",
    "hw_thermal": "by its hardware for heat",
    "sw_thermal": "by its driver for heat",
    "power_brake": "by an outside power brake",
}


def contradictions(run: Run, in_flight: int, intended_hit_rate: float | None) -> Iterator[str]:
    """Yield how the server contradicts the client, which had at most `in_flight` at once."""
    yield from _too_many(run, in_flight)
    yield from _too_much(run)
    yield from _too_warm(run, intended_hit_rate)


def _too_many(run: Run, in_flight: int) -> Iterator[str]:
    """Running and waiting together were more than the client had in flight at any time.

    What failed here may go on there. One of a user's own requests may ask for several answers, each
    of which a server counts.
    """
    if run.prompt_path == "requests_file":
        return
    in_flight += sum(not record.completed for record in run.records)
    known = {one.name: dict(zip(one.at_s, one.values, strict=True)) for one in _server(run)}
    running, waiting = known.get("running", {}), known.get("waiting", {})
    inside = (at_s for at_s in running if 0 <= at_s <= run.span_s)
    totals = [running[at_s] + waiting.get(at_s, 0.0) for at_s in inside]
    beyond = [total for total in totals if total > in_flight]
    if len(beyond) >= MIN_SEEN:
        yield (
            f"the server had {max(beyond):.0f} requests at once, the client never more than "
            f"{in_flight} in flight: somebody else sends to it ({len(beyond)} of {len(totals)} "
            "readings)"
        )


def _server(run: Run) -> Iterator[Series]:
    return (one for one in run.series if one.source == "server")


def _too_much(run: Run) -> Iterator[str]:
    """It generated more tokens than came here, and than failures and warm-up explain."""
    generated = run.engine.get("server_generation_tokens")
    received, unexplained = 0, run.engine.get("warmup_failed", 0.0) * WARM_UP_TAIL_TOKENS
    for record in run.records:
        count = metrics.output_tokens(record)
        if record.completed:
            unexplained += record.finish_reason != "length"
        else:
            count, unexplained = count or 0, unexplained + (record.asked_tokens or float("inf"))
        if count is None:
            return  # nobody knows how many came
        received += count
    if generated is not None and generated > received + unexplained:
        yield (
            f"the server generated {generated:.0f} tokens, {received} came here: "
            "somebody else sends to it"
        )


def _too_warm(run: Run, intended: float | None) -> Iterator[str]:
    """Its prefix cache found more than the prompts share: they had been seen before."""
    found = run.engine.get("server_prefix_hit_rate")
    failed = any(not record.completed for record in run.records)
    if found is None or intended is None or failed:
        return  # what was sent twice may be found
    # What a template puts before each prompt is the same for all.
    asked = sum(record.asked_prompt_tokens for record in run.records)
    added = max(metrics.tokens_added_each(run), default=0) * len(run.records)
    around = max(0.0, added / (asked + added)) if asked + added > 0 else 0.0
    if found > intended + around + MAX_HITS_BEYOND:
        yield (
            f"the server's prefix cache held {found:.1%} of the prompts' tokens; "
            f"they share {intended:.1%}: the rest it had seen before the Run"
        )


def disturbed(run: Run) -> Iterator[str]:
    """Yield what slowed the GPUs down, and who else worked on them."""
    slowed = [
        f"{how} for {seconds:.1f} s"
        for reason, how in SLOWED.items()
        if (seconds := run.engine.get(f"gpu_{reason}_s", 0.0)) > 0
    ]
    if slowed:
        yield f"the GPU was slowed down {', '.join(slowed)} of {run.span_s:.1f} s"
    others = run.engine.get("gpu_foreign_processes", 0.0)
    if others > 0:
        held = run.engine.get("gpu_foreign_bytes", 0.0) / 2**30
        what = "process that is" if others == 1 else "processes that are"
        yield f"{others:.0f} {what} not ours worked on the GPU, with {held:.1f} GiB of its memory"
