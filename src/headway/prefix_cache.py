"""What a prefix cache may find of a Run's prompts, and whether it found that.

Prompts are the same at every level, so that what a cache kept of another Run would make this one
look fast. What requests of one Run share is meant, and is known before the first is sent. Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from itertools import pairwise

from headway import metrics
from headway.core import Request, Run
from headway.workload import continued

# Of all prompt tokens: a server may count a block of its own begin or template here and there.
TOLERATED_SHARE = 0.01
# A cache that found less than this part of what it could have is told of; the first requests that
# share a prefix find nothing, and how many that are depends on the load.
LITTLE, WORTH_TELLING = 0.5, 0.05


def expected_hit_rate(requests: Sequence[Request], block_tokens: int = 1) -> float | None:
    """Return the share of prompt tokens that a perfect prefix cache would find; None of none.

    The cache is as large as it must be and holds every earlier prompt whole, in blocks of
    `block_tokens`, of which only full ones are found; it holds no outputs. What several requests
    that are in flight together could share, it counts as found.
    """
    seen: list[tuple[int, ...]] = []
    found = total = 0
    for request in _with_answers(requests):
        prompt = request.prompt_token_ids
        # In lexicographic order the longest common beginning is with a neighbour.
        place = bisect.bisect_left(seen, prompt)
        near = seen[max(0, place - 1) : place + 1]
        longest = max((_common(prompt, other) for other in near), default=0)
        found += longest // block_tokens * block_tokens
        total += len(prompt)
        seen.insert(place, prompt)
    return found / total if total else None


def _with_answers(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield requests as they are sent; an answer is as long as was asked, of ids of its own."""
    before: Request | None = None
    for own in requests:
        request = own
        if own.turn and before is not None:
            answer = range(-1, -1 - (before.max_tokens or 0), -1)
            request = continued(own, before, [k - before.index * 10**6 for k in answer])
        yield request
        before = request


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two prompts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((k for k, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def most_cached(requests: Sequence[Request]) -> tuple[int, ...]:
    """Return how much of each prompt another request of the same Run may have left in a cache.

    Whichever came first. Of a conversation's later turn only its own ids are known here: 0.
    """
    order = sorted(
        (k for k, one in enumerate(requests) if not one.turn),
        key=lambda k: requests[k].prompt_token_ids,
    )
    found = [0] * len(requests)
    for k, j in pairwise(order):
        shared = _common(requests[k].prompt_token_ids, requests[j].prompt_token_ids)
        found[k], found[j] = max(found[k], shared), max(found[j], shared)
    return tuple(found)


def problems(run: Run, requests: Sequence[Request]) -> tuple[str, ...]:
    """Say so where more was cached than this Run's own requests can have left there.

    Blocks only make it less. Not judged: prompts whose ids only the server knows.
    """
    around, more, total = metrics.tokens_added(run), 0, 0
    for own, shared, record in zip(requests, most_cached(requests), run.records, strict=False):
        asked, cached = record.asked_prompt_tokens, record.cached_prompt_tokens
        if asked and own.body is None:
            said_before = asked - len(own.prompt_token_ids) if own.turn else 0
            more += max(0, (cached or 0) - max(shared, said_before) - around)
            total += asked
    if more <= TOLERATED_SHARE * total:
        return ()
    return (
        f"{more} of {total} prompt tokens came from a prefix cache beyond what this Run's own "
        "requests share: it held prompts of another Run",
    )


def shortfall(cached: float | None, expected: float | None) -> str | None:
    """Say so where much less was cached than a perfect cache would have found."""
    if cached is None or expected is None or expected < WORTH_TELLING:
        return None
    if cached >= LITTLE * expected:
        return None
    return (
        f"{cached:.0%} of the prompt tokens were cached, of {expected:.0%} that requests share "
        "(the first with a prefix find nothing)"
    )
