"""HOW LONG prompts and outputs are: laws, mixtures of them, and recorded traces; in tokens.

Laws are plain data and a draw is a pure function of its generator. A recorded trace also says when
its requests came: `headway.arrivals` sends them at those times.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

STANDARD = NormalDist()
EDGE = 2.0**-53


@dataclass(frozen=True, slots=True)
class Uniform:
    """Whole numbers from `min` to `max`, both included, each as likely."""

    min: int
    max: int


@dataclass(frozen=True, slots=True)
class Lognormal:
    """exp(log median + sigma · z), z standard normal, given that it lies within [min, max].

    Rounded to whole tokens. The bounds cut the law off: nothing piles up at them. `median` is that
    of the law before it is cut.
    """

    median: float
    sigma: float
    min: int
    max: int


Length = int | Uniform | Lognormal


@dataclass(frozen=True, slots=True)
class Part:
    """One kind of request in a mixture; `share` is its weight among all shares."""

    prompt_tokens: Length
    output_tokens: Length
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Trace:
    """Recorded requests in order: when each came, in seconds from the first, and its lengths."""

    name: str
    times_s: tuple[float, ...]
    prompt_tokens: tuple[int, ...]
    output_tokens: tuple[int, ...]


FIVE_PROMPTS = (16, 64, 256, 1024, 4096)
FIVE_BUDGET = Uniform(64, 256)
# Mixtures with a name. `five`: prompts of five lengths as likely each, any budget with any of them.
MIXTURES = {"five": tuple(Part(prompt, FIVE_BUDGET) for prompt in FIVE_PROMPTS)}


def draw(law: Length, source: random.Random) -> int:
    """Return one length; a fixed one takes nothing from the source."""
    if isinstance(law, int):
        return law
    if isinstance(law, Uniform):
        return source.randint(law.min, law.max)
    low, high = (STANDARD.cdf(math.log(end / law.median) / law.sigma) for end in (law.min, law.max))
    u = low + (high - low) * source.random()
    # A bound so far out that its probability is rounded away is no bound: keep off 0 and 1.
    z = STANDARD.inv_cdf(min(max(u, EDGE), 1 - EDGE))
    return min(law.max, max(law.min, round(law.median * math.exp(law.sigma * z))))


def draw_pair(parts: Sequence[Part], source: random.Random) -> tuple[int, int]:
    """Return the prompt's and the output's length of one request of a mixture."""
    (part,) = source.choices(parts, [part.share for part in parts])
    return draw(part.prompt_tokens, source), draw(part.output_tokens, source)


def bounds(law: Length) -> tuple[int, int]:
    """Return the smallest and the largest length that a law gives."""
    return (law, law) if isinstance(law, int) else (law.min, law.max)


def pairs_at(parts: Iterable[Part], end: int) -> list[tuple[int, int]]:
    """Return each part's (prompt, output) lengths at its lower (0) or upper (1) bounds."""
    return [(bounds(p.prompt_tokens)[end], bounds(p.output_tokens)[end]) for p in parts]


def scaled(law: Length, scale: float) -> Length:
    """Return a law of lengths `scale` times as long, in whole tokens, at least 1."""

    def whole(length: int) -> int:
        return max(1, round(length * scale))

    if isinstance(law, int):
        return whole(law)
    if isinstance(law, Uniform):
        return Uniform(whole(law.min), whole(law.max))
    low, high = whole(law.min), whole(law.max)
    return Lognormal(min(high, max(low, law.median * scale)), law.sigma, low, high)


def scaled_part(part: Part, scale: float) -> Part:
    """Return a part of a mixture with lengths `scale` times as long, and its share as it was."""
    return Part(scaled(part.prompt_tokens, scale), scaled(part.output_tokens, scale), part.share)


def scaled_trace(trace: Trace, scale: float) -> Trace:
    """Return a trace with lengths `scale` times as long, at the same times."""
    lengths = (
        tuple(max(1, round(length * scale)) for length in column)
        for column in (trace.prompt_tokens, trace.output_tokens)
    )
    return Trace(trace.name, trace.times_s, *lengths)


def said(law: Length) -> str:
    """Write a law for a person."""
    if isinstance(law, int):
        return str(law)
    spread = f" (median {law.median:g}, sigma {law.sigma:g})" if isinstance(law, Lognormal) else ""
    return f"{law.min} to {law.max}{spread}"
