"""What a reference thinks of an output, token by token, and the verdict that follows; no torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Longer lists end early; the largest gap and the counts are of all tokens.
MAX_NONARGMAX = 1000


@dataclass(frozen=True, slots=True)
class Scores:
    """One entry for each output token, in logits or nats.

    `gaps` is the best logit minus the token's (0: the token is an argmax), `ranks` how many tokens
    have a strictly larger logit, `margins` the best logit minus the second best, `best` an argmax.
    """

    gaps: list[float]
    ranks: list[int]
    margins: list[float]
    best: list[int]
    logprobs: list[float]


def summarise(scores: Scores, output: Sequence[int], epsilon: float) -> dict[str, Any]:
    """Return the verdict on one output as a plain dict.

    A token is a violation when its gap exceeds `epsilon` logits; `violation` tells of the first.
    """
    gaps, ranks = scores.gaps, scores.ranks
    violations = [index for index, gap in enumerate(gaps) if gap > epsilon]
    others = [index for index, gap in enumerate(gaps) if gap > 0]
    first = violations[0] if violations else None
    return {
        "num_tokens": len(gaps),
        "max_gap": max(gaps),
        "num_nonargmax": len(others),
        "num_violations": len(violations),
        "first_violation": first,
        "violation": None if first is None else _describe(scores, output, first),
        "min_margin": min(scores.margins),
        "nonargmax": [[i, gaps[i], ranks[i]] for i in others[:MAX_NONARGMAX]],
        "logprob_sum": math.fsum(scores.logprobs),
    }


def _describe(scores: Scores, output: Sequence[int], index: int) -> dict[str, Any]:
    return {
        "index": index,
        "token": output[index],
        "expected": scores.best[index],
        "gap": scores.gaps[index],
        "rank": scores.ranks[index],
    }
